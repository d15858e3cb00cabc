# SPDX-License-Identifier: Apache-2.0
"""The graph of a converted model as text, and back: what torchq.save writes beside the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.convert.graph_data import by_name, is_known, name_of
from torchq.convert.graph_module import QuantizedGraph
from torchq.nn.module import QModule, text_bytes
from torchq.serialization.conditions import is_name, is_path

GRAPH_KEY = "torchq_graph"
"""Name of the tensor that holds the text in a saved state."""

_VERSION = 2
_CONSTANTS = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout)
}


def encode(model: fx.GraphModule) -> Tensor:
    """Return the graph as a tensor of bytes.

    Raises:
        NotImplementedError: it calls a function that is neither of torch nor an operator, or passes
            an argument that is no plain value.
    """
    nodes = []
    for node in model.graph.nodes:
        args, kwargs = _encode(list(node.args), node), _encode(dict(node.kwargs), node)
        entry = [node.op, node.name, _encode_target(node), args, kwargs]
        module = _owned(model, node)
        if module is not None:
            quantized = isinstance(module, QModule)
            entry.append(None if quantized else str(node.target))
            if not quantized and (plain := _encode_module(module, node)) is not None:
                entry.append(plain)
        nodes.append(entry)
    fields = {"version": _VERSION, "name": type(model).__name__, "nodes": nodes}
    text = json.dumps(fields, separators=(",", ":"))
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def decode(
    text: Tensor, modules: Callable[..., nn.Module], tensors: Mapping[str, Tensor]
) -> QuantizedGraph:
    """Return the graph module of such a tensor.

    Args:
        text: from :func:`encode`.
        modules: from the name of a module, its name in the float model (None for a quantized one),
            and what :func:`plain_module` takes, to the module.
        tensors: the saved state, for the constants of the graph.

    Raises:
        ValueError: the text is not that of a graph, or names a function that is not allowed.
    """
    try:
        fields = json.loads(text_bytes(text))
        entries = fields["nodes"] if fields["version"] == _VERSION else None
    except (ValueError, KeyError, TypeError):
        entries = None
    if entries is None:
        raise ValueError(
            "torchq.load: the file's graph must be the text of version "
            f"{_VERSION} of torchq's graphs, got {text_bytes(text)[:60]!r}. Was it written by "
            "another version of torchq? Quantize the model again, and save it with this one."
        )
    graph, nodes, owned = (
        fx.Graph(),
        dict[str, fx.Node](),
        dict[str, Any](),
    )
    for op, name, target, args, kwargs, *more in entries:
        if op == "call_module" or (op == "get_attr" and more):
            owned[target] = owned.get(target) or modules(target, *more)
        elif op == "get_attr":
            owned[target] = tensors[target]
        _check_names(op, target, kwargs["dict"])
        resolved = _decode_target(op, target)
        values = tuple(_decode(args, nodes)), _decode(kwargs, nodes)
        nodes[name] = graph.create_node(op, resolved, *values, name=name)
    return QuantizedGraph(owned, graph, fields["name"])


def plain_module(plain: dict[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of torch.nn from its settings and tensors.

    Raises:
        ValueError: it names no module class of torch.nn.
    """
    cls = getattr(nn, str(plain["class"]), None)
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise ValueError(
            f"torchq.load: the file's float modules must be of torch.nn, got '{plain['class']}'. "
            "Was it written by torchq.save?"
        )
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in plain["fields"].items():
        if name not in _INTERNAL:
            vars(module)[name] = _decode(value, {})
    for kind, names in (("_parameters", plain["parameters"]), ("_buffers", plain["buffers"])):
        for name in names:
            value = state[name].clone() if name in state else None
            if kind == "_parameters" and value is not None:
                value = nn.Parameter(value, False)
            getattr(module, kind)[name] = value
    return module


_INTERNAL = frozenset(vars(nn.Module()))


def _owned(model: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls or, as another one's argument, is."""
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    found = getattr(model, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, nn.Module) else None


def _encode_module(module: nn.Module, node: fx.Node) -> dict[str, Any] | None:
    """Return what :func:`plain_module` takes; None for what is no plain module of torch.nn."""
    name = type(module).__name__
    hooked = module._forward_hooks or module._forward_pre_hooks
    if getattr(nn, name, None) is not type(module) or next(module.children(), None) or hooked:
        return None
    tensors = {*module._parameters, *module._buffers} - module._non_persistent_buffers_set
    if len(tensors) != len(module._parameters) + len(module._buffers):
        return None
    settings = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
    try:
        fields = {key: _encode(value, node) for key, value in settings.items()}
    except NotImplementedError:
        return None
    return {
        "class": name,
        "fields": fields,
        "parameters": list(module._parameters),
        "buffers": list(module._buffers),
    }


def _encode_target(node: fx.Node) -> str:
    if node.op == "call_method" and not _is_method(str(node.target)):
        raise NotImplementedError(
            f"torchq.save: the graph must call methods of tensors only, got {node.target} in "
            f"{node.name}. Save the whole model with torch.save."
        )
    if node.op != "call_function":
        return str(node.target)
    name = name_of(node.target)
    if name is None or not is_known(name):
        raise NotImplementedError(
            f"torchq.save: the graph must call functions of torch only, got {node.target} in "
            f"{node.name}. Save the whole model with torch.save, or as TorchScript."
        )
    return name


def _is_method(name: str) -> bool:
    """Return whether a loaded graph may call it: of a tensor, a number or a dict."""
    known = hasattr(Tensor, name) or hasattr(float, name) or name == "get"
    return known and not name.startswith("_")


def _check_names(op: str, target: Any, keywords: Iterable[str]) -> None:
    """Refuse names that would not be names in the code that torch.fx writes of a graph."""
    known = (
        is_name if op == "placeholder" else is_path if op in ("get_attr", "call_module") else None
    )
    wrong = [name for name in keywords if not is_name(name)]
    wrong += [target] if known is not None and not known(target) else []
    if wrong:
        raise ValueError(
            f"torchq.load: names in the file's graph must be names of Python, got "
            f"{wrong[0]!r:.60}. Was it written by torchq.save?"
        )


def _decode_target(op: str, target: str) -> Any:
    if op == "call_function" and not is_known(target):
        raise ValueError(
            f"torchq.load: the file's graph must call functions of torch only, got '{target}'. "
            "Was it written by torchq.save?"
        )
    if op == "call_method" and not _is_method(target):
        raise ValueError(
            f"torchq.load: the file's graph must call methods of tensors only, got '{target}'. "
            "Was it written by torchq.save?"
        )
    return by_name(target) if op == "call_function" else target


def _encode(value: Any, node: fx.Node) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, node) for item in value]}
    if isinstance(value, list):
        return [_encode(item, node) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item, node) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encode(item, node) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if value is ...:
        return {"constant": "..."}
    if str(value) in _CONSTANTS:
        return {"constant": str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise NotImplementedError(
        f"torchq.save: arguments in the graph must be plain values, got {type(value).__name__} in "
        f"{node.name}. Save the whole model with torch.save, or as TorchScript."
    )


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "tuple":
        return tuple(_decode(content, nodes))
    if kind == "dict":
        return {key: _decode(item, nodes) for key, item in content.items()}
    if kind == "slice":
        return slice(*_decode(content, nodes))
    if kind == "complex":
        return complex(*content)
    if kind == "device":
        return torch.device(content)
    return ... if content == "..." else _CONSTANTS[content]

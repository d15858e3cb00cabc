# SPDX-License-Identifier: Apache-2.0
"""The graph of a converted model as text, and back: what torchq.save writes beside the tensors."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import rnn

from torchq.fx import guards
from torchq.fx.module import QuantizedGraph
from torchq.fx.sequences import SequenceTracer
from torchq.nn.module import QModule

__all__ = ["GRAPH_KEY", "decode", "encode"]

GRAPH_KEY = "torchq_graph"
"""Name of the tensor that holds the text in a saved state."""

_VERSION = 1
_NAMESPACES: dict[str, Any] = {
    "torch": torch._C._VariableFunctions,  # functions of tensors, and nothing else of torch
    "functional": F,
    "operator": operator,
    "math": math,
    "rnn": rnn,
    "guards": guards,
}
_REFUSED = ("call", "methodcaller", "attrgetter", "itemgetter", "delitem")


def _functions() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"getattr": getattr}
    for prefix, namespace in _NAMESPACES.items():
        for name in dir(namespace):
            function = getattr(namespace, name)
            if callable(function) and not name.startswith("_") and name not in _REFUSED:
                found[f"{prefix}.{name}"] = function
    for name in torch.functional.__all__:  # of torch, too, but written in Python
        found[f"torch.{name}"] = getattr(torch.functional, name)
    for name in ("zeros", "ones", "full", "empty", "arange", "eye", "linspace"):
        found[f"torch.{name}"] = getattr(torch, name)
    return found


_BY_NAME = _functions()
_NAMES = {id(function): name for name, function in reversed(_BY_NAME.items())}
_CONSTANTS = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout)
}


def encode(model: fx.GraphModule) -> Tensor:
    """The graph as a tensor of bytes.

    Raises:
        NotImplementedError: it calls a function that is neither of torch nor an operator, or passes
            an argument that is no plain value.
    """
    nodes = []
    for node in model.graph.nodes:
        args, kwargs = _encode(list(node.args), node), _encode(dict(node.kwargs), node)
        entry = [node.op, node.name, _encode_target(node), args, kwargs]
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            quantized = isinstance(module, QModule)
            entry.append(None if quantized else node.meta.get("source", node.target))
        nodes.append(entry)
    fields = {"version": _VERSION, "name": type(model).__name__, "nodes": nodes}
    text = json.dumps(fields, separators=(",", ":"))
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def decode(
    text: Tensor, modules: Callable[[str, str | None], nn.Module], tensors: Mapping[str, Tensor]
) -> QuantizedGraph:
    """The graph module of such a tensor.

    Args:
        text: from :func:`encode`.
        modules: from the name of a module, and its name in the float model (None for a quantized
            one), to the module.
        tensors: the saved state, for the constants of the graph.

    Raises:
        ValueError: the text is not that of a graph, or names a function that is not allowed.
    """
    try:
        fields = json.loads(bytes(text.tolist()))
        entries = fields["nodes"] if fields["version"] == _VERSION else None
    except (ValueError, KeyError, TypeError):
        entries = None
    if entries is None:
        raise ValueError(
            "torchq.load: the file's graph must be the text of version "
            f"{_VERSION} of torchq's graphs, got {bytes(text.tolist())[:60]!r}. Was it written by "
            "another version of torchq?"
        )
    graph, nodes, owned = (
        fx.Graph(tracer_cls=SequenceTracer),
        dict[str, fx.Node](),
        dict[str, Any](),
    )
    for op, name, target, args, kwargs, *source in entries:
        if op == "call_module":
            owned[target] = owned.get(target) or modules(target, source[0])
        if op == "get_attr":
            owned[target] = tensors[target]
        resolved = _decode_target(op, target)
        values = tuple(_decode(args, nodes)), _decode(kwargs, nodes)
        nodes[name] = graph.create_node(op, resolved, *values, name=name)
        if source and source[0] is not None:
            nodes[name].meta["source"] = source[0]
    return QuantizedGraph(owned, graph, fields["name"])


def _encode_target(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if id(node.target) not in _NAMES:
        raise NotImplementedError(
            f"torchq.save: the graph must call functions of torch only, got {node.target} in "
            f"{node.name}. Save the whole model with torch.save, or as TorchScript."
        )
    return _NAMES[id(node.target)]


def _decode_target(op: str, target: str) -> Any:
    if op == "call_function" and target not in _BY_NAME:
        raise ValueError(
            f"torchq.load: the file's graph must call functions of torch only, got '{target}'. "
            "Was it written by torchq.save?"
        )
    method = op == "call_method"
    if method and (target.startswith("_") or not hasattr(Tensor, target)):
        raise ValueError(
            f"torchq.load: the file's graph must call methods of tensors only, got '{target}'. "
            "Was it written by torchq.save?"
        )
    return _BY_NAME[target] if op == "call_function" else target


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
    if kind == "device":
        return torch.device(content)
    return ... if content == "..." else _CONSTANTS[content]

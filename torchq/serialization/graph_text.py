# SPDX-License-Identifier: Apache-2.0
"""The graph of a converted model as text, and back: what torchq.save writes beside the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.attributes.json_text import read_json
from torchq.functional.placeholders import count
from torchq.graphs.module import QuantizedGraph
from torchq.nn.module import QModule, text_bytes
from torchq.serialization.allowed import DTYPES, by_name, name_of
from torchq.serialization.conditions import is_held, is_name, is_path, is_variable
from torchq.serialization.graph_checks import (
    MODULE,
    RESULT,
    TENSOR,
    Checker,
    Fact,
    are_values,
    has_tensors,
)
from torchq.serialization.plain_modules import describe_plain

GRAPH_KEY = "torchq_graph"
"""Name of the tensor that holds the text in a saved state."""

_VERSION, _KNOWN = 3, (2, 3)
"""Version 2 had methods of tensors beside functions."""
_OPS = ("placeholder", "get_attr", "call_module", "call_function", "call_method", "output")
_FORMATS = (torch.contiguous_format, torch.preserve_format)
_CONSTANTS: dict[str, object] = {
    str(value): value for value in (*DTYPES, *_FORMATS, torch.channels_last, torch.channels_last_3d)
}


def encode(model: fx.GraphModule) -> Tensor:
    """Return the graph as a tensor of bytes.

    Raises:
        NotImplementedError: it calls a function that files may not call, or passes an argument that
            is no plain value.
    """
    nodes, checker = [], Checker()
    for node in model.graph.nodes:
        args, kwargs = _encode(list(node.args), node), _encode(dict(node.kwargs), node)
        module = _owned(model, node)
        called = node.op in ("call_function", "call_method")
        target = _checked_name(node, checker) if called else str(node.target)
        if not called:
            checker.facts[node] = _fact_of(node.op, module is not None)
        entry = ["call_function" if called else node.op, node.name, target, args, kwargs]
        if module is not None:
            quantized = isinstance(module, QModule)
            entry.append(None if quantized else str(node.target))
            if not quantized and (plain := describe_plain(module)) is not None:
                entry.append(plain)
        nodes.append(entry)
    fields = {"version": _VERSION, "name": type(model).__name__, "nodes": nodes}
    text = json.dumps(fields, separators=(",", ":"))
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _checked_name(node: fx.Node, checker: Checker) -> str:
    """Return the name of a call's function, which a loaded file may call so."""
    name = name_of(node.target, node.op)
    try:
        checker.facts[node] = checker.call(str(name), node.args, dict(node.kwargs))
    except ValueError:
        what = getattr(node.target, "__name__", node.target) if name is None else name
        raise NotImplementedError(
            "torchq.save: the graph must call functions of torch that files may call, got "
            f"{what} in {node.name}. Save the whole model with torch.save, or as TorchScript."
        ) from None
    return str(name)


def _fact_of(op: str, of_module: bool) -> Fact:
    """Return what a node gives that calls no function."""
    if op == "get_attr" and of_module:
        return MODULE
    return RESULT if op == "call_module" else TENSOR


def decode(
    text: Tensor, modules: Callable[..., nn.Module], tensors: Mapping[str, Tensor]
) -> QuantizedGraph:
    """Return the graph module of such a tensor.

    Args:
        text: from :func:`encode`.
        modules: from the name of a module, its name in the float model (None for a quantized one),
            and what :func:`describe_plain` gives, to the module.
        tensors: the saved state, for the constants of the graph.

    Raises:
        ValueError: the text is not that of a graph, or calls what is not allowed.
    """
    raw = text_bytes(text)
    count("bytes of texts", len(raw))
    try:
        fields = read_json(raw)
        entries = fields["nodes"] if fields["version"] in _KNOWN else None
    except (ValueError, KeyError, TypeError):
        entries = None
    if entries is None:
        raise ValueError(
            "torchq.load: the file's graph must be the text of version "
            f"{_VERSION} of torchq's graphs, got {raw[:60]!r}. Was it written by "
            "another version of torchq? Quantize the model again, and save it with this one."
        )
    count("nodes of graphs", len(entries))
    reader = _Reader(modules, tensors)
    for entry in entries:
        reader.add(*entry)
    _check_parts(reader.owned)
    name = fields["name"]  # of a class, which TorchScript writes into its source
    known = is_name(name) and name.isascii()
    made = QuantizedGraph(reader.owned, reader.graph, name if known else QuantizedGraph.__name__)
    for target in reader.owned:
        if not is_held(made, target):
            raise _wrong_name(target)
    return made


def _check_parts(owned: Mapping[str, object]) -> None:
    """Refuse names within a module that are no parts of it: they would replace what it has.

    Tensors of layers with packed weights are refused, too: who gets one as a result may write to
    it, and its sums and bounds are checked once.
    """
    for target, own in owned.items():
        outer, *rest = target.split(".")
        while rest:
            module = owned.get(outer)
            if isinstance(module, nn.Module) and not is_held(module, ".".join(rest)):
                raise _wrong_name(target)
            if isinstance(own, Tensor) and isinstance(module, QModule) and _is_packed(module):
                raise _wrong_name(target)
            outer, rest = f"{outer}.{rest[0]}", rest[1:]


def _is_packed(module: QModule) -> bool:
    return any(isinstance(m, QModule) and m._packed_weights() for m in module.modules())


class _Reader:
    """Makes a graph of the entries of a file."""

    def __init__(self, modules: Callable[..., nn.Module], tensors: Mapping[str, Tensor]) -> None:
        """See :func:`decode`."""
        self.modules, self.tensors = modules, tensors
        self.graph, self.checker = fx.Graph(), Checker()
        self.nodes: dict[str, fx.Node] = {}
        self.checked: dict[object, fx.Node] = {}
        self.owned: dict[str, object] = {}
        self.inputs, self.outer = set[str](), set[str]()

    def add(
        self, op: str, name: str, target: str, args: object, kwargs: object, *more: object
    ) -> None:
        """Append a node."""
        count("values in graphs", _count([args, kwargs]))
        values = tuple(_decode(args, self.nodes)), _decode(kwargs, self.nodes)
        self._check_names(op, name, target, values[1])
        if op in ("call_function", "call_method"):
            known = target if op == "call_function" else f"Tensor.{target}"  # in version 2
            fact = self.checker.call(known, *values)
            values = fx.node.map_arg(values, self._checked)
            op, called = by_name(known, self.checker.overload)
        else:
            called, fact = target, _fact_of(op, bool(more))
            self._own(op, target, more)
            self.inputs |= {target} if op == "placeholder" else set()
            self._check_values(op, *values)
        node = self.graph.create_node(op, called, *values, name=name)
        self.nodes[name], self.checker.facts[node] = node, fact

    def _checked(self, value: fx.Node) -> fx.Node:
        """Return a number behind its check, where the last call needs that; each is checked once.

        The check's name begins as that of the number: the direct graph leaves guards out by names.
        """
        check = self.checker.checks.get(value)
        if check is None or value.target is check:
            return value
        if (value, check) not in self.checked:
            count("nodes of graphs")
            name = f"{value.name}_checked"
            made = self.graph.create_node("call_function", check, (value,), name=name)
            self.checked[value, check] = made
            self.checker.facts[made] = self.checker.facts[value]
        return self.checked[value, check]

    def _own(self, op: str, target: str, more: tuple[object, ...]) -> None:
        """Take the module or tensor that a node has."""
        if op not in ("get_attr", "call_module"):
            return
        count("values in graphs", target.count("."))  # each is a part of the code
        is_module = op == "call_module" or bool(more)
        if target in self.owned:
            if isinstance(self.owned[target], nn.Module) != is_module:
                raise _wrong_name(target)
            return
        outer = target.rpartition(".")[0]
        while outer and outer not in self.outer:  # each becomes a module, too
            count("nodes of graphs")
            self.outer.add(outer)
            outer = outer.rpartition(".")[0]
        self.owned[target] = self.modules(target, *more) if is_module else self.tensors[target]

    def _check_names(self, op: str, name: str, target: str, kwargs: dict[str, object]) -> None:
        """Refuse names that would not be names in the code that torch.fx writes of a graph."""
        wrong = [key for key in kwargs if not is_name(key)]
        # torch.fx writes ASCII, and searches for a name that is free in place of any other
        if not is_variable(name) or not name.isascii() or name in self.nodes:
            wrong.append(name)
        if op == "placeholder" and (not is_variable(target) or target in self.inputs):
            wrong.append(target)
        if op in ("get_attr", "call_module") and not is_path(target):
            wrong.append(target)
        if op not in _OPS:
            wrong.append(op)
        if wrong:
            raise _wrong_name(wrong[0])

    def _check_values(self, op: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Refuse arguments that a node of this kind does not take."""
        allowed = not kwargs
        if op == "call_module":
            sources = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
            nodes = [source for source in sources if isinstance(source, fx.Node)]
            allowed = are_values([*args, *kwargs.values()]) and 0 < len(nodes) == len(sources)
            allowed = allowed and all(has_tensors(self.checker.facts[node]) for node in nodes)
        if op in ("placeholder", "get_attr"):
            allowed = not args and not kwargs
        if not allowed:
            raise ValueError(
                "torchq.load: modules in the file's graph must be called with tensors and plain "
                "values, got others. Was it written by torchq.save?"
            )


def _wrong_name(name: object) -> ValueError:
    return ValueError(
        f"torchq.load: names in the file's graph must be names of Python, got {name!r:.60}. Was it "
        "written by torchq.save?"
    )


def _owned(model: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls or, as another one's argument, is."""
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    found = getattr(model, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, nn.Module) else None


def _encode(value: object, node: fx.Node) -> object:
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
    raise NotImplementedError(
        f"torchq.save: arguments in the graph must be plain values, got {type(value).__name__} in "
        f"{node.name}. Save the whole model with torch.save, or as TorchScript."
    )


def _count(value: object) -> int:
    """Return how many plain values, and lists and the like of them, there are within."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count, parts))


def _decode(value: object, nodes: dict[str, fx.Node]) -> Any:
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
    return ... if content == "..." else _CONSTANTS[content]

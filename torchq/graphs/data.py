# SPDX-License-Identifier: Apache-2.0
"""A graph as data that pickle takes.

Note [Overloads]
The ops that graphs call are overloads, such as ``torch.ops.aten.index.Tensor``. The packet
``aten.index`` tries its overloads one after the other in each call. For each that does not fit,
PyTorch writes the arguments into the message of an error that nobody reads. That takes milliseconds
where they are tensors. TorchScript takes packets only: it chooses their overloads once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchq.models.trees import Args, Kwargs

_NAMESPACES: dict[str, object] = {
    "torch": torch._C._VariableFunctions,  # functions of tensors, and nothing else of torch
    "nn": torch._C._nn,
    "operator": operator,
    "math": math,
}
_PYTHON = (int, float, max, min, abs, len)
_SIZES = ("size", "numel", "item", "dim")
_TENSOR = torch.empty(0, dtype=torch.float32, device="meta")
_REFUSED = ("call", "methodcaller", "attrgetter", "itemgetter", "delitem", "from_file", "save")


def _functions() -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {function.__name__: function for function in _PYTHON}
    for prefix, namespace in _NAMESPACES.items():
        for name in dir(namespace):
            function = getattr(namespace, name)
            known = callable(function) and not isinstance(function, type)
            if known and not name.startswith("_") and name not in _REFUSED:
                found[f"{prefix}.{name}"] = function
    made = ("zeros", "ones", "full", "empty", "arange", "eye", "linspace", "tensor")
    for name in (*made, "_assert", *torch.functional.__all__):
        found[f"torch.{name}"] = getattr(torch, name)
    return found


BY_NAME = _functions()
NAMES = {id(function): name for name, function in reversed(BY_NAME.items())}


def name_of(function: object) -> str | None:
    """Return the name of a function in a stored graph: ``torch.relu``, ``aten::index.Tensor``."""
    if isinstance(function, torch._ops.OpOverload):
        return f"{function.overloadpacket._qualified_op_name}.{function._overloadname}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        return str(function._qualified_op_name)
    return NAMES.get(id(function))


def _function(name: str) -> Callable[..., object]:
    library, _, own = name.rpartition("::")
    if not library:
        return BY_NAME[name]
    own, _, overload = own.partition(".")
    packet: Callable[..., object] = getattr(getattr(torch.ops, library), own)
    return getattr(packet, overload) if overload else packet


def with_overloads(graph: fx.Graph) -> fx.Graph:
    """Return the graph; the packets in it become overloads, which PyTorch chooses for its values.

    Files of earlier versions name packets: see Note [Overloads].
    """
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        of_python = not NAMES.get(id(node.target), "torch.").startswith(("torch.", "nn."))
        of_numbers = of_python and sources and numbers.issuperset(sources)
        if of_numbers or (node.op == "call_method" and node.target in _SIZES):
            numbers.add(node)
        elif isinstance(node.target, torch._ops.OpOverloadPacket):
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda value: 1 if value in numbers else _TENSOR
            )
            node.target = _overload(node.target, args, kwargs)
    return graph


def _overload(
    packet: torch._ops.OpOverloadPacket, args: Args, kwargs: Kwargs
) -> Callable[..., object]:
    """Return the overload for such arguments; the packet if none fits, whose call says so."""
    try:
        name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:
        return packet
    overload: Callable[..., object] = getattr(packet, name)
    return overload


@dataclass(frozen=True)
class _Ref:
    """The result of another node, or a function of torch."""

    name: str


def plain_nodes(graph: fx.Graph, keys: Collection[str]) -> list[tuple[object, ...]]:
    """Return a graph as data that pickle takes, with these entries of its nodes' ``meta``."""

    def named(value: object) -> Any:
        return _Ref(value.name) if isinstance(value, fx.Node) else value

    nodes: list[tuple[object, ...]] = []
    for n in graph.nodes:
        meta = {key: n.meta[key] for key in keys if key in n.meta}
        args, kwargs, meta = (fx.node.map_aggregate(a, named) for a in (n.args, n.kwargs, meta))
        name = name_of(n.target)
        target = n.target if name is None else _Ref(name)
        nodes.append((n.op, n.name, target, args, kwargs, dict(meta), n.type))
    return nodes


def graph_of(plain: list[tuple[Any, ...]]) -> fx.Graph:
    """Return the graph that :func:`plain_nodes` wrote."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()

    def resolve(value: object) -> Any:
        return nodes[value.name] if isinstance(value, _Ref) else value

    for op, node_name, target, args, kwargs, meta, kind in plain:
        args, kwargs = (fx.node.map_aggregate(a, resolve) for a in (args, kwargs))
        target = _function(target.name) if isinstance(target, _Ref) else target
        node = graph.create_node(op, target, args, kwargs, name=node_name, type_expr=kind)
        nodes[node_name] = node
        for key, value in meta.items():
            node.meta[key] = fx.node.map_aggregate(value, resolve)
    return graph

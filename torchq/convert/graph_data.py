# SPDX-License-Identifier: Apache-2.0
"""A graph as data that pickle takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_NAMESPACES: dict[str, Any] = {
    "torch": torch._C._VariableFunctions,  # functions of tensors, and nothing else of torch
    "nn": torch._C._nn,
    "operator": operator,
    "math": math,
}
_OWN = ("embedding", "embedding_bag")
"""Ops of torchq that a float graph calls: their modules are there when it is captured."""
_PYTHON = (int, float, max, min, abs, len)
_REFUSED = ("call", "methodcaller", "attrgetter", "itemgetter", "delitem", "from_file", "save")


def _functions() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {function.__name__: function for function in _PYTHON}
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


def name_of(function: Any) -> str | None:
    """Return the name that a stored graph has for a function; None for one it may not call."""
    if isinstance(function, torch._ops.OpOverload) and function.namespace == "aten":
        function = function.overloadpacket
    if isinstance(function, torch._ops.OpOverloadPacket):
        return str(function._qualified_op_name)
    return NAMES.get(id(function))


def is_known(name: str) -> bool:
    """Return whether there is a function of such a name."""
    library, _, own = name.rpartition("::")
    if library == "aten":
        return own not in _REFUSED and hasattr(torch.ops.aten, own)
    if library == "torchq":
        return own in _OWN
    return name in BY_NAME


def by_name(name: str) -> Callable[..., Any]:
    """Return the function of such a name.

    Raises:
        KeyError: there is none, or it is of another library.
    """
    if not is_known(name):
        raise KeyError(name)
    library, _, own = name.rpartition("::")
    if library:
        return getattr(getattr(torch.ops, library), own)  # type: ignore[no-any-return]
    return BY_NAME[name]


@dataclass(frozen=True)
class _Ref:
    """The result of another node, or a function of torch."""

    name: str


def plain_nodes(graph: fx.Graph, keys: Collection[str]) -> list[tuple[Any, ...]]:
    """Return a graph as data that pickle takes, with these entries of its nodes' ``meta``."""

    def named(value: Any) -> Any:
        return _Ref(value.name) if isinstance(value, fx.Node) else value

    nodes = []
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

    def resolve(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _Ref) else value

    for op, node_name, target, args, kwargs, meta, kind in plain:
        args, kwargs = (fx.node.map_aggregate(a, resolve) for a in (args, kwargs))
        target = by_name(target.name) if isinstance(target, _Ref) else target
        node = graph.create_node(op, target, args, kwargs, name=node_name, type_expr=kind)
        nodes[node_name] = node
        for key, value in meta.items():
            node.meta[key] = fx.node.map_aggregate(value, resolve)
    return graph

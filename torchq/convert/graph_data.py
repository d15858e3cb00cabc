# SPDX-License-Identifier: Apache-2.0
"""A graph as data that pickle takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchq.convert.names import by_name, name_of


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

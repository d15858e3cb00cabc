# SPDX-License-Identifier: Apache-2.0
"""Computes once what linears and convolutions make of constants, such as tables of positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from torchq.convert.graph import Captured, remove_unused
from torchq.convert.ops import Role
from torchq.convert.patterns import row_of


def compute_once(captured: Captured) -> None:
    """Put results in the place of the calls that make them in each run.

    So do functions behind them that give no more elements. What the model returns stays, as its
    caller may write to that.
    """
    graph, model = captured.graph, captured.model
    made: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_made(node, made):
            made[node] = None
    returned = set(graph.output_node().all_input_nodes)
    owners = {node.meta["owner"] for node in made} - {""}
    for i, node in enumerate(made):
        value = node.meta["constant"]
        if not isinstance(value, Tensor) or node in returned or made.keys() >= node.users.keys():
            continue
        name = f"_torchq_made_{i}"
        model.register_buffer(name, value.detach().clone())
        with graph.inserting_before(node):
            stored = graph.create_node("get_attr", name)
        stored.meta.update(node.meta, constant=getattr(model, name), owner="")
        node.replace_all_uses_with(stored)
    remove_unused(graph)
    captured.once = owners - {node.meta.get("owner") for node in graph.nodes}


def _is_made(node: fx.Node, made: dict[fx.Node, None]) -> bool:
    """Return whether it is such a call, or what a function makes of results and constants."""
    if node.op not in ("call_function", "call_method") or node.meta["varying"]:
        return False
    row = row_of(node)
    if row is not None and row.role in (Role.MATMUL, Role.PRODUCT):
        return True
    sources = [n for n in node.all_input_nodes if n in made]
    if not sources or (row is not None and row.role is Role.FAKE):
        return False
    return _size(node) <= max(map(_size, sources))


def _size(node: fx.Node) -> int:
    """Return the elements of a tensor, or of all in a sequence."""
    found: Any = node.meta["constant"]
    tensors = found if isinstance(found, tuple | list) else [found]
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))

# SPDX-License-Identifier: Apache-2.0
"""What linears and convolutions make of constants alone, such as tables of positions: once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.fx.ops import Role
from torchq.fx.patterns import PATTERNS
from torchq.fx.tracing.capture import Captured, remove_unused
from torchq.fx.tracing.fake import fake_quantizer
from torchq.fx.tracing.nodes import compute
from torchq.kinds import MATMUL

_PRODUCTS = {
    f for row in PATTERNS if row.role in (Role.MATMUL, Role.PRODUCT) for f in row.functions
}
_FAKES = {f for row in PATTERNS if row.role is Role.FAKE for f in row.functions}


def compute_once(captured: Captured) -> None:
    """Puts results in the place of the calls that make them in each run.

    So do functions behind them that give no more elements. Left as they are: what is random, what
    somebody writes to, and what the model returns, as its caller may write to that.
    """
    graph, model = captured.graph, captured.model
    made: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_made(node, model, made):
            made[node] = None
    if not made:
        return
    shared = {n.meta["value"].storage for node in graph.nodes for n in node.meta.get("writes", ())}
    shared |= {n.meta["value"].storage for n in graph.output_node().all_input_nodes}
    values = _computed(graph, model, made)
    for i, node in enumerate(made):
        value = values.get(node)
        if not isinstance(value, Tensor) or node.meta["value"].storage in shared:
            continue
        if made.keys() >= node.users.keys() or not torch.equal(value, node.meta["constant"]):
            continue
        name = f"_tensor_constant_made_{i}"
        model.register_buffer(name, value.detach().clone())
        with graph.inserting_before(node):
            stored = graph.create_node("get_attr", name)
        stored.meta.update(node.meta, static=False, constant=getattr(model, name))
        node.replace_all_uses_with(stored)
    before = {str(node.target) for node in made if node.op == "call_module"}
    remove_unused(graph)
    captured.once = before - {str(node.target) for node in graph.nodes}


def _is_made(node: fx.Node, model: nn.Module, made: dict[fx.Node, None]) -> bool:
    """Whether it is such a call, or what a function makes of such results and constants."""
    if not node.op.startswith("call_") or node.meta["varying"] or node.meta["writes"]:
        return False
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if module._forward_hooks or module._forward_pre_hooks or fake_quantizer(module) is not None:
            return False
        if isinstance(module, MATMUL):
            return True
    if node.target in _PRODUCTS:
        return True
    sources = [n for n in node.all_input_nodes if n in made]
    if not sources or node.target in _FAKES:
        return False
    return _size(node) <= max(map(_size, sources))


def _size(node: fx.Node) -> int:
    """Elements of a tensor, or of all in a sequence."""
    found: Any = node.meta["constant"]
    tensors = found if isinstance(found, tuple | list) else [found]
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))


def _computed(graph: fx.Graph, model: nn.Module, wanted: dict[fx.Node, None]) -> dict[fx.Node, Any]:
    """Values of these nodes and of what they are made of, if that is of constants only."""
    needed, left = set[fx.Node](), list(wanted)
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left.extend(node.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node in needed and not node.meta["varying"] and all(n in values for n in sources):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = compute(model, node, args, kwargs)
    return values

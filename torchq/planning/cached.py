# SPDX-License-Identifier: Apache-2.0
"""Attention to keys and values that the caller keeps from one call to the next stays float.

They come as float and go as float: a step of one token would quantize those of all tokens before.
With ``cache_bits`` they come and go as compressed rows, where PyTorch's attention alone reads them.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch
from torch import fx

from torchq.attributes.arguments import FLOATS
from torchq.capture.graph import aten_name
from torchq.capture.ops import Op, Role
from torchq.capture.patterns import arguments_of
from torchq.planning.plan import Plan
from torchq.report import reasons

_MOVES = ("unsqueeze", "expand", "reshape", "view", "transpose", "permute", "clone", "contiguous")


def leave_cached(plan: Plan) -> Plan:
    """Return the plan, without int8 products of what a call adds to such keys or values."""
    ops = dict(plan.ops)
    for op in plan.ops.values():
        if op.role is Role.PRODUCT and any(map(_is_cached, op.srcs[1:])):
            ops[op.node] = replace(op, role=Role.OPAQUE, reason=reasons.CACHED)
        elif plan.captured.has_cache and _grows(op.node):
            ops[op.node] = replace(op, role=Role.OPAQUE, reason=reasons.GROWS)
    return replace(plan, ops=ops | _compressed(plan, ops))


def _compressed(plan: Plan, ops: dict[fx.Node, Op]) -> dict[fx.Node, Op]:
    """Return the operations that a compressed cache changes.

    An attention reads both operands compressed or neither, and every other reader must allow that.
    """
    grown = {op.node: op for op in ops.values() if op.reason == reasons.GROWS and _wants(plan, op)}
    reads = {op.node: op for op in ops.values() if op.reason == reasons.CACHED}
    fits = {op.node for op in reads.values() if _wants(plan, op) and _reads_rows(op, grown)}
    good, known = set(grown), -1
    while len(good) != known:
        known = len(good)
        fits -= {node for node in fits if not good.issuperset(reads[node].srcs[1:])}
        good = {node for node in good if _is_rows(node, fits)}
    changed = {node: replace(reads[node], reason=reasons.CACHED_8) for node in fits}
    for node, op in grown.items():
        changed[node] = replace(op, reason=reasons.GROWS_8 if node in good else reasons.NOT_8)
    return changed


def _wants(plan: Plan, op: Op) -> bool:
    config = plan.config(op.base)
    return config is not None and config.cache_bits is not None


def _reads_rows(op: Op, grown: Container[fx.Node]) -> bool:
    """Return whether an attention of compressed rows can do what an operation does."""
    query, *pair = op.srcs
    if aten_name(op.node) != "scaled_dot_product_attention" or any(n not in grown for n in pair):
        return False
    a = arguments_of(op.node)
    if a.why_varying("query", "key", "value", "attn_mask") or a.dropout_p or a.is_causal:
        return False
    sizes, *others = (node.meta["sizes"] for node in (query, *pair))
    kinds = {node.meta["value"].dtype for node in op.srcs}
    if len(sizes) != 4 or others[0][1] != others[1][1] or len(kinds) != 1:
        return False
    mask = a.nodes.get("attn_mask")
    dtype = torch.bool if mask is None else mask.meta["value"].dtype
    fits = a.enable_gqa or all(size[1] in ("1", sizes[1]) for size in others)
    return fits and dtype in (torch.bool, torch.float32)


def _is_rows(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Return whether only such attention reads keys or values, with those of a cache in front."""
    past = node.all_input_nodes[0]
    if arguments_of(node).dim not in (-2, 2) or past.meta["value"].dtype not in FLOATS:
        return False
    readers = {*readers, node}
    return all(user in readers or _keeps(user) for source in (past, node) for user in source.users)


def _keeps(user: fx.Node) -> bool:
    """Return True for the output, and for sizes that compression keeps."""
    if user.op == "output":
        return True
    return user.target == "size" and len(user.args) == 2 and user.args[1] in (0, 1, 2)


def _grows(node: fx.Node) -> bool:
    """Return whether a node puts keys or values behind those of a cache."""
    is_pair = aten_name(node) == "cat" and len(node.all_input_nodes) == 2
    return is_pair and len(node.meta.get("sizes") or ()) == 4 and _is_cached(node)


def compressed_inputs(plan: Plan) -> list[int]:
    """Return which of a graph's inputs are compressed rows."""
    rows = {n.all_input_nodes[0] for n, op in plan.ops.items() if op.reason == reasons.GROWS_8}
    inputs = plan.captured.graph.find_nodes(op="placeholder")
    return [i for i, node in enumerate(inputs) if node in rows]


def _is_cached(node: fx.Node) -> bool:
    """Return whether a value is one of the call's own with another one behind it."""
    while aten_name(node) in _MOVES:
        node = node.all_input_nodes[0]
    return aten_name(node) == "cat" and node.all_input_nodes[0].op == "placeholder"

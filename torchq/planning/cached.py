# SPDX-License-Identifier: Apache-2.0
"""Attention to keys and values that the caller keeps from one call to the next stays float.

They come as float and go as float: a step of one token would quantize those of all tokens before.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from torchq.capture.graph import aten_name
from torchq.capture.ops import Role
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
    return replace(plan, ops=ops)


def _grows(node: fx.Node) -> bool:
    """Return whether a node puts keys or values behind those of a cache."""
    is_pair = aten_name(node) == "cat" and len(node.all_input_nodes) == 2
    return is_pair and len(node.meta.get("sizes") or ()) == 4 and _is_cached(node)


def _is_cached(node: fx.Node) -> bool:
    """Return whether a value is one of the call's own with another one behind it."""
    while aten_name(node) in _MOVES:
        node = node.all_input_nodes[0]
    return aten_name(node) == "cat" and node.all_input_nodes[0].op == "placeholder"

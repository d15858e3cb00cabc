# SPDX-License-Identifier: Apache-2.0
"""Leaves float what computes angles of many periods, of which int8 loses the place within one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from torchq.capture.graph import aten_name
from torchq.capture.ops import Op, Role
from torchq.planning.layers import HARD, Layer
from torchq.planning.plan import Plan
from torchq.quantization.recipes.phases import ANGLES, why_coarse


def leave_angles(plan: Plan) -> Plan:
    """Return the plan, with the layers and dynamic operations in float that compute such angles."""
    ops, layers = dict(plan.ops), {layer.dst: layer for layer in plan.layers}
    for one, reason in dict(_coarse(plan)).items():
        if isinstance(one, Layer):
            layers[one.dst] = replace(one, reason=one.reason or reason)
        else:
            ops[one.node] = replace(one, role=Role.OPAQUE, reason=reason)
    return replace(plan, ops=ops, layers=tuple(layers.values()))


def _coarse(plan: Plan) -> Iterator[tuple[Layer | Op, str]]:
    """Yield layers and dynamic operations that compute large angles, and why they stay float.

    They may come more than once. What a sum of products reads is no angle.
    """
    made_by: dict[fx.Node, Layer | Op] = {p.node: v for v in plan.layers for p in v.parts}
    made_by |= {op.node: op for op in plan.ops.values() if op.role is Role.DYNAMIC}
    for node in plan.captured.graph.nodes:
        reason = why_coarse(node.meta.get("phase"))
        if not reason:
            continue
        if node in made_by:
            yield made_by[node], reason
        source = node.args[ANGLES[aten_name(node)][0]]
        while isinstance(source, fx.Node):
            one = made_by.get(source)
            if one is not None:
                yield one, reason
                if one.role in (*HARD, Role.DYNAMIC):
                    break
            varying = [n for n in source.all_input_nodes if n.meta["varying"]]
            source = varying[0] if len(varying) == 1 else None

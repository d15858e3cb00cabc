# SPDX-License-Identifier: Apache-2.0
"""Layers of a graph that compute phases of many periods, which stay float."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import fx

from torchq.capture.graph import aten_name
from torchq.capture.ops import Op, Role
from torchq.convert.fuse import HARD, Layer
from torchq.quantization.recipes.phases import ANGLES, why_coarse

if TYPE_CHECKING:
    from torchq.convert.plan import Plan


def coarse_phases(plan: Plan) -> Iterator[tuple[Layer | Op, str]]:
    """Yield layers and dynamic operations that compute large phases, and why they stay float.

    They may come more than once. What a sum of products reads is no phase.
    """
    behind: dict[fx.Node, Layer | Op] = {p.node: v for v in plan.layers for p in v.parts}
    behind |= {op.node: op for op in plan.ops.values() if op.role is Role.DYNAMIC}
    for node in plan.captured.graph.nodes:
        reason = why_coarse(node.meta.get("phase"))
        if not reason:
            continue
        if node in behind:
            yield behind[node], reason
        source: Any = node.args[ANGLES[aten_name(node)][0]]
        while isinstance(source, fx.Node):
            one = behind.get(source)
            if one is not None:
                yield one, reason
                if one.role in (*HARD, Role.DYNAMIC):
                    break
            varying = [n for n in source.all_input_nodes if n.meta["varying"]]
            source = varying[0] if len(varying) == 1 else None

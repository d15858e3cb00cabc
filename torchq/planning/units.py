# SPDX-License-Identifier: Apache-2.0
"""Finds recurrent modules, which are quantized as one unit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from torchq.capture.module_kinds import RECURRENT, why_float
from torchq.capture.ops import Op, Role
from torchq.planning.plan import Plan


def find_units(plan: Plan) -> Plan:
    """Return the plan with the recurrent modules that become int8, and why others stay float."""
    calls: dict[str, list[Op]] = defaultdict(list)
    for op in plan.ops.values():
        if op.node.op == "call_module" and isinstance(op.owner, RECURRENT):
            calls[op.base].append(op)
    ops, names = dict(plan.ops), []
    for name, own in calls.items():
        assert own[0].owner is not None
        values = [src.meta["value"] for op in own for src in op.node.all_input_nodes]
        dtypes = {value.dtype for value in values if value.dtype is not None}
        reason = why_float(own[0].owner, plan.config(name), dtypes)
        ops |= {op.node: replace(op, role=Role.OPAQUE, reason=reason) for op in own}
        if not reason:
            names.append(name)
    return replace(plan, ops=ops, self_contained=tuple(names))

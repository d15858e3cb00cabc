# SPDX-License-Identifier: Apache-2.0
"""Leaves out of the static layers what calibration has found to be coarse."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from torchq.capture.ops import Role
from torchq.planning.plan import Plan
from torchq.report import reasons


def leave_coarse(plan: Plan) -> Plan:
    """Return the plan, where such linear layers are dynamic, and others float.

    What was fused into them stays float. :mod:`torchq.convert.recipes.rows` finds them.
    """
    ops, layers = dict(plan.ops), list(plan.layers)
    for i, layer in enumerate(layers):
        why = (plan.coarse or {}).get(layer.op.node)
        if why and isinstance(layer.op.module, nn.Linear) and not layer.op.absorbed:
            ops[layer.op.node] = replace(layer.op, role=Role.DYNAMIC)
            why = f"{reasons.DYNAMIC}{why}"
        layers[i] = replace(layer, reason=why or layer.reason)
    return replace(plan, ops=ops, layers=tuple(layers))

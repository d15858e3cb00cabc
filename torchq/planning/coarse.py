# SPDX-License-Identifier: Apache-2.0
"""Leaves out of the static layers what calibration has found to be coarse."""

from __future__ import annotations

from dataclasses import replace

from torchq.planning.plan import Plan


def leave_coarse(plan: Plan) -> Plan:
    """Return the plan, with the reasons of the row rule: :mod:`torchq.convert.recipes.rows`."""
    reasons = plan.coarse or {}
    layers = (replace(v, reason=reasons.get(v.op.node, v.reason)) for v in plan.layers)
    return replace(plan, layers=tuple(layers))

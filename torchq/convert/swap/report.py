# SPDX-License-Identifier: Apache-2.0
"""One row for each module of the float model that computes something by itself."""

from __future__ import annotations

from torch import nn

from torchq.convert.explain import NOT_CALLED, READ, Row
from torchq.convert.module_kinds import MATMUL
from torchq.convert.self_contained import FOREIGN, RECURRENT, is_foreign
from torchq.convert.swap.planning import Plan


def report_rows(model: nn.Module, plan: Plan) -> list[Row]:
    """Returns one row per module without children, or with parameters of its own."""
    return [
        _row(name, module, plan)
        for name, module in model.named_modules()
        if next(module.children(), None) is None or next(module.parameters(False), None) is not None
    ]


def _row(name: str, module: nn.Module, plan: Plan) -> Row:
    known = plan.reasons.get(name)
    reason = _without_layer(name, module, plan) if known is None else known
    calls = len(plan.recording.calls.get(name, ()))
    full, made = plan.full_name(name), plan.recording.leaves.get(name, module)
    is_matmul = isinstance(made, (*MATMUL, *RECURRENT))
    requested = plan.config(name) is None
    return Row(
        full, type(module).__name__, known == "", reason, full, is_matmul, requested, max(calls, 1)
    )  # fmt: skip


def _without_layer(name: str, module: nn.Module, plan: Plan) -> str:
    if is_foreign(module):
        return FOREIGN
    if name in plan.recording.read:
        return READ
    if name in plan.recording.leaves:
        return NOT_CALLED
    return "only linear, convolution and recurrent layers have an int8 form"

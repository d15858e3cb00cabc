# SPDX-License-Identifier: Apache-2.0
"""One row for each module of the float model that computes something by itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from torchq.convert.explain import NOT_CALLED, READ, Row
from torchq.convert.module_kinds import MATMUL
from torchq.convert.self_contained import RECURRENT
from torchq.convert.swap.planning import Plan
from torchq.nn.experts import is_experts

_SCRIPTED = {cls.__name__ for cls in (*MATMUL, nn.LSTM, nn.GRU, nn.RNN)}


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
    made = plan.recording.leaves.get(name, module)
    kind = getattr(module, "original_name", type(module).__name__)  # of TorchScript
    is_matmul = isinstance(made, (*MATMUL, *RECURRENT)) or is_experts(made)
    is_matmul |= isinstance(module, torch.jit.ScriptModule) and kind in _SCRIPTED
    requested = plan.config(name) is None
    own = module.named_parameters(recurse=is_matmul)
    weights = tuple(f"{name}.{key}".lstrip(".") for key, _ in own)
    row = Row(name, kind, known == "", reason, name, is_matmul, requested, max(calls, 1))
    return replace(row, weights=weights)


def _without_layer(name: str, module: nn.Module, plan: Plan) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript compiled it: quantize first, then script the result"
    if name not in plan.recording.leaves:
        if isinstance(module, RECURRENT):
            return "it is a recurrent module with code of its own"
        return "only leaf modules of torch.nn and torchq.nn have an int8 form"
    if plan.recording.calls[name]:
        return "the model's own code calls it, which gets and gives float32"
    if name in plan.recording.read:
        return READ
    return NOT_CALLED

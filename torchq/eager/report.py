# SPDX-License-Identifier: Apache-2.0
"""One row for each module of the float model that computes something by itself."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from torchq.eager.planning import Plan, inside
from torchq.explain import NOT_CALLED, Row
from torchq.kinds import MATMUL
from torchq.standalone import FOREIGN, RECURRENT, is_foreign


def report_rows(model: nn.Module, plan: Plan, graphs: dict[str, list[Row]]) -> list[Row]:
    """One row per module that computes something by itself, and per product with parameters.

    Args:
        model: the float model.
        plan: what was decided about it.
        graphs: sequence that became a graph -> the rows of what is in it.
    """
    rows = []
    for name, module in model.named_modules():
        if name in graphs:
            prefix = inside(f"{plan.prefix}{name}".rstrip("."))
            for row in graphs[name]:
                reason = row.reason.replace("fused into ", f"fused into {prefix}")
                full, site = f"{prefix}{row.name}", f"{prefix}{row.site}"
                rows.append(replace(row, name=full, site=site, reason=reason))
        elif name.startswith(tuple(map(inside, graphs))):
            continue
        elif (
            next(module.children(), None) is None
            or next(module.parameters(False), None) is not None
        ):
            rows.append(_row(name, module, plan))
    return [*rows, *_function_rows(plan)]


def _function_rows(plan: Plan) -> list[Row]:
    """Of what the model's own code multiplies by its parameters."""
    reason, rows = "a function of a model whose modules are swapped", []
    for name, kind in plan.products.items():
        full, first = f"{plan.prefix}{name}", f"{plan.prefix}{kind}"
        requested = plan.config(name) is None
        rows.append(Row(full, kind, False, reason, full, True, requested, first=first))
    return rows


def _row(name: str, module: nn.Module, plan: Plan) -> Row:
    reasons = plan.layers | plan.standalone
    reason = reasons[name] if name in reasons else _without_layer(name, module, plan)
    quantized = name in reasons and not reason
    calls = sum(call.first for call in plan.calls.get(name, ()))
    full, made = f"{plan.prefix}{name}".rstrip("."), plan.recording.leaves.get(name, module)
    is_matmul = isinstance(made, (*MATMUL, *RECURRENT))
    requested = plan.config(name) is None
    return Row(
        full, type(module).__name__, quantized, reason, full, is_matmul, requested, max(calls, 1)
    )  # fmt: skip


def _without_layer(name: str, module: nn.Module, plan: Plan) -> str:
    calls = plan.calls.get(name)
    if is_foreign(module):
        return FOREIGN
    if name not in plan.recording.leaves:
        return "only leaf modules of torch.nn and torchq.nn have an int8 form"
    if not calls and name in plan.recording.exposed:
        return "its parameters are used outside of it, and it is not called"
    if not calls:
        return NOT_CALLED
    return "the model's own code calls it, which gets and gives float32"

# SPDX-License-Identifier: Apache-2.0
"""The row rule: layers that read rows far too small for their tensor's scale are not static.

:mod:`torchq.quantization.recipes.rows` has the arithmetic. Linear layers become dynamic, others
stay float. A layer whose configuration an override gives is static all the same.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx, nn

from torchq.convert.module_kinds import RECURRENT
from torchq.convert.plan import Plan
from torchq.convert.prepared import Prepared
from torchq.convert.report import report_rows
from torchq.convert.rows import Row
from torchq.convert.swap.observed import ObservedLeaf
from torchq.nn.rnn_observed import ObservedRNN, ObservedRNNCell

DYNAMIC = "dynamic: "


class Settled(NamedTuple):
    """Graphs with plans that follow the rule, leaves that are not static and why, the report."""

    graphs: list[Prepared]
    leaves: dict[str, str]
    rows: list[Row]


def follow_row_rule(prepared: nn.Module, graphs: list[Any], rows: list[Row]) -> Settled:
    """Apply the rule to a calibrated model.

    Args:
        prepared: the model.
        graphs: its own.
        rows: its report.
    """
    settled, leaves, in_graphs = [], dict[str, str](), set[str]()
    for graph in graphs:
        reasons = _coarse(graph)
        settled.append(_without(graph, reasons))
        rows = _updated(rows, graph.plan, settled[-1].plan)
        for layer in graph.plan.layer_at.values():
            name = f"{graph.plan.prefix}{layer.op.base}"
            in_graphs.add(name)
            if layer.op.node in reasons:
                leaves[name] = reasons[layer.op.node]
    for name, leaf in prepared.named_modules():
        known = isinstance(leaf, (ObservedLeaf, ObservedRNN, ObservedRNNCell))
        if known and name not in in_graphs and (why := leaf.why_coarse()):
            leaves[name], prefix = why, _becomes(leaf)
            now: dict[str, Any] = {"quantized": bool(prefix), "reason": f"{prefix}{why}"}
            rows = [replace(row, **now) if row.name == name else row for row in rows]
    return Settled(settled, leaves, rows)


def _becomes(leaf: Any) -> str:
    """Return what a module becomes, in front of the reason; "" for float."""
    if getattr(leaf, "has_float_first", False):
        return "first layer float, others dynamic: "
    return DYNAMIC if isinstance(leaf.module, (nn.Linear, *RECURRENT)) else ""


def _coarse(prepared: Prepared) -> dict[fx.Node, str]:
    """Return the nodes of layers that one scale does not suit, and why."""
    found: dict[fx.Node, str] = {}
    equalized = prepared.between()  # their channels have scales of their own
    for layer in prepared.plan.layer_at.values():
        rows = prepared.rows_of(layer)
        one_scale = prepared.plan.root(layer.srcs[0]) not in equalized
        if rows is not None and rows.calibrated and one_scale:
            why = rows.why_coarse(prepared.qparams(layer.srcs[0]))
            dynamic = isinstance(layer.op.module, nn.Linear) and not layer.op.absorbed
            found |= {layer.op.node: f"{DYNAMIC if dynamic else ''}{why}"} if why else {}
    return found


def _without(prepared: Prepared, reasons: dict[fx.Node, str]) -> Prepared:
    if not reasons:
        return prepared
    other, plan = copy.copy(prepared), prepared.plan
    other.plan = Plan(plan.captured, plan._config, plan._overrides, reasons)
    ops = (other.plan.ops[node] for node in reasons)
    linear = (op for op in ops if isinstance(op.module, nn.Linear) and not op.absorbed)
    other.plan.dynamic_at |= {op.node: op for op in linear}
    return other


def _updated(rows: list[Row], before: Plan, after: Plan) -> list[Row]:
    """Return a report with what another plan of the same graph says."""
    if before is after:
        return rows
    old, new = ({row.name: row for row in report_rows(plan)} for plan in (before, after))
    found = []
    for row in rows:
        now = new.get(row.name)
        if now is not None and now != old.get(row.name):
            own = now.quantized or now.is_matmul  # others only follow such a layer
            reason = now.reason if own else "its sources are float"
            row = replace(row, quantized=now.quantized, reason=reason, site=now.site)
        found.append(row)
    return found

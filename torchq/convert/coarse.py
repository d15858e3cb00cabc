# SPDX-License-Identifier: Apache-2.0
"""The row rule: layers that read rows far too small for their tensor's scale are not static.

:mod:`torchq.quantization.recipes.rows` has the arithmetic. Linear and
recurrent layers become dynamic, convolutions and the first of several layers of an LSTM stay float.
A layer whose configuration an override gives is static all the same.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx, nn

from torchq.capture.module_kinds import RECURRENT
from torchq.convert.fuse import Layer
from torchq.convert.plan import Plan
from torchq.convert.prepared import Prepared
from torchq.convert.report import report_rows
from torchq.convert.swap.observed import ObservedLeaf
from torchq.nn.rnn_observed import ObservedRNN, ObservedRNNCell
from torchq.quantization.config import resolve
from torchq.report.rows import Row

DYNAMIC = "dynamic: "
_FIRST = re.compile(r"_l0(_reverse)?$")  # weights of a network's first layer


class Settled(NamedTuple):
    """Graphs with plans that follow the rule, names of leaves that are not static, the report."""

    graphs: list[Prepared]
    leaves: set[str]
    rows: list[Row]


def follow_row_rule(prepared: nn.Module, graphs: list[Any], rows: list[Row]) -> Settled:
    """Apply the rule to a calibrated model, its graphs and its report."""
    settled, leaves, in_graphs = [], set[str](), set[str]()
    for graph in [g.with_plan(g.plan, {}) for g in graphs]:  # these search each range once
        reasons = coarse_layers(graph)
        settled.append(without_coarse(graph, reasons))
        rows = _updated(rows, graph.plan, settled[-1].plan)
        for layer in graph.plan.layer_at.values():
            name = f"{graph.plan.prefix}{layer.op.base}"
            in_graphs.add(name)
            if layer.op.node in reasons:
                leaves.add(name)
    for name, leaf in prepared.named_modules():
        known = isinstance(leaf, (ObservedLeaf, ObservedRNN, ObservedRNNCell))
        if known and name not in in_graphs and (why := leaf.why_coarse()):
            leaves.add(name)
            told = (_told(row, leaf, why) if row.name == name else [row] for row in rows)
            rows = [row for several in told for row in several]
    return Settled(settled, leaves, rows)


def _told(row: Row, leaf: Any, why: str) -> list[Row]:
    """Return the rows of a module that one scale does not suit."""
    if not isinstance(leaf.module, (nn.Linear, *RECURRENT)):
        return [replace(row, quantized=False, reason=why)]
    first = [w for w in row.weights if getattr(leaf, "has_float_first", False) and _FIRST.search(w)]
    rest = tuple(w for w in row.weights if w not in first)
    dynamic = replace(row, quantized=True, reason=f"{DYNAMIC}{why}", weights=rest)
    if not first:
        return [dynamic]
    name = f"{row.name}, first layer"
    return [replace(row, name=name, quantized=False, reason=why, weights=tuple(first)), dynamic]


def coarse_layers(prepared: Prepared) -> dict[fx.Node, str]:
    """Return the nodes of layers that one scale does not suit, and why."""
    plan, found = prepared.plan, dict[Layer, str]()
    for layer in plan.layer_at.values():
        rows = prepared.rows_of(layer)
        chosen = resolve(plan._overrides, f"{plan.prefix}{layer.op.base}", None)
        if rows is None or not rows.calibrated or chosen is not None:
            continue
        if why := rows.why_coarse(prepared.qparams(layer.srcs[0])):
            dynamic = isinstance(layer.op.module, nn.Linear) and not layer.op.absorbed
            found[layer] = f"{DYNAMIC if dynamic else ''}{why}"
    equalized = prepared.between() if found else {}  # whose channels have scales of their own
    return {v.op.node: w for v, w in found.items() if plan.root(v.srcs[0]) not in equalized}


def without_coarse(prepared: Prepared, reasons: dict[fx.Node, str]) -> Prepared:
    """Return the same graph with a plan in which these layers are not static."""
    if not reasons:
        return prepared
    old = prepared.plan
    plan = Plan(old.captured, old._config, old._overrides, reasons)
    ops = (plan.ops[node] for node in reasons)
    linear = (op for op in ops if isinstance(op.module, nn.Linear) and not op.absorbed)
    plan.dynamic_at |= {op.node: op for op in linear}
    return prepared.with_plan(plan)


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

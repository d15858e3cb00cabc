# SPDX-License-Identifier: Apache-2.0
"""One row for each module of the float model and each function that its graph calls."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches

from torch import nn

from torchq.capture.graph import parameters_of
from torchq.capture.module_kinds import MATMUL, RECURRENT
from torchq.capture.ops import Op, Role
from torchq.capture.patterns import GETITEM, row_of
from torchq.convert.settled import Settled
from torchq.nn.rnn_observed import ObservedRNN, ObservedRNNCell
from torchq.planning.layers import KEEPING, Layer
from torchq.planning.plan import Plan
from torchq.quantization.config import Overrides, unmatched_patterns
from torchq.report import reasons
from torchq.report.rows import Row, Weight


def report_rows(plan: Plan) -> list[Row]:
    """Return rows in the order of calls; what depends on sizes and positions alone has none."""
    layer_of = {part.node: layer for layer in plan.layers for part in layer.parts}
    rows: dict[str, list[Row]] = defaultdict(list)
    firsts: dict[tuple[str, str, str], str] = {}
    for op in plan.ops.values():
        if op.node.meta["positional"] or op.role is Role.SHAPE:
            continue
        if op.owner is None and op.role is Role.PASS:
            continue
        unpacks = op.owner is None and op.srcs and op.srcs[0].meta["value"].is_sequence
        if unpacks and op.node not in plan.joined:  # the results of a module
            continue
        if row_of(op.node) is GETITEM and op.srcs and op.srcs[0].op == "call_module":
            continue
        name = op.base if op.owner is not None else op.name
        row = _row(plan, op, layer_of.get(op.node), name)
        if op.owner is None and op.node.meta["line"]:
            line = op.kind, op.node.meta["scope"], op.node.meta["line"]
            row = replace(row, first=f"{plan.prefix}{firsts.setdefault(line, name)}")
        rows[name].append(row)
    found = [_together(several) for several in rows.values()]
    found += [_once(plan, name) for name in sorted(plan.captured.once - rows.keys())]
    prefix = plan.prefix
    return [replace(row, name=f"{prefix}{row.name}", site=f"{prefix}{row.site}") for row in found]


def merged(
    leaves: Iterable[Row],
    graphs: Iterable[tuple[str, list[Row]]],
    unused: Iterable[Row],
    names: Collection[str],
) -> list[Row]:
    """Return the rows of a model: of its graphs, and of leaves that no graph calls.

    Args:
        leaves: rows of every leaf, as the model's own code calls it.
        graphs: names of modules that have a graph, and the graphs' rows.
        unused: rows of graphs that nothing is int8 in; those of functions tell why.
        names: of the float model's modules; parts of one that was split are counted once.
    """
    found: dict[str, Row] = {}
    inside: list[str] = []
    for name, rows in graphs:
        found |= {row.name: row for row in rows}
        inside.append(f"{name}." if name else "")
    for row in leaves:
        shown = row.is_matmul and row.name in names
        shown = shown and row.reason != reasons.READ  # the graph has the function that reads
        captured = row.name.startswith(tuple(inside)) and not shown
        if row.name not in found and not captured:
            found[row.name] = row
    for row in unused:
        if row.name not in names:
            found.setdefault(row.name, row)
    return list(found.values())


_FIRST = re.compile(r"_l0(_reverse)?$")  # weights of a network's first layer


def coarse_names(graphs: Iterable[Settled]) -> dict[str, str]:
    """Return by name of a layer that calibrated graphs call why it is not static, or ""."""
    found: dict[str, str] = {}
    for settled in graphs:
        before, after = settled.seen.watched, settled.plan
        coarse = {after.ops[node].base: why for node, why in (after.coarse or {}).items()}
        for base in (*(layer.op.base for layer in before.active), *coarse):
            name = f"{before.prefix}{base}"
            found[name] = coarse.get(base) or found.get(name, "")
    return found


def with_coarse(rows: Sequence[Row], prepared: nn.Module, plans: Iterable[Settled]) -> list[Row]:
    """Return the rows of a calibrated model, by the ``plans`` of its graphs and leaves.

    Linear and recurrent layers that one scale does not suit become dynamic; convolutions stay
    float, and so does the first of several layers of an LSTM.
    """
    for settled in plans:
        rows = _updated(rows, settled.seen.watched, settled.plan)
    for name, unit in prepared.named_modules():
        if isinstance(unit, ObservedRNN | ObservedRNNCell) and (why := unit.why_coarse()):
            several = (_coarse(row, unit, why) if row.name == name else [row] for row in rows)
            rows = [row for some in several for row in some]
    return list(rows)


def _coarse(row: Row, leaf: ObservedRNN | ObservedRNNCell, why: str) -> list[Row]:
    """Return the rows of a recurrent module that one scale does not suit."""
    first = [w for w in row.weights if getattr(leaf, "has_float_first", False) and _FIRST.search(w)]
    rest = tuple(w for w in row.weights if w not in first)
    dynamic = replace(row, quantized=True, reason=f"{reasons.DYNAMIC}{why}", weights=rest)
    if not first:
        return [dynamic]
    name = f"{row.name}, first layer"
    return [replace(row, name=name, quantized=False, reason=why, weights=tuple(first)), dynamic]


def _updated(rows: Sequence[Row], before: Plan, after: Plan) -> Sequence[Row]:
    """Return a report with what another plan of the same graph says."""
    if after.ops is before.ops:
        return rows
    old, new = ({row.name: row for row in report_rows(plan)} for plan in (before, after))
    found = []
    for row in rows:
        now = new.get(row.name)
        if now is not None and now != old.get(row.name):
            own = now.quantized or now.is_matmul  # others only follow such a layer
            reason = now.reason if own else reasons.FLOAT_SOURCES
            row = replace(row, quantized=now.quantized, reason=reason, site=now.site)
        found.append(row)
    return found


def _together(rows: list[Row]) -> Row:
    """Return one row for all calls of a module."""
    rows = [replace(row, calls=len(rows)) for row in rows]
    quantized = [row for row in rows if row.quantized]
    if not quantized or len(quantized) == len(rows):
        found = dict.fromkeys(row.reason for row in rows)
        if all(r.startswith(reasons.FUSED) for r in found):
            into = dict.fromkeys(r.removeprefix(reasons.FUSED) for r in found)
            return replace(rows[0], reason=reasons.FUSED + ", ".join(into))
        return replace(rows[0], reason="; ".join(filter(None, found)))
    left = next(row.reason for row in rows if not row.quantized)
    first = quantized[0]
    here = first.reason or "int8"
    return replace(first, reason=reasons.ELSEWHERE.format(here=here, why=left))


def _row(plan: Plan, op: Op, layer: Layer | None, name: str) -> Row:
    quantized, reason, site = False, op.reason, op.name
    if isinstance(op.owner, RECURRENT):
        quantized, site = op.base in plan.self_contained, op.base
    elif (whole := plan.dynamic_wholes.get(op.node)) is not None:
        quantized, reason, site = True, f"{reasons.FUSED}{plan.prefix}{whole.name}", whole.name
    elif layer is not None:
        reason = layer.reason or layer.op.note
        quantized = not layer.reason or op.node in plan.dynamic_at
        host = plan.table_hosts.get(layer, layer)
        if quantized and op.node is not host.op.node:
            reason, site = f"{reasons.FUSED}{plan.prefix}{host.op.name}", host.op.name
    elif op.role in KEEPING:
        quantized = plan.is_int8(op.node)
        reason = reasons.PASSES if quantized and op.role is Role.PASS else op.reason
    elif op.role is Role.DYNAMIC:
        quantized = True
    elif op.role is Role.FAKE:
        quantized, reason = True, reasons.LEVELS
    is_matmul = isinstance(op.owner, (*MATMUL, *RECURRENT)) or op.is_matmul
    row = Row(name, op.kind, quantized, reason, site, is_matmul, op.requested)
    return replace(row, weights=_weights(plan, op))


def _weights(plan: Plan, op: Op) -> tuple[str, ...]:
    """Return the names of the parameters that an operation computes with."""
    names = {name for part in (op, *op.absorbed) for name in parameters_of(part.node)}
    if op.node.op == "call_module" and op.owner is not None:
        names |= {f"{op.base}.{name}" for name, _ in op.owner.named_parameters()}
    return tuple(sorted(f"{plan.prefix}{name}" for name in names))


def _once(plan: Plan, name: str) -> Row:
    kind = type(plan.captured.model.get_submodule(name)).__name__
    return Row(name, kind, False, reasons.ONCE, name, False, plan.config(name) is None)


def check_patterns(
    model: nn.Module, rows: list[Row], weights: Sequence[Weight], overrides: Overrides | None
) -> None:
    """Raise ValueError for an override that matches no module, row, weight or ``.dst`` of one."""
    names = [name for name, _ in model.named_modules()]
    names += [*(row.name for row in rows), *(weight.name for weight in weights)]
    if unmatched := unmatched_patterns(overrides, [*names, *(f"{name}.dst" for name in names)]):
        told = ", ".join(map(repr, unmatched[:3])) + (", ..." if len(unmatched) > 3 else "")
        raise ValueError(
            f"torchq.prepare: overrides must match names of modules or functions, but {told} "
            f"match{'es' * (len(unmatched) == 1)} none. {_nearest_names(model, rows, unmatched)} "
            "torchq.explain(torchq.prepare(model, example_inputs)) lists all."
        )


def _nearest_names(model: nn.Module, rows: list[Row], patterns: list[str]) -> str:
    """Return a sentence with the names that are most like patterns, or with the outermost ones."""
    modules = [name for name, _ in model.named_modules() if name]
    known = [*modules, *(row.name for row in rows if row.quantized and row.name not in modules)]
    near = []
    for pattern in patterns[:3]:
        text, end = (pattern[:-4], ".dst") if pattern.endswith(".dst") else (pattern, "")
        near += [name + end for name in get_close_matches(text, known, 2, 0.55)]
    if near:
        return f"Did you mean {' or '.join(map(repr, dict.fromkeys(near)))}?"
    outer = list(dict.fromkeys(name.partition(".")[0] for name in known if name))
    if not outer:
        return "The model is one module, which only '' and '*' match."
    more = f" and {len(outer) - 5} more" if len(outer) > 5 else ""
    return f"Names begin with {', '.join(map(repr, outer[:5]))}{more}."

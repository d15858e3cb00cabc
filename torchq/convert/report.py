# SPDX-License-Identifier: Apache-2.0
"""One row for each module of the float model and each function that its graph calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from torchq.capture.graph import parameters_of
from torchq.capture.module_kinds import MATMUL, RECURRENT
from torchq.capture.ops import Op, Role
from torchq.capture.patterns import GETITEM, row_of
from torchq.convert.fuse import Layer
from torchq.convert.plan import Plan
from torchq.report.rows import READ, Row

ONCE = "nothing that it reads depends on the inputs: it is computed once"


def report_rows(plan: Plan) -> list[Row]:
    """Return rows in the order of calls; what depends on sizes and positions alone has none."""
    layer_of = {part: layer for layer in plan.layers for part in layer.parts}
    rows: dict[str, list[Row]] = defaultdict(list)
    firsts: dict[tuple[str, str, str], str] = {}
    for op in plan.ops.values():
        if op.node.meta["positional"] or op.role is Role.SHAPE:
            continue
        if op.owner is None and op.role is Role.PASS:
            continue
        unpacks = op.owner is None and op.srcs and op.srcs[0].meta["value"].is_sequence
        if unpacks and not plan.is_joined(op.node):  # the results of a module
            continue
        if row_of(op.node) is GETITEM and op.srcs and op.srcs[0].op == "call_module":
            continue
        name = op.base if op.owner is not None else op.name
        row = _row(plan, op, layer_of.get(op), name)
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
        shown = shown and row.reason != READ  # the graph has the function that reads
        captured = row.name.startswith(tuple(inside)) and not shown
        if row.name not in found and not captured:
            found[row.name] = row
    for row in unused:
        if row.name not in names:
            found.setdefault(row.name, row)
    return list(found.values())


def _together(rows: list[Row]) -> Row:
    """Return one row for all calls of a module."""
    rows = [replace(row, calls=len(rows)) for row in rows]
    quantized = [row for row in rows if row.quantized]
    if not quantized or len(quantized) == len(rows):
        reasons = dict.fromkeys(row.reason for row in rows)
        if all(r.startswith("fused into ") for r in reasons):
            into = dict.fromkeys(r.removeprefix("fused into ") for r in reasons)
            return replace(rows[0], reason="fused into " + ", ".join(into))
        return replace(rows[0], reason="; ".join(r for r in reasons if r))
    left = next(row.reason for row in rows if not row.quantized)
    first = quantized[0]
    return replace(first, reason=f"{first.reason or 'int8'}; elsewhere float: {left}")


def _row(plan: Plan, op: Op, layer: Layer | None, name: str) -> Row:
    quantized, reason, site = False, op.reason, op.name
    if isinstance(op.owner, RECURRENT):
        quantized, site = op.base in plan.self_contained, op.base
    elif (whole := plan.dynamic_wholes.get(op)) is not None:
        quantized, reason, site = True, f"fused into {plan.prefix}{whole.name}", whole.name
    elif layer is not None:
        reason = plan.reasons[layer]
        quantized = not reason
        if quantized:
            reason = layer.op.note
        quantized |= op.node in plan.dynamic_at
        host = plan.table_hosts.get(layer, layer)
        if quantized and op is not host.op:
            reason, site = f"fused into {plan.prefix}{host.op.name}", host.op.name
    elif op.role in (Role.MOVE, Role.PASS, Role.POOL, Role.PAD):
        quantized = plan.is_int8(op.node)
        reason = "passes values on as they are" if op.role is Role.PASS else ""
        if not quantized:
            reason = "its sources are float"
    elif op.role is Role.DYNAMIC:
        quantized = True
    elif op.role is Role.FAKE:
        quantized, reason = True, "says what the scale and zero point are"
    elif op.role is Role.SLOPES:
        reason = "it has a slope per channel, and no convolution or linear in front takes it over"
    elif op.role is Role.NORM:
        reason = "it stands alone on rows of features"
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
    return Row(name, kind, False, ONCE, name, False, plan.config(name) is None)

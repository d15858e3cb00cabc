# SPDX-License-Identifier: Apache-2.0
"""Chooses the values that are int8.

A group is int8 if a matmul reads it, or if a layer emits it as int8 and another can read that, or
if the model rounds it to levels itself. Where an int8 value is read as float32, the converted graph
dequantizes it there.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from torch import fx

from torchq.capture.ops import Role
from torchq.planning.layers import HARD, KEEPING, Layer
from torchq.planning.plan import Plan
from torchq.report import reasons


def choose_int8(plan: Plan) -> Plan:
    """Return the plan with its int8 groups; layers that would gain nothing stay float."""
    while True:
        hard, soft = _wanted(plan)
        plan = replace(plan, int8=frozenset(hard | soft))
        layers = tuple(_tried(plan, layer, hard) for layer in plan.layers)
        if all(new is old for new, old in zip(layers, plan.layers, strict=True)):
            break
        plan = replace(plan, layers=layers)
    # whatever these read must have parameters
    combined = [v for v in plan.active if v.role in (Role.COMBINE, Role.PRODUCT)]
    read = {plan.root(src) for layer in combined for src in layer.srcs}
    plan = replace(plan, int8=plan.int8 | read)
    moved = [op for op in plan.ops.values() if op.role in KEEPING and not plan.is_int8(op.node)]
    left = {op.node: replace(op, reason=reasons.FLOAT_SOURCES) for op in moved}
    return replace(plan, ops={**plan.ops, **left})


def _wanted(plan: Plan) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the roots that have to be int8, and others that are int8 between layers."""
    hard = {plan.root(node) for node in plan.levels}
    soft, emitted = set[fx.Node](), set[fx.Node]()
    for layer in plan.active:
        roots = {plan.root(node) for node in layer.srcs}
        (hard if layer.role in HARD else soft).update(roots)
        if layer.residual is not None:
            soft.add(plan.root(layer.residual))
        if layer.may_emit_int8:
            emitted.add(plan.root(layer.dst))
    # what a float operation reads as well gains nothing from 8 bits: a residual stream, say
    return hard, emitted & soft - _read_as_float(plan)


def _read_as_float(plan: Plan) -> set[fx.Node]:
    """Return the roots of the groups that something reads which is no quantized layer."""
    inside = {part.node for layer in plan.active for part in layer.parts} | plan.joined
    found: set[fx.Node] = set()
    for node in plan.captured.graph.nodes:
        op = plan.ops.get(node)
        if node not in inside and not (op and op.role is Role.SHAPE):
            found.update(plan.root(src) for src in node.all_input_nodes)
    return found


def _tried(plan: Plan, layer: Layer, hard: AbstractSet[fx.Node]) -> Layer:
    """Return a layer, in float if it is no matmul and would gain nothing from int8."""
    if layer.reason or layer.role in HARD:
        return layer
    if not any(plan.is_int8(node) for node in layer.srcs):
        return replace(layer, reason=reasons.FLOAT_SOURCES)
    wanted = hard >= {plan.root(node) for node in layer.srcs}
    if not plan.emits_int8(layer) and (layer.role is Role.UNARY or not wanted):
        return replace(layer, reason=reasons.FLOAT_DESTINATION)
    return layer

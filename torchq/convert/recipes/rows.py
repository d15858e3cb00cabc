# SPDX-License-Identifier: Apache-2.0
"""The row rule: layers that read rows far too small for their tensor's scale are not static.

:mod:`torchq.quantization.recipes.rows` has the arithmetic, :mod:`torchq.planning.coarse` says what
becomes of them. A layer whose configuration an override gives is static all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from torchq.capture.module_kinds import MATMUL
from torchq.capture.ops import Role
from torchq.convert.recipes.equalization import between_layers
from torchq.convert.settled import Seen, Settled
from torchq.convert.watching import Watch
from torchq.planning.layers import Layer
from torchq.planning.passes import decided
from torchq.planning.plan import Plan
from torchq.quantization.recipes.rows import RowPowers


class RowRule:
    """Leaves layers out of the static ones; the passes then decide anew."""

    def watch(self, plan: Plan) -> Iterator[Watch]:
        """Yield the rows that static layers read."""
        for layer in plan.active:
            if (watch := _watched(plan, layer)) is not None:
                yield watch

    def apply(self, settled: Settled) -> Settled:
        """Return a plan without the coarse layers, if nobody has decided that before."""
        plan = settled.plan
        if plan.coarse is not None:
            return settled
        finer = without_coarse(plan, coarse(settled.seen))
        return replace(settled, seen=settled.seen.with_plan(finer))


def _watched(plan: Plan, layer: Layer) -> Watch | None:
    """Return what records the rows that a layer reads; None where the rule is not for it."""
    module = layer.op.module
    free = layer.op.role is Role.MATMUL and plan.fixed(layer.srcs[0]) is None
    if not free or not isinstance(module, MATMUL):
        return None
    powers = RowPowers.of(module)
    powers.name = f"{plan.prefix}{layer.op.base}"
    return Watch("rows", (layer.srcs[0],), powers.extra_repr(), lambda: powers)


def coarse(seen: Seen) -> dict[fx.Node, str]:
    """Return the nodes of layers that one scale does not suit, and why."""
    plan, found = seen.plan, dict[Layer, str]()
    for layer in plan.active:
        watch = None if plan.is_chosen(layer.op.base) else _watched(plan, layer)
        rows = None if watch is None else seen.recorder(watch)
        if not isinstance(rows, RowPowers) or not rows.calibrated:
            continue
        if why := rows.why_coarse(seen.qparams(layer.srcs[0])):
            found[layer] = why
    equalized = between_layers(seen) if found else {}  # whose channels have scales of their own
    return {v.op.node: w for v, w in found.items() if plan.root(v.srcs[0]) not in equalized}


def without_coarse(plan: Plan, found: Mapping[fx.Node, str]) -> Plan:
    """Return the plan in which these layers are not static, and nothing else is coarse."""
    if not found:
        return replace(plan, coarse={})
    return decided(plan.captured, plan.default, plan.overrides, found)

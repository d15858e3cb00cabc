# SPDX-License-Identifier: Apache-2.0
"""Linear layers keep 8 bits where 4 would cost their results too much.

``QConfig(weight_bits=4, min_sqnr=...)`` says how much. A layer's float result is compared with that
of its 4-bit form, on a sample of what the layer reads in the calibration data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from glob import escape

import torch
from torch import nn

from torchq.attributes.arguments import as_float32
from torchq.capture.ops import Op, Role
from torchq.convert.recipes.samples import sampled_sources
from torchq.convert.settled import Seen, Settled
from torchq.convert.watching import Watch
from torchq.models.inputs import decibels
from torchq.nn.from_float import dynamic_from_float
from torchq.planning.plan import Plan
from torchq.quantization.config import QConfig
from torchq.quantization.recipes.sample import SourceSample
from torchq.report import reasons


class MixedBits:
    """Gives such layers 8 bits in the plan, so that all that reads the plan agrees."""

    def watch(self, plan: Plan) -> Iterator[Watch]:
        """Yield the source of each layer that may keep 8 bits."""
        yield from sampled_sources(plan, _has_limit).values()

    def apply(self, settled: Settled) -> Settled:
        """Return a plan in which these layers have 8 bits, and say why."""
        seen, found = settled.seen, dict[str, str]()
        ops = {op.base: op for op in seen.plan.dynamic_at.values()}
        for name, watch in sampled_sources(seen.plan, _has_limit).items():
            if why := seen.once(("bits", name), partial(_why_8, seen, ops[name], watch)):
                found[name] = why
        if not found:
            return settled
        return replace(settled, seen=seen.with_plan(_with_8_bits(seen.plan, found)))


def _has_limit(config: QConfig) -> bool:
    return config.min_sqnr is not None


def _why_8(seen: Seen, op: Op, watch: Watch) -> str:
    """Return why a layer keeps 8 bits, or ""."""
    config, linear, sample = seen.plan.config(op.base), op.module, seen.recorder(watch)
    assert config is not None and config.min_sqnr is not None and isinstance(linear, nn.Linear)
    if op.weight_scale is not None:  # of int8 integers, that the model itself gives
        return ""
    if not isinstance(sample, SourceSample) or not sample.calibrated:
        return reasons.EIGHT_UNSEEN
    four = dynamic_from_float(linear, config, sample=sample if config.samples_rows else None)
    bias = None if linear.bias is None else as_float32(linear.bias)
    expected = nn.functional.linear(sample.kept, as_float32(linear.weight), bias)
    powers = (
        each.square().sum(dtype=torch.float64) for each in (expected, four(sample.kept) - expected)
    )
    left = decibels(*map(float, powers))
    enough = left >= config.min_sqnr
    return "" if enough else reasons.EIGHT_BITS.format(left=left, limit=config.min_sqnr)


def _with_8_bits(plan: Plan, found: dict[str, str]) -> Plan:
    """Return the plan in which these layers have 8 bits for the reasons given."""
    overrides, ops = dict(plan.overrides or {}), dict(plan.ops)
    for name in found:
        config = plan.config(name)
        assert config is not None
        eight = replace(config, weight_bits=8, group_size=None, min_sqnr=None)
        overrides[escape(f"{plan.prefix}{name}")] = eight
    for node, op in plan.ops.items():
        if op.role is Role.DYNAMIC and op.base in found:
            ops[node] = replace(op, reason=found[op.base])
    return replace(plan, overrides=overrides, ops=ops)

# SPDX-License-Identifier: Apache-2.0
"""From accumulators to destinations, the part of the oracle (reference.py) that rounds.

Parameters are folded in float64 and rounded to float32 once. From there on every step is one
float32 operation with one rounding, `fma32` being the fused multiply-add: results are compared bit
for bit.

`epilogue` with side -1 or 1 answers the least and the greatest result which the stated errors of
torchq's transcendental functions allow: it follows the interval around the float64 value through
the chain, so that both are the same except at ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from reference_arithmetic import RANGE, Number, f32, f64, fma32, rne, store
from reference_post_ops import BINARY, PostOp, PostOps, bind, bounded_step, float_step, foldable
from torch import Tensor


@dataclass(frozen=True)
class Real:
    """x = multiplier * acc + offset; post-ops; q = rne(x / dst_scale + zero_point). Float64."""

    multiplier: Tensor  # [channels]
    offset: Tensor
    dst_scale: Tensor
    zero_point: Tensor


@dataclass(frozen=True)
class Folded:
    """y = fma(acc, multiplier, offset); per sum y = fma(old, s, y); q = clamp(rne(y), lo, hi)."""

    multiplier: Tensor  # float32 [channels], as all others
    offset: Tensor
    sums: list[Tensor]
    lo: Tensor
    hi: Tensor


def real_units(
    src_scale: Number | None,
    weight_scale: Number | None,
    bias: Tensor | None,
    dst_scale: Number | None,
    dst_zero_point: Number,
    channels: int,
) -> Real:
    """v3: the bias is real and added after scaling."""
    scales = [f64(1.0 if s is None else s) for s in (src_scale, weight_scale, dst_scale)]
    offset = f64(0.0 if bias is None else bias)
    parts = (scales[0] * scales[1], offset, scales[2], f64(dst_zero_point))
    return Real(*(part.reshape(-1).expand(channels) for part in parts))


def scaled_units(
    output_scales: Number, bias: Tensor | None, dst_zero_point: Number, channels: int
) -> Real:
    """v1: the bias is added before the scale; post-ops act in destination units."""
    multiplier = f64(output_scales)
    offset = f64(0.0 if bias is None else bias) * multiplier
    parts = (multiplier, offset, f64(1.0), f64(dst_zero_point))
    return Real(*(part.reshape(-1).expand(channels) for part in parts))


def fold_chain(real: Real, chain: Sequence[PostOp], dst_dtype: torch.dtype) -> Folded:
    """Rule 3. Float64 operations in exactly this order, then one rounding to float32."""
    assert foldable(chain), "only affine chains fold, with at most one plain relu or clip last"
    multiplier, offset = real.multiplier, real.offset
    sums: list[Tensor] = []
    low, high = -math.inf, math.inf
    for op in chain:
        if op.kind == "sum":
            sums.append(torch.full_like(multiplier, op.scale))
            offset = offset - op.scale * op.zero_point
        elif op.kind == "add":
            offset = offset + f64(op.operand)
        elif op.kind in ("linear", "mul"):
            factor = f64(op.operand) if op.kind == "mul" else op.alpha * op.scale
            multiplier, offset = multiplier * factor, offset * factor
            sums = [s * factor for s in sums]
            if op.kind == "linear":
                offset = offset + op.beta * op.scale
        elif op.kind == "relu":
            low = 0.0
        elif op.kind == "clip":
            low, high = op.alpha, op.beta

    def to_bound(bound: float) -> Tensor:
        y = bound / real.dst_scale + real.zero_point
        return f32(y if dst_dtype == torch.float32 else rne(y).clamp(*RANGE[dst_dtype]))

    return Folded(
        f32(multiplier / real.dst_scale),
        f32(offset / real.dst_scale + real.zero_point),
        [f32(s / real.dst_scale) for s in sums],
        to_bound(low),
        to_bound(high),
    )


def fold(
    src_scale: Number,
    weight_scale: Number,
    bias: Tensor | None,
    dst_scale: Number | None,
    dst_zero_point: Number,
    post_ops: PostOps,
    values: Sequence[Tensor],
    channels: int,
    dst_dtype: torch.dtype,
) -> Folded:
    """The parameters of rule 3 from readable ones."""
    real = real_units(src_scale, weight_scale, bias, dst_scale, dst_zero_point, channels)
    return fold_chain(real, bind(post_ops, values), dst_dtype)


def fold_output_scales(
    output_scales: Number,
    bias: Tensor | None,
    post_ops: PostOps,
    values: Sequence[Tensor],
    channels: int,
    dst_dtype: torch.dtype,
    dst_zero_point: Number = 0,
) -> Folded:
    """The parameters of rule 3 from v1's output scales."""
    real = scaled_units(output_scales, bias, dst_zero_point, channels)
    return fold_chain(real, bind(post_ops, values), dst_dtype)


def epilogue(
    acc: Tensor,
    real: Real,
    chain: Sequence[PostOp],
    dst_dtype: torch.dtype,
    axis: int = -1,
    side: int = 0,
) -> Tensor:
    """From accumulators (channels on `axis`) to dst: rule 3 if the chain folds, else rule 4.

    `side` -1 and 1: the least and the greatest result within the stated errors.
    """
    shape = [1] * acc.ndim
    shape[axis] = -1

    def per_channel(value: Tensor) -> Tensor:
        return value.reshape(shape) if value.ndim == 1 else value

    zero_point = per_channel(real.zero_point)
    if foldable(chain):
        folded = fold_chain(real, chain, dst_dtype)
        y = fma32(f32(acc), per_channel(folded.multiplier), per_channel(folded.offset))
        for s, op in zip(folded.sums, (op for op in chain if op.kind == "sum"), strict=True):
            y = fma32(f32(op.operand), per_channel(s), y)
        return store(y, zero_point, dst_dtype, per_channel(folded.lo), per_channel(folded.hi))

    x = fma32(f32(acc), per_channel(f32(real.multiplier)), per_channel(f32(real.offset)))
    low = high = x
    for op in chain:
        if op.kind in BINARY or op.kind == "select":
            op = PostOp(op.kind, operand=per_channel(op.operand), condition=op.condition)
        x, low, high = bounded_step(x, low, high, op) if side else (float_step(x, op), x, x)
    x = (low, x, high)[side + 1] if side else x
    if dst_dtype == torch.float32:
        return x
    y = fma32(x, per_channel(f32(1 / real.dst_scale)), f32(zero_point))
    return store(y, zero_point, dst_dtype)

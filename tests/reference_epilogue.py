# SPDX-License-Identifier: Apache-2.0
"""From accumulators to destinations, the part of the oracle (reference.py) that rounds.

Parameters are folded in float64 and rounded to float32 once. From there on every step is one
float32 operation with one rounding, `fma32` being the fused multiply-add: results are compared bit
for bit.

Post-ops are tuples, first to last; trailing fields may be left out, and x is the value so far:

    ("sum", scale=1, zero_point=0, dtype=None)   x + scale * (old - zero_point)
    ("relu", alpha=0, scale=1)                   scale * (x > 0 ? x : alpha * x); 0: max(x, 0)
    ("clip", lo, hi, scale=1)                    scale * min(max(x, lo), hi)
    ("linear", alpha, beta, scale=1)             scale * (alpha * x + beta)
    ("add", v), ("mul", v)                       x + v, x * v

`old` is the next of `srcs`, read as dtype. v is a tensor, or a mask as in torchq's text, which
`parse` reads: with mask 0 (one value) or 2 (one per channel) v is the next of `values`, with any
other it has the destination's shape and is the next of `srcs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor
PostOps = str | Sequence[tuple[Any, ...]]

RANGE = {
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.float32: (-math.inf, math.inf),
}


# Arithmetic


def f32(x: Number) -> Tensor:
    """Rounds a float64 (or an integer below 2^53) to float32, half to even."""
    return torch.as_tensor(x).to(torch.float64).to(torch.float32)


def f64(x: Number) -> Tensor:
    """A readable parameter as torchq receives it, a float32, in float64. Integers stay exact."""
    value = torch.as_tensor(x)
    return value.to(torch.float32).double() if value.is_floating_point() else value.double()


def rne(x: Tensor) -> Tensor:
    """Rounds to an integer, half to even, in float64."""
    return torch.round(x.double())


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """round_to_float32(a * b + c) with a single rounding.

    The product of two float32 is exact in float64. The sum is rounded to odd in float64 (TwoSum
    says on which side the exact value lies), so that rounding to float32 is as if from the exact
    value: 53 >= 24 + 2 bits.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact_and_even = (error != 0) & total.isfinite() & (total.view(torch.int64) % 2 == 0)
    odd = torch.nextafter(total, torch.copysign(torch.full_like(total, math.inf), error))
    return f32(torch.where(inexact_and_even, odd, total))


def store(
    y: Tensor, zero_point: Number, dtype: torch.dtype, lo: Number = -math.inf, hi: Number = math.inf
) -> Tensor:
    """clamp(rne(y), lo, hi), saturated to dtype; NaN becomes the zero point, even outside lo..hi.

    A float32 destination is only clamped, and keeps NaN.
    """
    lo, hi = f64(lo), f64(hi)
    if dtype == torch.float32:
        y = torch.where(y < lo, lo.float(), y)
        return torch.where(y > hi, hi.float(), y)
    q = torch.minimum(torch.maximum(rne(y), lo), hi).clamp(*RANGE[dtype])
    return torch.where(y.isnan(), f64(zero_point), q).to(dtype)


# Post-ops


@dataclass(frozen=True)
class PostOp:
    kind: str
    alpha: float = 0.0
    beta: float = 0.0
    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype | None = None
    operand: Tensor | None = None  # sum: old; add, mul: v


FIELDS = {
    "sum": ("scale", "zero_point", "dtype"),
    "relu": ("alpha", "scale"),
    "clip": ("alpha", "beta", "scale"),
    "linear": ("alpha", "beta", "scale"),
}
DTYPES = {"u8": torch.uint8, "s8": torch.int8, "s32": torch.int32, "f32": torch.float32}


def parse(text: str) -> list[tuple[Any, ...]]:
    """Post-op text ('sum:0.5+eltwise_clip:0:6+binary_add:2') as tuples."""
    post_ops: list[tuple[Any, ...]] = []
    for part in text.split("+") if text else []:
        name, *fields = part.split(":")
        if name == "sum":
            scale, zero_point, dtype = (fields + ["1", "0", ""][len(fields) :])[:3]
            post_ops.append(("sum", float(scale), int(zero_point), DTYPES.get(dtype)))
        elif name.startswith("eltwise_"):
            alpha, beta, scale = map(float, fields + ["0", "0", "1"][len(fields) :])
            kind = name.removeprefix("eltwise_")
            post_ops.append((kind, alpha, scale) if kind == "relu" else (kind, alpha, beta, scale))
        else:
            post_ops.append((name.removeprefix("binary_"), int(fields[0])))
    return post_ops


def bind(
    post_ops: PostOps, values: Sequence[Tensor] = (), srcs: Sequence[Tensor] = ()
) -> list[PostOp]:
    """Reads tuples or text, takes operands in order, rounds coefficients to float32."""
    remaining_values, remaining_srcs = iter(values), iter(srcs)
    chain = []
    for kind, *fields in parse(post_ops) if isinstance(post_ops, str) else post_ops:
        if kind in ("add", "mul"):
            operand = fields[0]
            if not isinstance(operand, Tensor):
                operand = next(remaining_values if operand in (0, 2) else remaining_srcs)
            chain.append(PostOp(kind, operand=operand))
            continue
        named = dict(zip(FIELDS[kind], fields, strict=False))
        floats = {
            key: f32(value).item()
            for key, value in named.items()
            if key in ("alpha", "beta", "scale")
        }
        operand = next(remaining_srcs, None) if kind == "sum" else None
        if operand is not None and named.get("dtype") is not None:
            operand = operand.view(named["dtype"])
        chain.append(PostOp(kind, operand=operand, **(named | floats)))
    return chain


def foldable(chain: Sequence[PostOp]) -> bool:
    """Whether rule 3 applies: affine in x and old, then at most one plain relu or clip."""
    if chain and ((chain[-1].kind == "relu" and chain[-1].alpha == 0) or chain[-1].kind == "clip"):
        if chain[-1].scale != 1:
            return False
        chain = chain[:-1]
    return all(
        op.kind in ("sum", "linear") or (op.kind in ("add", "mul") and op.operand.ndim <= 1)
        for op in chain
    )


# Epilogue


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


def scaled_units(output_scales: Number, bias: Tensor | None, channels: int) -> Real:
    """v1: the bias is added before the scale; post-ops act in destination units."""
    multiplier = f64(output_scales)
    offset = f64(0.0 if bias is None else bias) * multiplier
    parts = (multiplier, offset, f64(1.0), f64(0.0))
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
) -> Folded:
    """The parameters of rule 3 from v1's output scales."""
    real = scaled_units(output_scales, bias, channels)
    return fold_chain(real, bind(post_ops, values), dst_dtype)


def float_step(x: Tensor, op: PostOp) -> Tensor:
    """One post-op of rule 4, on float32 in real units; one rounding per operation."""
    scale = f32(op.scale)
    if op.kind == "sum":
        return fma32(scale, f32(op.operand.double() - op.zero_point), x)
    if op.kind == "linear":
        return fma32(x, f32(op.alpha * op.scale), f32(op.beta * op.scale))
    if op.kind == "add":
        return x + op.operand.float()
    if op.kind == "mul":
        return x * op.operand.float()
    if op.kind == "relu":
        x = torch.where(x > 0, x, f32(op.alpha) * x) if op.alpha else torch.where(x < 0, 0, x)
    else:
        x = torch.where(x < op.alpha, f32(op.alpha), torch.where(x > op.beta, f32(op.beta), x))
    return x if op.scale == 1 else x * scale


def epilogue(
    acc: Tensor, real: Real, chain: Sequence[PostOp], dst_dtype: torch.dtype, axis: int = -1
) -> Tensor:
    """From accumulators (channels on `axis`) to dst: rule 3 if the chain folds, else rule 4."""
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
    for op in chain:
        if op.kind in ("add", "mul"):
            op = PostOp(op.kind, operand=per_channel(op.operand))
        x = float_step(x, op)
    if dst_dtype == torch.float32:
        return x
    y = fma32(x, per_channel(f32(1 / real.dst_scale)), f32(zero_point))
    return store(y, zero_point, dst_dtype)

# SPDX-License-Identifier: Apache-2.0
"""Roundings, of which every result of the oracle is made: float64 rounded to float32 once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Number = float | Tensor

RANGE = {
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.float32: (-math.inf, math.inf),
}


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

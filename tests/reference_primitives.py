# SPDX-License-Identifier: Apache-2.0
"""The oracle of ops in real units: float64, each float32 step rounded where torchq says it is.

`real` reads a quantized tensor, `to_dst` writes one. What lies between is exact in float64, or
within the error that `near` is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reference_epilogue import RANGE, f32, f64, fma32, store
from torch import Tensor

Params = tuple[float, int]  # scale, zero point


def real(q: Tensor, params: Params) -> Tensor:
    """scale * (q - zero_point): the difference, then the product, rounded to float32."""
    if q.is_floating_point():
        return f32(q.double() * f64(params[0]))
    return f32(f32(q.long() - params[1]).double() * f64(params[0]))


def to_dst(x: Tensor, params: Params, dtype: torch.dtype) -> Tensor:
    """Quantizes float32 real values: clamp(rne(fma(x, 1 / scale, zero_point)))."""
    assert x.dtype == torch.float32
    if dtype == torch.float32:
        return x
    inverse = f32(1 / f64(params[0]))
    return store(fma32(x, inverse, f64(params[1])), params[1], dtype)


def near(got: Tensor, exact: Tensor, params: Params, error: Tensor | float) -> None:
    """got is the quantized exact value: of any value no farther from it than `error` real units.

    With float32 destinations: within `error`.
    """
    if got.dtype == torch.float32:
        wrong = (got.double() - exact).abs() > error
        wrong &= ~(got.isnan() & exact.isnan()) & (got != exact.float())
    else:
        low, high = (
            torch.round((exact + e) / f64(params[0]) + params[1]).clamp(*RANGE[got.dtype])
            for e in (-1 * torch.as_tensor(error), torch.as_tensor(error))
        )
        q = got.double()
        wrong = ~exact.isnan() & ((q < low) | (q > high))
        wrong |= exact.isnan() & (q != params[1])
    if wrong.any():
        i = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {got.numel()} differ, first at {i}: got {got[i].item()}, "
            f"exact value {exact[i].item()}"
        )


def _gelu_tanh(x: Tensor, a: float, b: float) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _hardsigmoid(x: Tensor, a: float, b: float) -> Tensor:
    return (a * x + b).clamp(0, 1)


ELTWISE: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "abs": lambda x, a, b: x.abs(),
    "clip": lambda x, a, b: x.clamp(a, b),
    "elu": lambda x, a, b: torch.where(x > 0, x, a * torch.expm1(x)),
    "exp": lambda x, a, b: torch.exp(x),
    "gelu_erf": lambda x, a, b: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": _gelu_tanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x, a, b: x * _hardsigmoid(x, a, b),
    "linear": lambda x, a, b: a * x + b,
    "log": lambda x, a, b: torch.log(x),
    "logistic": lambda x, a, b: 1 / (1 + torch.exp(-x)),
    "mish": lambda x, a, b: x * torch.tanh(torch.logaddexp(x, torch.zeros(1))),
    "pow": lambda x, a, b: a * x**b,
    "relu": lambda x, a, b: torch.where(x > 0, x, a * x),
    "round": lambda x, a, b: torch.round(x),
    "soft_relu": lambda x, a, b: torch.logaddexp(f32(a * x).double(), torch.zeros(1)) / a,
    "sqrt": lambda x, a, b: torch.sqrt(x),
    "square": lambda x, a, b: x * x,
    "swish": lambda x, a, b: x / (1 + torch.exp(-a * x)),
    "tanh": lambda x, a, b: torch.tanh(x),
}
EXACT = ("abs", "clip", "relu", "round", "sqrt", "square")  # one rounding: bits

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, v: x + v,
    "sub": lambda x, v: x - v,
    "mul": lambda x, v: x * v,
    "div": lambda x, v: x / v,
    "max": lambda x, v: torch.where(v > x, v, x),  # NaN in src1 gives src0
    "min": lambda x, v: torch.where(v < x, v, x),
    "ge": torch.ge,
    "gt": torch.gt,
    "le": torch.le,
    "lt": torch.lt,
    "eq": torch.eq,
    "ne": torch.ne,
    "prelu": lambda x, v: torch.where(x >= 0, x, x * v),
}


def binary(
    src0: Tensor, src1: Tensor, alg: str, params: list[Params], dtype: torch.dtype
) -> Tensor:
    """One operation on two real values, rounded to float32."""
    x = BINARY[alg](real(src0, params[0]).double(), real(src1, params[1]).double())
    return to_dst(f32(x), params[2], dtype)


def select(
    condition: Tensor, src0: Tensor, src1: Tensor, params: list[Params], dtype: torch.dtype
) -> Tensor:
    x = torch.where(condition != 0, real(src0, params[0]), real(src1, params[1]))
    return to_dst(x, params[2], dtype)


def weighted_sum(srcs: list[Tensor], params: list[Params], dtype: torch.dtype) -> Tensor:
    total = real(srcs[0], params[0])
    for src, param in zip(srcs[1:], params[1:-1], strict=True):
        total = f32(total.double() + real(src, param).double())
    return to_dst(total, params[-1], dtype)


def shuffle(src: Tensor, group_size: int, dim: int) -> Tensor:
    """The index formula, value by value."""
    size = src.shape[dim]
    source: list[Any] = [None] * size
    for i in range(size // group_size):
        for j in range(group_size):
            source[j * (size // group_size) + i] = src.select(dim, i * group_size + j)
    return torch.stack(source, dim)

# SPDX-License-Identifier: Apache-2.0
"""The oracle of ops in real units: float64, each float32 step rounded where torchq says it is.

`real` reads a quantized tensor, `to_dst` writes one. What lies between is exact in float64, or
within the error that `near` is given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from reference_arithmetic import RANGE, f32, f64, fma32, store
from reference_post_ops import BINARY as CHAIN_BINARY
from reference_post_ops import TRANSCENDENTAL, bind, bounded_step, parse
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


def approximate(post_ops: str) -> bool:
    """Returns True if a function of the chain has an error, so that `finish` has an interval."""
    return any(kind in TRANSCENDENTAL for kind, *_ in parse(post_ops))


def finish(
    x: Tensor,
    post_ops: str,
    operands: Sequence[Tensor],
    to: Params,
    dtype: torch.dtype,
    relative: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The chain on float32 values in real units, then `to_dst`: least, float64's, greatest result.

    ``operands`` are all of the chain, in order: the old values of a sum, the operand of a binary or
    prelu, broadcast, and behind it the condition of a select. x is good to ``relative``.
    """
    left, chain, srcs = list(operands), [], []
    for kind, *fields in parse(post_ops):
        if kind in CHAIN_BINARY or kind == "select":
            fields = [left.pop(0)]
        if kind in ("sum", "select"):
            srcs.append(left.pop(0))
        chain.append((kind, *fields))
    bounds = x, f32(x.double() * (1 - relative)), f32(x.double() * (1 + relative))
    for op in bind(chain, srcs=srcs):
        bounds = bounded_step(*bounds, op)
    x, low, high = (to_dst(y, to, dtype) for y in bounds)
    return low, x, high


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


COEFFICIENTS = {
    "clip": (-0.5, 1.25),
    "elu": (0.7, 0.0),
    "hardsigmoid": (0.2, 0.5),
    "hardswish": (0.3, 0.4),
    "linear": (-1.7, 0.3),
    "pow": (0.6, 1.7),
    "relu": (0.1, 0.0),
    "soft_relu": (1.3, 0.0),
    "swish": (1.1, 0.0),
}
"""alpha and beta of the eltwise algorithms that have some, as tests use them."""

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


# Rows: integers exactly, then float64 in the order torchq states, rounded to float32 once


def centered(q: Tensor, params: Params) -> Tensor:
    """q - zero_point, exactly."""
    return q.double() if q.is_floating_point() else q.long() - params[1]


def softmax(q: Tensor, dim: int, params: Params, logarithmic: bool) -> Tensor:
    """In float64, of float32 or properly dequantized values: compare with `near`."""
    x = q.double() if q.is_floating_point() else centered(q, params).double() * f64(params[0])
    return x.log_softmax(dim) if logarithmic else x.softmax(dim)


EXACT: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def _power(x: Tensor, p: float) -> Tensor:
    if p in (1, 2):
        return x.abs() if p == 1 else x * x
    return x.abs().apply_(lambda value: math.pow(value, p))


def norm(alg: str, power: Tensor, p: float, eps: float) -> Tensor:
    power = power.clamp(min=eps) if alg.endswith("max") else power + eps
    if "power" in alg or p == 1:
        return power
    return power.sqrt() if p == 2 else _power(power, 1 / p)


def reduction(
    q: Tensor,
    alg: str,
    dims: list[int],
    params: list[Params],
    dtype: torch.dtype,
    p: float = 2.0,
    eps: float = 0.0,
) -> Tensor:
    """Reduced dims stay with size 1."""
    x, scale = centered(q, params[0]), f64(params[0][0])
    units = params[0][0] == params[1][0] == 1 and not q.is_floating_point()
    if alg in EXACT:
        y = EXACT[alg](x, dims, keepdim=True)
        if units and dtype == torch.int32:
            return (y + params[1][1]).clamp(*RANGE[dtype]).to(dtype)
        y = scale * y.double()
    elif alg == "mul" or alg.startswith("norm"):
        rows = x.movedim(sorted(d % q.ndim for d in dims), list(range(-len(dims), 0)))
        rows = rows.flatten(-len(dims))
        y = torch.full(rows.shape[:-1], float(alg == "mul"), dtype=torch.float64)
        for i in range(rows.shape[-1]):
            value = scale * rows[..., i].double()
            y = y * value if alg == "mul" else y + _power(value, p)
        if alg != "mul":
            y = norm(alg, y, p, eps)
        y = y.reshape(x.sum(dims, keepdim=True).shape)
    else:
        y = scale * x.sum(dims, keepdim=True).double()
        y = y / (q.numel() / y.numel())
    return to_dst(f32(y), params[1], dtype)


def normalize(
    q: Tensor, weight: Tensor, bias: Tensor, eps: float, params: list[Params], dtype: torch.dtype
) -> Tensor:
    """Over the last dim, the sums as Python integers; float64 up to factor and shift."""
    x, scale = centered(q, params[0]), f64(params[0][0])
    rows = x.reshape(-1, x.shape[-1])
    n = rows.shape[1]
    pairs = zip(rows.sum(1).tolist(), (rows * rows).sum(1).tolist(), strict=True)
    spread = torch.tensor([float(n * b - a * a) for a, b in pairs], dtype=torch.float64)[:, None]
    factor = scale / torch.sqrt(scale * scale * (spread / (float(n) * float(n))) + eps)
    center = (rows.sum(1, keepdim=True) + n * params[0][1]).double() / n  # of q itself
    whole = torch.round(center)
    shift = (whole - center) * factor
    y = fma32(f32(rows + params[0][1] - whole), f32(factor), f32(shift)).reshape(x.shape)
    return to_dst(fma32(y, weight, bias), params[1], dtype)


def rms_norm(
    q: Tensor, weight: Tensor, eps: float, params: list[Params], dtype: torch.dtype
) -> Tensor:
    """Over the last dim, with exact sums; float64 up to the factor."""
    x, scale = centered(q, params[0]), f64(params[0][0])
    mean = (x.long() * x.long()).sum(-1, keepdim=True).double() / x.shape[-1]
    factor = f32(scale / torch.sqrt(scale * scale * mean + eps))
    zero = torch.zeros(())
    return to_dst(fma32(fma32(f32(x), factor, zero), weight, zero), params[1], dtype)


def sum_in_lanes(x: Tensor) -> Tensor:
    """Float32 sums of rows in the order that csrc/kernels/rows/contract.h states for softmax."""
    total = torch.zeros(len(x), 16)
    for block in x.split(512, 1):
        panels = torch.nn.functional.pad(block, (0, -block.shape[1] % 16)).reshape(len(x), -1, 16)
        total = total + functools.reduce(torch.add, panels.unbind(1), torch.zeros(len(x), 16))
    for half in (8, 4, 2, 1):
        total = total[:, :half] + total[:, half:]
    return total


def normalize_floats(
    x: Tensor, centered: bool, weight: Tensor, bias: Tensor, eps: float, to: Params,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Layer or RMS norm over the last dim of float32, whose means are float64."""
    rows, n = x.reshape(-1, x.shape[-1]), x.shape[-1]
    rows = rows - f32(sum_in_lanes(rows).double() / n) if centered else rows
    variance = f32(sum_in_lanes(rows * rows).double() / n + eps)
    factor = f32(1 / f32(variance.double().sqrt()).double())  # torch's are not the nearest
    return to_dst(fma32(rows * factor, weight, bias).reshape(x.shape), to, dtype)


def group_norm_floats(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, to: Params, dtype: torch.dtype
) -> Tensor:
    """Group norm of float32: per channel and 64 positions, sums of deviations from the first."""
    rows = x.reshape(len(x), groups, x.shape[1] // groups, -1)
    origin = rows[:, :, 0, 0].double()
    total, squares = torch.zeros_like(origin), torch.zeros_like(origin)
    for block in rows.split(64, 3):
        d = (block - block[..., :1]).unbind(3)
        sums = functools.reduce(torch.add, d)
        squared = functools.reduce(lambda s, v: fma32(v, v, s), d, torch.zeros_like(d[0]))
        count = float(len(d))
        for c in range(block.shape[2]):
            first, s, q = block[:, :, c, 0] - origin, sums[..., c].double(), squared[..., c]
            total = total + (count * first + s)
            squares = squares + (first * (count * first + 2 * s) + q.double())
    n = float(rows[0, 0].numel())
    mean = total / n
    factor = 1 / torch.sqrt((squares / n - mean * mean).clamp(min=0) + eps)
    mean = origin + mean
    center = f32(mean)
    shift = f32((center.double() - mean) * factor)
    terms = [v[:, :, None, None] for v in (center, f32(factor), shift)]
    y = fma32(rows - terms[0], terms[1], terms[2])
    affine = [v.reshape(groups, -1, 1) for v in (weight, bias)]
    return to_dst(fma32(y, *affine).reshape(x.shape), to, dtype)


def batch_norm(
    q: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float,
    params: list[Params], dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Channels last; parameters are multiplied out in float64."""
    gain = weight.double() / torch.sqrt(variance.double() + eps)
    shift = bias.double() - mean.double() * gain
    y = fma32(f32(centered(q, params[0])), f32(f64(params[0][0]) * gain), f32(shift))
    return to_dst(y, params[1], dtype)


def taps(input_size: int, output_size: int, linear: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Left and right index and the weight of the right one, per output position."""
    o = torch.arange(output_size, dtype=torch.float32)
    s = (o + 0.5) * float(input_size) / float(output_size) - 0.5
    if not linear or input_size == output_size:
        away = torch.where(s < 0, -torch.floor(-s + 0.5), torch.floor(s.double() + 0.5).float())
        i = away.long().clamp(0, input_size - 1)
        return i, i, torch.zeros(output_size, dtype=torch.float64)
    s = s.clamp(0, input_size - 1)
    left = torch.floor(s)
    i = left.long()
    return i, (i + 1).clamp(max=input_size - 1), (s - left).double()


def resampling(
    q: Tensor, size: list[int], alg: str, params: list[Params], dtype: torch.dtype
) -> Tensor:
    """The sum over corners, the last dim's right neighbor first to vary; no weight 0."""
    x = f32(centered(q, params[0]))
    dims = len(size)
    sides = [taps(q.shape[d + 2], size[d], alg == "linear") for d in range(dims)]
    total = torch.zeros([*q.shape[:2], *size])
    first = torch.ones(size, dtype=torch.bool)
    for corner in range(2**dims):
        value, weight = x, torch.ones(size, dtype=torch.float64)
        for d in range(dims):
            right = corner >> (dims - 1 - d) & 1
            w = sides[d][2] if right else 1 - sides[d][2]
            weight = weight * w.reshape([-1] + [1] * (dims - 1 - d))
            value = value.index_select(d + 2, sides[d][right])
        step = torch.where(first, f32(weight) * value, fma32(f32(weight), value, total))
        total = torch.where(weight == 0, total, step)
        first = first & (weight == 0)
    return to_dst(f32(params[0][0]) * total, params[1], dtype)

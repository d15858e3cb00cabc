# SPDX-License-Identifier: Apache-2.0
"""The meaning of every op, in exact arithmetic: an oracle that shares no code with torchq.

    real = scale * (q - zero_point)

Accumulators are exact integers; what happens to them afterwards is in reference_epilogue.py, with
its post-ops in reference_post_ops.py.
Tensors are plain and unpacked, with any strides: activations (N, C, ...) or (..., K). A parameter
is a number or a tensor that broadcasts; numbers are rounded to float32, as torchq receives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from reference_arithmetic import RANGE, Number, f32, f64, fma32, rne, store
from reference_epilogue import Folded, epilogue, fold, fold_output_scales, real_units, scaled_units
from reference_post_ops import PostOps, bind, float_step, foldable, parse
from torch import Tensor

__all__ = [
    "RANGE",
    "Folded",
    "adaptive_avg_pool",
    "add",
    "avg_pool",
    "bind",
    "concat",
    "conv",
    "dequantize",
    "epilogue",
    "f32",
    "f64",
    "float_step",
    "fma32",
    "fold",
    "fold_output_scales",
    "foldable",
    "linear",
    "lookup",
    "max_pool",
    "mul",
    "parse",
    "quantize",
    "reorder",
    "reorder_output_scales",
    "requantize",
    "rne",
    "store",
]


# Matmul-like ops


def finish(
    acc: Tensor,
    channels: int,
    axis: int,
    bias: Tensor | None = None,
    src_scale: Number | None = None,
    weight_scale: Number | None = None,
    dst_scale: Number | None = None,
    dst_zero_point: Number = 0,
    dst_dtype: torch.dtype = torch.int32,
    post_ops: PostOps = (),
    post_op_values: Sequence[Tensor] = (),
    post_op_srcs: Sequence[Tensor] = (),
    output_scales: Number | None = None,
    side: int = 0,
) -> Tensor:
    """Rules 2 to 5. An int32 bias joins acc; s32 with neither scales nor post-ops is exact."""
    if bias is not None and not bias.is_floating_point():
        acc = acc + bias.long().reshape([-1 if i == axis else 1 for i in range(acc.ndim)])
        bias = None
    chain = bind(post_ops, post_op_values, post_op_srcs)
    scaled = not (src_scale is None and weight_scale is None and dst_scale is None)
    if output_scales is not None:
        assert not scaled, "output_scales exclude all other scales"
        real = scaled_units(output_scales, bias, dst_zero_point, channels)
        return epilogue(acc, real, chain, dst_dtype, axis, side)
    if dst_dtype == torch.int32 and bias is None and not chain and not scaled:
        return acc.to(torch.int32)
    assert dst_dtype != torch.float32 or dst_scale is None, "a float destination has no scale"
    real = real_units(src_scale, weight_scale, bias, dst_scale, dst_zero_point, channels)
    return epilogue(acc, real, chain, dst_dtype, axis, side)


def linear(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    src_zero_point: Number = 0,
    **params: Any,
) -> Tensor:
    """src (..., K), weight (N, K) to (..., N). `params`: see `finish`.

    Float64 holds every sum exactly: they stay below 2^53.
    """
    acc = (src.double() - f64(src_zero_point)) @ weight.double().t()
    return finish(acc.long(), weight.shape[0], acc.ndim - 1, bias, **params)


def conv(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    src_zero_point: Number = 0,
    *,
    stride: Sequence[int],
    padding: tuple[Sequence[int], Sequence[int]],
    dilation: Sequence[int],
    groups: int = 1,
    **params: Any,
) -> Tensor:
    """src (N, C, ...), weight (OC, C / groups, ...), padding (begin, end). `params`: see `finish`.

    Padding is real zero, so it is added after the zero point is taken off.
    """
    shifted = pad(src.double() - f64(src_zero_point), *padding, 0)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
    acc = convolve(shifted, weight.double(), None, tuple(stride), 0, tuple(dilation), groups)
    return finish(acc.long(), weight.shape[0], 1, bias, **params)


def conv_transpose(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    src_zero_point: Number = 0,
    *,
    stride: Sequence[int],
    padding: tuple[Sequence[int], Sequence[int]],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int = 1,
    **params: Any,
) -> Tensor:
    """src (N, C, ...), weight (C, OC / groups, ...). `params`: see `finish`.

    Every source value is spread over the whole of dst; padding then cuts it, and output_padding
    extends it with positions that no tap reaches.
    """
    deconvolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.ndim - 3]
    shifted = src.double() - f64(src_zero_point)
    acc = deconvolve(shifted, weight.double(), None, tuple(stride), 0, 0, groups, tuple(dilation))
    acc = pad(acc, [0] * len(stride), output_padding, 0)
    acc = pad(acc, *([-cut for cut in cuts] for cuts in padding), 0)
    channels = weight.shape[1] * groups
    return finish(acc.long(), channels, 1, bias, **params)


def pad(x: Tensor, begin: Sequence[int], end: Sequence[int], value: float) -> Tensor:
    pairs = list(zip(begin, end, strict=True))
    return F.pad(x, [amount for pair in reversed(pairs) for amount in pair], value=value)


# Between real and quantized


def quantize(src: Tensor, scale: Number, zero_point: Number, dst_dtype: torch.dtype) -> Tensor:
    """clamp(rne(fma(x, float(1 / scale), zero_point)))"""
    return store(fma32(src, f32(1 / f64(scale)), f32(zero_point)), zero_point, dst_dtype)


def dequantize(src: Tensor, scale: Number, zero_point: Number) -> Tensor:
    """scale * float(q - zero_point)"""
    return f32(scale) * f32(src.double() - f64(zero_point))


def requantize(
    src: Tensor,
    src_scale: Number,
    src_zero_point: Number,
    dst_scale: Number,
    dst_zero_point: Number,
    dst_dtype: torch.dtype,
) -> Tensor:
    """clamp(rne(fma(float(q - zs), ss / sd, zd))); a float destination is not rounded."""
    ratio = f32(f64(src_scale) / f64(dst_scale))
    y = fma32(f32(src.double() - f64(src_zero_point)), ratio, f32(dst_zero_point))
    return store(y, dst_zero_point, dst_dtype)


reorder = requantize  # one formula for every pair of dtypes, float32 included


def reorder_output_scales(
    src: Tensor,
    scales: Number,
    dst_dtype: torch.dtype,
    src_zero_point: Number = 0,
    dst_zero_point: Number = 0,
) -> Tensor:
    """v1: clamp(rne(fma(float(q - zs), scale, zd))); a float destination is not rounded."""
    real = f32(src.double() - f64(src_zero_point))
    if dst_dtype == torch.float32:
        return real * f32(scales)  # keeps the sign of zero
    return store(fma32(real, f32(scales), f32(dst_zero_point)), dst_zero_point, dst_dtype)


def concat(
    srcs: Sequence[Tensor],
    dim: int,
    src_scales: Sequence[Number],
    src_zero_points: Sequence[Number],
    dst_scale: Number,
    dst_zero_point: Number,
    dst_dtype: torch.dtype,
) -> Tensor:
    """Each source requantized, then joined."""
    sources = zip(srcs, src_scales, src_zero_points, strict=True)
    parts = [requantize(*source, dst_scale, dst_zero_point, dst_dtype) for source in sources]
    return torch.cat(parts, dim)


def lookup(src: Tensor, table: Tensor) -> Tensor:
    """table[q - lowest q]"""
    return table[src.long() - RANGE[src.dtype][0]]


# Binary


def add(
    src0: Tensor,
    src1: Tensor,
    scale0: Number,
    zero_point0: int,
    scale1: Number,
    zero_point1: int,
    dst_scale: Number = 1,
    dst_zero_point: int = 0,
    dst_dtype: torch.dtype = torch.uint8,
    relu: bool = False,
) -> Tensor:
    """clamp(rne(fma(float(q0), m0, fma(float(q1), m1, c))))

    where m = s / sd and c = (zd - z0 * m0) - z1 * m1, in float64 and rounded to float32 once.
    """
    m0, m1 = f64(scale0) / f64(dst_scale), f64(scale1) / f64(dst_scale)
    c = (dst_zero_point - zero_point0 * m0) - zero_point1 * m1
    y = fma32(f32(src0), f32(m0), fma32(f32(src1), f32(m1), f32(c)))
    return store(y, dst_zero_point, dst_dtype, lo=dst_zero_point if relu else RANGE[dst_dtype][0])


def mul(
    src0: Tensor,
    src1: Tensor,
    scale0: Number,
    zero_point0: int,
    scale1: Number,
    zero_point1: int,
    dst_scale: Number = 1,
    dst_zero_point: int = 0,
    dst_dtype: torch.dtype = torch.uint8,
    relu: bool = False,
) -> Tensor:
    """clamp(rne(fma(float((q0 - z0) * (q1 - z1)), s0 * s1 / sd, zd)))"""
    product = (src0.double() - zero_point0) * (src1.double() - zero_point1)
    multiplier = f32(f64(scale0) * f64(scale1) / f64(dst_scale))
    y = fma32(f32(product), multiplier, f32(dst_zero_point))
    return store(y, dst_zero_point, dst_dtype, lo=dst_zero_point if relu else RANGE[dst_dtype][0])


# Pooling


def pool_padding_end(
    size: int, kernel: int, stride: int, begin: int, end: int, dilation: int, ceil_mode: bool
) -> int:
    """The end padding that makes the windows fit.

    With ceil_mode there is one more window if it starts inside src or `begin`.
    """
    span = size + begin + end - dilation * (kernel - 1) - 1
    last = -(-span // stride) if ceil_mode else span // stride
    if ceil_mode and last * stride >= size + begin:
        last -= 1
    return last * stride + dilation * (kernel - 1) + 1 - size - begin


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """(N, C, size...) to (N, C, out..., taps)."""
    for dim, (taps, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        outputs = (x.shape[dim] - gap * (taps - 1) - 1) // step + 1
        index = torch.arange(outputs)[:, None] * step + torch.arange(taps) * gap
        x = x.index_select(dim, index.flatten()).unflatten(dim, index.shape).movedim(dim + 1, -1)
    return x.flatten(-len(kernel))


def max_pool(
    src: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: tuple[Sequence[int], Sequence[int]],
    dilation: Sequence[int],
    ceil_mode: bool = False,
) -> Tensor:
    """Padding is never picked: it is the lowest value."""
    geometry = zip(src.shape[2:], kernel, stride, *padding, dilation, strict=True)
    end = [pool_padding_end(*g, ceil_mode) for g in geometry]
    padded = pad(src.double(), padding[0], end, RANGE[src.dtype][0])
    return windows(padded, kernel, stride, dilation).amax(-1).to(src.dtype)


def avg_pool(
    src: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: tuple[Sequence[int], Sequence[int]],
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    zero_point: int = 0,
) -> Tensor:
    """clamp(rne(float(sum) / float(n))), the sum being over as many values as n counts.

    n is the number of valid taps, plus the padding if counted (never what ceil_mode adds), or it is
    divisor_override. What it counts beyond the valid taps is real zero: zero_point.
    """
    ones = [1] * len(kernel)
    geometry = zip(src.shape[2:], kernel, stride, *padding, ones, strict=True)
    end = [pool_padding_end(*g, ceil_mode) for g in geometry]
    beyond = [a - b for a, b in zip(end, padding[1], strict=True)]

    def total(x: Tensor, counted_padding: float) -> Tensor:
        x = pad(pad(x, *padding, counted_padding), [0] * len(end), beyond, 0)
        return windows(x, kernel, stride, ones).sum(-1)

    valid = total(torch.ones_like(src, dtype=torch.float64), 0)
    n = total(torch.ones_like(src, dtype=torch.float64), 1) if count_include_pad else valid
    if divisor_override is not None:
        n = torch.full_like(n, divisor_override)
    return average(total(src.double(), 0) + zero_point * (n - valid), n, zero_point, src.dtype)


def adaptive_avg_pool(src: Tensor, output_size: Sequence[int]) -> Tensor:
    """Output o averages floor(o * size / out) .. ceil((o + 1) * size / out) - 1; 1 is global."""
    total, n = src.double(), torch.ones([], dtype=torch.float64)
    for dim, out in enumerate(output_size, start=2):
        size = total.shape[dim]
        bounds = [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)]
        total = torch.stack([total.narrow(dim, a, b - a).sum(dim) for a, b in bounds], dim)
        lengths = torch.tensor([b - a for a, b in bounds], dtype=torch.float64)
        n = n[..., None] * lengths
    return average(total, n, 0, src.dtype)


def average(total: Tensor, n: Tensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    """A float32 division (a reciprocal is wrong for 14, 26, 28, ...); of int32 one in double.

    Of floats that one rounded to float32, which is the same where float32 holds the total. No taps:
    the zero point.
    """
    if dtype.is_floating_point:
        return f32(total / n)
    return store(total / n if dtype == torch.int32 else f32(total) / f32(n), zero_point, dtype)

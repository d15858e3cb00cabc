# SPDX-License-Identifier: Apache-2.0
"""Matmul, gemm and dynamic quantization in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from reference import finish
from reference_arithmetic import RANGE, Number, f32, f64, fma32, store
from torch import Tensor


def accumulate(
    src: Tensor, weight: Tensor, src_zero_point: Number, weight_zero_point: Number
) -> Tensor:
    """The exact sums; float64 holds them: they stay below 2^53."""
    acc = (src.double() - f64(src_zero_point)) @ (weight.double() - f64(weight_zero_point))
    return acc.long()


def matmul(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    src_zero_point: Number = 0,
    weight_zero_point: Number = 0,
    **params: Any,
) -> Tensor:
    """src (..., M, K), weight (..., K, N). `params`: see `reference.finish`."""
    acc = accumulate(src, weight, src_zero_point, weight_zero_point)
    return finish(acc, weight.shape[-1], acc.ndim - 1, bias, **params)


def matmul_by_groups(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    src_scale: Tensor,
    group_scales: Tensor,
    src_zero_point: Number,
    weight_zero_point: Number,
    dst_scale: Tensor | None,
    dst_zero_point: Number,
    dst_dtype: torch.dtype,
    post_ops: str,
    values: Sequence[Tensor] = (),
    srcs: Sequence[Tensor] = (),
    row_scales: Tensor | None = None,
    side: int = 0,
) -> Tensor:
    """Each group of k has a row of scales [groups, N]; float32 adds the scaled groups in order.

    What src has, and the zero points, are one, or one (row) per group. ``row_scales`` are those of
    src per row and group, [groups, ..., M, 1].
    """
    groups, n = group_scales.shape
    size = weight.shape[-2] // groups
    total = None

    def of(value: Number, g: int) -> Tensor:
        value = torch.as_tensor(value)
        return value[g] if value.ndim > 0 and value.shape[0] == groups else value

    for g in range(groups):
        k = slice(g * size, (g + 1) * size)
        zeros = of(src_zero_point, g), of(weight_zero_point, g)
        acc = accumulate(src[..., k], weight[..., k, :], *zeros)
        if g + 1 < groups:
            scale = f64(of(src_scale, g)) * f64(group_scales[g])
            part = fma32(f32(acc), f32(scale), f32(0.0))
            part = part if row_scales is None else part * row_scales[g]
            total = part if total is None else total + part
    assert total is not None
    rows = [] if row_scales is None else [row_scales[-1]]
    text = "+".join(["binary_mul:1"] * len(rows) + ["sum", post_ops]).rstrip("+")
    return finish(
        acc, n, acc.ndim - 1, bias, of(src_scale, groups - 1), group_scales[-1], dst_scale,
        dst_zero_point, dst_dtype, text, values, [*rows, total, *srcs], side=side,
    )  # fmt: skip


def gemm(
    a: Tensor, b: Tensor, c: Tensor | None, co: Tensor, alpha: float, beta: float, ao: int, bo: int
) -> Tensor:
    """a (M, K), b (K, N); co broadcasts. Exact integers for alpha 1 and beta 0 or 1."""
    acc = (a.long() - ao) @ (b.long() - bo)
    old = torch.zeros_like(acc) if c is None else c.long()
    if alpha == 1 and beta in (0, 1):
        exact = acc + int(beta) * old + co.long()
        return exact.clamp(*RANGE[torch.int32]).to(torch.int32)
    total = alpha * acc.double() + beta * old.double() + co.double()
    return torch.round(total.clamp(*RANGE[torch.int32])).to(torch.int32)


def qparams(low: Tensor, high: Tensor, integers: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """scale = (hi - lo) / steps, zero point = rne(qmin - lo * steps / (hi - lo)), 0 included."""
    qmin, qmax = integers
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    span = high - low
    tiny = 2.0**-126 * (qmax - qmin)
    span = torch.where(span == 0, float(qmax - qmin), span.clamp(min=tiny))
    zero_point = torch.round(qmin - low * (qmax - qmin) / span).clamp(qmin, qmax)
    return f32(span / (qmax - qmin)), zero_point.to(torch.int32)


def requantize_dynamic(acc: Tensor, scale: Number, dst_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Range of the real values, parameters from it, then requantize."""
    real = acc.double() * f64(scale)
    dst_scale, zero_point = qparams(real.min(), real.max(), RANGE[dst_dtype])
    ratio = f32(f64(scale) / f64(dst_scale))
    q = store(fma32(f32(acc), ratio, f32(zero_point)), zero_point, dst_dtype)
    return q, dst_scale, zero_point


def dynamic_linear(
    src: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, per_row: bool
) -> Tensor:
    """Quantize by the range of src, or of each row; sum exactly; scale back."""
    rows = src.reshape(-1, src.shape[-1])
    bounds = (rows.amin(1), rows.amax(1)) if per_row else (rows.min(), rows.max())
    scale, zero_point = qparams(*bounds, (0, 255))
    scale, zero_point = scale.reshape(-1, 1), zero_point.reshape(-1, 1)
    q = store(fma32(rows, f32(1 / f64(scale)), f32(zero_point)), zero_point, torch.uint8)
    acc = f32((q.double() - zero_point.double()) @ weight.double().t())
    offset = f32(torch.zeros(weight.shape[0]) if bias is None else bias)
    dst = acc * f32(weight_scale) * scale + offset
    return dst.reshape(*src.shape[:-1], weight.shape[0])


def grouped_linear(
    src: Tensor, offsets: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """A dynamic layer for the rows of each group; zeros behind the last one."""
    dst = torch.zeros(len(src), weight.shape[1])
    begin = 0
    for g, end in enumerate(offsets.tolist()):
        own = None if bias is None else bias[g]
        if end > begin:
            dst[begin:end] = dynamic_linear(src[begin:end], weight[g], weight_scale[g], own, True)
        begin = end
    return dst

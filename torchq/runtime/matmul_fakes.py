# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the matmul-like ops; with them ``FAKES`` has those of all ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attributes.post_op import CHANNEL_MASKS, Binary, PReLU
from torchq.attributes.post_ops import PostOps, foldable, post_ops_of
from torchq.runtime.fakes import FAKES, fake
from torchq.runtime.library import DTYPES, empty_channels_last
from torchq.runtime.windows import broadcast, conv_sizes, conv_transpose_sizes

__all__ = ["FAKES"]


def _conv_packing(
    outputs: int, inputs_per_group: int, groups: int, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[list[int], int]:
    """Return packed shape and rows of compensation (Note [Conv packings], ops/gemm/packing.h)."""
    taps = math.prod(kernel)
    if groups > 1 and inputs_per_group == 1 and outputs == groups:
        width, quads = kernel[-1], 0
        rows = taps // width
        for first in range(0, rows, 4):
            quads += -(-width // 4) if rows - first == 1 else width
        return [-(-outputs // 16), quads, 16, 4], 1
    longer = [d for d, size in enumerate(kernel) if size > 1]
    run = longer[-1] if longer else 0
    width = kernel[run]
    if groups == 1 and inputs_per_group % 4 != 0 and width > 1 and dilation[run] == 1:
        rows = taps // width
        return [-(-outputs // 16), rows, -(-width * inputs_per_group // 4), 16, 4], rows
    size = inputs_per_group * (2 if inputs_per_group == 2 and groups % 2 == 0 else 1)
    if groups > 1 and outputs == groups * inputs_per_group >= 16 and size in (4, 8):
        return [-(-outputs // 16), taps, size // 4, 16, 4], taps
    return _dense_packing(outputs, inputs_per_group, groups, taps)


def _dense_packing(
    outputs: int, inputs_per_group: int, groups: int, taps: int
) -> tuple[list[int], int]:
    group_outputs = outputs // groups
    merged = max(
        (m for m in range(2, min(groups, 16) + 1) if m * group_outputs <= 16 and groups % m == 0),
        default=1,
    )
    panels = groups // merged * -(-merged * group_outputs // 16)
    return [panels, taps, -(-merged * inputs_per_group // 4), 16, 4], taps


def _fake_packed(
    weight: Tensor, outputs: int, sizes: Sequence[int], rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        weight.new_empty(sizes),
        weight.new_empty([rows, outputs], dtype=torch.int32),
        weight.new_empty([sizes[0]], dtype=torch.int32),
    )


@fake("pack_linear")
def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, k = weight.shape
    return _fake_packed(weight, n, *_dense_packing(n, k, 1, 1))


@fake("unpack_linear")
def _(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    return packed.new_empty([out_features, in_features])


@fake("pack_conv")
def _(weight: Tensor, groups: int, dilation: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    outputs, inputs = weight.shape[:2]
    packing = _conv_packing(outputs, inputs, groups, weight.shape[2:], dilation)
    return _fake_packed(weight, outputs, *packing)


def _fake_unpack(packed: Tensor, weight_shape: Sequence[int]) -> Tensor:
    return packed.new_empty(weight_shape)


fake("unpack_conv")(_fake_unpack)
fake("unpack_conv_transpose")(_fake_unpack)


def _fake_fold(
    like: Tensor, channels: int, dst_dtype: int, post_ops: str
) -> tuple[Tensor, Tensor, Tensor]:
    # One by one: matmul's sum over groups of k stands beside sums of other dtypes.
    parts = post_ops.split("+") if post_ops else []
    chain = post_ops_of([op for part in parts for op in PostOps.parse(part)])
    names = [op.name for op in chain]
    sums = names.count("sum")
    values = sum(isinstance(op, Binary | PReLU) and op.mask in CHANNEL_MASKS for op in chain)
    if not names:
        params = 0
    elif foldable(chain, torch.int32):  # any dtype: int32 admits every zero point
        params = 1 + channels * (sums + 2 * (names[-1] == "eltwise_clip"))
    else:
        params = 1 + channels * (values + (dst_dtype != 6))
    return like.new_empty([channels]), like.new_empty([channels]), like.new_empty([params])


@fake("fold")
def _(
    src_scale: Tensor, channels: int, dst_dtype: int, post_ops: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_fold(src_scale, channels, dst_dtype, post_ops)


@fake("fold_output_scales")
def _(
    output_scales: Tensor, channels: int, dst_dtype: int, post_ops: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_fold(output_scales, channels, dst_dtype, post_ops)


def _result_dtype(dst_dtype: int, table: Tensor | None) -> torch.dtype:
    return DTYPES[dst_dtype] if table is None else table.dtype


@fake("linear")
def _(src: Tensor, compensation: Tensor, dst_dtype: int, table: Tensor | None) -> Tensor:
    sizes = [*src.shape[:-1], compensation.shape[1]]
    return src.new_empty(sizes, dtype=_result_dtype(dst_dtype, table))


@fake("conv")
def _(
    src: Tensor,
    compensation: Tensor,
    geometry: Sequence[int],
    dst_dtype: int,
    table: Tensor | None,
) -> Tensor:
    sizes = conv_sizes(src.shape, compensation.shape[1], geometry)
    return empty_channels_last(src, sizes, _result_dtype(dst_dtype, table))


@fake("dynamic_conv")
def _(src: Tensor, compensation: Tensor, geometry: Sequence[int]) -> Tensor:
    sizes = conv_sizes(src.shape, compensation.shape[1], geometry)
    if src.is_contiguous():
        return src.new_empty(sizes)
    return empty_channels_last(src, sizes, src.dtype)


@fake("pack_conv_transpose")
def _(weight: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs, outputs = weight.shape[0] // groups, weight.shape[1] * groups
    packing = _dense_packing(outputs, inputs, groups, math.prod(weight.shape[2:]))
    return _fake_packed(weight, outputs, *packing)


@fake("conv_transpose")
def _(
    src: Tensor,
    compensation: Tensor,
    geometry: Sequence[int],
    dst_dtype: int,
    table: Tensor | None,
) -> Tensor:
    sizes = conv_transpose_sizes(src.shape, compensation.shape[1], geometry)
    return empty_channels_last(src, sizes, _result_dtype(dst_dtype, table))


@fake("matmul")
def _(src: Tensor, weight: Tensor, dst_dtype: int) -> Tensor:
    batch = broadcast(src.shape[:-2], weight.shape[:-2])
    sizes = [*batch, src.shape[-2], weight.shape[-1]]
    return src.new_empty(sizes, dtype=DTYPES[dst_dtype])


@fake("gemm")
def _(a: Tensor, b: Tensor, trans_a: bool, trans_b: bool) -> Tensor:
    rows, columns = a.shape[1 if trans_a else 0], b.shape[0 if trans_b else 1]
    return a.new_empty([rows, columns], dtype=torch.int32)


@fake("dynamic_linear")
def _(src: Tensor, compensation: Tensor) -> Tensor:
    return src.new_empty([*src.shape[:-1], compensation.shape[1]])


@fake("dynamic_linear_int4")
def _(src: Tensor, out_features: int) -> Tensor:
    return src.new_empty([*src.shape[:-1], out_features])


@fake("grouped_linear")
def _(src: Tensor, out_features: int) -> Tensor:
    return src.new_empty([src.shape[0], out_features])


@fake("grouped_linear_int4")
def _(src: Tensor, out_features: int) -> Tensor:
    return src.new_empty([src.shape[0], out_features])

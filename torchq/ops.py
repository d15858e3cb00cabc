# SPDX-License-Identifier: Apache-2.0
"""Loads the shared library and gives every op its fake kernel.

The ops themselves are ``torch.ops.torchq.*`` (schemas: ``csrc/library.cpp``). A fake kernel states
shape, strides and dtype without data, which is what ``torch.compile`` and ``torch.export`` trace
with; it must match the real kernel exactly, strides included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchq._text import Binary, PReLU
from torchq.post_ops import CHANNEL_MASKS, PostOps, foldable

LIBRARY_PATH = Path(__file__).parent / "libtorchq.so"
"""The shared library; a C++ program loads the same file."""

_DTYPES = {0: torch.uint8, 1: torch.int8, 3: torch.int32, 6: torch.float32}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def dtype_code(dtype: torch.dtype, op: str = "") -> int:
    """The ``dst_dtype`` argument of an op for a torch dtype.

    Raises:
        NotImplementedError: ``dtype`` is not uint8, int8, int32 or float32.
    """
    if dtype not in _CODES:
        raise NotImplementedError(
            f"torchq{op and '.'}{op}: dst_dtype must be one of {', '.join(map(str, _CODES))}, got "
            f"{dtype}. The nearest supported destination is torch.float32."
        )
    return _CODES[dtype]


def _load() -> None:
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"torchq: {LIBRARY_PATH} does not exist: the extension was not built. Run "
            "`pip install --no-build-isolation -e .` in the source tree."
        )
    try:
        torch.ops.load_library(str(LIBRARY_PATH))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"torchq: {LIBRARY_PATH.name} does not load with torch {torch.__version__}; it was "
            "probably built for another torch release. Rebuild it with "
            f"`pip install --no-build-isolation -e .` ({error})"
        ) from error


_load()

_Fake = TypeVar("_Fake", bound=Callable[..., Any])


def _fake(name: str) -> Callable[[_Fake], _Fake]:
    register: Callable[[_Fake], _Fake] = torch.library.register_fake(f"torchq::{name}")
    return register


def channels_last_strides(sizes: Sequence[int]) -> list[int]:
    """Strides of (N, C, spatial...) with the channels innermost."""
    strides = [0] * len(sizes)
    strides[1] = 1
    stride = sizes[1]
    for dim in range(len(sizes) - 1, 1, -1):
        strides[dim] = stride
        stride = stride * sizes[dim]
    strides[0] = stride
    return strides


def _empty_channels_last(src: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, channels_last_strides(sizes), dtype=dtype, device=src.device)


def _conv_packing(
    outputs: int, inputs_per_group: int, groups: int, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[list[int], int]:
    """Packed shape and rows of the compensation (Note [Conv packings] in csrc/ops/packing.h)."""
    taps, width = math.prod(kernel), kernel[-1]
    rows = taps // width
    if groups > 1 and inputs_per_group == 1 and outputs == groups:
        quads = 0
        for first in range(0, rows, 4):
            quads += -(-width // 4) if rows - first == 1 else width
        return [-(-outputs // 16), quads, 16, 4], 1
    if groups == 1 and inputs_per_group % 4 != 0 and width > 1 and dilation[-1] == 1:
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


@_fake("pack_linear")
def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, k = weight.shape
    panels = -(-n // 16)
    return (
        weight.new_empty([panels, 1, -(-k // 4), 16, 4]),
        weight.new_empty([1, n], dtype=torch.int32),
        weight.new_empty([panels], dtype=torch.int32),
    )


@_fake("unpack_linear")
def _(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    return packed.new_empty([out_features, in_features])


@_fake("pack_conv")
def _(weight: Tensor, groups: int, dilation: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    outputs, inputs = weight.shape[:2]
    sizes, rows = _conv_packing(outputs, inputs, groups, weight.shape[2:], dilation)
    return (
        weight.new_empty(sizes),
        weight.new_empty([rows, outputs], dtype=torch.int32),
        weight.new_empty([sizes[0]], dtype=torch.int32),
    )


@_fake("unpack_conv")
def _(packed: Tensor, weight_shape: Sequence[int], groups: int, dilation: Sequence[int]) -> Tensor:
    return packed.new_empty(weight_shape)


def _fake_fold(like: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Both folds end in channels, dst_dtype, post_ops, post_op_values."""
    channels, dst_dtype, post_ops, _ = args[-4:]
    chain = PostOps.parse(post_ops)
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


_fake("fold")(_fake_fold)
_fake("fold_output_scales")(_fake_fold)


@_fake("linear")
def _(
    src: Tensor,
    weight: Tensor,
    compensation: Tensor,
    pair_bound: Tensor,
    multiplier: Tensor,
    offset: Tensor,
    acc_bias: Tensor | None,
    src_zero_point: Tensor | None,
    in_features: int,
    dst_dtype: int,
    post_ops: str,
    post_op_params: Tensor,
    post_op_srcs: Sequence[Tensor],
    weight_zero_point: Tensor | None = None,
    row_sums: Tensor | None = None,
) -> Tensor:
    return src.new_empty([*src.shape[:-1], compensation.shape[1]], dtype=_DTYPES[dst_dtype])


def _window_output(
    size: int, geometry: Sequence[int], dims: int, d: int, ceil_mode: bool = False
) -> int:
    kernel, stride, begin, end, dilation = (geometry[f * dims + d] for f in range(5))
    span = size + begin + end - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return span // stride + 1
    output = -(-span // stride) + 1
    return output - 1 if (output - 1) * stride >= size + begin else output


def conv_sizes(src: Sequence[int], channels: int, geometry: Sequence[int]) -> list[int]:
    """Shape of a convolution's dst (csrc/ops/geometry.h tells what ``geometry`` holds)."""
    dims = len(src) - 2
    spatial = [_window_output(src[d + 2], geometry, dims, d) for d in range(dims)]
    return [src[0], channels, *spatial]


@_fake("conv")
def _(
    src: Tensor,
    weight: Tensor,
    compensation: Tensor,
    pair_bound: Tensor,
    multiplier: Tensor,
    offset: Tensor,
    acc_bias: Tensor | None,
    src_zero_point: Tensor | None,
    geometry: Sequence[int],
    dst_dtype: int,
    post_ops: str,
    post_op_params: Tensor,
    post_op_srcs: Sequence[Tensor],
    weight_zero_point: Tensor | None = None,
    row_sums: Tensor | None = None,
) -> Tensor:
    sizes = conv_sizes(src.shape, compensation.shape[1], geometry)
    return _empty_channels_last(src, sizes, _DTYPES[dst_dtype])


@_fake("pack_conv_transpose")
def _(
    weight: Tensor, groups: int, stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    inputs, outputs = weight.shape[0] // groups, weight.shape[1] * groups
    sizes, rows = _dense_packing(outputs, inputs, groups, math.prod(weight.shape[2:]))
    return (
        weight.new_empty(sizes),
        weight.new_empty([rows, outputs], dtype=torch.int32),
        weight.new_empty([sizes[0]], dtype=torch.int32),
    )


@_fake("unpack_conv_transpose")
def _(
    packed: Tensor,
    weight_shape: Sequence[int],
    groups: int,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    return packed.new_empty(weight_shape)


def conv_transpose_sizes(src: Sequence[int], channels: int, geometry: Sequence[int]) -> list[int]:
    """Shape of a transposed convolution's dst."""
    dims = len(src) - 2
    sizes = [src[0], channels]
    for d in range(dims):
        kernel, stride, begin, end, dilation, extra = (geometry[f * dims + d] for f in range(6))
        size = (src[d + 2] - 1) * stride - begin - end
        sizes.append(size + dilation * (kernel - 1) + extra + 1)
    return sizes


@_fake("conv_transpose")
def _(
    src: Tensor,
    weight: Tensor,
    compensation: Tensor,
    pair_bound: Tensor,
    multiplier: Tensor,
    offset: Tensor,
    acc_bias: Tensor | None,
    src_zero_point: Tensor | None,
    geometry: Sequence[int],
    dst_dtype: int,
    post_ops: str,
    post_op_params: Tensor,
    post_op_srcs: Sequence[Tensor],
    weight_zero_point: Tensor | None = None,
) -> Tensor:
    sizes = conv_transpose_sizes(src.shape, compensation.shape[1], geometry)
    return _empty_channels_last(src, sizes, _DTYPES[dst_dtype])


@_fake("matmul")
def _(
    src: Tensor,
    weight: Tensor,
    multiplier: Tensor,
    offset: Tensor,
    acc_bias: Tensor | None,
    src_zero_point: Tensor | None,
    weight_zero_point: Tensor | None,
    dst_dtype: int,
    post_ops: str,
    post_op_params: Tensor,
    post_op_srcs: Sequence[Tensor],
) -> Tensor:
    batch = torch.broadcast_shapes(src.shape[:-2], weight.shape[:-2])  # type: ignore[no-untyped-call]
    sizes = [*batch, src.shape[-2], weight.shape[-1]]
    return src.new_empty(sizes, dtype=_DTYPES[dst_dtype])


@_fake("gemm")
def _(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    trans_a: bool,
    trans_b: bool,
    alpha: float,
    beta: float,
    ao: int,
    bo: int,
    offsetc: str,
    co: Tensor,
) -> Tensor:
    rows, columns = a.shape[1 if trans_a else 0], b.shape[0 if trans_b else 1]
    return a.new_empty([rows, columns], dtype=torch.int32)


@_fake("dynamic_linear")
def _(
    src: Tensor,
    weight: Tensor,
    compensation: Tensor,
    pair_bound: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    in_features: int,
    per_row: bool,
) -> Tensor:
    return src.new_empty([*src.shape[:-1], compensation.shape[1]])


@_fake("quantize")
def _(src: Tensor, scale: Tensor, zero_point: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(src, dtype=_DTYPES[dst_dtype])


@_fake("dequantize")
def _(src: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return torch.empty_like(src, dtype=torch.float32)


@_fake("requantize")
def _(
    src: Tensor,
    src_scale: Tensor,
    src_zero_point: Tensor,
    dst_scale: Tensor,
    dst_zero_point: Tensor,
    dst_dtype: int,
) -> Tensor:
    return torch.empty_like(src, dtype=_DTYPES[dst_dtype])


@_fake("reorder")
def _(src: Tensor, output_scales: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(src, dtype=_DTYPES[dst_dtype])


@_fake("lookup")
def _(src: Tensor, table: Tensor) -> Tensor:
    return torch.empty_like(src, dtype=table.dtype)


def _fake_binary(
    src0: Tensor, src1: Tensor, scales: Tensor, zero_points: Tensor, dst_dtype: int, relu: bool
) -> Tensor:
    shape = torch.broadcast_shapes(src0.shape, src1.shape)  # type: ignore[no-untyped-call]
    for src in (src0, src1):
        if src.shape == shape:
            return torch.empty_like(src, dtype=_DTYPES[dst_dtype])
    return src0.new_empty(shape, dtype=_DTYPES[dst_dtype])


_fake("add")(_fake_binary)
_fake("mul")(_fake_binary)


@_fake("concat")
def _(
    srcs: Sequence[Tensor], scales: Tensor, zero_points: Tensor, dim: int, dst_dtype: int
) -> Tensor:
    first = srcs[0]
    dim = dim % first.dim()
    sizes = list(first.shape)
    sizes[dim] = sum(src.shape[dim] for src in srcs)
    order = sorted(range(first.dim()), key=lambda d: -first.stride()[d])
    strides = [0] * first.dim()
    stride = 1
    for d in reversed(order):
        strides[d] = stride
        stride = stride * max(sizes[d], 1)
    return torch.empty_strided(sizes, strides, dtype=_DTYPES[dst_dtype], device=first.device)


def _fake_pool(src: Tensor, geometry: Sequence[int], ceil_mode: bool) -> Tensor:
    dims = src.dim() - 2
    spatial = [_window_output(src.shape[d + 2], geometry, dims, d, ceil_mode) for d in range(dims)]
    return _empty_channels_last(src, [*src.shape[:2], *spatial], src.dtype)


_fake("max_pool")(_fake_pool)


@_fake("avg_pool")
def _(
    src: Tensor,
    zero_point: Tensor,
    geometry: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    return _fake_pool(src, geometry, ceil_mode)


@_fake("adaptive_avg_pool")
def _(src: Tensor, output_size: Sequence[int]) -> Tensor:
    return _empty_channels_last(src, [*src.shape[:2], *output_size], src.dtype)


@_fake("rnn")
def _(
    src: Tensor, batch_sizes: Tensor | None, h_0: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """A packed source (with batch_sizes) needs h_0: it tells the batch without a look at data."""
    geometry, dst_dtype, _, h_n_dtype = args[-4:]
    cell, directions, _, hidden, projection = geometry[:5]
    if h_0 is None and batch_sizes is not None:
        raise ValueError(
            "torchq.rnn: h_0 must be given with batch_sizes where shapes are traced, got None. "
            "Pass zeros [directions, batch, units]."
        )
    batch = src.shape[1] if h_0 is None else h_0.shape[1]
    units = projection or hidden
    return (
        src.new_empty([*src.shape[:-1], directions * units], dtype=_DTYPES[dst_dtype]),
        src.new_empty([directions, batch, units], dtype=_DTYPES[h_n_dtype]),
        src.new_empty([directions, batch, hidden] if cell == 0 else [0], dtype=torch.float32),
    )


@_fake("eltwise")
def _(src: Tensor, scales: Tensor, zero_points: Tensor, dst_dtype: int, post_ops: str) -> Tensor:
    return torch.empty_like(src, dtype=_DTYPES[dst_dtype])


@_fake("binary")
def _(
    src0: Tensor,
    src1: Tensor,
    condition: Tensor | None,
    alg: str,
    scales: Tensor,
    zero_points: Tensor,
    dst_dtype: int,
    post_ops: str,
) -> Tensor:
    return _fake_binary(src0, src1, scales, zero_points, dst_dtype, False)


@_fake("sum")
def _(srcs: Sequence[Tensor], scales: Tensor, zero_points: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(srcs[0], dtype=_DTYPES[dst_dtype])


@_fake("reorder_rounded")
def _(src: Tensor, scales: Tensor, zero_points: Tensor, dst_dtype: int, *args: Any) -> Tensor:
    return src.new_empty(src.shape, dtype=_DTYPES[dst_dtype])


@_fake("softmax")
def _(
    src: Tensor,
    dim: int,
    logarithmic: bool,
    scales: Tensor,
    zero_points: Tensor,
    dst_dtype: int,
    post_ops: str,
) -> Tensor:
    sizes = src.movedim(dim, -1).shape
    return src.new_empty(sizes, dtype=_DTYPES[dst_dtype]).movedim(-1, dim)


@_fake("layer_norm")
def _(src: Tensor, *args: Any) -> Tensor:
    return src.new_empty(src.shape, dtype=_DTYPES[args[-2]])


def _fake_by_channel(src: Tensor, *args: Any) -> Tensor:
    """Channels-last; every such op ends in dst_dtype, post_ops."""
    return src.new_empty(src.movedim(1, -1).shape, dtype=_DTYPES[args[-2]]).movedim(-1, 1)


_fake("group_norm")(_fake_by_channel)
_fake("batch_norm")(_fake_by_channel)


@_fake("reduction")
def _(src: Tensor, alg: str, dims: Sequence[int], keepdim: bool, *args: Any) -> Tensor:
    gone = {d % src.dim() for d in dims}
    sizes = [1 if d in gone else size for d, size in enumerate(src.shape)]
    kept = [size for d, size in enumerate(sizes) if keepdim or d not in gone]
    return src.new_empty(kept, dtype=_DTYPES[args[-2]])


@_fake("resampling")
def _(src: Tensor, alg: str, size: Sequence[int], *args: Any) -> Tensor:
    return _empty_channels_last(src, [*src.shape[:2], *size], _DTYPES[args[-2]])

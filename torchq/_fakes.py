# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the ops that are no matrix products (see ``torchq.ops``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchq._library import DTYPES, empty_channels_last, window_output

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

FAKES: dict[str, Callable[..., Any]] = {}
"""By the name of the op. ``torchq.ops`` registers them: the library names it as their module."""


def fake(name: str) -> Callable[[_Kernel], _Kernel]:
    """Puts a function into `FAKES`."""

    def add(kernel: _Kernel) -> _Kernel:
        FAKES[name] = kernel
        return kernel

    return add


@fake("quantize")
def _(src: Tensor, scale: Tensor, zero_point: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(src, dtype=DTYPES[dst_dtype])


@fake("dequantize")
def _(src: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return torch.empty_like(src, dtype=torch.float32)


@fake("requantize")
def _(
    src: Tensor,
    src_scale: Tensor,
    src_zero_point: Tensor,
    dst_scale: Tensor,
    dst_zero_point: Tensor,
    dst_dtype: int,
) -> Tensor:
    return torch.empty_like(src, dtype=DTYPES[dst_dtype])


@fake("reorder")
def _(src: Tensor, output_scales: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(src, dtype=DTYPES[dst_dtype])


@fake("lookup")
def _(src: Tensor, table: Tensor) -> Tensor:
    return torch.empty_like(src, dtype=table.dtype)


def _fake_binary(
    src0: Tensor, src1: Tensor, scales: Tensor, zero_points: Tensor, dst_dtype: int, relu: bool
) -> Tensor:
    shape = torch.broadcast_shapes(src0.shape, src1.shape)  # type: ignore[no-untyped-call]
    for src in (src0, src1):
        if src.shape == shape:
            return torch.empty_like(src, dtype=DTYPES[dst_dtype])
    return src0.new_empty(shape, dtype=DTYPES[dst_dtype])


fake("add")(_fake_binary)
fake("mul")(_fake_binary)


def _is_expanded(src: Tensor) -> bool:
    return any(
        size > 1 and stride == 0 for size, stride in zip(src.shape, src.stride(), strict=True)
    )


@fake("concat")
def _(
    srcs: Sequence[Tensor], scales: Tensor, zero_points: Tensor, dim: int, dst_dtype: int
) -> Tensor:
    first = srcs[0]
    dim = dim % first.dim()
    sizes = list(first.shape)
    sizes[dim] = sum(src.shape[dim] for src in srcs)
    # The order of a source that is not expanded; contiguous where there is none.
    like = next((src for src in srcs if not _is_expanded(src)), torch.empty(sizes, device="meta"))
    order = sorted(range(first.dim()), key=lambda d: -like.stride()[d])
    strides = [0] * first.dim()
    stride = 1
    for d in reversed(order):
        strides[d] = stride
        stride = stride * max(sizes[d], 1)
    return torch.empty_strided(sizes, strides, dtype=DTYPES[dst_dtype], device=first.device)


def pool_sizes(src: Sequence[int], geometry: Sequence[int], ceil_mode: bool) -> list[int]:
    """Shape of a pool's dst."""
    dims = len(src) - 2
    spatial = [window_output(src[d + 2], geometry, dims, d, ceil_mode) for d in range(dims)]
    return [*src[:2], *spatial]


def _fake_pooled(src: Tensor, sizes: Sequence[int], real: Sequence[Any]) -> Tensor:
    """``real``: scales, zero_points, dst_dtype and more, as far as they are given."""
    code = real[2] if len(real) > 2 else None
    return empty_channels_last(src, sizes, src.dtype if code is None else DTYPES[code])


@fake("max_pool")
def _(src: Tensor, geometry: Sequence[int], ceil_mode: bool, *real: Any) -> Tensor:
    return _fake_pooled(src, pool_sizes(src.shape, geometry, ceil_mode), real)


@fake("avg_pool")
def _(
    src: Tensor,
    zero_point: Tensor,
    geometry: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *real: Any,
) -> Tensor:
    return _fake_pooled(src, pool_sizes(src.shape, geometry, ceil_mode), real)


@fake("adaptive_avg_pool")
def _(src: Tensor, output_size: Sequence[int], *real: Any) -> Tensor:
    return _fake_pooled(src, [*src.shape[:2], *output_size], real)


@fake("rnn")
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
        src.new_empty([*src.shape[:-1], directions * units], dtype=DTYPES[dst_dtype]),
        src.new_empty([directions, batch, units], dtype=DTYPES[h_n_dtype]),
        src.new_empty([directions, batch, hidden] if cell == 0 else [0], dtype=torch.float32),
    )


@fake("eltwise")
def _(src: Tensor, scales: Tensor, zero_points: Tensor, dst_dtype: int, *chain: Any) -> Tensor:
    return torch.empty_like(src, dtype=DTYPES[dst_dtype])


@fake("binary")
def _(
    src0: Tensor,
    src1: Tensor,
    condition: Tensor | None,
    alg: str,
    scales: Tensor,
    zero_points: Tensor,
    dst_dtype: int,
    *chain: Any,
) -> Tensor:
    return _fake_binary(src0, src1, scales, zero_points, dst_dtype, False)


@fake("sum")
def _(srcs: Sequence[Tensor], scales: Tensor, zero_points: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(srcs[0], dtype=DTYPES[dst_dtype])


@fake("reorder_rounded")
def _(src: Tensor, scales: Tensor, zero_points: Tensor, dst_dtype: int, *args: Any) -> Tensor:
    return src.new_empty(src.shape, dtype=DTYPES[dst_dtype])


@fake("softmax")
def _(
    src: Tensor,
    dim: int,
    logarithmic: bool,
    scales: Tensor,
    zero_points: Tensor,
    dst_dtype: int,
    *chain: Any,
) -> Tensor:
    sizes = src.movedim(dim, -1).shape
    return src.new_empty(sizes, dtype=DTYPES[dst_dtype]).movedim(-1, dim)


def _attended(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Queries stand where they do in query's memory."""
    leading = [src.shape[:-2] for src in (query, key, value)]
    batch = torch.broadcast_shapes(*leading)  # type: ignore[no-untyped-call]
    sizes = [*batch, query.shape[-2], value.shape[-1]]
    last = at = len(batch)
    while query.dim() == last + 2 and at > 0 and query.stride(at - 1) < query.stride(last):
        at -= 1
    sizes.insert(at, sizes.pop(last))
    return query.new_empty(sizes, dtype=dtype).movedim(at, last)


@fake("attention")
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    return _attended(query, key, value, DTYPES[args[5]])


@fake("dynamic_attention")
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    return _attended(query, key, value, torch.float32)


# The next ones end in dst_dtype, post_ops and post_op_srcs, which may be left out.


@fake("layer_norm")
def _(src: Tensor, *args: Any) -> Tensor:
    return src.new_empty(src.shape, dtype=DTYPES[args[6]])


def _by_channel(src: Tensor, dst_dtype: int) -> Tensor:
    return src.new_empty(src.movedim(1, -1).shape, dtype=DTYPES[dst_dtype]).movedim(-1, 1)


@fake("group_norm")
def _(src: Tensor, *args: Any) -> Tensor:
    return _by_channel(src, args[6])


@fake("batch_norm")
def _(src: Tensor, *args: Any) -> Tensor:
    return _by_channel(src, args[7])


def reduced_sizes(src: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    """Shape of a reduction's dst."""
    gone = {d + len(src) if d < 0 else d for d in dims}  # the op refuses others
    sizes = [1 if d in gone else size for d, size in enumerate(src)]
    return [size for d, size in enumerate(sizes) if keepdim or d not in gone]


@fake("reduction")
def _(src: Tensor, alg: str, dims: Sequence[int], keepdim: bool, *args: Any) -> Tensor:
    return src.new_empty(reduced_sizes(src.shape, dims, keepdim), dtype=DTYPES[args[2]])


@fake("resampling")
def _(src: Tensor, alg: str, size: Sequence[int], *args: Any) -> Tensor:
    return empty_channels_last(src, [*src.shape[:2], *size], DTYPES[args[2]])

# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the ops that are no matrix products (see ``torchq.ops``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchq.runtime.library import DTYPES, empty_channels_last
from torchq.runtime.windows import broadcast, pool_sizes, reduced_sizes

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])

FAKES: dict[str, Callable[..., object]] = {}
"""By the name of the op. ``torchq.ops`` registers them: the library names it as their module.

Each takes those of the op's arguments that it needs, by their names in the op's schema. The op has
checked them (``torchq.runtime.stand_ins``), except for symbolic sizes without a number.
"""


def fake(name: str) -> Callable[[_Kernel], _Kernel]:
    """Put a function into `FAKES`."""

    def add(kernel: _Kernel) -> _Kernel:
        FAKES[name] = kernel
        return kernel

    return add


@fake("quantize")
def _(src: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(src, dtype=DTYPES[dst_dtype])


@fake("dequantize")
def _(src: Tensor) -> Tensor:
    return torch.empty_like(src, dtype=torch.float32)


@fake("requantize")
def _(src: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(src, dtype=DTYPES[dst_dtype])


@fake("reorder")
def _(src: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(src, dtype=DTYPES[dst_dtype])


@fake("lookup")
def _(src: Tensor, table: Tensor) -> Tensor:
    return torch.empty_like(src, dtype=table.dtype)


def _fake_binary(src0: Tensor, src1: Tensor, dst_dtype: int) -> Tensor:
    shape = broadcast(src0.shape, src1.shape)
    for src in (src0, src1):
        if src.shape == shape:
            return torch.empty_like(src, dtype=DTYPES[dst_dtype])
    return src0.new_empty(shape, dtype=DTYPES[dst_dtype])


@fake("add")
def _(src0: Tensor, src1: Tensor, dst_dtype: int) -> Tensor:
    return _fake_binary(src0, src1, dst_dtype)


@fake("mul")
def _(src0: Tensor, src1: Tensor, dst_dtype: int) -> Tensor:
    return _fake_binary(src0, src1, dst_dtype)


def _is_expanded(src: Tensor) -> bool:
    return any(
        size > 1 and stride == 0 for size, stride in zip(src.shape, src.stride(), strict=True)
    )


@fake("concat")
def _(srcs: Sequence[Tensor], dim: int, dst_dtype: int) -> Tensor:
    first = srcs[0]
    sizes = list(first.shape)
    sizes[dim] = sum(src.shape[dim] for src in srcs)
    # The order of a source that is not expanded; contiguous where there is none.
    rows = torch.empty(sizes, dtype=first.dtype, device="meta")
    like = next((src for src in srcs if not _is_expanded(src)), rows)
    order = sorted(range(first.dim()), key=lambda d: -like.stride()[d])
    strides = [0] * first.dim()
    stride = 1
    for d in reversed(order):
        strides[d] = stride
        stride = stride * max(sizes[d], 1)
    return torch.empty_strided(sizes, strides, dtype=DTYPES[dst_dtype], device=first.device)


def _fake_pooled(src: Tensor, sizes: Sequence[int], code: int | None) -> Tensor:
    return empty_channels_last(src, sizes, src.dtype if code is None else DTYPES[code])


@fake("max_pool")
def _(src: Tensor, geometry: Sequence[int], ceil_mode: bool, dst_dtype: int | None) -> Tensor:
    return _fake_pooled(src, pool_sizes(src.shape, geometry, ceil_mode), dst_dtype)


@fake("avg_pool")
def _(src: Tensor, geometry: Sequence[int], ceil_mode: bool, dst_dtype: int | None) -> Tensor:
    return _fake_pooled(src, pool_sizes(src.shape, geometry, ceil_mode), dst_dtype)


@fake("adaptive_avg_pool")
def _(src: Tensor, output_size: Sequence[int], dst_dtype: int | None) -> Tensor:
    return _fake_pooled(src, [*src.shape[:2], *output_size], dst_dtype)


@fake("rotary")
def _(src: Tensor) -> Tensor:
    dst = torch.empty_like(src)
    return dst if dst.stride(-1) == 1 and not src.is_contiguous() else src.new_empty(src.shape)


@fake("rnn")
def _(
    src: Tensor,
    batch_sizes: Tensor | None,
    h_0: Tensor | None,
    geometry: Sequence[int],
    dst_dtype: int,
    h_n_dtype: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Infer shapes; a packed source needs h_0, which tells the batch without a look at data."""
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
def _(src: Tensor, dst_dtype: int) -> Tensor:
    return torch.empty_like(src, dtype=DTYPES[dst_dtype])


@fake("binary")
def _(src0: Tensor, src1: Tensor, dst_dtype: int) -> Tensor:
    return _fake_binary(src0, src1, dst_dtype)


@fake("sum")
def _(srcs: Sequence[Tensor], dst_dtype: int) -> Tensor:
    return torch.empty_like(srcs[0], dtype=DTYPES[dst_dtype])


@fake("reorder_rounded")
def _(src: Tensor, dst_dtype: int) -> Tensor:
    return src.new_empty(src.shape, dtype=DTYPES[dst_dtype])


@fake("softmax")
def _(src: Tensor, dim: int, dst_dtype: int) -> Tensor:
    sizes = src.movedim(dim, -1).shape
    return src.new_empty(sizes, dtype=DTYPES[dst_dtype]).movedim(-1, dim)


def _attended(
    query: Tensor, batch: Sequence[int], columns: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the result, with queries where they are in query's memory."""
    sizes = [*batch, query.shape[-2], columns]
    last = at = len(batch)
    while query.dim() == last + 2 and at > 0 and query.stride(at - 1) < query.stride(last):
        at -= 1
    sizes.insert(at, sizes.pop(last))
    return query.new_empty(sizes, dtype=dtype).movedim(at, last)


@fake("attention")
def _(query: Tensor, key: Tensor, value: Tensor, dst_dtype: int) -> Tensor:
    batch = broadcast(*(src.shape[:-2] for src in (query, key, value)))
    return _attended(query, batch, value.shape[-1], DTYPES[dst_dtype])


@fake("dynamic_attention")
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch = broadcast(*(src.shape[:-2] for src in (query, key, value)))
    return _attended(query, batch, value.shape[-1])


@fake("compress_rows")
def _(src: Tensor) -> Tensor:
    return src.new_empty([*src.shape[:-1], src.shape[-1] + 4], dtype=torch.int8)


@fake("compressed_attention")
def _(query: Tensor, value: Tensor) -> Tensor:
    return _attended(query, query.shape[:-2], value.shape[-1] - 4)


def _like_src(src: Tensor, dst_dtype: int) -> Tensor:
    return src.new_empty(src.shape, dtype=DTYPES[dst_dtype])


fake("layer_norm")(_like_src)
fake("rms_norm")(_like_src)


def _by_channel(src: Tensor, dst_dtype: int) -> Tensor:
    return src.new_empty(src.movedim(1, -1).shape, dtype=DTYPES[dst_dtype]).movedim(-1, 1)


fake("group_norm")(_by_channel)
fake("batch_norm")(_by_channel)


@fake("reduction")
def _(src: Tensor, dims: Sequence[int], keepdim: bool, dst_dtype: int) -> Tensor:
    return src.new_empty(reduced_sizes(src.shape, dims, keepdim), dtype=DTYPES[dst_dtype])


@fake("resampling")
def _(src: Tensor, size: Sequence[int], dst_dtype: int) -> Tensor:
    return empty_channels_last(src, [*src.shape[:2], *size], DTYPES[dst_dtype])


@fake("embedding")
def _(weight: Tensor, indices: Tensor, embedding_dim: int) -> Tensor:
    return weight.new_empty([*indices.shape, embedding_dim], dtype=torch.float32)


@fake("embedding_bag")
def _(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    embedding_dim: int,
    include_last_offset: bool,
) -> Tensor:
    bags = indices.shape[0] if offsets is None else offsets.shape[0] - int(include_last_offset)
    return weight.new_empty([bags, embedding_dim], dtype=torch.float32)

# SPDX-License-Identifier: Apache-2.0
"""Compressed rows, and attention to keys and values made of them, on every tier."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from calls import F32, S8, assert_same
from memory import before_guard_page, flushing_denormals, rounding_upward
from reference_arithmetic import f32, fma32
from test_attention import symmetric
from torch import Tensor

import torchq
import torchq.functional as TF


def unpacked(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers, as float32, and scales (..., 1)."""
    return rows[..., :-4].float(), rows[..., -4:].clone().view(F32)


def sum_lanes(lanes: Tensor) -> Tensor:
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, -1)
        lanes = low + high
    return lanes.squeeze(-1)


def expected(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """The formulas of CompressedAttention, one float32 step after the other."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    (k, k_scale), (v, v_scale) = unpacked(key), unpacked(value)
    lanes = torch.zeros(*query.shape[:3], key.shape[2], 16)
    for q_part, k_part in zip(query.split(16, -1), k.split(16, -1), strict=True):
        q_part, k_part = (F.pad(x, (0, 16 - x.shape[-1])) for x in (q_part, k_part))
        lanes = fma32(q_part.unsqueeze(3), k_part.unsqueeze(2), lanes)
    if mask is None:
        mask = torch.zeros(())
    elif mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf)
    x = fma32(sum_lanes(lanes), (k_scale * f32(scale)).mT, mask)
    softmax = TF.softmax(x).masked_fill((x == -math.inf).all(-1, True), 0)
    weights = softmax * v_scale.mT
    sums = torch.zeros(*query.shape[:3], v.shape[-1])
    for j in range(v.shape[2]):
        sums = fma32(weights[..., j : j + 1], v[:, :, j : j + 1], sums)
    return sums


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """PyTorch's attention in float64 to the real values."""
    if mask is not None:
        mask = mask.broadcast_to(*query.shape[:3], key.shape[2])
        mask = mask if mask.dtype == torch.bool else mask.double()
    real = [TF.decompress_rows(x).double() for x in (key, value)]
    return F.scaled_dot_product_attention(query.double(), *real, mask, scale=scale, enable_gqa=True)


def assert_attends(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float = 0.3
) -> None:
    got = TF.compressed_attention(query, key, value, mask, scale)
    assert torchq.last_kernel() == f"compressed_attention:{torchq.isa()}"
    assert_same(got, expected(query, key, value, mask, scale))
    want = exact(query, key, value, mask, scale)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def drawn(n: int, heads: int, length: int, size: int, seed: int) -> Tensor:
    """(N, H, L, E) as models have them; rows of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, length, heads, size, generator=draw)
    return (rows * torch.randn(n, length, heads, 1, generator=draw).exp()).transpose(1, 2)


def any_rows(n: int, heads: int, length: int, size: int, seed: int) -> Tensor:
    """Full-range bytes, -128 too, and scales of either sign."""
    draw = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(-128, 128, (n, heads, length, size), generator=draw, dtype=S8)
    scales = torch.randn(n, heads, length, 1, generator=draw) / 64
    return torch.cat([bytes_, scales.view(-1, 1).view(S8).view(n, heads, length, 4)], 3)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 64), (2, 3, 5, 80), (4, 0), (0, 8)], ids=str)
def test_rows(isa: str, shape: tuple[int, ...]) -> None:
    """To rne of the quotient by 1 / 127 of the largest; and back."""
    torch.manual_seed(0)
    for bound in (1.0, 1e-37, 3e38):
        src = (torch.rand(shape) * 2 - 1) * bound
        src[..., ::5] = 0
        rows = TF.compress_rows(src)
        assert rows.dtype == S8 and rows.shape == (*shape[:-1], shape[-1] + 4)
        q, scale = symmetric(F.pad(src, (0, 1)), (-1,))
        got_q, got_scale = unpacked(rows)
        assert_same(got_q, q[..., :-1].float())
        assert_same(got_scale, scale)
        assert_same(TF.decompress_rows(rows), got_q * scale)
        assert_same(TF.compress_rows(src.bfloat16()), TF.compress_rows(src.bfloat16().float()))


def test_rows_of_zeros_and_of_what_is_not_finite(isa: str) -> None:
    src = torch.randn(6, 20)
    src[0] = 0
    src[1, 3], src[2, 0], src[3, 19] = math.nan, math.inf, -math.inf
    src[4] = 1e-42
    rows = TF.compress_rows(src)
    real = TF.decompress_rows(rows)
    assert real[0].eq(0).all() and real[4].eq(0).all()
    assert real[1:4].isnan().all() and real[5].isfinite().all()
    with torchq.use_isa("reference"):
        assert_same(rows, TF.compress_rows(src))


def test_rows_are_cut_and_joined_as_floats() -> None:
    src = torch.randn(3, 2, 9, 6)
    rows = TF.compress_rows(src)
    beams = torch.tensor([2, 0, 0])
    assert_same(rows[:, :, :4], TF.compress_rows(src[:, :, :4]))
    assert_same(rows.index_select(0, beams), TF.compress_rows(src[beams]))
    assert_same(
        torch.cat([rows, rows[:, :, 2:]], 2), TF.compress_rows(torch.cat([src, src[:, :, 2:]], 2))
    )
    assert_same(TF.compress_rows(src.mT).mT, TF.compress_rows(src.mT.contiguous()).mT)


# L, S, E, Ev and heads of query and key: decoding, tails of panels and blocks, one of each, prompts
SHAPES = [
    (1, 80, 64, 64, 14, 2),
    (1, 16, 16, 128, 3, 3),
    (3, 5, 6, 10, 4, 1),
    (2, 33, 1, 1, 2, 2),
    (4, 130, 70, 81, 6, 2),
    (40, 47, 32, 20, 2, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(isa: str, shape: tuple[int, ...]) -> None:
    length, keys, size, value_size, heads, groups = shape
    query = drawn(2, heads, length, size, 1)
    key, value = any_rows(2, groups, keys, size, 2), any_rows(2, groups, keys, value_size, 3)
    draw = torch.Generator().manual_seed(length + keys)
    seen = torch.rand(2, 1, length, keys, generator=draw) > 0.4
    added = torch.randn(heads, length, keys, generator=draw)
    added[0, 0] = added[:, -1, : keys // 2] = -math.inf
    masks = [None, seen, added, seen.expand(2, heads, length, keys), seen[0, 0, 0], added[:, :, :1]]
    masks.append(torch.zeros(()).bool())
    for mask in masks:
        assert_attends(query, key, value, mask, scale=size**-0.5)


def test_strides(isa: str) -> None:
    """Parts of a cache, expanded batches, rows that are not adjacent; dst is laid out as query."""
    query = drawn(2, 4, 3, 20, 1)
    cache = any_rows(2, 2, 50, 20, 2)
    for key in (
        cache[:, :, 7:40],
        cache[:1].expand(2, 2, 50, 24),
        cache[:, :1].expand(2, 4, 50, 24),
        cache.transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::3],
        cache.mT.contiguous().mT,
    ):
        assert_attends(query, key, cache[:1, :1, : key.shape[2]].expand(*key.shape[:3], 24))
        for other in (
            query.contiguous(),
            query.mT.contiguous().mT,
            query[:, :1].expand(2, 4, 3, 20),
        ):
            assert_attends(other, key, key)
    assert TF.compressed_attention(query, cache, cache).transpose(1, 2).is_contiguous()


def test_masks_as_in_torch(isa: str) -> None:
    """Queries without keys get 0; NaN and infinity in a mask spoil their rows."""
    query, (key, value) = drawn(1, 2, 20, 16, 1), (any_rows(1, 1, 20, 16, i) for i in (2, 3))
    mask = torch.zeros(20, 20)
    mask[3, 5], mask[4, 0], mask[5] = math.nan, math.inf, -math.inf
    mask[6], mask[6, 19] = -math.inf, math.nan
    got = TF.compressed_attention(query, key, value, mask)
    real = [TF.decompress_rows(x) for x in (key, value)]
    want = F.scaled_dot_product_attention(query, *real, mask, enable_gqa=True)
    assert torch.equal(got.isnan(), want.isnan())
    assert got[:, :, 5].eq(0).all() and want[:, :, 5].eq(0).all()
    assert (got - want).nan_to_num().abs().max() < 1e-4
    hidden = TF.compressed_attention(query, key, value, torch.zeros(20, 20).bool())
    assert hidden.eq(0).all()


def test_what_is_not_finite(isa: str) -> None:
    """It spoils what it does in float."""
    query = torch.randn(1, 3, 20, 16)
    query[0, 0, 3, 5], query[0, 0, 4, 0] = math.nan, math.inf
    key, value = torch.randn(2, 1, 3, 20, 16)
    key[0, 1, 7, 1], value[0, 2, 0, 0] = math.nan, -math.inf
    got = TF.compressed_attention(query, TF.compress_rows(key), TF.compress_rows(value))
    spoilt = torch.zeros(1, 3, 20, dtype=torch.bool)
    spoilt[0, 0, 3:5] = spoilt[0, 1:] = True
    assert torch.equal(got.isnan().any(-1), spoilt) and torch.equal(got.isnan().all(-1), spoilt)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_blocks_change_nothing(threads: int) -> None:
    """One head whose queries are shared, and several; longer than what a thread takes at once."""
    before = torch.get_num_threads()
    for heads, groups, length, keys in ((1, 1, 150, 1000), (6, 3, 1, 5000)):
        query = drawn(1, heads, length, 32, 1)
        key, value = any_rows(1, groups, keys, 32, 2), any_rows(1, groups, keys, 32, 3)
        try:
            torch.set_num_threads(threads)
            got = TF.compressed_attention(query, key, value, scale=0.2)
        finally:
            torch.set_num_threads(before)
        assert_same(got, expected(query, key, value, None, 0.2))


@pytest.mark.parametrize("size", [3, 16, 20, 64])
def test_nothing_is_read_past_the_end(isa: str, size: int) -> None:
    query, mask = torch.randn(1, 4, 2, size), torch.randn(2, 21)
    key, value = any_rows(1, 2, 21, size, 1), any_rows(1, 2, 21, size + 1, 2)
    expected = TF.compressed_attention(query, key, value, mask)
    guarded = [before_guard_page(x) for x in (query, key, value, mask)]
    assert_same(TF.compressed_attention(*guarded), expected)
    assert_same(TF.compress_rows(guarded[0]), TF.compress_rows(query))


@pytest.mark.parametrize("mode", [rounding_upward, flushing_denormals])
@pytest.mark.parametrize("length", [1, 200])
def test_floating_point_mode(
    isa: str, mode: Callable[[], AbstractContextManager[None]], length: int
) -> None:
    """The calling thread's and its workers'; results and scales are denormal."""
    query, key, value = (
        drawn(1, 2, length, 20, 1),
        drawn(1, 2, 300, 20, 2),
        any_rows(1, 2, 300, 20, 3),
    )
    value[..., -4:] = torch.full((1,), 5e-41).view(S8)
    rows = TF.compress_rows(key)
    expected = TF.compressed_attention(query, rows, value)
    assert (expected.abs().double() < 2.0**-126).all() and expected.any()
    with mode():
        assert_same(TF.compress_rows(key), rows)
        assert_same(TF.compressed_attention(query, rows, value), expected)


def test_error_against_float64(isa: str) -> None:
    """Only the rounding of keys and values to 8 bits is lost."""
    query, key, value = (
        drawn(2, 4, 1, 64, 1),
        torch.randn(2, 2, 500, 64),
        torch.randn(2, 2, 500, 64),
    )
    got = TF.compressed_attention(query, TF.compress_rows(key), TF.compress_rows(value))
    want = F.scaled_dot_product_attention(
        *(x.double() for x in (query, key, value)), enable_gqa=True
    )
    assert (got - want).square().mean() < 1e-4 * want.square().mean()


def test_nothing_to_attend_to() -> None:
    for sizes, results in (
        ((2, 4, 3, 8, 2, 0), (2, 4, 3, 8)),
        ((2, 4, 0, 8, 2, 5), (2, 4, 0, 8)),
        ((0, 4, 3, 8, 2, 5), (0, 4, 3, 8)),
        ((2, 0, 3, 8, 0, 5), (2, 0, 3, 8)),
    ):
        n, heads, length, size, groups, keys = sizes
        rows = any_rows(n, groups, keys, size, 1)
        got = TF.compressed_attention(torch.randn(n, heads, length, size), rows, rows)
        assert got.shape == results and got.eq(0).all()
    rows = any_rows(1, 1, 5, 3, 1)
    assert TF.compressed_attention(torch.randn(1, 1, 2, 3), rows, rows[..., :4]).shape[-1] == 0
    mean = TF.compressed_attention(torch.randn(1, 1, 2, 0), rows[..., -4:], rows)
    assert torch.allclose(mean, TF.decompress_rows(rows).mean(2, keepdim=True).expand(1, 1, 2, 3))


def refuse(error: type[Exception], match: str, *args: object, **kwargs: object) -> None:
    with pytest.raises(error, match=match):
        TF.compressed_attention(*args, **kwargs)


def test_errors() -> None:
    q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 12, dtype=S8)
    refuse(TypeError, "compressed_attention: query must be float32, got uint8", q.byte(), k, k)
    refuse(TypeError, "key must be int8, got float32. Compress it with", q, k.float(), k)
    refuse(TypeError, "value must be int8, got uint8", q, k, k.byte())
    refuse(ValueError, r"must be \(N, H, L, E\), .* got \[4, 3, 8\]", q[0], k, k)
    refuse(ValueError, "must have the same batch", q[:1], k, k)
    refuse(ValueError, "key and value the same heads and rows", q, k, k[:, :, :4])
    refuse(ValueError, "key and value the same heads and rows", q, k, k[:, :1])
    refuse(ValueError, "a multiple of the heads of key and value, got 3 and 2", q[:, :3], k, k)
    refuse(
        ValueError, "a multiple of the heads of key and value, got 4 and 0", q, k[:, :0], k[:, :0]
    )
    refuse(ValueError, "rows of key must have 4 bytes more", q[..., :7], k, k)
    refuse(ValueError, "those of value at least 4", q, k, k[..., :3])
    refuse(ValueError, "scale must be finite and greater than 0, got -1", q, k, k, scale=-1.0)
    refuse(ValueError, "mask must broadcast", q, k, k, torch.zeros(5, 3))
    refuse(TypeError, "mask must be bool", q, k, k, torch.zeros(3, 5, dtype=torch.int64))
    with torch.enable_grad():
        refuse(RuntimeError, "query requires grad", q.requires_grad_(), k, k)
    for src, error, match in (
        (torch.zeros(3).double(), TypeError, "compress_rows: src must be float32, got float64"),
        (torch.zeros(()), ValueError, "compress_rows: src must have rows of at most"),
    ):
        with pytest.raises(error, match=match):
            TF.compress_rows(src)
    for rows, error, match in (
        (torch.zeros(8), TypeError, "decompress_rows: src must be torch.int8, got torch.float32"),
        (torch.zeros(3, dtype=S8), ValueError, r"rows of a scale's 4 bytes and more, got \[3\]"),
    ):
        with pytest.raises(error, match=match):
            TF.decompress_rows(rows)

# SPDX-License-Identifier: Apache-2.0
"""torchq::matmul on every tier against the oracle, bit for bit."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import cases
import pytest
import reference_matmul
import torch
from calls import F32, S8, S32, U8, assert_same, check_fake, gemm_kernel
from cases import random_q
from torch import Tensor
from torch.library import opcheck

import torchq
import torchq.functional as TF
from torchq import Attr, PostOps

ops = torch.ops.torchq
DTYPES = (U8, S8, S32, F32)
ZEROS = {U8: 117, S8: -13}
# Rows and channels in whole tiles and panels, and with tails; k in quads, in 16s and odd.
SIZES = [(7, 64, 37), (6, 32, 64), (13, 101, 70), (1, 16, 16), (5, 3, 1), (3, 1, 18), (64, 48, 80)]
BATCHES = [
    ((), ()),
    ((3,), ()),
    ((2, 3), (2, 3)),
    ((2, 1), (1, 3)),
    ((1,), (4,)),
    ((), (2, 2)),
    ((3, 2), (1, 1)),
    ((2, 3), (3,)),
]


def operands(
    size: tuple[int, int, int],
    src: torch.dtype = U8,
    weight: torch.dtype = S8,
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> tuple[Tensor, Tensor]:
    m, k, n = size
    return random_q((*batch[0], m, k), src, 1), random_q((*batch[1], k, n), weight, 2)


def parameters(k: int, n: int, dst: torch.dtype) -> dict[str, Any]:
    """Destinations use most of their range."""
    step = {U8: 0.025, S8: 0.025, S32: 1e-5, F32: 1.0}[dst]
    scales = {
        "bias": torch.randn(n),
        "src_scale": torch.tensor(0.15 / max(k, 1) ** 0.5),
        "weight_scale": 0.002 + 0.008 * torch.rand(n),
    }
    if dst != F32:
        scales["dst_scale"] = torch.tensor(4 * step)
        scales["dst_zero_point"] = torch.tensor({U8: 101, S8: -7, S32: 5}[dst], dtype=S32)
    return scales


def attributes(
    args: dict[str, Any], dims: tuple[int, int], zeros: dict[str, Any] | None = None, text: str = ""
) -> Attr:
    """``dims``: of weight and dst."""
    attr = Attr().set_scales("src", 0, args["src_scale"])
    attr.set_scales("weights", 1 << (dims[0] - 1), args["weight_scale"])
    if "dst_scale" in args:
        attr.set_scales("dst", 0, args["dst_scale"])
        attr.set_zero_points("dst", 0, args["dst_zero_point"])
    for arg, value in (zeros or {}).items():
        per_column = isinstance(value, Tensor) and value.numel() > 1
        attr.set_zero_points(arg, 1 << (dims[0] - 1) if per_column else 0, value)
    return attr.set_post_ops(PostOps.parse(text))


def raw(src: Tensor, weight: Tensor, /, **zeros: Any) -> Tensor:
    attr = Attr()
    for arg, value in zeros.items():
        per_column = isinstance(value, Tensor) and value.numel() > 1
        attr.set_zero_points(arg, 1 << (weight.dim() - 1) if per_column else 0, value)
    return TF.matmul(src, weight, attr=attr, dst_dtype=S32)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_accumulators_are_exact(isa: str, size: tuple[int, int, int]):
    for a, b in itertools.product((U8, S8), repeat=2):
        src, weight = operands(size, a, b)
        for za, zb in ((0, 0), (ZEROS[a], 0), (0, ZEROS[b]), (ZEROS[a], ZEROS[b])):
            expected = reference_matmul.matmul(src, weight, None, za, zb, dst_dtype=S32)
            assert_same(raw(src, weight, src=za, weights=zb), expected, (a, b, za, zb))
        per_column = torch.arange(size[2], dtype=S32) % 100
        expected = reference_matmul.matmul(src, weight, None, 5, per_column, dst_dtype=S32)
        assert_same(raw(src, weight, src=5, weights=per_column), expected, "per column")


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_batches_broadcast(isa: str, batch: tuple[tuple[int, ...], tuple[int, ...]]):
    for i, (a, b) in enumerate(itertools.product((U8, S8), repeat=2)):
        src, weight = operands(SIZES[i], a, b, batch)
        dst = DTYPES[i]
        args = parameters(*SIZES[i][1:], dst)
        expected = reference_matmul.matmul(
            src, weight, src_zero_point=3, weight_zero_point=7, dst_dtype=dst, **args
        )
        dims = (weight.dim(), expected.dim())
        attr = attributes(args, dims, {"src": 3, "weights": 7})
        assert_same(TF.matmul(src, weight, args["bias"], attr, dst), expected, (a, b))


CHAINS = [c for c in cases.FOLDED_CHAINS + cases.FLOAT_CHAINS if "binary" not in c]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain or "none")
def test_post_ops(isa: str, chain: str):
    for i, dst in enumerate(DTYPES):
        src, weight = operands(SIZES[i % 3], (U8, S8)[i % 2], S8)
        args = parameters(*SIZES[i % 3][1:], dst)
        shape, old = (src.shape[0], weight.shape[1]), S8 if dst == F32 else dst
        sums = chain.count("sum")
        srcs = [cases.random_dst(shape, old, s) for s in range(sums)]
        text = chain
        if dst == F32:  # the sources of its sums are int8
            parts = [
                ":".join([*op.split(":"), *["1", "0", "s8"][len(op.split(":")) - 1 :]])
                if op.startswith("sum")
                else op
                for op in chain.split("+")
            ]
            text = "+".join(parts)
        expected = reference_matmul.matmul(
            src, weight, src_zero_point=9, dst_dtype=dst, post_ops=chain, post_op_srcs=srcs, **args
        )
        attr = attributes(args, (2, 2), {"src": 9}, text)
        assert_same(TF.matmul(src, weight, args["bias"], attr, dst, srcs), expected, dst)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("places", itertools.product((False, True), repeat=3), ids=str)
def test_biases_of_other_shapes(isa: str, batch: tuple[int, ...], places: Any):
    """Added to the scaled sum, in front of post-ops; with values of 8 bits the same."""
    src, weight = operands((4, 6, 18), batch=(batch, ()))
    all_batches, rows, columns = places
    outer = [n if all_batches else 1 for n in batch]
    shape = [*outer, 4 if rows else 1, 18 if columns else 1]
    small = torch.randint(-100, 100, shape, dtype=S8)
    relu, per_row = PostOps().append_eltwise("relu"), 1 << len(batch)
    plain = Attr().set_scales("src", 0, 0.02).set_scales("weights", 0, 0.03)
    by_row = Attr().set_scales("src", per_row, torch.rand(4)).set_scales("weights", 0, 0.03)
    for attr in (plain, by_row):
        scaled = TF.matmul(src, weight, attr=attr)
        expected = TF.matmul(src, weight, small.float(), attr)
        assert_same(TF.matmul(src, weight, small, attr), expected)
        got = TF.matmul(src, weight, small, copy.deepcopy(attr).set_post_ops(relu))
        if any(n > 1 for n in shape[:-1]):
            assert_same(got, (scaled + small).relu())
        else:
            per_column = small.float().reshape(-1).expand(18)
            assert_same(got, TF.matmul(src, weight, per_column, attr).relu())
    quantized = copy.deepcopy(plain).set_scales("dst", 0, 0.7).set_zero_points("dst", 0, 101)
    expected = TF.quantize(TF.matmul(src, weight, small, plain), 0.7, 101)
    got = TF.matmul(src, weight, small, quantized, U8)
    assert int((got.int() - expected.int()).abs().max()) <= 1  # rounded once, not twice


@pytest.mark.parametrize("dst", [F32, S32, U8], ids=str)
@pytest.mark.parametrize("src_dtype", [U8, S8], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_zero_points_of_rows(
    isa: str, batch: tuple[int, ...], src_dtype: torch.dtype, dst: torch.dtype
):
    """Exact sums of the whole range: the least value less the largest zero point, and so on."""
    src, weight = operands((5, 64, 18), src_dtype, batch=(batch, ()))
    low, high = torch.iinfo(src_dtype).min, torch.iinfo(src_dtype).max
    src[..., 0, :], src[..., 1, :] = low, high
    shifts = torch.tensor([high, low, 0, 1, high - 1], dtype=S32).expand(*batch, 5)
    rows = (2 << len(batch)) - 1
    for zero in (0, -20):
        attr = Attr().set_zero_points("src", rows, shifts.reshape(-1))
        attr.set_zero_points("weights", 0, zero)
        exact = (src.double() - shifts[..., None]) @ (weight.double() - zero)
        assert_same(TF.matmul(src, weight, attr=attr, dst_dtype=S32), exact.to(S32))
        scales, by_row, bias = 0.01 * torch.rand(18), torch.rand(*batch, 5), torch.randn(18)
        attr.set_scales("weights", 2, scales).set_scales("src", rows, by_row.reshape(-1))
        real = exact.float() * scales * by_row[..., None] + bias
        chain = PostOps().append_binary("mul", by_row.reshape(-1), rows).append_eltwise("relu")
        expected = (real * by_row[..., None]).relu()
        attr.set_post_ops(chain)
        if dst != F32:
            attr.set_scales("dst", 0, 0.37).set_zero_points("dst", 0, 7)
            expected = (expected / 0.37).round() + 7
            expected = expected.clamp(torch.iinfo(dst).min, torch.iinfo(dst).max).to(dst)
        got = TF.matmul(src, weight, bias, attr, dst)
        if dst == F32:
            assert_same(got, expected)
        else:
            assert int((got.int() - expected.int()).abs().max()) <= 1


@pytest.mark.parametrize("kind", ["scales", "zero_points"])
def test_zero_points_of_rows_beside_groups_of_all_columns(kind: str):
    """One group of k, with a mask that has k, is no group."""
    src, weight = operands((5, 64, 18))
    values = torch.arange(1, 19, dtype=S32 if kind == "zero_points" else F32)

    def attr(mask: int, groups: tuple[int, int] | None) -> Attr:
        made = Attr().set_zero_points("src", 1, [3, 0, 255, 7, 9])
        make = made.set_scales if kind == "scales" else made.set_zero_points
        return make("weights", mask, values, groups)

    by_column = TF.matmul(src, weight, attr=attr(2, None))
    assert_same(TF.matmul(src, weight, attr=attr(3, (64, 1))), by_column)
    for mask, scales in ((1, torch.rand(5)), (3, torch.rand(5)), (2, torch.rand(1))):
        own, groups = torch.broadcast_to(scales, (5,)), None if mask == 1 else (1, 64)
        plain, other = attr(2, None), attr(2, None).set_scales("src", mask, scales, groups)
        expected = TF.matmul(src, weight, attr=plain.set_scales("src", 1, own))
        assert_same(TF.matmul(src, weight, attr=other), expected)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_scales_of_rows_of_dst(isa: str, batch: tuple[int, ...]):
    """The same as a division in the end."""
    src, weight = operands((5, 64, 18), batch=(batch, ()))
    rows, bias = (2 << len(batch)) - 1, torch.randn(18)
    scales = 0.5 + torch.rand((*batch, 5))
    relu = PostOps().append_eltwise("relu")
    for dst in (U8, S8, S32):
        attr = Attr().set_scales("src", 0, 0.02).set_scales("weights", 0, 0.03).set_post_ops(relu)
        real = TF.matmul(src, weight, bias, attr)
        expected = (real / scales[..., None]).round() + 7
        expected = expected.clamp(torch.iinfo(dst).min, torch.iinfo(dst).max).to(dst)
        attr.set_scales("dst", rows, scales.reshape(-1)).set_zero_points("dst", 0, 7)
        assert_same(TF.matmul(src, weight, bias, attr, dst), expected)


def test_layouts(isa: str):
    """Transposed, sliced, expanded and scattered operands."""
    for m, k, n in SIZES:
        src, weight = operands((m, k, n), S8, U8)
        expected = reference_matmul.matmul(src, weight, None, 1, 2, dst_dtype=S32)
        wide = torch.zeros(m + 2, k + 5, dtype=S8)
        wide[1:-1, 2:-3] = src
        tall = torch.zeros(k + 2, n + 5, dtype=U8)
        tall[1:-1, 2:-3] = weight
        scattered = torch.stack([weight, weight], -1)[..., 0]
        for a in (src, src.t().contiguous().t(), wide[1:-1, 2:-3]):
            for b in (weight, weight.t().contiguous().t(), tall[1:-1, 2:-3], scattered):
                assert_same(raw(a, b, src=1, weights=2), expected, (m, k, n))
        one = src[None].expand(3, m, k)
        assert_same(raw(one, weight, src=1, weights=2), expected.expand(3, m, n), "expanded")
        assert_same(raw(one, weight.expand(3, k, n), src=1, weights=2), expected.expand(3, m, n))


def test_bias_and_output_scales(isa: str):
    src, weight = operands(SIZES[0])
    n = weight.shape[1]
    bias = torch.randint(-(2**14), 2**14, (n,), dtype=S32)
    expected = reference_matmul.matmul(src, weight, bias, 4, 5, dst_dtype=S32)
    attr = Attr().set_zero_points("src", 0, 4).set_zero_points("weights", 0, 5)
    assert_same(TF.matmul(src, weight, bias, attr, S32), expected)
    scales, real_bias = torch.rand(n) * 1e-3, 1e4 * torch.randn(n)
    expected = reference_matmul.matmul(src, weight, real_bias, output_scales=scales, dst_dtype=U8)
    attr = Attr().set_output_scales(2, scales)
    assert_same(TF.matmul(src, weight, real_bias, attr, U8), expected)
    for batch, text in (((), "eltwise_relu"), ((2,), "eltwise_tanh")):
        rows = src.expand(*batch, *src.shape)
        expected = reference_matmul.matmul(
            rows, weight, real_bias, output_scales=scales, dst_dtype=U8, dst_zero_point=9,
            post_ops=text,
        )  # fmt: skip
        attr = Attr().set_output_scales(2 << len(batch), scales).set_zero_points("dst", 0, 9)
        attr.set_post_ops(PostOps.parse(text))
        assert_same(TF.matmul(rows, weight, real_bias, attr, U8), expected)


def test_per_column_destination_scales(isa: str):
    src, weight = operands(SIZES[1])
    args = parameters(*SIZES[1][1:], U8)
    args["dst_scale"] = 0.05 + 0.05 * torch.rand(weight.shape[1])
    expected = reference_matmul.matmul(src, weight, dst_dtype=U8, **args)
    attr = Attr().set_scales("src", 0, args["src_scale"])
    attr.set_scales("weights", 2, args["weight_scale"]).set_scales("dst", 2, args["dst_scale"])
    attr.set_zero_points("dst", 0, args["dst_zero_point"])
    assert_same(TF.matmul(src, weight, args["bias"], attr, U8), expected)


@pytest.mark.parametrize("pair", cases.EXTREME_PAIRS, ids=str)
def test_extreme_pairs(isa: str, pair: tuple[int, int]):
    """Every product the same; zero points at the ends of the range double its size."""
    for m, k, n in ((7, 64, 17), (6, 33, 64)):
        src = torch.full((m, k), pair[0], dtype=U8 if pair[0] >= 0 else S8)
        weight = torch.full((k, n), pair[1], dtype=S8)
        low, high = cases.RANGE[src.dtype]
        for za, zb in itertools.product((low, 0, high), (-128, 0, 127)):
            exact = k * (pair[0] - za) * (pair[1] - zb)
            assert (raw(src, weight, src=za, weights=zb) == exact).all()


def test_the_longest_sums(isa: str):
    """K at its limits, with and without weight zero points."""
    src = torch.full((1, 65793), 255, dtype=U8)
    assert raw(src, torch.full((65793, 1), -128, dtype=S8)).item() == -255 * 128 * 65793
    src, weight = src[:, :33025], torch.full((33025, 1), 255, dtype=U8)
    assert raw(src, weight).item() == 255 * 255 * 33025
    with pytest.raises(ValueError, match="K must be at most 33025 for weights with a zero point"):
        raw(torch.zeros(1, 33026, dtype=U8), torch.zeros(33026, 1, dtype=U8))
    with pytest.raises(ValueError, match="K must be at most 65793"):
        raw(torch.zeros(1, 65794, dtype=U8), torch.zeros(65794, 1, dtype=S8))


def test_empty_operands(isa: str):
    for m, k, n in ((0, 5, 3), (4, 5, 0), (4, 0, 3)):
        src, weight = operands((m, k, n), U8, S8)
        assert_same(raw(src, weight, src=9, weights=3), torch.zeros(m, n, dtype=S32))
    bias = torch.arange(3, dtype=S32)
    src, weight = operands((4, 0, 3), U8, S8)
    assert_same(TF.matmul(src, weight, bias, dst_dtype=S32), bias.expand(4, 3))
    src, weight = operands((2, 3, 4), U8, S8, ((0, 2), (2,)))
    assert raw(src, weight).shape == (0, 2, 2, 4)


def test_threads_change_no_bit():
    calls = [operands((65, 130, 90), S8, U8), operands((20, 64, 40), U8, S8, ((7,), (7,)))]
    expected = [reference_matmul.matmul(*call, None, 3, 4, dst_dtype=S32) for call in calls]
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        for call, result in zip(calls, expected, strict=True):
            assert_same(raw(*call, src=3, weights=4), result)


def test_weight_only_int8():
    """Float source: torch's matmul of the dequantized weight."""
    src, weight = torch.randn(5, 24), random_q((24, 10), S8)
    scales = torch.rand(10) + 0.1
    real = scales * (weight.float() - 3)
    attr = Attr().set_scales("weights", 2, scales).set_zero_points("weights", 0, 3)
    bias = torch.randn(10)
    expected = src @ real + bias
    assert_same(TF.matmul(src, weight, bias, attr), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(TF.matmul(src, weight, bias, attr), expected)
    groups = torch.rand(6, 10) + 0.1
    attr = Attr().set_scales("weights", 3, groups.reshape(-1), (4, 1))
    real = groups.repeat_interleave(4, 0) * weight.float()
    assert_same(TF.matmul(src, weight, None, attr), src @ real)
    zeros = torch.arange(-15, 0, dtype=S32).reshape(3, 5)
    attr.set_zero_points("weights", 3, zeros.reshape(-1), (8, 2))
    shifted = weight.float() - zeros.repeat_interleave(8, 0).repeat_interleave(2, 1)
    assert_same(
        TF.matmul(src, weight, None, attr), src @ (groups.repeat_interleave(4, 0) * shifted)
    )
    batched, scales = random_q((2, 24, 10), U8), torch.rand(2) + 0.1
    attr = Attr().set_scales("weights", 1, scales)
    assert_same(TF.matmul(src, batched, None, attr), src @ (scales[:, None, None] * batched))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_only_int8_with_post_ops_and_a_destination(isa: str, dtype: torch.dtype):
    """Masks index the dims of dst, in batches too."""
    src, weight, bias = torch.randn(2, 5, 24), random_q((24, 10), S8), torch.randn(10)
    rows, columns, old = torch.rand(10) + 0.5, torch.randn(10), random_q((2, 5, 10), U8)
    chain = PostOps().append_binary("mul", rows, 3).append_sum(0.5, 7, "u8")
    chain.append_eltwise("relu").append_binary("add", columns, 4)
    attr = Attr().set_scales("weights", 0, 0.01).set_post_ops(chain)
    if dtype != F32:
        attr.set_scales("dst", 0, 0.5).set_zero_points("dst", 0, 9)
    got = TF.matmul(src, weight, bias, attr, dtype, [old])
    real = src @ (torch.tensor(0.01) * weight.float()) + bias
    real = real.double() * rows.reshape(2, 5, 1) + 0.5 * (old.double() - 7)
    real = real.clamp(min=0) + columns
    assert got.dtype == dtype and got.unique().numel() > 10
    if dtype == F32:
        torch.testing.assert_close(got.double(), real, rtol=0, atol=1e-5)
        return
    info = torch.iinfo(dtype)
    steps = got.double() - (real / 0.5 + 9).clamp(info.min, info.max)
    assert float(steps.abs().max()) < 0.501


def hot_arguments(dst: int = 0, groups: int = 1) -> tuple[Any, ...]:
    src, weight = operands((5, 8, 10), U8, S8, ((2, 1), (3,)))
    multiplier = torch.rand(groups, 10) * 1e-3 if groups > 1 else torch.rand(10) * 1e-3
    text = "sum:1:0:f32" if groups > 1 else ""
    params = torch.cat([torch.zeros(1), torch.ones(10)]) if groups > 1 else torch.empty(0)
    zeros = (torch.tensor([3], dtype=S32), torch.tensor([4], dtype=S32))
    return (src, weight, multiplier, torch.rand(10), None, *zeros, dst, text, params, [])


def test_opcheck_and_fakes():
    opcheck(ops.matmul.default, hot_arguments())
    opcheck(ops.matmul.default, hot_arguments(6, 2))
    for batch in BATCHES:
        src, weight = operands((3, 4, 5), S8, U8, batch)
        none = torch.empty(0)
        check_fake(ops.matmul, (src, weight, none, none, None, None, None, 3, "", none, []))


def test_kernel(isa: str):
    raw(*operands(SIZES[0]))
    assert torchq.last_kernel() == gemm_kernel(isa, SIZES[0][0])


# Errors

A, B = torch.zeros(4, 8, dtype=U8), torch.zeros(8, 5, dtype=S8)
ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: TF.matmul(A, B[:7]), ValueError, "src and weight must be (..., M, K) and (..., K, N)"),
    (lambda: TF.matmul(A[0], B), ValueError, "src and weight must be"),
    (lambda: TF.matmul(A.double(), B), TypeError, "a floating src must be torch.float32"),
    (lambda: TF.matmul(A.int(), B), TypeError, "src must be torch.uint8 or torch.int8"),
    (lambda: TF.matmul(A, B.float()), TypeError, "weight must be torch.uint8 or torch.int8"),
    (lambda: raw(A.expand(2, 4, 8), B.expand(3, 8, 5)), ValueError, "batch dimensions"),
    (lambda: raw(A, B, weights=200), ValueError, "weight_zero_point must lie in [-128, 127]"),
    (lambda: raw(A, B, src=-1), ValueError, "src_zero_point must lie in [0, 255]"),
    (
        lambda: TF.matmul(A, B[None], attr=Attr().set_scales("weights", 1, torch.ones(1))),
        NotImplementedError,
        "scales of weights must have mask 0 or 2 or 6 or 4, got 1",
    ),
    (
        lambda: TF.matmul(A, B, attr=Attr().set_scales("src", 3, torch.ones(7), (1, 4))),
        ValueError,
        "scales of src must be 8 values",
    ),
    (
        lambda: TF.matmul(
            A,
            B,
            attr=Attr()
            .set_scales("src", 3, torch.ones(8), (1, 4))
            .set_zero_points("dst", 2, [1] * 5),
            dst_dtype=U8,
        ),
        NotImplementedError,
        "zero points of dst per column must come without scales of src per row",
    ),
    (
        lambda: TF.matmul(A, B, attr=Attr().set_scales("src", 1, torch.ones(3))),
        ValueError,
        "scales of src must be 4 values",
    ),
    (
        lambda: TF.matmul(A, B, attr=Attr().set_zero_points("src", 3, torch.ones(12, dtype=S32))),
        NotImplementedError,
        "zero_points of src must have mask 0 or 2 or 1, got 3",
    ),
    (
        lambda: TF.matmul(A, B, attr=Attr().set_zero_points("src", 1, [0, 1, 255, 256])),
        ValueError,
        "zero points of src must lie in [0, 255] for torch.uint8, got 0 to 256",
    ),
    (
        lambda: TF.matmul(
            A,
            B,
            attr=Attr().set_zero_points("src", 1, [1] * 4).set_scales("dst", 2, [0.5] * 5),
            dst_dtype=U8,
        ),
        NotImplementedError,
        "zero points of src per row must come without groups of k",
    ),
    (
        lambda: TF.matmul(A, B, None, Attr().set_scales("dst", 1, [0.5] * 4)),
        ValueError,
        "dst must be an integer to have a scale or zero point, got dst_dtype torch.float32",
    ),
    (
        lambda: TF.matmul(A, B, None, Attr().set_scales("dst", 1, [0.5] * 3), U8),
        ValueError,
        "scales of dst must be 4 values",
    ),
    (
        lambda: raw(A, B, src=torch.full((8,), 256, dtype=S32)),
        ValueError,
        "src_zero_point must lie in [0, 255]",
    ),
    (
        lambda: TF.matmul(A.float(), B, torch.ones(5, dtype=S32)),
        TypeError,
        "bias must be float32, bfloat16, float16, int8 or uint8 with a float src, got torch.int32",
    ),
    (
        lambda: TF.matmul(A.float(), B, attr=Attr().set_scales("src", 0, 0.5)),
        ValueError,
        "attr must set only scales of weights",
    ),
    (
        lambda: TF.matmul(A.float(), B, attr=Attr().set_scales("dst", 0, 0.5)),
        ValueError,
        "a float32 destination must have scale 1, got 0.5",
    ),
    (
        lambda: TF.matmul(A.float(), B, torch.ones(4)),
        ValueError,
        "bias must have shape [5]; one of float32, or converted to it, may have 1 or dst's size in "
        "each dimension of dst, [4, 5]; got torch.float32 [4]",
    ),
    (
        lambda: TF.matmul(A, B, torch.ones(4, 2)),
        ValueError,
        "got torch.float32 [4, 2]",
    ),
    (
        lambda: TF.matmul(A, B, torch.ones(4, 1, dtype=S32)),
        ValueError,
        "got torch.int32 [4, 1]",
    ),
    (
        lambda: TF.matmul(A, B, torch.ones(4, 1), Attr().set_output_scales(0, 0.5)),
        NotImplementedError,
        "a bias of rows must come without output scales",
    ),
    (
        lambda: TF.matmul(A, B, attr=Attr().set_scales("src1", 0, 1.0)),
        ValueError,
        "attr must set only",
    ),
    (
        lambda: TF.matmul(A, B, torch.full((5,), 2**31 - 1, dtype=S32)),
        ValueError,
        "int32 bias must be at most",
    ),
    (
        lambda: TF.matmul(A.float(), B, attr=Attr().set_scales("dst", 2, torch.ones(5))),
        NotImplementedError,
        "scales of dst must have mask 0, got 2",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS, ids=[e[2][:40] for e in ERRORS])
def test_errors(call: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=r"torchq\.(.|\n)*" + re.escape(text)):
        call()


def test_op_errors():
    src, weight, multiplier, *rest = hot_arguments()
    with pytest.raises(ValueError, match="multiplier must have 10 values"):
        ops.matmul(src, weight, multiplier[:3], *rest)
    with pytest.raises(ValueError, match="post_ops must begin with 'sum:1:0:f32'"):
        ops.matmul(src, weight, multiplier.expand(2, 10).contiguous(), *rest)
    with pytest.raises(ValueError, match="groups that divide K = 8"):
        ops.matmul(src, weight, multiplier.expand(3, 10).contiguous(), *rest)


def test_errors_of_scales_by_row_and_group():
    src, weight = torch.ones(3, 8, dtype=U8), torch.ones(8, 5, dtype=S8)
    args = [src, weight, torch.ones(2, 5), torch.zeros(5), None, None, None, 6]
    args += ["binary_mul:1+sum:1:0:f32", torch.zeros(1)]
    for given, error, text in (
        ([], ValueError, "needs 2 sources, got 1"),
        ([torch.ones(3, 1)], ValueError, "post_op_srcs[0] must have shape [2, 3, 1] for post_ops"),
        ([torch.ones(2, 3, 1, dtype=S32)], TypeError, "post_op_srcs[0] must be float32 as"),
        ([torch.ones(2, 3, 1)] * 2, ValueError, "needs 2 sources, got 3"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            ops.matmul(*args, given)
    rows = 1.0 + torch.arange(12.0)[::2].reshape(2, 3, 1)
    expected = 4.0 * (rows[0] + rows[1]).expand(3, 5)
    for given in (rows, rows.mT.contiguous().mT, rows.expand(2, 3, 2)[..., 1:]):
        assert_same(ops.matmul(*args, [given]), expected)

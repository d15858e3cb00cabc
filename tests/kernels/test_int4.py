# SPDX-License-Identifier: Apache-2.0
"""Linear layers with 4-bit weights, against the formula in exact arithmetic."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from calls import F32, S8, S32, U8, assert_same, check_fake
from cases import random_q
from reference_arithmetic import f32, fma32, rne
from torch import Tensor
from torch.library import opcheck

import torchq
import torchq.functional as TF
from torchq import PostOps
from torchq.packing import pack_linear_int4

op = torch.ops.torchq.dynamic_linear_int4


class Case(NamedTuple):
    """A layer: rows, inputs, outputs, group size, and whether groups have zero points."""

    m: int
    k: int
    n: int
    group_size: Any = 32
    affine: bool = False

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Return src, codes, scales, zero points and bias, of their full ranges."""
        generator = torch.Generator().manual_seed(sum(self[:4]))
        groups = -(-self.k // self.group_size)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        src = random(self.m, self.k) * (10 * random(self.m, 1)).exp2()
        codes = torch.randint(0, 16, (self.n, self.k), generator=generator, dtype=torch.uint8)
        zero = torch.randint(0, 16, (self.n, groups), generator=generator, dtype=torch.uint8)
        scale = random(self.n, groups) * (4 * random(self.n, groups)).exp2()
        return src, codes, scale.bfloat16().float(), zero if self.affine else None, random(self.n)


def oracle(
    src: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, size: int
) -> Tensor:
    """Quantize each row by its largest magnitude; sum each group exactly; add groups in order."""
    largest = src.abs().amax(1, keepdim=True) if src.shape[1] else torch.zeros(len(src), 1)
    src_scale = f32(largest.clamp(min=1e-30).double() / 127)
    q = rne(fma32(src, f32(1 / src_scale.double()), torch.tensor(128.0)).double()) - 128
    acc = torch.zeros(len(src), len(codes))
    for g in range(scale.shape[1]):
        part = slice(g * size, (g + 1) * size)
        own = codes[:, part].double() - (8 if zero is None else zero[:, g : g + 1].double())
        acc = fma32(f32(q[:, part] @ own.t()), scale[:, g], acc)
    dst = acc * src_scale
    return dst if bias is None else dst + bias


CASES = [
    Case(1, 128, 64),
    Case(1, 4096, 37, 128),
    Case(2, 96, 80),
    Case(3, 200, 33, 64),
    Case(5, 33, 17),
    Case(7, 64, 31, 64),
    Case(13, 1, 1),
    Case(16, 516, 100, 128),
    Case(70, 72, 50),
    Case(64, 7, 130, 128),
    Case(1, 130, 70, 32, True),
    Case(6, 257, 48, 128, True),
    Case(23, 100, 19, 64, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_formula(isa: str, case: Case) -> None:
    src, codes, scale, zero, bias = case.operands()
    weight = pack_linear_int4(codes, scale, zero, case.group_size)
    for values in (src, src.relu(), torch.zeros_like(src), src * 1e-36, src * 1e25):
        expected = oracle(values, codes, scale, zero, bias, case.group_size)
        assert_same(TF.dynamic_linear_int4(values, weight, bias), expected)
    expected = oracle(src, codes, scale, zero, None, case.group_size)
    assert_same(TF.dynamic_linear_int4(src, weight), expected)


@pytest.mark.parametrize("code", (0, 15))
@pytest.mark.parametrize("zero", (None, 0, 15), ids=str)
def test_largest_sums(isa: str, code: int, zero: int | None) -> None:
    """Sources of one sign at full range, and codes at an end of theirs."""
    src = torch.full((3, 256), -1.0)
    src[1] = 1.0
    codes, scale = torch.full((20, 256), code, dtype=torch.uint8), torch.ones(20, 2)
    zeros = None if zero is None else torch.full((20, 2), zero, dtype=torch.uint8)
    got = TF.dynamic_linear_int4(src, pack_linear_int4(codes, scale, zeros, 128))
    assert_same(got, oracle(src, codes, scale, zeros, None, 128))
    assert got[1, 0] == pytest.approx(256 * (code - (8 if zero is None else zero)))


def test_a_row_of_zeros_gives_the_bias(isa: str) -> None:
    src, codes, scale, _, bias = Case(4, 70, 40).operands()
    src[2] = 0
    got = TF.dynamic_linear_int4(src, pack_linear_int4(codes, scale), bias)
    assert_same(got[2], bias)


def test_layouts_and_leading_dimensions(isa: str) -> None:
    src, codes, scale, _, bias = Case(12, 40, 20).operands()
    weight = pack_linear_int4(codes, scale)
    expected = oracle(src, codes, scale, None, bias, 32)
    assert_same(TF.dynamic_linear_int4(src.t().contiguous().t(), weight, bias), expected)
    got = TF.dynamic_linear_int4(src.reshape(3, 2, 2, 40), weight, bias)
    assert_same(got, expected.reshape(3, 2, 2, 20))
    assert_same(TF.dynamic_linear_int4(src[0], weight, bias), expected[0])


def test_a_row_does_not_depend_on_its_batch(isa: str) -> None:
    src, codes, scale, _, bias = Case(31, 160, 70).operands()
    weight = pack_linear_int4(codes, scale)
    whole = TF.dynamic_linear_int4(src, weight, bias)
    for r in range(31):
        assert_same(TF.dynamic_linear_int4(src[r : r + 1], weight, bias), whole[r : r + 1])


@pytest.mark.parametrize("rows", (1, 400))
def test_threads_change_no_bit(rows: int) -> None:
    src, codes, scale, zero, bias = Case(rows, 600, 1100, 64, True).operands()
    weight = pack_linear_int4(codes, scale, zero, 64)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(TF.dynamic_linear_int4(src, weight, bias))
    for result in results[1:]:
        assert_same(result, results[0])


def test_empty_sources(isa: str) -> None:
    codes, bias = torch.zeros(5, 8, dtype=torch.uint8), torch.arange(5.0)
    weight = pack_linear_int4(codes, torch.ones(5, 1))
    assert TF.dynamic_linear_int4(torch.empty(0, 8), weight).shape == (0, 5)
    none = pack_linear_int4(codes[:0], torch.ones(0, 1))
    assert TF.dynamic_linear_int4(torch.ones(3, 8), none).shape == (3, 0)
    narrow = pack_linear_int4(codes[:, :0], torch.ones(5, 0))
    assert_same(TF.dynamic_linear_int4(torch.empty(3, 0), narrow, bias), bias.expand(3, 5))


@pytest.mark.parametrize("case", (Case(3, 70, 50), Case(20, 64, 64), Case(1, 32, 1030)), ids=str)
def test_post_ops_are_those_of_the_result(isa: str, case: Case) -> None:
    src, codes, scale, _, bias = case.operands()
    weight = pack_linear_int4(codes, scale)
    other = [torch.randn(case.m, case.n)]
    chain = PostOps().append_eltwise("swish", 1.0).append_sum(1.0, 0, "f32").append_eltwise("relu")
    result = TF.dynamic_linear_int4(src, weight, bias)
    attr = torchq.Attr().set_post_ops(chain)
    expected = TF.eltwise(result, "linear", 1.0, 0.0, attr, F32, other)
    assert_same(TF.dynamic_linear_int4(src, weight, bias, attr, None, other), expected)


@pytest.mark.parametrize("dtype", (U8, S8, S32), ids=str)
@pytest.mark.parametrize("shape", ((3,), (2, 4), ()), ids=str)
def test_an_integer_destination(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Post-ops with constants and operands, then one rounding, as of `eltwise`."""
    _, codes, scale, _, bias = Case(1, 70, 20).operands()
    weight, src = pack_linear_int4(codes, scale), torch.randn(*shape, 70)
    factors = torch.rand(20)
    chain = PostOps().append_sum(0.5, 3, "s8").append_binary("mul", factors, 1 << len(shape))
    old = random_q((*shape, 20), S8)
    attr = torchq.Attr().set_scales("dst", 0, 0.02).set_zero_points("dst", 0, 5)
    attr.set_post_ops(chain)
    got = TF.dynamic_linear_int4(src, weight, bias, attr, dtype, [old])
    real = TF.dynamic_linear_int4(src, weight, bias).double()
    real = (real + 0.5 * (old.double() - 3)) * factors.double()
    exact, info = real / 0.02 + 5, torch.iinfo(dtype)
    assert got.dtype == dtype and got.unique().numel() > 2
    steps = (got.double() - exact.clamp(info.min, info.max)).abs()
    assert (steps <= 0.501 + 2**-21 * exact.abs()).all()
    halves = TF.dynamic_linear_int4(src.half(), weight, bias, attr, dtype, [old])
    assert_same(
        halves, TF.dynamic_linear_int4(src.half().float(), weight, bias, attr, dtype, [old])
    )


def test_bfloat16(isa: str) -> None:
    src, codes, scale, _, bias = Case(4, 70, 40).operands()
    weight, src = pack_linear_int4(codes, scale), src.bfloat16()
    expected = TF.dynamic_linear_int4(src.float(), weight, bias).bfloat16()
    assert torch.equal(TF.dynamic_linear_int4(src, weight, bias), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packing_keeps_codes_scales_and_zero_points(case: Case) -> None:
    _, codes, scale, zero, _ = case.operands()
    packed = pack_linear_int4(codes, scale, zero, case.group_size)
    unpacked = packed.unpack()
    zeros = torch.full_like(scale, 8, dtype=torch.uint8) if zero is None else zero
    for got, expected in zip(unpacked, (codes, scale, zeros), strict=True):
        assert torch.equal(got, expected)
    each = torch.arange(case.k) // case.group_size
    expected = scale[:, each] * (codes.float() - zeros[:, each].float())
    assert_same(packed.dequantize(), expected)


def test_layout_by_hand() -> None:
    """Inputs k and k + 4 share a byte, the first in its low half; 16 outputs lie side by side."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(17, 1)
    scale = torch.full((17, 1), 3.0)
    packed = pack_linear_int4(codes, scale)
    assert packed.weight.shape == (2, 2, 16, 4)
    assert packed.weight[0, 1, 5].tolist() == [8 + 12 * 16, 9 + 13 * 16, 10 + 14 * 16, 11 + 15 * 16]
    assert packed.weight[1, :, 1:].count_nonzero() == 0
    assert packed.params[0].tolist() == [[0x4040] * 16]  # 3 as bfloat16, the first of two groups
    affine = pack_linear_int4(codes, scale, torch.full((17, 1), 5, dtype=torch.uint8))
    assert affine.params[0].tolist() == [[0x40400005] * 16]


@pytest.mark.parametrize("size", (32, 64, 128))
def test_quantized_weights(size: Any) -> None:
    """Each weight is within half a step of its own, but for the clipped ends of a group."""
    weight = torch.randn(40, 200)
    weight[3] = 0
    codes, scale = TF.quantize_weight_int4(weight, size)
    packed = pack_linear_int4(codes, scale, None, size)
    assert torch.equal(packed.unpack()[1], scale)
    step = scale.abs().repeat_interleave(size, 1)[:, :200]
    inner = (codes > 0) & (codes < 15)
    assert ((packed.dequantize() - weight).abs() <= step * 0.5001)[inner].all()
    assert packed.dequantize()[3].count_nonzero() == 0
    assert torchq.sqnr(weight, packed.dequantize()) > {32: 21, 64: 20, 128: 19}[size]


def test_opcheck_and_fakes() -> None:
    src, codes, scale, zero, bias = Case(5, 70, 20, 32, True).operands()
    for given in (None, zero):
        w = pack_linear_int4(codes, scale, given)
        args = (w.weight, w.params, bias, 70, 20, 32, given is None)
        opcheck(op.default, (src, *args))
        opcheck(op.default, (src, *args, "eltwise_relu+sum:1:0:f32", [torch.randn(5, 20)]))
        check_fake(op, (src.expand(2, 5, 70), *args))


def test_kernel(isa: str) -> None:
    src, codes, scale, _, _ = Case(5, 70, 20).operands()
    TF.dynamic_linear_int4(src, pack_linear_int4(codes, scale))
    tier = "avx512_vnni" if isa == "amx" else isa
    assert torchq.last_kernel() in (f"gemm_int4:{isa}", f"gemm_int4:{tier}")


# Errors

X, C, S = torch.zeros(3, 40), torch.zeros(5, 40, dtype=torch.uint8), torch.ones(5, 2)
W = pack_linear_int4(C, S)
ARGS = (W.weight, W.params, None, 40, 5, 32, True)
ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: op(X.to(torch.uint8), *ARGS), TypeError, "src must be float32, got uint8"),
    (lambda: op(X.double(), *ARGS), TypeError, "float64"),
    (lambda: op(X[:, :7], *ARGS), ValueError, "src must be (*, 40), got [3, 7]"),
    (lambda: op(X, *ARGS[:5], 16, True), ValueError, "group_size must be 32, 64 or 128, got 16"),
    (lambda: op(X, *ARGS[:4], 17, 32, True), ValueError, "weight must be [ceil(N/16), ceil(K/8)"),
    (lambda: op(X, *ARGS[:6], False), ValueError, "with params [ceil(N/16), 2, 16]"),
    (lambda: op(X, W.weight.char(), *ARGS[1:]), TypeError, "weight must be uint8, got int8"),
    (lambda: op(X, W.weight, W.params.float(), *ARGS[2:]), TypeError, "params must be int32"),
    (lambda: TF.dynamic_linear_int4(X, W, torch.ones(4)), ValueError, "bias must have 5 values"),
    (lambda: TF.dynamic_linear_int4(X.log(), W), ValueError, "got NaN or inf in row 0"),
    (lambda: TF.dynamic_linear_int4(X + torch.nan, W), ValueError, "src must be finite"),
    (lambda: TF.dynamic_linear_int4(X, C), TypeError, "weight must be of type PackedInt4"),  # type: ignore[arg-type]
    (lambda: pack_linear_int4(C.char(), S), TypeError, "codes must be uint8, got torch.int8"),
    (lambda: pack_linear_int4(C + 16, S), ValueError, "codes must lie in [0, 15], got 16"),
    (lambda: pack_linear_int4(C[0], S), ValueError, "codes must be (out_features, in_features)"),
    (lambda: pack_linear_int4(C, S[:, :1]), ValueError, "scale must be [5, 2] for codes [5, 40]"),
    (lambda: pack_linear_int4(C, S * torch.inf), ValueError, "scale must be finite in bfloat16"),
    (lambda: pack_linear_int4(C, S, S), TypeError, "zero_point must be uint8"),
    (lambda: pack_linear_int4(C, S, None, 48), ValueError, "group_size must be 32, 64 or 128"),  # type: ignore[arg-type]
    (lambda: TF.quantize_weight_int4(C), TypeError, "weight must be float32, got torch.uint8"),
    (lambda: TF.quantize_weight_int4(S / 0), ValueError, "with finite values"),
    (lambda: TF.quantize_weight_int4(S[0]), ValueError, "got [2]"),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS, ids=[e[2][:40] for e in ERRORS])
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"torchq\.(.|\n)*" + re.escape(text)):
        call()

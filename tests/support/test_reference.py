# SPDX-License-Identifier: Apache-2.0
"""Tests of the oracle against definitions that share nothing with it: fractions and loops."""

import ast
import itertools
import math
from fractions import Fraction
from pathlib import Path

import cases
import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from reference import f32, fma32
from reference_epilogue import real_units
from reference_post_ops import bind

U8, S8, S32, FP = torch.uint8, torch.int8, torch.int32, torch.float32


def test_imports_nothing_from_torchq():
    for name in ("reference.py", "reference_epilogue.py"):
        tree = ast.parse((Path(__file__).parent / name).read_text())
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not [n for n in imports if "torchq" in ast.unparse(n)]


# fma32


def nearest_float32(x: Fraction) -> float:
    """By definition: rounded to a multiple of the spacing, which is at least 2^-149."""
    if x == 0:
        return 0.0
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    spacing = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(x / spacing) * spacing
    return math.copysign(math.inf, x) if abs(rounded) >= 2**128 else float(rounded)


def check_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    got = fma32(*(torch.from_numpy(v.astype(np.float32)) for v in (a, b, c))).tolist()
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        assert result == nearest_float32(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)


def random_float32(rng: np.random.Generator, n: int) -> np.ndarray:
    values = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(1.0))


def test_fma32_on_any_bits():
    rng = np.random.default_rng(0)
    check_fma(*(random_float32(rng, 4000) for _ in range(3)))


@pytest.mark.parametrize("exponent", [0, 100, -70, -74, -75])
def test_fma32_with_cancellation_and_denormals(exponent: int):
    rng = np.random.default_rng(1)
    a = (rng.standard_normal(1500) * 2.0**exponent).astype(np.float32)
    b = (rng.standard_normal(1500) * 2.0 ** min(exponent, 20)).astype(np.float32)
    c = (-a.astype(np.float64) * b).astype(np.float32)
    check_fma(a, b, c)
    check_fma(a, b, np.nextafter(c, np.float32(np.inf), dtype=np.float32))


def near_ties() -> tuple[np.ndarray, ...]:
    """c + a * b lies within 2^-46 of halfway between two float32; float64 alone rounds twice."""
    tiny = [1.0, 1 + 2.0**-23, 1 - 2.0**-24, 1 - 2.0**-23]
    rows = [
        (a * 2.0**half, sign * b, c)
        for a, b in itertools.product(tiny, tiny)
        for c, half in [(1.0, -24), (1 + 2.0**-23, -24), (2.0 - 2.0**-23, -24), (2.0**-126, -150)]
        for sign in (1, -1)
    ]
    a, b, c = np.array(rows, dtype=np.float64).T
    # 2^-150 is no float32: b takes half of the exponent.
    small = c == 2.0**-126
    a[small], b[small] = a[small] * 2.0**75, b[small] * 2.0**-75
    return a.astype(np.float32), b.astype(np.float32), c.astype(np.float32)


def test_fma32_rounds_once():
    a, b, c = near_ties()
    check_fma(a, b, c)
    with np.errstate(all="ignore"):
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (fma32(*map(torch.from_numpy, (a, b, c))).numpy() != twice).any(), "the data is too easy"


def test_fma32_specials():
    inf, nan = math.inf, math.nan
    rows = [(inf, 1, 1, inf), (inf, 0, 1, nan), (inf, 1, -inf, nan), (1, 1, -inf, -inf)]
    rows += [(nan, 1, 1, nan), (3e38, 10, -inf, -inf), (3e38, 2, 0, inf), (2.0**127, 2, -1, inf)]
    a, b, c, expected = torch.tensor(rows, dtype=FP).unbind(1)
    assert torch.equal(fma32(a, b, c).nan_to_num(nan=7), expected.nan_to_num(nan=7))
    zeros = fma32(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([-1.0, 0.0, -0.0]), f32(1.0) * 0)
    assert not torch.signbit(zeros[1:]).any()
    assert torch.signbit(fma32(f32(-1.0), f32(0.0), -f32(0.0)))


# Matmul-like ops


def test_worked_example_of_int8_inference():
    """Q_a = 255 / 15 = 17, Q_w = 127 / 9.8, half to even; truncation is what the source printed."""
    q_a, q_w = 255 / 15, 127 / 9.8
    activation = torch.tensor([15.0, 14.0, 11.0])
    weight = torch.tensor([-5.1, 6.8, -1.2, 9.8], dtype=torch.float64)
    bias = torch.tensor([2.4, -5.2, -8.0], dtype=torch.float64)
    assert reference.quantize(activation, 1 / q_a, 0, U8).tolist() == [255, 238, 187]
    assert reference.quantize(weight.float(), 1 / q_w, 0, S8).tolist() == [-66, 88, -16, 127]
    assert reference.rne(bias * q_a * q_w).tolist() == [529, -1146, -1762]
    assert torch.trunc(weight * q_w)[2] == -15
    assert torch.trunc(bias * q_a * q_w)[:2].tolist() == [528, -1145]


def loop_conv(src, weight, zero_point, shape: cases.ConvShape) -> torch.Tensor:
    """Taps outside src are skipped; Python integers."""
    src, weight = src.long(), weight.long()
    dst = torch.zeros(shape.dst, dtype=torch.int64)
    per_group = shape.out_channels // shape.groups
    width = shape.in_channels // shape.groups
    for at in itertools.product(*map(range, shape.dst)):
        n, oc, *out = at
        for ic, *tap in itertools.product(range(width), *map(range, shape.kernel)):
            geometry = zip(out, shape.stride, tap, shape.dilation, shape.padding_begin, strict=True)
            pixel = [o * s + k * d - p for o, s, k, d, p in geometry]
            if all(0 <= x < size for x, size in zip(pixel, shape.size, strict=True)):
                channel = oc // per_group * width + ic
                dst[at] += (src[(n, channel, *pixel)] - zero_point) * weight[(oc, ic, *tap)]
    return dst


LOOP_SHAPES = [
    cases.conv("plain", (2, 3), (4, 5), 3, 1, 1),
    cases.conv("everything", (4, 6), (5, 4), (3, 2), (2, 1), (2, 0), (1, 2), (1, 2), 2, 2),
    cases.conv("1d", (3, 2), (7,), 3, 2, 2, 0, 2),
    cases.conv("3d", (2, 2), (3, 2, 3), 2, (1, 2, 1), (0, 1, 2), (1, 1, 0)),
    cases.conv("kernel_exceeds_src", (2, 2), (2, 1), 4, 1, 2),
    cases.depthwise("depthwise", 3, (4, 3), multiplier=2, padding=1),
]


@pytest.mark.parametrize("shape", LOOP_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [U8, S8])
def test_conv_is_the_sum_over_valid_taps(shape: cases.ConvShape, dtype):
    src, weight = cases.random_q(shape.src, dtype), cases.random_s8(shape.weight, 1)
    acc = reference.conv(src, weight, None, 9, **shape.oracle)
    assert acc.dtype == S32
    assert torch.equal(acc.long(), loop_conv(src, weight, 9, shape))


def test_linear_is_exact_and_adds_int32_bias():
    args = cases.sample(cases.LinearShape(3, 4, 11), bias=S32)
    exact = {key: args[key] for key in ("src", "weight", "bias", "src_zero_point")}
    acc = [
        [
            sum((x - 117) * w for x, w in zip(row, channel, strict=True)) + b
            for channel, b in zip(args["weight"].tolist(), args["bias"].tolist(), strict=True)
        ]
        for row in args["src"].tolist()
    ]
    assert reference.linear(**exact).tolist() == acc


def test_longest_sum_fits_int32():
    shape = cases.LinearShape(1, 1, cases.MAX_TAPS_K)
    assert reference.linear(**cases.constant(shape, 255, -128)).item() == -255 * 128 * 65793
    assert 255 * 128 * (cases.MAX_TAPS_K + 1) > 2**31 - 1


@pytest.mark.parametrize("m, n, k", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_linear(m: int, n: int, k: int):
    bias = torch.full((n,), 2.0)
    src, weight = cases.random_u8((m, k)), cases.random_s8((n, k))
    dst = reference.linear(src, weight, bias, src_scale=1.0, weight_scale=1.0, dst_dtype=FP)
    assert dst.shape == (m, n)
    assert k or torch.equal(dst, bias.expand(m, n))


# Post-ops


def real_chain(args: dict) -> torch.Tensor:
    """The real value before the destination's quantization, in float64, post-op by post-op."""
    acc = (args["src"].double() - args["src_zero_point"].item()) @ args["weight"].double().t()
    x = acc * args["src_scale"].double() * args["weight_scale"].double() + args["bias"].double()
    for op in bind(args["post_ops"], args["post_op_values"], args["post_op_srcs"]):
        if op.kind == "sum":
            x = x + op.scale * (op.operand.double() - op.zero_point)
        elif op.kind == "relu":
            x = op.scale * torch.where(x > 0, x, op.alpha * x)
        elif op.kind == "clip":
            x = op.scale * x.clamp(op.alpha, op.beta)
        elif op.kind == "linear":
            x = op.scale * (op.alpha * x + op.beta)
        else:
            x = x + op.operand.double() if op.kind == "add" else x * op.operand.double()
    return x


@pytest.mark.parametrize("post_ops", cases.FOLDED_CHAINS + cases.FLOAT_CHAINS)
@pytest.mark.parametrize("per_channel_dst", [False, True])
@pytest.mark.parametrize("dst_dtype", [U8, S8])
def test_chains_round_the_real_formula(post_ops: str, dst_dtype, per_channel_dst: bool):
    shape = cases.LinearShape(40, 19, 64)
    args = cases.sample(shape, U8, dst_dtype, post_ops, per_channel_dst=per_channel_dst)
    q = reference.linear(**args).double()
    y = real_chain(args) / args["dst_scale"].double() + args["dst_zero_point"].item()
    y = y.clamp(*reference.RANGE[dst_dtype])
    assert ((q - y).abs() <= 0.5 + 1e-3).all()
    assert len(q.unique()) > 20


@pytest.mark.parametrize("post_ops", cases.FOLDED_CHAINS + cases.FLOAT_CHAINS)
def test_float_destination_keeps_real_units(post_ops: str):
    args = cases.sample(cases.LinearShape(9, 19, 64), S8, FP, post_ops)
    torch.testing.assert_close(
        reference.linear(**args).double(), real_chain(args), rtol=1e-5, atol=1e-4
    )


def test_which_chains_fold():
    value = [torch.ones(3)]
    assert all(reference.foldable(bind(text, value * 2)) for text in cases.FOLDED_CHAINS)
    assert not any(reference.foldable(bind(text, value * 2)) for text in cases.FLOAT_CHAINS)
    assert not reference.foldable(bind("binary_add:3", (), [torch.ones(2, 3)]))


def test_fold_by_hand():
    scale, bias = torch.tensor([0.5, 2.0]), torch.tensor([1.0, -3.0])
    folded = reference.fold(
        0.25, scale, bias, 0.125, 7, "sum:0.5:4+binary_mul:2+eltwise_clip:-1:2.5",
        [torch.tensor([1.0, 2.0])], 2, U8,
    )  # fmt: skip
    assert folded.multiplier.tolist() == [1.0, 8.0]
    assert folded.offset.tolist() == [(1 - 2) / 0.125 + 7, (-3 - 2) * 2 / 0.125 + 7]
    assert [s.tolist() for s in folded.sums] == [[4.0, 8.0]]
    assert folded.lo.tolist() == [0.0, 0.0]  # -1 / 0.125 + 7 = -1, below u8
    assert folded.hi.tolist() == [27.0, 27.0]


def test_clip_bounds_round_half_to_even():
    folded = reference.fold(1.0, 1.0, None, 1.0, 1, [("clip", 0.5, 2.5)], [], 1, U8)
    assert (folded.lo.item(), folded.hi.item()) == (2.0, 4.0)


def test_output_scales_scale_the_bias():
    src, weight = torch.tensor([[10]], dtype=U8), torch.tensor([[3]], dtype=S8)
    args = {"src": src, "weight": weight, "output_scales": 0.5, "dst_dtype": S8}
    assert reference.linear(**args, bias=torch.tensor([4], dtype=S32)).item() == 17
    assert reference.linear(**args, bias=torch.tensor([4.0])).item() == 17
    after = {"post_ops": "eltwise_linear:2:1"}  # in destination units
    assert reference.linear(**args, **after, bias=torch.tensor([4.0])).item() == 35
    folded = reference.fold_output_scales(-0.5, torch.tensor([4.0]), "", [], 1, S8)
    assert (folded.multiplier.item(), folded.offset.item()) == (-0.5, -2.0)


def test_parse_reads_the_text_grammar():
    text = "sum+sum:0.5:3:u8+eltwise_relu:0.25+eltwise_linear:2:1:3+eltwise_clip:0:6+binary_mul:2"
    assert reference.parse(text) == [
        ("sum", 1.0, 0, None), ("sum", 0.5, 3, U8), ("relu", 0.25, 1.0), ("linear", 2.0, 1.0, 3.0),
        ("clip", 0.0, 6.0, 1.0), ("mul", 2),
    ]  # fmt: skip
    assert reference.parse("") == []
    assert bind("sum:0.1")[0].scale == f32(0.1).item() != 0.1
    assert bind("sum:1:0:s8", (), [torch.tensor([255], dtype=U8)])[0].operand.item() == -1


def test_integer_destinations():
    acc = torch.tensor([2**24 + 1, 2**31 - 1, -(2**31)])[:, None]
    no_scale = reference.epilogue(acc, real_units(None, None, None, None, 0, 1), [], S32)
    assert no_scale.flatten().tolist() == [2**24, 2**31 - 1, -(2**31)]
    doubled = reference.epilogue(acc, real_units(2.0, None, None, None, 0, 1), [], S32)
    assert doubled.flatten().tolist() == [2**25, 2**31 - 1, -(2**31)]
    exact = reference.linear(torch.tensor([[1]], dtype=U8), torch.tensor([[1]], dtype=S8),
                             torch.tensor([2**24], dtype=S32))  # fmt: skip
    assert exact.item() == 2**24 + 1


@pytest.mark.parametrize("zero_point", [0, 1, 128, 101])
def test_ties_round_after_the_zero_point(zero_point: int):
    args = cases.ties(U8, U8, zero_point)
    acc = args["src"].long() @ args["weight"].long().t()
    scales = [Fraction(scale) / 2 for scale in args["weight_scale"].tolist()]
    expected = [
        [min(max(round(x * s + zero_point), 0), 255) for x, s in zip(row, scales, strict=True)]
        for row in acc.tolist()
    ]
    assert reference.linear(**args).tolist() == expected


# Other ops


def test_quantize():
    half = torch.tensor([0.5, 1.5, 2.5, -0.5])
    assert reference.quantize(half, 1.0, 1, U8).tolist() == [2, 2, 4, 0]
    special = torch.tensor([math.nan, math.inf, -math.inf, 1e30])
    assert reference.quantize(special, 0.1, 7, S8).tolist() == [7, 127, -128, 127]
    scale, zero_point = torch.tensor([[0.1], [0.2]]), torch.tensor([[3], [-4]], dtype=S32)
    x = torch.linspace(-10, 10, 101).expand(2, 101)
    q = reference.quantize(x, scale, zero_point, S8)
    assert ((reference.dequantize(q, scale, zero_point) - x).abs() <= scale / 2 * 1.0001).all()


def test_reorder_contains_quantize_and_dequantize():
    x, q = torch.randn(500) * 9, cases.random_u8((500,))
    assert torch.equal(reference.reorder(x, 1.0, 0, 0.1, 5, U8), reference.quantize(x, 0.1, 5, U8))
    assert torch.equal(reference.reorder(q, 0.1, 5, 1.0, 0, FP), reference.dequantize(q, 0.1, 5))
    assert torch.equal(reference.requantize(q, 0.1, 5, 0.1, 5, U8), q)
    assert reference.reorder_output_scales(torch.tensor([5, -5, 999]), 0.5, U8).tolist() == [
        2,
        0,
        255,
    ]


@pytest.mark.parametrize("relu", [False, True])
def test_add_and_mul_round_the_real_formula(relu: bool):
    q0, q1 = cases.random_u8((5000,)), cases.random_s8((5000,), 1)
    r0, r1 = (q0.double() - 99) * f32(0.02).double(), (q1.double() + 3) * f32(0.03).double()
    for op, real in [(reference.add, r0 + r1), (reference.mul, r0 * r1)]:
        got = op(q0, q1, 0.02, 99, 0.03, -3, 0.04, 31, U8, relu).double()
        real = (real.clamp(min=0) if relu else real) / f32(0.04).double() + 31
        assert ((got - real.clamp(0, 255)).abs() <= 0.5 + 1e-4).all()


def test_concat_and_lookup():
    q0, q1 = cases.random_u8((3, 4)), cases.random_s8((3, 2))
    dst = reference.concat([q0, q1], 1, [0.1, 0.2], [4, -1], 0.1, 4, U8)
    assert torch.equal(dst[:, :4], q0)
    assert torch.equal(dst[:, 4:], reference.requantize(q1, 0.2, -1, 0.1, 4, U8))
    every = torch.arange(-128, 128).to(S8)
    table = cases.random_u8((256,))
    assert torch.equal(reference.lookup(every, table), table)
    assert torch.equal(reference.lookup(every.view(U8).sort()[0], table), table)


POOLS = [((3, 3), (2, 2), (1, 1)), ((2, 3), (1, 2), (0, 1)), ((2, 2), (3, 3), (1, 1))]


@pytest.mark.parametrize("kernel, stride, padding", POOLS)
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pooling_agrees_with_torch(kernel, stride, padding, ceil_mode: bool):
    src = cases.random_s8((2, 3, 10, 11))
    got = reference.max_pool(src, kernel, stride, (padding, padding), (1, 1), ceil_mode)
    assert torch.equal(
        got.float(), F.max_pool2d(src.float(), kernel, stride, padding, 1, ceil_mode)
    )
    for include, divisor, zero_point in itertools.product((False, True), (None, 5), (0, -7)):
        got = reference.avg_pool(
            src, kernel, stride, (padding, padding), ceil_mode, include, divisor, zero_point
        )
        real = src.double() - zero_point
        real = F.avg_pool2d(real, kernel, stride, padding, ceil_mode, include, divisor)
        assert ((got - (real + zero_point).clamp(-128, 127)).abs() <= 0.5 + 1e-5).all()


def test_max_pool_never_picks_padding():
    src = torch.full((1, 1, 3), -100, dtype=S8)
    assert reference.max_pool(src, [3], [1], ([1], [1]), [1]).tolist() == [[[-100] * 3]]


def test_average_divides():
    """91 / 14 = 6.5 rounds to 6; 91 * float32(1 / 14) lies above the tie."""
    assert torch.round(f32(91) * f32(1 / 14)) == 7
    src = torch.tensor([13] * 7 + [0] * 7, dtype=U8)[None, None]
    assert reference.avg_pool(src, [14], [14], ([0], [0])).item() == 6
    assert reference.adaptive_avg_pool(src, [1]).item() == 6


def test_adaptive_pooling_agrees_with_torch():
    src = cases.random_u8((2, 3, 7, 10))
    real = F.adaptive_avg_pool2d(src.double(), (3, 4))
    assert ((reference.adaptive_avg_pool(src, (3, 4)) - real).abs() <= 0.5 + 1e-5).all()


# The tables


def test_shapes_are_legal_and_named_once():
    shapes = cases.LINEAR + cases.CONV
    assert len({str(shape) for shape in shapes}) == len(shapes)
    assert all(shape.reduction <= cases.MAX_TAPS_K for shape in shapes)
    generated = [s for dims in (1, 2, 3) for s in cases.random_conv_shapes(20, dims, dims)]
    for shape in cases.CONV + generated:
        assert min(shape.dst_size) > 0 and shape.in_channels % shape.groups == 0, shape
        assert len(shape.geometry) == 5 * len(shape.size) + 2


def test_large_sums_exceed_float32():
    args = cases.large_sums(cases.LinearShape(3, 5, 1200))
    acc = reference.linear(args["src"], args["weight"])
    assert (acc.abs() > 2**24).all() and (acc % 2 == 1).any()

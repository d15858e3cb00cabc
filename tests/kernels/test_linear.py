# SPDX-License-Identifier: Apache-2.0
"""torchq::linear on every tier against the oracle, bit for bit."""

from __future__ import annotations

import itertools
import math

import cases
import pytest
import torch
from calls import F32, S8, S32, U8, Call, assert_same, gemm_kernel, make_call, sampled
from cases import LinearShape

import torchq

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = (U8, S8, S32, F32)
CHAINS = cases.FOLDED_CHAINS + cases.FLOAT_CHAINS
# Channels in whole panels finish in registers, tails in memory: 64 + 32 + 5.
MIXED = LinearShape(13, 101, 37, "mixed")
WHOLE = LinearShape(7, 128, 24, "whole")


@pytest.mark.parametrize("shape", cases.LINEAR_NETWORKS, ids=str)
def test_networks(shape: LinearShape):
    sampled(shape).check()
    sampled(shape, S8, S8, "sum:0.05+eltwise_relu", narrow=True).check("narrow")
    sampled(shape, S8, S8, "sum:0.05+eltwise_relu", few_pairs=True).check("few pairs")


@pytest.mark.parametrize("src", (U8, S8), ids=str)
@pytest.mark.parametrize(
    "shape",
    cases.LINEAR_TAILS
    + cases.LINEAR_UNITS
    + cases.LINEAR_SHORT
    + cases.LINEAR_WIDENED
    + cases.LINEAR_LIMITS,
    ids=str,
)
def test_shapes(shape: LinearShape, src: torch.dtype):
    for dst in DTYPES if shape.reduction < 1000 else (U8, F32):
        sampled(shape, src, dst).check(dst)
    sampled(shape, src, U8, narrow=True).check("narrow")
    sampled(shape, src, U8, few_pairs=True).check("few pairs")


@pytest.mark.parametrize("rows", (1, 7, 8, 9, 13, 15, 16, 17))
def test_few_rows_take_all_panels(rows: int):
    """Tiles of three panels with up to 8 rows, where they save a pass over the weights."""
    for channels, reduction in ((149, 37), (160, 24), (272, 4100)):  # the last: beyond 1 MB
        for src in (U8, S8):
            sampled(LinearShape(rows, channels, reduction), src).check((channels, src))


@pytest.mark.parametrize("rows", (1, 2, 3, 4))
@pytest.mark.parametrize(
    "size",
    ((16, 4200), (149, 461), (192, 512), (240, 401), (1045, 300), (1045, 1100), (1109, 5738)),
    ids=str,
)
def test_streams_of_weights(rows: int, size: tuple[int, int]):
    """Over 64 KB, over 1 MB and over 6 MB; any number of panels is left to the last tiles."""
    chains = ("", "sum:0.05+eltwise_relu", "eltwise_tanh")
    for src, chain in itertools.product((U8, S8), chains[: 2 + (size[1] < 1000)]):
        sampled(LinearShape(rows, *size), src, U8, chain).check((src, chain))
    sampled(LinearShape(rows, *size), U8, F32).check(F32)


@pytest.mark.parametrize("shape", cases.LINEAR_OVERLAPPED, ids=str)
@pytest.mark.parametrize("src", (U8, S8), ids=str)
def test_ends_overlap_products(shape: LinearShape, src: torch.dtype):
    for dst, old in itertools.product((U8, S8), repeat=2):
        sampled(shape, src, dst, "sum:0.05", old=old).check((dst, old))
    for chain in ("", "sum:0.05+eltwise_clip:-1:2", "sum:0.05+sum:0.1"):
        sampled(shape, src, U8, chain).check(chain)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain or "none")
@pytest.mark.parametrize("dst", DTYPES, ids=str)
def test_post_ops(chain: str, dst: torch.dtype):
    for shape, src in itertools.product((MIXED, WHOLE), (U8, S8)):
        sampled(shape, src, dst, chain).check((shape, src))
    if dst != F32:
        sampled(MIXED, U8, dst, chain, per_channel_dst=True).check("per-channel dst scale")


@pytest.mark.parametrize("old", DTYPES, ids=str)
@pytest.mark.parametrize("chain", ("sum:0.03", "sum:0.05+eltwise_relu", "eltwise_relu+sum:0.03"))
def test_sum_sources(old: torch.dtype, chain: str):
    for shape, dst in itertools.product((MIXED, WHOLE), DTYPES):
        sampled(shape, U8, dst, chain, old=old).check((shape, dst))


@pytest.mark.parametrize("last", ("sum:0.125", "sum:0.125+eltwise_relu:0.5"))
def test_many_sums(last: str):
    """Any number of them, folded and step by step."""
    chain = "+".join([*["sum:0.0625"] * 10, last])
    sampled(LinearShape(7, 40, 12), post_ops=chain).check()


def test_sum_source_in_another_layout():
    call = sampled(MIXED, U8, U8, "sum:0.04:3+binary_mul:0+sum:0.02+eltwise_relu")
    first, second = call.args["post_op_srcs"]
    strided = torch.stack((second, second), -1)[..., 0]
    call.check(post_op_srcs=[first.t().contiguous().t(), strided])


@pytest.mark.parametrize("bias", (None, F32, S32), ids=str)
@pytest.mark.parametrize("output_scales", (False, True), ids=("scales", "output_scales"))
def test_bias(bias: torch.dtype | None, output_scales: bool):
    for shape, dst, chain in itertools.product(
        (MIXED, WHOLE), DTYPES, ("", "sum:0.04+eltwise_relu", "eltwise_relu:0.1")
    ):
        call = sampled(shape, S8, dst, chain, bias=bias, output_scales=output_scales)
        call.check((shape, dst, chain))


def test_output_scales_may_be_negative_or_zero():
    args = cases.sample(MIXED, output_scales=True)
    args["output_scales"][::2] *= -1
    args["output_scales"][::5] = 0
    make_call(args).check()


def test_one_scale_serves_all_channels():
    args = cases.sample(WHOLE)
    make_call(args | {"weight_scale": torch.tensor(0.004)}).check()
    args = cases.sample(WHOLE, output_scales=True)
    make_call(args | {"output_scales": torch.tensor([1e-4])}).check()


# Sums


def raw(**args: torch.Tensor) -> Call:
    return make_call(args | {"dst_dtype": S32})


@pytest.mark.parametrize("src", (U8, S8), ids=str)
@pytest.mark.parametrize("bias", (None, S32), ids=str)
def test_raw_accumulators(src: torch.dtype, bias: torch.dtype | None):
    for shape in (MIXED, WHOLE, LinearShape(3, 17, 0, "no_k")):
        args = cases.sample(shape, src, bias=bias)
        call = raw(**{key: args[key] for key in ("src", "weight", "bias", "src_zero_point")})
        assert call.args["multiplier"].numel() == 0
        call.check(shape)


@pytest.mark.parametrize("pair", cases.EXTREME_PAIRS, ids=str)
def test_extreme_pairs(pair: tuple[int, int]):
    """255 * 127 twice is 64770; 16-bit saturation would make it 32767."""
    for m, n, k in itertools.product((1, 6, 7), (16, 17, 64, 70), (1, 2, 3, 4, 64)):
        make_call(cases.constant(LinearShape(m, n, k), *pair)).check((m, n, k))


def test_every_source_value():
    make_call(cases.ramp()).check()
    make_call(cases.ramp(64)).check()
    swapped = cases.ramp(48)
    swapped["src"] = (swapped["src"].int() - 128).to(S8)
    make_call(swapped).check("s8")


@pytest.mark.parametrize("src", (U8, S8), ids=str)
def test_zero_points_at_the_ends_of_the_range(src: torch.dtype):
    for zero_point in cases.RANGE[src]:
        args = cases.sample(MIXED, src)
        args["src_zero_point"] = torch.tensor([zero_point], dtype=S32)
        make_call(args).check(zero_point)


@pytest.mark.parametrize("weight", (127, -128))
@pytest.mark.parametrize("src", (0, 255, -128))
def test_longest_sums(src: int, weight: int):
    """255 * 128 * 65793 is the last product below 2^31."""
    args = cases.constant(LinearShape(2, 17, cases.MAX_TAPS_K), src, weight)
    if src == -128:
        args["src_zero_point"] = torch.tensor(127, dtype=S32)
    make_call(args).check()


@pytest.mark.parametrize("dst", DTYPES, ids=str)
def test_sums_beyond_the_float_mantissa(dst: torch.dtype):
    shape = LinearShape(5, 33, 3000)
    args = cases.large_sums(shape, dst)
    assert ((args["src"].double() @ args["weight"].double().t()).abs() > 2**24).any()
    make_call(args).check()


# Rounding and saturation


@pytest.mark.parametrize("zero_point", (100, 101, 7, -6))
@pytest.mark.parametrize("dst", (U8, S8, S32, F32), ids=str)
def test_ties_go_to_even(dst: torch.dtype, zero_point: int):
    """The zero point is added before rounding: an odd one turns ties the other way."""
    if (dst == U8 and zero_point < 0) or (dst == F32):
        zero_point = 0
    for src, chain in itertools.product((U8, S8), ("", "eltwise_relu", "eltwise_relu:0.5")):
        args = cases.ties(src, dst, zero_point) | {"post_ops": chain}
        if dst == F32:
            del args["dst_scale"]
        make_call(args).check((src, chain))


@pytest.mark.parametrize("chain", ("", "eltwise_relu", "eltwise_clip:-5:5", "eltwise_relu:0.5"))
@pytest.mark.parametrize("dst", (U8, S8, S32), ids=str)
def test_overflow_saturates(dst: torch.dtype, chain: str):
    """A conversion of |y| >= 2^31 alone gives -2^31, whatever the sign."""
    for shape, scale in itertools.product((MIXED, WHOLE), (1e4, 2.0**31, 1e30)):
        args = cases.sample(shape, S8, dst, chain)
        args["src_scale"] = torch.tensor(scale)
        call = make_call(args)
        if "clip" not in chain:
            assert (call.expected == cases.RANGE[dst][1]).any()
        call.check((shape, scale))


def test_conversion_at_the_edge_of_int32():
    """The largest |y| that such weights could give: just below 2^31, just above, and beyond."""
    weight = torch.tensor([[127], [-128]], dtype=S8).repeat(32, 1)
    src = torch.arange(256, dtype=U8)[:, None]
    for top in (2147479000.0, 2147483520.0, 2.0**31, 2.0**31 * 128 / 127, 2.2e9, 4.2e9, 5e9):
        for dst in (U8, S8, S32):
            scale = torch.tensor(top / (255 * 128))
            args = {"src": src, "weight": weight, "src_scale": scale, "dst_dtype": dst}
            make_call(args).check((top, dst))


@pytest.mark.parametrize("chain", ("sum", "sum:0.05+eltwise_relu", "eltwise_relu+sum:0.03"))
@pytest.mark.parametrize("dst", DTYPES, ids=str)
def test_nan_becomes_the_zero_point(dst: torch.dtype, chain: str):
    chains = (chain, "sum+eltwise_clip:-1:2") if dst != F32 else (chain,)
    for shape, post_ops in itertools.product((MIXED, WHOLE), chains):
        args = cases.sample(shape, U8, dst, post_ops)
        old = torch.randn(shape.dst)
        old.view(-1)[::3] = math.nan
        old.view(-1)[1::7] = math.inf
        old.view(-1)[2::11] = -math.inf
        call = make_call(args | {"post_op_srcs": [old]})
        if dst in (U8, S8) and post_ops == "sum":
            assert (call.expected[old.isnan()] == args["dst_zero_point"]).all()
        call.check((shape, post_ops))


# Shapes and layouts


def test_dimensions_of_src():
    call = sampled(MIXED)
    src = call.args["src"]
    assert_same(call.run(src=src[4]), call.expected[4])
    assert_same(call.run(src=src[:12].reshape(3, 4, -1)), call.expected[:12].reshape(3, 4, -1))
    assert_same(call.run(src=src[:, None, None]), call.expected[:, None, None])
    for empty in (src[:0], src[:0].reshape(2, 0, 37)):
        assert call.run(src=empty).shape == (*empty.shape[:-1], 101)


def test_layouts_of_src():
    for shape in (MIXED, WHOLE):
        call = sampled(shape)
        src = call.args["src"]
        call.check("transposed", src=src.t().contiguous().t())
        wide = torch.zeros(shape.m, shape.k + 9, dtype=U8)
        wide[:, 4 : 4 + shape.k] = src
        call.check("columns of a wider tensor", src=wide[:, 4 : 4 + shape.k])
        twice = torch.zeros(shape.m, shape.k, 2, dtype=U8)
        twice[..., 0] = src
        call.check("every second byte", src=twice[..., 0])
        row = src[:1].expand(5, -1)
        assert_same(call.run(src=row), call.expected[:1].expand(5, -1), "broadcast rows")
        assert call.run().is_contiguous()


# Which kernel


def test_kernel(isa: str):
    vectors = isa in ("avx2", "avx512")
    for rows in (7, 13, 16, 17, 64, 65):
        shape = LinearShape(rows, 101, 37)
        full = gemm_kernel(isa, rows)
        sampled(shape).run()
        assert torchq.last_kernel() == full
        sampled(shape, narrow=True).run()
        assert torchq.last_kernel() == (f"gemm_narrow:{isa}" if vectors else full)
        sampled(shape, few_pairs=True).run()
        clips = isa == "avx2" and rows > 16
        assert torchq.last_kernel() == (f"gemm_clipped:{isa}" if clips else full)


PAIRS = [
    ((64, 64), True),
    ((65, 64), False),
    ((127, 1), True),
    ((127, 2), False),
    ((-128, 0), True),
    ((-128, -1), False),
    ((-64, -64), True),
    ((-64, -65), False),
    ((127, -128), True),  # of opposite signs they cannot add up
]


@pytest.mark.parametrize(("pair", "fits"), PAIRS)
def test_edge_of_the_pair_bound(isa: str, pair: tuple[int, int], fits: bool):
    """255 * 128 = 32640 fits 16 bits, 255 * 129 does not; one pair anywhere decides."""
    weight = torch.zeros(40, 14, dtype=S8)
    weight[37, 4:6] = torch.tensor(pair, dtype=S8)
    for src in (torch.full((7, 14), 255, dtype=U8), torch.full((7, 14), 127, dtype=S8)):
        raw(src=src, weight=weight).check()
        narrow = fits and isa in ("avx2", "avx512")
        assert torchq.last_kernel() == (f"gemm_narrow:{isa}" if narrow else gemm_kernel(isa, 7))
    weight[:, 0::2], weight[:, 1::2] = pair
    raw(src=torch.full((7, 14), 255, dtype=U8), weight=weight).check("every pair")


def test_edges_of_clipped_weights(isa: str):
    """Each pair, and those that lack most, both ways round, in either half of a quad, alone in its
    channel; every source value stands beside them, and the extremes in all."""
    pairs = [pair for pair, _ in PAIRS] + [(127, 127), (-128, -128), (127, 126), (-128, -127)]
    pairs += [(b, a) for a, b in pairs]
    weight = torch.zeros(2 * len(pairs), 256, dtype=S8)
    for i, (pair, half) in enumerate(itertools.product(pairs, (0, 2))):
        k = 32 * (i % 8) + 8 * (i // 16) + half  # an eighth of the quads, or fewer, in each panel
        weight[i, k : k + 2] = torch.tensor(pair, dtype=S8)
    values = torch.arange(256, dtype=U8)[:, None].repeat(1, 256)
    values[128:, ::2] = 255
    for src in (values, (values.int() - 128).to(S8)):
        raw(src=src, weight=weight).check(src.dtype)
        expected = f"gemm_clipped:{isa}" if isa == "avx2" else gemm_kernel(isa, len(src))
        assert torchq.last_kernel() == expected


def test_nearly_all_weights_are_clipped(isa: str):
    """Judged by the quads that are looked at, which have nothing to clip here."""
    args = cases.constant(LinearShape(65, 16, 256), 255, 127)
    for first in (0, 68, 136, 204):
        args["weight"][:, first : first + 16] = 1
    make_call(args).check()
    expected = f"gemm_clipped:{isa}" if isa == "avx2" else gemm_kernel(isa, 65)
    assert torchq.last_kernel() == expected

# SPDX-License-Identifier: Apache-2.0
"""torchq::conv on every tier against the oracle, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import math

import cases
import pytest
import torch
from calls import F32, S8, S32, U8, Call, assert_same, gemm_kernel, make_call, sampled
from cases import ConvShape
from torch import Tensor

import torchq
from torchq.runtime.library import channels_last_strides

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = (U8, S8, S32, F32)
CHAINS = cases.FOLDED_CHAINS + cases.FLOAT_CHAINS
SMALL = [
    shape
    for shape in cases.CONV_BORDERS
    + cases.CONV_UNITS
    + cases.CONV_1D
    + cases.CONV_3D
    + cases.CONV_COLUMNS
    + cases.CONV_GROUPED
    if shape.reduction < 1000
]
LARGE = [shape for shape in cases.CONV_NETWORKS + cases.CONV_BORDERS if shape not in SMALL]
MANY_CLASSES = cases.conv("many_classes", (4, 5), (9, 10, 11), 5, 1, 2)
# One shape per form of packed weights and per way through the epilogue; the first and the third
# have so many pixels that avx2 copies their weights.
FORMS = [
    cases.conv("dense", (16, 64), (9, 8), 3, 1, 1),
    cases.conv("dense_tail", (8, 37), (4, 5), 3, 2, 1, batch=2),
    cases.conv("row_runs", (3, 24), (17, 16), 3, 2, 1),
    cases.conv("grouped", (12, 20), (6, 5), 3, 1, 1, groups=4),
    cases.conv("groups_of_4", (20, 20), (6, 7), 3, 1, 1, groups=5),
    cases.conv("groups_of_8", (40, 40), (5, 6), 3, 2, 1, groups=5, batch=2),
    cases.depthwise("dw", 64, (5, 6), padding=1),
    cases.depthwise("dw_tail", 37, (5, 6), stride=2, padding=1, batch=2),
    cases.conv("joined_groups_of_16", (80, 80), (5, 6), 3, 1, 1, groups=5),
    cases.conv("joined_groups_of_32", (96, 96), (5, 6), 3, 2, 1, groups=3, batch=2),
    cases.conv("groups_of_8_in_lines", (40, 40), (7, 8), 3, 1, 1, groups=5),
]


def pixels(shape: ConvShape) -> int:
    return shape.batch * math.prod(shape.dst_size)


def border(shape: ConvShape) -> tuple[int, int, int]:
    """Sets of valid taps over all destination pixels; taps of all pixels, and the valid ones."""
    classes, valid = 1, shape.batch
    for d, size in enumerate(shape.dst_size):
        starts = [o * shape.stride[d] - shape.padding_begin[d] for o in range(size)]
        taps = [
            range(s, s + shape.kernel[d] * shape.dilation[d], shape.dilation[d]) for s in starts
        ]
        met = [tuple(0 <= x < shape.size[d] for x in tap) for tap in taps]
        classes *= len(set(met))
        valid *= sum(sum(tap) for tap in met)
    return classes, pixels(shape) * math.prod(shape.kernel), valid


def in_place(shape: ConvShape) -> bool:
    """Returns True if the source is read in place, without a copy that has padding.

    That holds for few regions with the same valid taps, of 3 pixels and more, if products with
    padding cost more than the regions.
    """
    classes, taps, valid = border(shape)
    outputs, inputs = shape.weight[:2]
    rows = pixels(shape)
    few = 1 < classes <= 64 and 3 * classes <= rows
    least = (taps - valid) * (inputs // 4) * max(outputs // 16, 1)
    return few and least >= 400 * (classes - 1)


DENSE = [s for s in [*SMALL, *LARGE, MANY_CLASSES] if s.weight[1] > 3 and s.batch]
# So many images that the padding of each is worth skipping.
SKIPPED = [
    dataclasses.replace(shape, batch=60)
    for shape in SMALL
    if shape in DENSE and not in_place(shape) and in_place(dataclasses.replace(shape, batch=60))
]


def test_shapes_reach_every_path():
    """Padding as classes of valid taps, and as a padded copy: too many classes, or too few rows, or
    too few products.
    """
    assert len(SKIPPED) > 20
    assert any(in_place(shape) for shape in DENSE)
    counts = {shape: border(shape)[0] for shape in DENSE}
    rows = {shape: pixels(shape) for shape in DENSE}
    assert any(counts[s] <= 64 and counts[s] > rows[s] / 3 for s in DENSE)
    assert any(counts[s] > 64 for s in DENSE)


@pytest.mark.parametrize(
    ("shape", "src"), [(shape, (U8, S8)[i % 2]) for i, shape in enumerate(SKIPPED)], ids=str
)
def test_padding_of_many_images(shape: ConvShape, src: torch.dtype):
    sampled(shape, src).check()


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_networks(shape: ConvShape):
    sampled(shape).check()


@pytest.mark.parametrize("src", (U8, S8), ids=str)
@pytest.mark.parametrize("shape", [*SMALL, MANY_CLASSES], ids=str)
def test_shapes(shape: ConvShape, src: torch.dtype):
    for dst in (U8, F32) if src == U8 else (S8, S32):
        sampled(shape, src, dst).check(dst)
    sampled(shape, src, U8, narrow=True).check("narrow")
    sampled(shape, src, U8, few_pairs=True).check("few pairs")


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("channels", ((99, 149), (299, 425), (700, 1109)), ids=str)
def test_streams_of_weights(batch: int, channels: tuple[int, int]):
    """One pixel an image, with few weights, over 1 MB and over 6 MB."""
    for size in ((3, 3), (3, 4)):  # one run of bytes for all taps, and three
        shape = cases.conv("pixel", channels, size, 3, 2, 0, batch=batch)
        assert shape.dst_size == (1, 1)
        for src in (U8, S8):
            sampled(shape, src).check((size, src))


@pytest.mark.parametrize("groups", (1, 4), ids=str)
def test_threads_change_no_bit(groups: int):
    """Their shares end within classes of pixels, at tiles where a share has many rows."""
    for batch, size in ((2, 14), (1, 9)):
        shape = cases.conv("threads", (64, 64), (size, size), 3, 1, 1, batch=batch, groups=groups)
        call = sampled(shape)
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            call.check(f"{shape}, {count} threads")


@pytest.mark.parametrize("channels", ((64, 32), (48, 48), (52, 64), (64, 112)), ids=str)
def test_ends_overlap_products_of_many_runs(channels: tuple[int, int]):
    shape = cases.conv("overlapped", channels, (7, 9), 3, 1, 1)
    for src, dst, old in itertools.product((U8, S8), repeat=3):
        sampled(shape, src, dst, "sum:0.05+eltwise_relu", old=old).check((src, dst, old))
    sampled(shape).check()


@pytest.mark.parametrize("src", (U8, S8), ids=str)
@pytest.mark.parametrize("shape", cases.CONV_DEPTHWISE, ids=str)
def test_depthwise(shape: ConvShape, src: torch.dtype):
    for dst in (U8, F32) if src == U8 else (U8, S8, S32):
        sampled(shape, src, dst).check(dst)


@pytest.mark.parametrize(
    ("shape", "turn"),
    [(shape, i % 3) for i, shape in enumerate(cases.CONV_DEPTHWISE)],
    ids=str,
)
def test_bounds_of_depthwise(shape: ConvShape, turn: int):
    """The same in all channels, which finish in bytes, and one by one; a shape in three has each
    bound with each of the dtypes.
    """
    bounds = [(0, 6), (-1.5, 0.5), (-100, 100)]
    for (src, dst), (low, high) in zip(
        ((U8, U8), (U8, S8), (S8, U8)), bounds[turn:] + bounds[:turn], strict=True
    ):
        chain = f"eltwise_clip:{low}:{high}"
        call = sampled(shape, src, dst, chain)
        if high < 100:
            assert call.expected.unique().numel() <= round((high - low) / 0.08) + 1
        call.check((src, dst, chain))
        sampled(shape, src, dst, chain, per_channel_dst=True).check((src, dst, chain, "channels"))


@pytest.mark.parametrize("dims", (1, 2, 3))
def test_random_geometries(dims: int):
    for i, shape in enumerate(cases.random_conv_shapes(40, seed=dims, dims=dims)):
        weights = {"narrow": i % 3 == 0, "few_pairs": i % 3 == 1}
        sampled(shape, (U8, S8)[i % 2], DTYPES[i % 4], **weights).check(shape)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain or "none")
def test_post_ops(chain: str):
    for i, (shape, dst) in enumerate(itertools.product(FORMS, DTYPES)):
        sampled(shape, (U8, S8)[i // 4 % 2], dst, chain).check((shape, dst))
    for shape in (FORMS[1], FORMS[4], FORMS[6]):
        sampled(shape, U8, U8, chain, per_channel_dst=True).check((shape, "per-channel dst"))


@pytest.mark.parametrize("old", DTYPES, ids=str)
def test_sum_sources(old: torch.dtype):
    for shape, chain in itertools.product(
        FORMS, ("sum:0.05+eltwise_relu", "eltwise_relu+sum:0.03")
    ):
        dst = F32 if old == U8 else U8
        call = sampled(shape, U8, dst, chain, old=old)
        call.check((shape, chain, "contiguous"))
        [src] = call.args["post_op_srcs"]
        call.check((shape, chain, "channels-last"), post_op_srcs=[channels_last(src)])


@pytest.mark.parametrize("output_scales", (False, True), ids=("scales", "output_scales"))
@pytest.mark.parametrize("bias", (None, F32, S32), ids=str)
def test_bias(bias: torch.dtype | None, output_scales: bool):
    for shape, dst in itertools.product(FORMS, (U8, S32)):
        call = sampled(shape, S8, dst, "", bias=bias, output_scales=output_scales)
        call.check((shape, dst))


# Sums


def raw(shape: ConvShape, **args: Tensor) -> Call:
    return make_call(args | {"dst_dtype": S32}, shape)


@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_raw_accumulators(shape: ConvShape):
    for src, bias in itertools.product((U8, S8), (None, S32)):
        args = cases.sample(shape, src, bias=bias)
        call = {name: args[name] for name in ("src", "weight", "bias", "src_zero_point")}
        raw(shape, **call).check((src, bias))
        call["src_zero_point"] = torch.tensor(cases.RANGE[src][0], dtype=S32)
        raw(shape, **call).check((src, bias, "pixels at the border need no compensation"))


@pytest.mark.parametrize("pair", cases.EXTREME_PAIRS, ids=str)
def test_extreme_pairs(pair: tuple[int, int]):
    for shape in FORMS:
        args = cases.constant(shape, *pair)
        make_call(args, shape).check(shape)
        low, high = cases.RANGE[args["src"].dtype]
        for zero_point in (low, high):  # what the border is made of
            zp = torch.tensor(zero_point, dtype=S32)
            make_call(args | {"src_zero_point": zp}, shape).check((shape, zero_point))


@pytest.mark.parametrize("padding", ((0, 0), (1, 0), (0, 2), (3, 1)), ids=str)
def test_every_border_has_its_own_sum(padding: tuple[int, int]):
    """An all-zero-point source must give exactly 0 wherever the window lies."""
    begin, end = padding
    for dilation, groups, channels in ((1, 1, 8), (2, 1, 8), (1, 1, 3), (1, 6, 6), (2, 6, 6)):
        shape = cases.conv(
            "border", (channels, 6), (7, 8), 3, 1, begin, end, dilation=dilation, groups=groups
        )
        for dtype, zero_point in ((U8, 201), (S8, -77), (S8, 0)):
            src = torch.full(shape.src, zero_point, dtype=dtype)
            zp = torch.tensor(zero_point, dtype=S32)
            call = raw(shape, src=src, weight=cases.random_s8(shape.weight), src_zero_point=zp)
            assert not call.run().any(), (shape, zero_point)


@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_overflow_saturates_and_nan_becomes_the_zero_point(shape: ConvShape):
    for dst, chain in itertools.product((U8, S8, S32), ("", "eltwise_relu", "eltwise_relu:0.5")):
        args = cases.sample(shape, S8, dst, chain)
        make_call(args | {"src_scale": torch.tensor(1e12)}, shape).check((dst, chain))
    for dst, chain in itertools.product(DTYPES, ("sum", "sum+eltwise_relu", "eltwise_relu+sum")):
        args = cases.sample(shape, U8, dst, chain)
        old = torch.randn(shape.dst)
        old.view(-1)[::3] = math.nan
        make_call(args | {"post_op_srcs": [old]}, shape).check((dst, chain))


# Layouts


def channels_last(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, channels_last_strides(x.shape), dtype=x.dtype).copy_(x)


LAYOUT_SHAPES = [
    *FORMS,
    cases.conv("pointwise", (24, 40), (5, 7), 1, batch=2),
    cases.conv("one_channel", (1, 5), (6, 7), 3, 1, 1, batch=2),
    cases.conv("3d", (6, 10), (3, 4, 5), 2, 1, 1, batch=2),
    cases.conv("1d", (6, 10), (15,), 3, 1, 1, batch=2),
    cases.depthwise("1d_dw", 18, (15,), kernel=3, padding=1, batch=2),
]


@pytest.mark.parametrize("shape", LAYOUT_SHAPES, ids=str)
def test_layouts_of_src(shape: ConvShape):
    call = sampled(shape)
    src = call.args["src"]
    call.check("contiguous", src=src.contiguous())
    call.check("channels-last", src=channels_last(src))
    call.check("reversed strides", src=src.mT.contiguous().mT)
    wide = torch.zeros([shape.batch, shape.in_channels + 3, *(s + 2 for s in shape.size)], dtype=U8)
    for whole, name in ((wide, "contiguous"), (channels_last(wide), "channels-last")):
        view = whole[:, 2:-1]
        for dim in range(2, view.ndim):
            view = view.narrow(dim, 1, view.shape[dim] - 2)
        call.check(f"slice of {name}", src=view.copy_(src))
    one = src[:1].expand(3, *src.shape[1:])
    expected = call.expected[:1].expand(3, *call.expected.shape[1:])
    assert_same(call.run(src=one), expected, "expanded batch")


@pytest.mark.parametrize("shape", [*LAYOUT_SHAPES, cases.CONV_BORDERS[-2]], ids=str)
def test_layout_of_dst(shape: ConvShape):
    dst = sampled(shape).run()
    assert list(dst.stride()) == channels_last_strides(shape.dst)
    if dst.ndim == 4:
        assert dst.is_contiguous(memory_format=torch.channels_last)


def test_no_channels():
    """No outputs: an empty dst. No inputs: the bias alone."""
    call = sampled(cases.conv("conv", (4, 8), (5, 5), 3, 1, 1))
    packed = torch.ops.torchq.pack_conv(torch.empty(0, 4, 3, 3, dtype=S8), 1, [1, 1])
    changes = dict(zip(("weight", "compensation", "pair_bound"), packed, strict=True))
    dst = call.run(**changes, multiplier=torch.empty(0), offset=torch.empty(0))
    assert dst.shape == (1, 0, 5, 5)
    packed = torch.ops.torchq.pack_conv(torch.empty(8, 0, 3, 3, dtype=S8), 1, [1, 1])
    changes = dict(zip(("weight", "compensation", "pair_bound"), packed, strict=True))
    offset = torch.arange(8.0)
    geometry = [*call.args["geometry"][:-1], 0]
    src = torch.empty(1, 0, 5, 5, dtype=U8)
    dst = call.run(**changes, src=src, offset=offset, geometry=geometry)
    assert_same(dst, offset.to(U8)[None, :, None, None].expand(1, 8, 5, 5))


# Which kernel


@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_kernel(shape: ConvShape, isa: str):
    name, has_narrow = "gemm", isa in ("avx2", "avx512")
    if shape.name.startswith("dw"):
        name, has_narrow = "depthwise", False
    elif shape.name.startswith("groups_of"):
        name = "small_groups"
    elif isa == "amx" and shape.name in ("dense", "joined_groups_of_16"):
        name = "gemm_matrix"
    elif shape.name.startswith("joined") and isa in ("avx512_vnni", "amx"):
        name = "gemm_groups"
    elif isa == "avx2" and pixels(shape) <= 64:
        name = "gemm_split"
    sampled(shape).run()
    assert torchq.last_kernel() == f"{name}:{isa}"
    sampled(shape, narrow=True).run()
    narrow = name.removesuffix("_split") + "_narrow" * has_narrow
    assert torchq.last_kernel() == f"{narrow}:{isa}"
    if shape.name in ("dense", "dense_tail"):
        sampled(shape, few_pairs=True).run()
        clips = isa == "avx2" and pixels(shape) > 16
        assert torchq.last_kernel() == f"{'gemm_clipped' if clips else name}:{isa}"


@pytest.mark.parametrize("shape", cases.CONV_UNITS, ids=str)
def test_kernel_of_many_channels(shape: ConvShape, isa: str):
    sampled(shape).run()
    assert torchq.last_kernel() == gemm_kernel(isa, pixels(shape))


def test_weights_merged_to_groups_of_16_are_refused():
    """As groups of 4 were packed before they had a layout of their own."""
    call = sampled(cases.conv("groups_of_4", (32, 32), (6, 5), 3, 1, 1, groups=8))
    assert call.args["weight"].shape == (2, 9, 1, 16, 4)
    with pytest.raises(
        ValueError, match=r"needs weight \[2, 9, 1, 16, 4\].*got \[2, 9, 4, 16, 4\]"
    ):
        call.run(weight=torch.zeros(2, 9, 4, 16, 4, dtype=S8))

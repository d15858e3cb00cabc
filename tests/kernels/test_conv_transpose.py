# SPDX-License-Identifier: Apache-2.0
"""torchq::conv_transpose and its functional form, bit for bit on every tier."""

from __future__ import annotations

import itertools
import re
from typing import Any

import cases
import pytest
import reference
import torch
from calls import F32, NAMES, S8, S32, U8, assert_same, check_fake, make_call, sampled
from conv_transpose_shapes import CONV_TRANSPOSE, random_conv_transpose_shapes
from geometries import ConvTransposeShape, conv_transpose
from torch.library import opcheck

import torchq
import torchq.functional as TF
from torchq import Attr
from torchq.functional.packing import pack_conv, pack_conv_transpose
from torchq.runtime.library import channels_last_strides

ops = torch.ops.torchq
DTYPES = (U8, S8, S32, F32)
BY_NAME = {shape.name: shape for shape in CONV_TRANSPOSE}
FORMS = [BY_NAME[name] for name in ("gan", "odd", "grouped", "few_rows_per_class", "1d", "3d")]


@pytest.mark.parametrize("shape", CONV_TRANSPOSE, ids=str)
def test_shapes(isa: str, shape: ConvTransposeShape):
    for src, dst in ((U8, U8), (S8, S8)):
        sampled(shape, src, dst).check(dst)
    sampled(shape, S8, F32, narrow=True).check("narrow")
    sampled(shape, S8, F32, few_pairs=True).check("few pairs")


@pytest.mark.parametrize("dims", (1, 2, 3))
def test_random_geometries(isa: str, dims: int):
    for i, shape in enumerate(random_conv_transpose_shapes(40 // dims, dims)):
        weights = {"narrow": i % 3 == 0, "few_pairs": i % 3 == 1}
        call = sampled(shape, (U8, S8)[i % 2], DTYPES[i % 4], **weights)
        call.check(shape)
        assert list(call.run().stride()) == channels_last_strides(shape.dst)


@pytest.mark.parametrize("chain", cases.FOLDED_CHAINS + cases.FLOAT_CHAINS, ids=str)
def test_post_ops(isa: str, chain: str):
    for i, shape in enumerate(FORMS):
        sampled(shape, (U8, S8)[i % 2], DTYPES[i % 4], chain).check(shape)
    sampled(FORMS[0], U8, U8, chain, per_channel_dst=True).check("per-channel dst")


@pytest.mark.parametrize("bias", (None, F32, S32), ids=str)
def test_bias_and_output_scales(isa: str, bias: torch.dtype | None):
    for shape, output_scales in itertools.product(FORMS, (False, True)):
        sampled(shape, S8, U8, bias=bias, output_scales=output_scales).check(shape)


def test_raw_accumulators_and_extremes(isa: str):
    for shape in FORMS:
        args = cases.sample(shape, S8, bias=S32)
        names = ("src", "weight", "bias", "src_zero_point")
        make_call({n: args[n] for n in names} | {"dst_dtype": S32}, shape).check(shape)
        for pair in cases.EXTREME_PAIRS:
            make_call(cases.constant(shape, *pair), shape).check((shape, pair))


def test_a_source_of_zero_points_gives_exactly_zero(isa: str):
    """Borders, phases without taps and padded copies each have their own sum of weights."""
    for shape, (dtype, zero_point) in itertools.product(CONV_TRANSPOSE, ((U8, 201), (S8, -77))):
        args = {
            "src": torch.full(shape.src, zero_point, dtype=dtype),
            "weight": cases.random_s8(shape.weight),
            "src_zero_point": torch.tensor(zero_point, dtype=S32),
            "dst_dtype": S32,
        }
        assert not make_call(args, shape).run().any(), shape


@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_layouts_of_src(isa: str, shape: ConvTransposeShape):
    call = sampled(shape)
    src = call.args["src"]
    last = torch.empty_strided(src.shape, channels_last_strides(src.shape), dtype=U8).copy_(src)
    call.check("channels-last", src=last)
    call.check("reversed", src=src.mT.contiguous().mT)
    wide = torch.zeros([s + 2 for s in src.shape], dtype=U8)
    view = wide[tuple(slice(1, -1) for _ in src.shape)]
    call.check("slice", src=view.copy_(src))


def test_threads_change_no_bit():
    call = sampled(conv_transpose("large", (64, 64), (20, 20), 4, 2, 1))
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        call.check(count)


def test_empty_tensors():
    """No batch or no outputs: an empty dst. No inputs: the bias alone."""
    call = sampled(conv_transpose("empty", (4, 8), (5, 5), 3, 2, 1))
    assert call.run(src=torch.empty(0, 4, 5, 5, dtype=U8)).shape == (0, 8, 9, 9)
    packed = ops.pack_conv_transpose(torch.empty(4, 0, 3, 3, dtype=S8), 1, [2, 2], [1, 1])
    changes = dict(zip(NAMES[1:4], packed, strict=True))
    dst = call.run(**changes, multiplier=torch.empty(0), offset=torch.empty(0))
    assert dst.shape == (1, 0, 9, 9)
    packed = ops.pack_conv_transpose(torch.empty(0, 8, 3, 3, dtype=S8), 1, [2, 2], [1, 1])
    changes = dict(zip(NAMES[1:4], packed, strict=True))
    geometry, offset = [*call.args["geometry"][:-1], 0], torch.arange(8.0)
    dst = call.run(
        **changes, src=torch.empty(1, 0, 5, 5, dtype=U8), offset=offset, geometry=geometry
    )
    assert_same(dst, offset.to(U8)[None, :, None, None].expand(1, 8, 9, 9))


@pytest.mark.parametrize("shape", CONV_TRANSPOSE, ids=str)
def test_unpack_is_the_inverse(shape: ConvTransposeShape):
    weight = cases.random_s8(shape.weight)
    packed = pack_conv_transpose(weight, shape.groups, shape.stride, shape.dilation)
    assert torch.equal(packed.unpack(), weight)
    assert packed.shape == (
        shape.channels,
        shape.in_channels // shape.groups,
        *shape.kernel,
    )
    check_fake(ops.pack_conv_transpose, (weight, shape.groups, shape.stride, shape.dilation))


def test_reduction_counts_the_taps_that_meet_one_destination():
    """A stride of 32 with a kernel of 64 sums 4 taps, not 4096."""
    packed = pack_conv_transpose(torch.zeros(21, 21, 64, 64, dtype=S8), 1, 32)
    assert packed.reduction == 21 * 4
    with pytest.raises(ValueError, match=r"weight sums 4096 taps of 21 channels per output"):
        pack_conv_transpose(torch.zeros(21, 21, 64, 64, dtype=S8))


# The functional API


@pytest.mark.parametrize("dims", (1, 2, 3))
def test_functional(dims: int):
    functional = (TF.conv_transpose1d, TF.conv_transpose2d, TF.conv_transpose3d)[dims - 1]
    for i, shape in enumerate(random_conv_transpose_shapes(12 // dims, dims)):
        args = cases.sample(shape, U8, DTYPES[i % 4])
        attr = Attr().set_scales("src", 0, args["src_scale"])
        attr.set_zero_points("src", 0, args["src_zero_point"])
        attr.set_scales("weights", 1 if shape.groups == 1 else 3, args["weight_scale"])
        if args["dst_dtype"] != F32:
            attr.set_scales("dst", 0, args["dst_scale"])
            attr.set_zero_points("dst", 0, args["dst_zero_point"])
        window = {
            "stride": shape.stride,
            "padding": shape.padding_begin,
            "padding_end": shape.padding_end,
            "output_padding": shape.output_padding,
            "dilation": shape.dilation,
            "groups": shape.groups,
        }
        rest = {"attr": attr, "dst_dtype": args["dst_dtype"]}
        expected = reference.conv_transpose(**args, **shape.oracle)
        got = functional(args["src"], args["weight"], args["bias"], **window, **rest)
        assert_same(got, expected, shape)
        packed = pack_conv_transpose(args["weight"], shape.groups, shape.stride, shape.dilation)
        got = functional(args["src"], packed, args["bias"], **window, **rest)
        assert_same(got, expected, (shape, "packed"))


def test_mask_2_shares_scales_between_groups():
    src, weight = cases.random_u8((1, 8, 3, 3)), cases.random_s8((8, 3, 2, 2))
    scales = torch.tensor([0.5, 1.0, 2.0])
    attr = Attr().set_scales("weights", 2, scales)
    got = TF.conv_transpose2d(src, weight, stride=2, groups=2, attr=attr)
    attr = Attr().set_scales("weights", 3, scales.repeat(2))
    assert_same(got, TF.conv_transpose2d(src, weight, stride=2, groups=2, attr=attr))


def test_opcheck():
    shape = BY_NAME["grouped"]
    opcheck(ops.conv_transpose.default, tuple(sampled(shape, S8).args.values()))
    weight = cases.random_s8(shape.weight)
    opcheck(ops.pack_conv_transpose.default, (weight, shape.groups, shape.stride, shape.dilation))
    packed = ops.pack_conv_transpose(weight, shape.groups, shape.stride, shape.dilation)[0]
    arguments = (packed, list(weight.shape), shape.groups, shape.stride, shape.dilation)
    opcheck(ops.unpack_conv_transpose.default, arguments)
    for dims in (1, 2, 3):
        for random_shape in random_conv_transpose_shapes(10 // dims, dims):
            check_fake(ops.conv_transpose, tuple(sampled(random_shape).args.values()))


def test_kernel(isa: str):
    sampled(FORMS[0]).run()
    assert torchq.last_kernel() == f"gemm:{isa}"
    sampled(FORMS[0], few_pairs=True).run()
    assert torchq.last_kernel() == ("gemm_clipped:" if isa == "avx2" else "gemm:") + isa


# Errors

GOOD = conv_transpose("good", (4, 8), (5, 6), 3, 2, 1, 1)


def geometry(**changes: Any) -> list[int]:
    return conv_transpose("bad", (4, 8), (5, 6), **({"kernel": 3, "stride": 2} | changes)).geometry


ERRORS = [
    ({"src": torch.zeros(1, 4, 5, 6)}, TypeError, "src must be uint8 or int8, got float32"),
    ({"src": torch.zeros(4, dtype=U8)}, ValueError, "src must be (N, C, spatial...)"),
    ({"src": torch.zeros(1, 3, 5, 6, dtype=U8)}, ValueError, "src must have 4 channels"),
    ({"src": torch.zeros(1, 4, 0, 6, dtype=U8)}, ValueError, "spatial sizes of 1 to 2^32"),
    ({"geometry": [1, 2]}, ValueError, "geometry must be [kernel, stride, padding_begin"),
    (
        {"geometry": geometry(padding=9)},
        ValueError,
        "leaves nothing of dst, got kernel 3x3, stride 2x2, padding 9x9, dilation 1x1. Use",
    ),
    (
        {"geometry": geometry(output_padding=2)},
        ValueError,
        "below stride or dilation, got 2 in dimension 0 of kernel 3x3, stride 2x2",
    ),
    (
        {"geometry": geometry(kernel=2)},
        ValueError,
        "Pack it with torch.ops.torchq.pack_conv_transpose",
    ),
    ({"geometry": geometry(stride=200)}, NotImplementedError, "multiply to at most 16384"),
    ({"weight": torch.zeros(1, 9, 1, 16, 4)}, TypeError, "weight must be int8, got float32"),
    ({"compensation": torch.zeros(9, dtype=S32)}, ValueError, "groups must divide"),
    ({"multiplier": torch.ones(3)}, ValueError, "multiplier must have 8 values"),
    ({"dst_dtype": 7}, NotImplementedError, "dst_dtype must be 0 (uint8)"),
]


@pytest.mark.parametrize(("changes", "error", "text"), ERRORS, ids=[e[2][:30] for e in ERRORS])
def test_op_errors(changes: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=r"torchq\.conv_transpose: (.|\n)*" + re.escape(text)):
        sampled(GOOD).run(**changes)


def test_huge_geometries_raise():
    call, big = sampled(conv_transpose("huge", (4, 8), (5, 6), 3, 2)), 2**24 - 1
    with pytest.raises(NotImplementedError, match="multiply to at most 16384"):
        call.run(geometry=[3, 3, big, big, 0, 0, 0, 0, big, big, 0, 0, 1, 4])
    with pytest.raises(ValueError, match=r"makes a dst of more than 2\^46 values"):
        call.run(geometry=[3, 3, 2, 2, 0, 0, 0, 0, big, big, 0, 0, 1, 4])


def test_functional_errors():
    src, weight = torch.zeros(1, 4, 5, 6, dtype=U8), torch.zeros(4, 8, 3, 3, dtype=S8)
    cases_: list[tuple[Any, type[Exception], str]] = [
        (lambda: TF.conv_transpose1d(src, weight), ValueError, "weight must be (C, OC/groups"),
        (lambda: TF.conv_transpose2d(src[0], weight), ValueError, "src must be (N, 4, spatial...)"),
        (lambda: TF.conv_transpose2d(src.float(), weight), TypeError, "src must be torch.uint8"),
        (lambda: TF.conv_transpose2d(src, weight.float()), TypeError, "weight must be int8"),
        (lambda: TF.conv_transpose2d(src, weight, groups=3), ValueError, "groups must divide"),
        (lambda: TF.conv_transpose2d(src, weight, stride=(2,)), ValueError, "one integer or 2"),
        (
            lambda: TF.conv_transpose2d(src, pack_conv_transpose(weight), stride=2),
            ValueError,
            "weight must be packed for groups=1, stride=(2, 2)",
        ),
        (
            lambda: TF.conv2d(src, pack_conv_transpose(weight)),
            ValueError,
            "Use conv_transpose1d, 2d or 3d",
        ),
        (
            lambda: TF.conv_transpose2d(src, pack_conv(weight)),
            ValueError,
            "Call pack_conv_transpose with these",
        ),
        (
            lambda: TF.conv_transpose2d(
                src, weight, attr=Attr().set_scales("weights", 2, [1.0] * 4)
            ),
            NotImplementedError,
            "scales of weights must have mask 0 or 1",
        ),
    ]
    for call, error, text in cases_:
        with pytest.raises(error, match=re.escape(text)):
            call()

# SPDX-License-Identifier: Apache-2.0
"""Linear and convolutions of the functional API: what an Attr says, bit for bit.

One tier is enough here: the kernels are tested on all of them, in test_linear.py and its like.
"""

from __future__ import annotations

from typing import Any

import cases
import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same
from torch import Tensor

import torchq.functional as TF
from torchq import Attr, PostOps
from torchq.functional.packing import PackedWeight, pack_conv, pack_linear

LINEAR = cases.LinearShape(5, 33, 19)
CONVS = [
    cases.conv("1d", (6, 20), (17,), 3, 2, 1, batch=2),
    cases.conv("2d", (5, 18), (9, 8), 3, 1, 1),
    cases.conv("2d_uneven", (8, 16), (9, 10), (3, 2), (2, 1), (1, 0), dilation=(1, 2)),
    cases.conv("2d_asymmetric", (8, 17), (9, 10), 3, 1, (0, 1), (2, 1)),
    cases.conv("3d", (4, 9), (4, 5, 6), (1, 3, 3), 1, (0, 1, 1)),
    cases.conv("2d_grouped", (12, 18), (7, 6), 3, 1, 1, groups=3),
    cases.depthwise("2d_depthwise", 20, (6, 7), padding=1),
]
SHAPES = [LINEAR, *CONVS]


def attr_of(args: dict[str, Any], shape: cases.LinearShape | cases.ConvShape) -> Attr:
    """The Attr that says what the oracle's arguments say."""
    attr = Attr().set_zero_points("src", 0, args["src_zero_point"])
    if "output_scales" in args:
        scales = args["output_scales"]
        attr.set_output_scales(2 if scales.numel() > 1 else 0, scales)
    else:
        grouped = isinstance(shape, cases.ConvShape) and shape.groups > 1
        attr.set_scales("src", 0, args["src_scale"])
        attr.set_scales("weights", 3 if grouped else 1, args["weight_scale"])
    if "dst_scale" in args:
        attr.set_scales("dst", 2 if args["dst_scale"].numel() > 1 else 0, args["dst_scale"])
    if "dst_zero_point" in args:
        attr.set_zero_points("dst", 0, args["dst_zero_point"])
    return attr.set_post_ops(PostOps.parse(args["post_ops"], args["post_op_values"]))


def run(
    args: dict[str, Any],
    shape: cases.LinearShape | cases.ConvShape,
    attr: Attr,
    weight: PackedWeight | None = None,
) -> Tensor:
    """The function for `shape`, called with PyTorch's argument names."""
    inputs = (args["src"], weight or args["weight"], args["bias"])
    rest = {"attr": attr, "dst_dtype": args["dst_dtype"], "post_op_srcs": args["post_op_srcs"]}
    if isinstance(shape, cases.LinearShape):
        return TF.linear(*inputs, **rest)
    window = {name: getattr(shape, name) for name in ("stride", "dilation", "groups")}
    window |= {"padding": shape.padding_begin, "padding_end": shape.padding_end}
    function = (TF.conv1d, TF.conv2d, TF.conv3d)[len(shape.size) - 1]
    return function(*inputs, **window, **rest)


def expect(args: dict[str, Any], shape: cases.LinearShape | cases.ConvShape) -> Tensor:
    if isinstance(shape, cases.LinearShape):
        return reference.linear(**args)
    return reference.conv(**args, **shape.oracle)


def check(args: dict[str, Any], shape: cases.LinearShape | cases.ConvShape) -> None:
    assert_same(run(args, shape, attr_of(args, shape)), expect(args, shape), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dst", (U8, S8, S32, F32), ids=str)
@pytest.mark.parametrize("src", (U8, S8), ids=str)
def test_scales_and_zero_points(
    shape: cases.LinearShape | cases.ConvShape, src: torch.dtype, dst: torch.dtype
) -> None:
    check(cases.sample(shape, src, dst), shape)
    if dst != F32:
        check(cases.sample(shape, src, dst, per_channel_dst=True), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", (None, F32, S32), ids=str)
def test_bias_in_real_or_accumulator_units(
    shape: cases.LinearShape | cases.ConvShape, bias: torch.dtype | None
) -> None:
    """Under v3 scales a float bias is added after them and an int32 bias to the accumulator."""
    check(cases.sample(shape, bias=bias), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", (None, F32, S32), ids=str)
@pytest.mark.parametrize("dst", (U8, S8, S32, F32), ids=str)
def test_output_scales_multiply_acc_and_bias(
    shape: cases.LinearShape | cases.ConvShape, bias: torch.dtype | None, dst: torch.dtype
) -> None:
    args = cases.sample(shape, S8, dst, bias=bias, output_scales=True)
    check(args, shape)
    args["output_scales"] = args["output_scales"][:1]
    check(args, shape)


def test_output_scales_may_be_zero_or_negative() -> None:
    args = cases.sample(LINEAR, U8, S8, output_scales=True)
    args["output_scales"][::3] *= -1
    args["output_scales"][1] = 0
    check(args, LINEAR)


CHAINS = {
    "relu": lambda n: PostOps().append_eltwise("relu"),
    "sum_relu": lambda n: PostOps().append_sum(0.05, 7, "u8").append_eltwise("relu"),
    "clip": lambda n: PostOps().append_eltwise("clip", 0, 6),
    "scale_shift": lambda n: (
        PostOps()
        .append_binary("mul", torch.linspace(-1, 2, n), 2)
        .append_binary("add", torch.linspace(-3, 3, n), 2)
        .append_eltwise("relu")
    ),
    "one_value": lambda n: (
        PostOps().append_binary("mul", 0.75, 0).append_binary("add", torch.tensor([-0.5]), 0)
    ),
    "float_chain": lambda n: (
        PostOps()
        .append_eltwise("relu", 0.1)
        .append_sum(0.03, 3, "u8")
        .append_binary("add", torch.linspace(-3, 3, n), 2)
        .append_eltwise("linear", 0.5, -1)
    ),
}


@pytest.mark.parametrize("shape", [LINEAR, CONVS[1], CONVS[5]], ids=str)
@pytest.mark.parametrize("dst", (U8, F32), ids=str)
@pytest.mark.parametrize("output_scales", (False, True), ids=("v3", "v1"))
@pytest.mark.parametrize("name", CHAINS)
def test_post_ops(
    name: str,
    output_scales: bool,
    dst: torch.dtype,
    shape: cases.LinearShape | cases.ConvShape,
) -> None:
    args = cases.sample(shape, U8, dst, output_scales=output_scales)
    post_ops = CHAINS[name](shape.channels)
    args |= {"post_ops": str(post_ops), "post_op_values": post_ops.values}
    args["post_op_srcs"] = [cases.random_q(shape.dst, U8)] * post_ops.num_srcs
    attr = attr_of(args, shape)
    attr.post_ops = post_ops
    assert_same(run(args, shape, attr), expect(args, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_weight_gives_the_same(shape: cases.LinearShape | cases.ConvShape) -> None:
    args = cases.sample(shape)
    if isinstance(shape, cases.LinearShape):
        packed = pack_linear(args["weight"])
    else:
        packed = pack_conv(args["weight"], shape.groups, shape.dilation)
    assert torch.equal(packed.unpack(), args["weight"])
    assert_same(run(args, shape, attr_of(args, shape), packed), expect(args, shape))


@pytest.mark.parametrize("mask,count", [(0, 1), (1, 33)])
def test_weight_masks_of_linear(mask: int, count: int) -> None:
    args = cases.sample(LINEAR)
    values = torch.rand(count) * 0.01 + 0.001
    attr = attr_of(args, LINEAR).set_scales("weights", mask, values)
    assert_same(run(args, LINEAR, attr), expect(args | {"weight_scale": values}, LINEAR))


@pytest.mark.parametrize("mask,count", [(0, 1), (1, 3), (2, 6), (3, 18)])
def test_weight_masks_of_a_grouped_convolution(mask: int, count: int) -> None:
    """Dims are (G, OC/G, IC/G, kh, kw): mask 2 is shared by the groups, mask 1 by a group."""
    shape = CONVS[5]
    args = cases.sample(shape)
    values = torch.rand(count) * 0.01 + 0.001
    by_channel = {
        0: values.repeat(18),
        1: values.repeat_interleave(6),
        2: values.repeat(3),
        3: values,
    }
    attr = attr_of(args, shape).set_scales("weights", mask, values)
    expected = expect(args | {"weight_scale": by_channel[mask]}, shape)
    assert_same(run(args, shape, attr), expected)


def test_weight_groups_share_scales_over_blocks_of_channels() -> None:
    args = cases.sample(cases.LinearShape(4, 32, 12))
    values = torch.rand(8) * 0.01 + 0.001
    shape = cases.LinearShape(4, 32, 12)
    attr = attr_of(args, shape).set_scales("weights", 1, values, groups=(4, 1))
    expected = expect(args | {"weight_scale": values.repeat_interleave(4)}, shape)
    assert_same(run(args, shape, attr), expected)


@pytest.mark.parametrize("src", (U8, S8), ids=str)
def test_int32_without_scales_is_the_exact_sum(src: torch.dtype) -> None:
    """Beyond 2^24, where a float32 would round; a zero point of dst is added exactly, too."""
    extreme = 255 if src == U8 else -128
    args = cases.constant(cases.LinearShape(2, 17, 2000), extreme, 127)
    expected = torch.full((2, 17), extreme * 127 * 2000, dtype=S32)
    assert_same(TF.linear(args["src"], args["weight"], dst_dtype=S32), expected)
    attr = Attr().set_zero_points("dst", 0, 77)
    assert_same(TF.linear(args["src"], args["weight"], None, attr, S32), expected + 77)
    bias = torch.arange(17, dtype=S32) - 5
    assert_same(TF.linear(args["src"], args["weight"], bias, attr, S32), expected + 77 + bias)


def test_destination_scale_defaults_to_1() -> None:
    args = cases.sample(LINEAR, U8, U8)
    args["src_scale"] = args["src_scale"] * 20
    del args["dst_scale"], args["dst_zero_point"]
    check(args, LINEAR)
    assert_same(
        TF.linear(args["src"], args["weight"], dst_dtype=U8),
        reference.linear(args["src"], args["weight"], src_scale=1.0, dst_dtype=U8),
    )


def test_any_batch_dims_and_strides() -> None:
    args = cases.sample(LINEAR)
    attr, expected = attr_of(args, LINEAR), expect(args, LINEAR)
    apart = torch.stack([args["src"], args["src"]], 2)[..., 0]
    assert not apart.is_contiguous()
    assert_same(run(args | {"src": apart}, LINEAR, attr), expected)
    batched = args["src"].repeat(6, 1).reshape(2, 3, *args["src"].shape)
    assert_same(run(args | {"src": batched}, LINEAR, attr), expected.expand(2, 3, *expected.shape))
    args = cases.sample(CONVS[1])
    channels_last = args["src"].to(memory_format=torch.channels_last)
    result = run(args | {"src": channels_last}, CONVS[1], attr_of(args, CONVS[1]))
    assert_same(result, expect(args, CONVS[1]))
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_values_supplied_at_execution() -> None:
    args = cases.sample(LINEAR)
    attr, text = attr_of(args, LINEAR), "scales:src:0+weights:1+dst:0 zero_points:src:0+dst:0"
    assert str(attr) == text
    late = Attr.parse(
        text,
        scales={arg: attr.values(arg) for arg in ("src", "weights", "dst")},
        zero_points={arg: attr.values(arg, "zero_points") for arg in ("src", "dst")},
    )
    assert_same(run(args, LINEAR, late), expect(args, LINEAR))


def test_parameters_that_require_grad_are_only_read() -> None:
    args = cases.sample(LINEAR)
    args["bias"].requires_grad_()
    result = run(args, LINEAR, attr_of(args, LINEAR))
    assert not result.requires_grad
    assert_same(result, expect(args | {"bias": args["bias"].detach()}, LINEAR))


def test_all_is_exported() -> None:
    assert sorted(TF.__all__) == TF.__all__
    assert all(callable(getattr(TF, name)) for name in TF.__all__)

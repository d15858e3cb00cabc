# SPDX-License-Identifier: Apache-2.0
"""The functional API: what an Attr says is what the oracle computes, bit for bit.

One tier is enough here: the kernels are tested on all of them, in test_linear.py and its like.
"""

from __future__ import annotations

import itertools
from typing import Any

import cases
import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same
from torch import Tensor

import torchq.functional as TF
from torchq import Attr, PostOps, QParams
from torchq.packing import PackedWeight, pack_conv, pack_linear

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


# Matmul-like ops


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


# Reorders

HWIGO = (3, 4, 2, 0, 1)  # memory order of a (G, OC/G, IC/G, KH, KW) weight, as a permutation


def hwigo(sizes: tuple[int, ...]) -> Tensor:
    g, o, i, h, w = sizes
    return torch.randn(h, w, i, g, o).permute(3, 4, 2, 0, 1)


def values_of(mask: int, dims: tuple[int, ...], low: float, high: float) -> Tensor:
    return torch.empty(Attr.expected_values(mask, dims)).uniform_(low, high)


@pytest.mark.parametrize("source", (F32, U8, S8, S32), ids=str)
@pytest.mark.parametrize("dst", (U8, S8, S32, F32), ids=str)
def test_reorder_with_every_pair_of_masks(source: torch.dtype, dst: torch.dtype) -> None:
    dims = (2, 3, 4)
    src = torch.randn(dims) * 40 if source == F32 else cases.random_q(dims, source)
    if source == S32:
        src = src // 2**18
    for src_mask, dst_mask in itertools.product(range(8), range(8)):
        attr = Attr().set_scales("src", src_mask, values_of(src_mask, dims, 0.5, 2))
        attr.set_scales("dst", dst_mask, values_of(dst_mask, dims, 0.5, 2))
        for arg, mask, dtype in (("src", dst_mask, source), ("dst", src_mask, dst)):
            if dtype in (U8, S8):
                points = values_of(mask, dims, 0, 99).int()
                attr.set_zero_points(arg, mask, points)
        resolved = [
            attr.resolve(arg, dims, kind)
            for arg in ("src", "dst")
            for kind in ("scales", "zero_points")
        ]
        expected = reference.reorder(src, *resolved, dst)
        assert_same(TF.reorder(src, dst, attr), expected, attr)


@pytest.mark.parametrize("dst", (U8, S8, S32, F32), ids=str)
def test_reorder_with_output_scales(dst: torch.dtype) -> None:
    """v1 multiplies, by any finite number."""
    dims = (3, 2, 5)
    for source, mask in itertools.product((F32, S32, S8), range(8)):
        src = torch.randn(dims) * 40 if source == F32 else cases.random_q(dims, source)
        scales = values_of(mask, dims, -2, 2)
        attr = Attr().set_output_scales(mask, scales)
        resolved = attr.resolve("dst", dims, "output_scales")
        expected = reference.reorder_output_scales(src, resolved, dst)
        assert_same(TF.reorder(src, dst, attr), expected, attr)


def test_reorder_keeps_strides() -> None:
    """Weights stay in hwigo order; masks count logical dims, whatever the memory order."""
    dims = (2, 3, 4, 3, 2)
    weight = hwigo(dims)
    for mask in range(32):
        scales = values_of(mask, dims, 0.01, 0.02)
        attr = Attr().set_scales("dst", mask, scales)
        result = TF.reorder(weight, S8, attr)
        expected = reference.quantize(weight, attr.resolve("dst", dims), 0, S8)
        assert_same(result, expected, mask)
        assert result.stride() == weight.stride()


def test_reorder_without_scales_converts() -> None:
    integers = torch.tensor([-(2**31), -129, -1, 0, 1, 128, 300, 2**24 + 1, 2**31 - 1]).int()
    assert_same(TF.reorder(integers, S32), integers)
    assert TF.reorder(integers, S8).tolist() == [-128, -128, -1, 0, 1, 127, 127, 127, 127]
    assert TF.reorder(integers, U8).tolist() == [0, 0, 0, 0, 1, 128, 255, 255, 255]
    assert_same(TF.reorder(integers, F32), integers.float())
    halves = torch.tensor([-0.5, 0.5, 1.5, 2.5, float("nan"), 1e30])
    assert TF.reorder(halves, U8).tolist() == [0, 0, 2, 2, 0, 255]


def test_quantize_dequantize_requantize() -> None:
    real = torch.randn(4, 3, 5) * 30
    scale, zero_point = torch.rand(3, 1) + 0.1, torch.tensor([[3], [100], [250]], dtype=S32)
    q = TF.quantize(real, scale, zero_point)
    assert_same(q, reference.quantize(real, scale, zero_point, U8))
    assert_same(TF.dequantize(q, scale, zero_point), reference.dequantize(q, scale, zero_point))
    expected = reference.requantize(q, scale, zero_point, 0.3, -5, S8)
    assert_same(TF.requantize(q, scale, zero_point, 0.3, -5, S8), expected)
    assert TF.quantize(torch.tensor([0.5, 1.5, 2.5, -0.5]), 1, 1).tolist() == [2, 2, 4, 0]


@pytest.mark.parametrize("bits,limit", [(8, 127), (7, 63)])
def test_quantize_weight_is_symmetric(bits: int, limit: int) -> None:
    weight = hwigo((2, 3, 4, 3, 2)).requires_grad_()
    largest = weight.detach().abs().amax((2, 3, 4), keepdim=True)
    q = TF.quantize_weight(weight, largest / limit, bits)
    expected = reference.quantize(weight.detach(), largest / limit, 0, S8).clamp(-limit, limit)
    assert_same(q, expected)
    assert q.stride() == weight.stride() and q.abs().amax() == limit
    assert TF.quantize_weight(torch.tensor([-9.0]), 0.001, bits).item() == -limit


# Pooling


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("dtype", (U8, S8), ids=str)
def test_pooling(dims: int, dtype: torch.dtype) -> None:
    src = cases.random_q((2, 21, *(9, 8, 7)[:dims]), dtype)
    ones, padding = [1] * dims, ([1] * dims, [1] * dims)
    for stride, ceil_mode in itertools.product((None, 2, [1] * dims), (False, True)):
        step = [3] * dims if stride is None else [2] * dims if stride == 2 else stride
        assert_same(
            TF.max_pool(src, 3, stride, 1, ceil_mode=ceil_mode),
            reference.max_pool(src, [3] * dims, step, padding, ones, ceil_mode),
        )
        for include in (True, False):
            assert_same(
                TF.avg_pool(src, 3, stride, 1, ceil_mode, include, zero_point=19),
                reference.avg_pool(
                    src, [3] * dims, step, padding, ceil_mode, include, zero_point=19
                ),
            )
    assert_same(
        TF.avg_pool(src, 2, divisor_override=3),
        reference.avg_pool(src, [2] * dims, [2] * dims, ([0] * dims,) * 2, divisor_override=3),
    )
    assert_same(
        TF.max_pool(src, 2, 1, 0, 2),
        reference.max_pool(src, [2] * dims, ones, ([0] * dims,) * 2, [2] * dims),
    )
    for size in (1, 3):
        expected = reference.adaptive_avg_pool(src, [size] * dims)
        assert_same(TF.adaptive_avg_pool(src, size), expected)


# Elementwise


def binary_attr(relu: bool = False, dst: bool = True) -> tuple[Attr, dict[str, Any]]:
    args: dict[str, Any] = {"scale0": 0.1, "zero_point0": 3, "scale1": 0.07, "zero_point1": -4}
    attr = Attr().set_scales("src0", 0, 0.1).set_zero_points("src0", 0, 3)
    attr.set_scales("src1", 0, 0.07).set_zero_points("src1", 0, -4)
    if dst:
        attr.set_scales("dst", 0, 0.12).set_zero_points("dst", 0, 20)
        args |= {"dst_scale": 0.12, "dst_zero_point": 20}
    if relu:
        attr.post_ops.append_eltwise("relu")
    return attr, args | {"relu": relu}


@pytest.mark.parametrize("name", ("add", "mul"))
@pytest.mark.parametrize("relu", (False, True))
@pytest.mark.parametrize("dst", (U8, S8, F32), ids=str)
def test_add_and_mul(name: str, relu: bool, dst: torch.dtype) -> None:
    attr, args = binary_attr(relu, dst != F32)
    for shape in ((2, 5, 4, 3), (5, 1, 3), (1,)):
        src0, src1 = cases.random_u8((2, 5, 4, 3)), cases.random_s8(shape)
        expected = getattr(reference, name)(src0, src1, **args, dst_dtype=dst)
        assert_same(getattr(TF, name)(src0, src1, attr, dst), expected)


def test_concat_requantizes_what_differs() -> None:
    srcs = [cases.random_u8((2, c, 3)) for c in (2, 3, 4)]
    scales, points = [0.1, 0.2, 0.3], [5, 5, 7]
    attr = Attr().set_scales("dst", 0, 0.2).set_zero_points("dst", 0, 5)
    for i, (scale, point) in enumerate(zip(scales, points, strict=True)):
        attr.set_scales(f"src{i}", 0, scale).set_zero_points(f"src{i}", 0, point)
    expected = reference.concat(srcs, 1, scales, points, 0.2, 5, U8)
    assert_same(TF.concat(srcs, attr), expected)
    assert_same(TF.concat(srcs, attr, dim=-2), expected)
    assert_same(TF.concat(srcs), torch.cat(srcs, 1))


@pytest.mark.parametrize("dtype", (U8, S8), ids=str)
def test_lookup_is_any_unary_function(dtype: torch.dtype) -> None:
    src_qparams = QParams.per_tensor(0.05, 7, dtype)
    dst_qparams = QParams.per_tensor(1 / 255, 0)
    table = TF.lookup_table(torch.sigmoid, src_qparams, dst_qparams)
    src = torch.arange(256).add(torch.iinfo(dtype).min).to(dtype)
    expected = TF.quantize(torch.sigmoid(TF.dequantize(src, 0.05, 7)), 1 / 255)
    assert_same(TF.lookup(src, table), expected)
    assert_same(TF.lookup(src, table), reference.lookup(src, table))


def test_pad_is_real_zero() -> None:
    src = cases.random_u8((1, 2, 3, 3))
    padded = TF.pad(src, (1, 2, 0, 1), 128)
    assert padded.shape == (1, 2, 4, 6) and padded[..., 0].eq(128).all()
    assert_same(padded[..., :3, 1:4], src)


def test_all_is_exported() -> None:
    assert sorted(TF.__all__) == TF.__all__
    assert all(callable(getattr(TF, name)) for name in TF.__all__)

# SPDX-License-Identifier: Apache-2.0
"""uint8 weights and zero points of weights, per tensor and per channel, against the oracle.

The oracle subtracts the zero points from the weights in float64, where every sum is exact.
"""

from __future__ import annotations

import cases
import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same, assert_same_deployed
from cases import ConvShape, LinearShape, random_q
from geometries import ConvTransposeShape, conv_transpose
from torch import Tensor, nn
from torch.library import opcheck

import torchq
import torchq.functional as TF
import torchq.nn as tnn
from torchq import Attr, PostOps, QParams
from torchq.functional.packing import pack_conv, pack_conv_transpose, pack_linear
from torchq.onednn.saturation.proof import prove_module

ops = torch.ops.torchq

LINEAR = [
    LinearShape(7, 37, 21),
    LinearShape(1, 64, 64),
    LinearShape(3, 5, 0),
    LinearShape(0, 4, 8),
]
CONV = [
    ConvShape(2, 6, 21, (5, 7), (3, 3), (2, 1), (1, 1), (0, 2), (1, 1), 1, "dense"),
    ConvShape(1, 3, 64, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1, "runs"),
    ConvShape(1, 8, 12, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), (2, 2), 4, "groups"),
    ConvShape(1, 20, 20, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 5, "small groups"),
    ConvShape(1, 64, 128, (4,), (3,), (1,), (1,), (1,), (1,), 2, "wide groups"),
    ConvShape(1, 37, 37, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 37, "depthwise"),
    ConvShape(1, 15, 45, (6,), (2,), (1,), (1,), (1,), (1,), 5, "9 channels a group"),
    ConvShape(2, 19, 19, (7, 9), (3, 2), (2, 3), (3, 0), (1, 2), (2, 3), 19, "strided depthwise"),
    ConvShape(1, 66, 66, (7, 6), (5, 5), (1, 1), (2, 2), (2, 2), (1, 1), 66, "depthwise 5x5"),
    ConvShape(0, 16, 16, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 16, "no depthwise"),
    ConvShape(2, 6, 8, (4, 5, 6), (2, 3, 3), (1, 2, 1), (1, 0, 2), (0, 2, 2), (2, 1, 2), 2, "3d"),
]
CONV_TRANSPOSE = [
    conv_transpose("strided", (6, 21), (5, 7), 3, 2, 1),
    conv_transpose("1d", (3, 17), (4,), 4, 3, batch=2),
    conv_transpose("groups", (8, 12), (5, 4), 2, 2, groups=4),
    conv_transpose("no taps", (4, 5), (3, 3), 1, 3),
    conv_transpose("dilated", (18, 5), (4, 3), 3, 2, 2, dilation=3),
    conv_transpose("3d", (4, 6), (3, 2, 3), (2, 3, 1), (1, 2, 3), 1, groups=2, batch=2),
]


def arguments(shape, dst: torch.dtype, weight_dtype: torch.dtype, per_channel: bool):
    """Readable arguments, and the zero points as one per output channel."""
    args = cases.sample(shape, S8 if shape.channels % 2 else U8, dst, "")
    weight = random_q(shape.weight, weight_dtype, 3)
    limits = torch.iinfo(weight_dtype)
    zero = torch.randint(limits.min, limits.max + 1, (shape.channels if per_channel else 1,))
    args |= {"weight": weight, "weight_scale": torch.tensor(5e-4), "src_scale": None}
    args |= {"dst_scale": None if dst == F32 else torch.tensor(0.5), "dst_zero_point": 0}
    return args, zero.int()


def attr_of(args, zero: Tensor, shape, dst: torch.dtype) -> Attr:
    grouped = getattr(shape, "groups", 1) > 1
    mask = 0 if zero.numel() == 1 else 3 if grouped else 1
    attr = Attr().set_scales("weights", 0, args["weight_scale"])
    attr.set_zero_points("weights", mask, zero).set_zero_points("src", 0, args["src_zero_point"])
    return attr if dst == F32 else attr.set_scales("dst", 0, args["dst_scale"])


def expected(args, zero: Tensor, shape) -> Tensor:
    if isinstance(shape, ConvTransposeShape):  # channels are dimension 1, inside of the groups of 0
        weight = args["weight"].double()
        groups = weight.reshape(shape.groups, -1, *weight.shape[1:])
        along = zero.double().expand(shape.channels)
        along = along.reshape(shape.groups, 1, -1, *[1] * len(shape.kernel))
        changed = args | {"weight": (groups - along).reshape(weight.shape)}
        return reference.conv_transpose(**changed, **shape.oracle)
    shifted = args["weight"].double() - zero.double().reshape(-1, *[1] * (args["weight"].dim() - 1))
    call = reference.linear if isinstance(shape, LinearShape) else reference.conv
    extra = {} if isinstance(shape, LinearShape) else shape.oracle
    return call(**(args | {"weight": shifted}), **extra)


def run(args, attr: Attr, shape, dst: torch.dtype, weight=None, **changes) -> Tensor:
    weight = args["weight"] if weight is None else weight
    if isinstance(shape, LinearShape):
        return TF.linear(args["src"], weight, args["bias"], attr, dst, **changes)
    transposed = isinstance(shape, ConvTransposeShape)
    conv = getattr(TF, f"conv{'_transpose' if transposed else ''}{len(shape.kernel)}d")
    begin, end = shape.oracle["padding"]
    window = {"stride": shape.stride, "padding": begin, "padding_end": end}
    window |= {"output_padding": shape.output_padding} if transposed else {}
    window |= {"dilation": shape.dilation, "groups": shape.groups}
    return conv(args["src"], weight, args["bias"], attr=attr, dst_dtype=dst, **window, **changes)


@pytest.mark.parametrize("shape", [*LINEAR, *CONV, *CONV_TRANSPOSE], ids=str)
@pytest.mark.parametrize("weight_dtype", [U8, S8], ids=str)
def test_against_the_oracle(shape, weight_dtype: torch.dtype, isa: str):
    for dst, per_channel in ((U8, True), (S8, False), (F32, True), (S32, True)):
        args, zero = arguments(shape, dst, weight_dtype, per_channel)
        got = run(args, attr_of(args, zero, shape, dst), shape, dst)
        assert_same(got, expected(args, zero, shape), (shape, dst, per_channel))


@pytest.mark.parametrize(
    "shape", [LINEAR[0], CONV[0], CONV[3], CONV[5], CONV_TRANSPOSE[0]], ids=str
)
def test_exact_sums_and_chains(shape, isa: str):
    """Without scales an int32 destination is exact; float chains start from the same sums."""
    args, zero = arguments(shape, S32, U8, True)
    args |= {"weight_scale": None, "dst_scale": None, "bias": None}
    attr = Attr().set_zero_points("src", 0, args["src_zero_point"])
    attr.set_zero_points("weights", 3 if getattr(shape, "groups", 1) > 1 else 1, zero)
    assert_same(run(args, attr, shape, S32), expected(args, zero, shape))
    args, zero = arguments(shape, U8, U8, True)
    attr = attr_of(args, zero, shape, U8)
    attr.post_ops.append_eltwise("relu", 0.1).append_sum(0.25)
    old = random_q(shape.dst, U8, 9)
    args |= {"post_ops": "eltwise_relu:0.1+sum:0.25", "post_op_srcs": [old]}
    assert_same(run(args, attr, shape, U8, post_op_srcs=[old]), expected(args, zero, shape))


@pytest.mark.parametrize("shape", [s for s in CONV if "depthwise" in str(s)], ids=str)
@pytest.mark.parametrize("zeros", [(-128, 127), (-127, 3), (0,)], ids=str)
def test_depthwise_weights_of_one_to_three_parts(shape, zeros: tuple[int, ...], isa: str):
    """w - z_w of 255 = 127 + 127 + 1, of 254 = 127 + 127, and of 8 bits."""
    for src_dtype in (U8, S8):
        args, _ = arguments(shape, S32, S8, True)
        limits = torch.iinfo(src_dtype)
        args |= {"src": random_q(shape.src, src_dtype), "src_zero_point": limits.max}
        args |= {"weight": 127 - 255 * random_q(shape.weight, U8).gt(127).to(S8)}
        args |= {"weight_scale": None, "dst_scale": None, "bias": None}
        zero = torch.tensor(zeros, dtype=S32)[torch.arange(shape.channels) % len(zeros)]
        attr = Attr().set_zero_points("src", 0, args["src_zero_point"])
        attr.set_zero_points("weights", 3, zero)
        assert_same(run(args, attr, shape, S32), expected(args, zero, shape), (shape, zeros))


def test_uint8_weights_without_zero_points_and_at_128():
    shape = LINEAR[0]
    args, _ = arguments(shape, U8, U8, False)
    for zero, attr in ((0, Attr()), (128, Attr().set_zero_points("weights", 0, 128))):
        attr.set_scales("weights", 0, 5e-4).set_scales("dst", 0, 0.5)
        attr.set_zero_points("src", 0, args["src_zero_point"])
        want = expected(args, torch.tensor([zero]), shape)
        assert_same(run(args, attr, shape, U8), want)
        assert_same(run(args, attr, shape, U8, pack_linear(args["weight"])), want)


def test_extremes_do_not_overflow(isa: str):
    """255 * 255 * 33025 < 2^31, in both signs."""
    k = 33025
    src = torch.full((1, k), 255, dtype=U8)
    for q, zero in ((255, 0), (0, 255)):
        attr = Attr().set_zero_points("weights", 0, zero)
        got = TF.linear(src, torch.full((17, k), q, dtype=U8), attr=attr, dst_dtype=S32)
        assert (got == 255 * (q - zero) * k).all()
    with pytest.raises(ValueError, match="at most 33025 products per output, got 33026"):
        TF.linear(torch.zeros(1, k + 1, dtype=U8), torch.zeros(1, k + 1, dtype=U8))


def test_packing_uint8_is_lossless():
    weight = random_q((20, 9), U8)
    assert torch.equal(pack_linear(weight).unpack(), weight)
    kernel = random_q((8, 3, 3, 3), U8)
    assert torch.equal(pack_conv(kernel).unpack(), kernel)
    assert torch.equal(pack_conv_transpose(kernel, 2, 2).unpack(), kernel)


def op_arguments(shape, weight_zero_point: Tensor):
    """A call of the op itself with raw sums."""
    weight = random_q(shape.weight, S8)
    if isinstance(shape, LinearShape):
        op, packed, geometry = ops.linear, pack_linear(weight), shape.weight[1]
    elif isinstance(shape, ConvTransposeShape):
        packed = pack_conv_transpose(weight, shape.groups, shape.stride, shape.dilation)
        op, geometry = ops.conv_transpose, shape.geometry
    else:
        packed = pack_conv(weight, shape.groups, shape.dilation)
        op, geometry = ops.conv, shape.geometry
    empty = torch.empty(0)
    tensors = [packed.weight, packed.compensation, packed.pair_bound, empty, empty, None]
    zero_point = torch.tensor([3], dtype=S32)
    args = [random_q(shape.src, U8), *tensors, zero_point, geometry, 3, "", empty, []]
    return op, (*args, weight_zero_point)


@pytest.mark.parametrize("shape", [LINEAR[0], CONV[0], CONV[5], CONV_TRANSPOSE[0]], ids=str)
def test_opcheck(shape):
    op, args = op_arguments(shape, torch.arange(shape.channels, dtype=S32))
    opcheck(op.default, args)


@pytest.mark.parametrize("shape", [LINEAR[0], CONV[2]], ids=str)
def test_given_row_sums_are_used(shape, isa: str):
    """acc - row_sums[row][group] * weight_zero_point[n]."""
    zero = torch.arange(shape.channels, dtype=S32)
    op, args = op_arguments(shape, zero)
    raw = op(*args[:-1])
    dim, groups = (1, shape.groups) if isinstance(shape, ConvShape) else (-1, 1)
    sums = random_q((*raw.movedim(dim, -1).shape[:-1], groups), S32, 7).movedim(-1, dim)
    per_channel = sums.repeat_interleave(shape.channels // groups, dim)
    along = zero.reshape(-1, 1, 1) if dim == 1 else zero
    assert_same(op(*args, sums), raw - per_channel * along)


def test_errors():
    src, weight = random_q((2, 8), U8), random_q((4, 8), S8)
    for zero, message in ((128, "must be .*128"), (-129, "must be .*-129")):
        with pytest.raises(ValueError, match=message):
            TF.linear(src, weight, attr=Attr().set_zero_points("weights", 0, zero))
    with pytest.raises(ValueError, match="must be 4 values"):
        TF.linear(src, weight, attr=Attr().set_zero_points("weights", 1, [1, 2]))
    with pytest.raises(ValueError, match="int32 bias must be at most"):
        bias = torch.full((4,), 2**31 - 1 - 255 * 128 * 8, dtype=S32)
        TF.linear(src, weight, bias, Attr().set_zero_points("weights", 0, 1), S32)
    packed = pack_linear(weight)
    raw = (torch.empty(0), torch.empty(0), None, None, 8, 3, "", torch.empty(0), [])
    zero, sums = torch.ones(4, dtype=S32), torch.ones(2, 1, dtype=S32)
    tensors = (packed.weight, packed.compensation, packed.pair_bound)
    for pair, error, message in (
        ((None, sums), ValueError, "row_sums must come with a weight_zero_point"),
        ((zero[:3], sums), ValueError, "weight_zero_point must have 4 values"),
        ((zero, sums[:1]), ValueError, r"row_sums must have shape \[2, 1\]"),
        ((zero, sums.float()), TypeError, "row_sums must be int32"),
        ((zero.float(), sums), TypeError, "weight_zero_point must be int32"),
        ((zero * 128, sums), ValueError, r"must lie in \[-128, 127\].*got 128 at index 0"),
    ):
        with pytest.raises(error, match=message):
            ops.linear(src, *tensors, *raw, *pair)


@pytest.mark.parametrize("shape", [LINEAR[0], CONV[0], CONV_TRANSPOSE[0]], ids=str)
def test_the_op_refuses_longer_sums_with_zero_points(shape):
    """Sums with zero points may have fewer products; the op checks this itself, without packing."""
    k = 33025 + 1
    zero = torch.zeros(1, dtype=S32)
    if isinstance(shape, LinearShape):
        shape = LinearShape(1, 1, k)
    elif isinstance(shape, ConvTransposeShape):
        shape = conv_transpose("long", (k, 1), (1,), 1)
    else:
        shape = ConvShape(1, k, 1, (1,), (1,), (1,), (0,), (0,), (1,), 1, "long")
    op, args = op_arguments(shape, zero)
    op(*args[:-1])
    with pytest.raises(ValueError, match="more than 33025"):
        op(*args)


# Modules

IN, OUT = QParams.per_tensor(0.021, 117), QParams.per_tensor(0.05, -9, S8)
FLOATS = {
    "linear": (lambda: nn.Linear(37, 21), (5, 37)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, padding=1), (2, 6, 9)),
    "conv2d": (lambda: nn.Conv2d(8, 12, 3, 2, groups=4), (1, 8, 7, 6)),
    "depthwise": (lambda: nn.Conv2d(9, 9, 3, padding=1, groups=9), (1, 9, 5, 6)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(8, 6, 3, 2, 1, groups=2), (1, 8, 4, 5)),
}


def affine_module(name: str, dst: QParams | None, granularity: str = "per_channel"):
    """Weights from 0 up, which need their zero points, and a module of them."""
    module = FLOATS[name][0]()
    with torch.no_grad():
        module.weight.abs_().add_(0.02)
    kind = getattr(tnn, f"Q{type(module).__name__}")
    chain = PostOps.parse("eltwise_relu:0.1")
    return module, kind.from_float(
        module, IN, dst, granularity=granularity, affine=True, post_ops=chain
    )


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("name", FLOATS)
def test_modules_against_the_oracle(name: str, granularity: str):
    for dst in (None, OUT):
        module, q = affine_module(name, dst, granularity)
        src = random_q(FLOATS[name][1], U8)
        weight = q.packed().unpack()
        assert weight.dtype == U8 and int(weight.max()) == 255
        zero = q.weight_zero_point.expand(q.packed().channels)
        args = {
            "src": src, "weight": weight, "bias": q.bias, "src_zero_point": 117,
            "src_scale": q.src_scale, "weight_scale": q.weight_scale,
            "dst_scale": None if dst is None else q.dst_scale,
            "dst_zero_point": 0 if dst is None else -9,
            "dst_dtype": F32 if dst is None else S8, "post_ops": "eltwise_relu:0.1",
        }  # fmt: skip
        assert_same(q(src), expected(args, zero, Geometry(module)), name)
        assert ("weights" in str(q.attr).split("zero_points")[1]) and str(q.attr) in repr(q)


class Geometry:
    """A float module as the oracles want it."""

    def __new__(cls, module: nn.Module):
        if isinstance(module, nn.Linear):
            return LINEAR[0]
        window = (module.stride, module.padding, module.padding, module.dilation)
        channels, size = (module.in_channels, module.out_channels), module.kernel_size
        if isinstance(module, nn.ConvTranspose2d):
            extra = (module.groups, "module", module.output_padding)
            return ConvTransposeShape(1, *channels, size, size, *window, *extra)
        return ConvShape(1, *channels, size, size, *window, module.groups, "module")


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv_transpose"])
def test_modules_everywhere(name: str, tmp_path):
    _, q = affine_module(name, OUT)
    model, src = nn.Sequential(q).eval(), torch.randn(FLOATS[name][1])
    want = model(src)
    assert_same_deployed(model, (src,), want)
    torchq.save(model, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", nn.Sequential(nn.Identity()))
    assert_same(loaded(src), want)
    assert repr(loaded) == repr(model)


def test_given_weights_with_zero_points():
    """int8 ones too; an attribute that leaves uint8 weights without zero points means 0."""
    src = random_q((4, 9), U8)
    for dtype, zero in ((S8, [7, -128, 0, 90, 127]), (U8, [3]), (U8, None)):
        weight = random_q((5, 9), dtype)
        values = None if zero is None else torch.tensor(zero, dtype=S32)
        q = tnn.QLinear(pack_linear(weight), torch.tensor(0.01), None, IN, None, None, values)
        shifted = weight.double() - (0 if values is None else values.double().reshape(-1, 1))
        want = reference.linear(
            src, shifted, None, 117, src_scale=IN.scale, weight_scale=0.01, dst_dtype=F32
        )
        assert_same(q(src), want)


def test_module_errors():
    with pytest.raises(ValueError, match="weight_scale must be None for an affine weight"):
        tnn.QLinear.from_float(nn.Linear(4, 3), IN, affine=True, weight_scale=torch.ones(1))
    with pytest.raises(ValueError, match="zero_points of weights must be 3 values"):
        packed, two = pack_linear(random_q((3, 4), U8)), torch.zeros(2, dtype=S32)
        tnn.QLinear(packed, torch.ones(3), None, IN, None, None, two)
    _, q = affine_module("linear", OUT)
    with pytest.raises(NotImplementedError, match="weights must have no zero points"):
        prove_module(q)

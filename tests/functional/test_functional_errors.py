# SPDX-License-Identifier: Apache-2.0
"""Misuse of the functional API: every message has op, argument, what was expected, got, remedy."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from calls import F32, S8, S32, U8

import torchq.functional as TF
from torchq import Attr, PostOps, QParams
from torchq.functional.packing import pack_conv, pack_linear

SRC, WEIGHT = torch.zeros(2, 8, dtype=U8), torch.ones(4, 8, dtype=S8)
IMAGE, KERNEL = torch.zeros(1, 8, 5, 5, dtype=U8), torch.ones(4, 8, 3, 3, dtype=S8)
GROUPED = torch.ones(4, 4, 3, 3, dtype=S8)
F32_BIAS, S32_BIAS = torch.zeros(4), torch.zeros(4, dtype=S32)
LOW, SCALED = Attr().set_scales("src", 0, 0.5), Attr().set_output_scales(0, 0.5)


def refuse(error: type[Exception], call: Callable[[], object], *parts: str) -> None:
    """`call` raises `error` with these parts in this order; the last is the remedy."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value).split("\nException raised from")[0]
    assert re.search(".*".join(map(re.escape, parts)), message, re.DOTALL), message
    assert re.match(r"torchq\.[\w.]+: .*\.$", message, re.DOTALL), message


def lin(attr: Attr | None = None, dst: torch.dtype = F32, **kwargs: object) -> Callable[[], object]:
    """A linear call, with arguments replaced."""
    args = {"src": SRC, "weight": WEIGHT, "attr": attr, "dst_dtype": dst} | kwargs
    return lambda: TF.linear(**args)  # type: ignore[arg-type]


def conv(**kwargs: object) -> Callable[[], object]:
    """A conv2d call, with arguments replaced."""
    args = {"src": IMAGE, "weight": KERNEL} | kwargs
    return lambda: TF.conv2d(**args)  # type: ignore[arg-type]


# Attributes


@pytest.mark.parametrize(
    "attr,named",
    [
        (Attr().set_scales("src0", 0, 1.0), "scales of src0"),
        (Attr().set_scales("src1", 0, 1.0), "scales of src1"),
        (Attr().set_zero_points("src0", 0, 1), "zero_points of src0"),
        (Attr().set_rnn_weights_qparams(0, 63.0), "rnn_weights of weights"),
        (Attr().set_rnn_weights_projection_qparams(0, 1.0), "rnn_weights_projection of"),
        (Attr().set_rnn_data_qparams(127, 128), "rnn_data"),
    ],
)
def test_attributes_of_other_ops(attr: Attr, named: str) -> None:
    """They would be ignored without a word."""
    expected = ("attr must set only", "scales of src, scales of weights, scales of dst")
    refuse(ValueError, lin(attr), "torchq.linear: ", *expected, f"got {named}")
    refuse(ValueError, conv(attr=attr), "torchq.conv2d: ", *expected, f"got {named}")
    refuse(ValueError, lambda: TF.reorder(SRC, S8, attr), "torchq.reorder: ", f"got {named}")


def test_arguments_of_the_elementwise_ops() -> None:
    for arg in ("src", "src2", "weights"):
        attr = Attr().set_scales(arg, 0, 1.0)
        for name in ("add", "mul"):
            call = getattr(TF, name)
            got = (f"torchq.{name}: attr must set only", f"got scales of {arg}", "Name the")
            refuse(ValueError, lambda c=call, a=attr: c(SRC, SRC, a), *got)
        got = ("torchq.concat: attr must set only", f"got scales of {arg}", "Name the")
        refuse(ValueError, lambda a=attr: TF.concat([SRC, SRC], a), *got)
    v1 = ("torchq.add: attr must set only", "got output_scales of dst")
    refuse(ValueError, lambda: TF.add(SRC, SRC, SCALED), *v1)


def test_rounding_modes_only_in_reorder() -> None:
    attr = Attr().set_rounding("dst", "stochastic")
    expected = "rounding of dst must be nearest (half to even), got stochastic. The nearest"
    for call in (lin(attr), lambda: TF.add(SRC, SRC, attr)):
        refuse(NotImplementedError, call, expected, "torchq.functional.reorder")


@pytest.mark.parametrize(
    "kind,arg,mask,expected",
    [
        ("scales", "src", 1, "must have mask 0, got 1"),
        ("scales", "src", 2, "must have mask 0, got 2"),
        ("scales", "weights", 2, "must have mask 0 or 1, got 2"),
        ("scales", "weights", 3, "must have mask 0 or 1, got 3"),
        ("scales", "dst", 1, "must have mask 0 or 2, got 1"),
        ("scales", "dst", 3, "must have mask 0 or 2, got 3"),
        ("zero_points", "src", 2, "must have mask 0, got 2"),
        ("zero_points", "dst", 1, "must have mask 0 or 2, got 1"),
    ],
)
def test_masks_without_a_kernel(kind: str, arg: str, mask: int, expected: str) -> None:
    attr = getattr(Attr(), f"set_{kind}")(arg, mask, [1, 1])
    parts = (f"{kind} of {arg} {expected}", "The nearest supported is mask")
    refuse(NotImplementedError, lin(attr, U8), "torchq.linear: ", *parts)
    refuse(NotImplementedError, conv(attr=attr, dst_dtype=U8), "torchq.conv2d: ", *parts)


def test_masks_of_grouped_weights_output_scales_and_binary_ops() -> None:
    attr = Attr().set_scales("weights", 4, torch.ones(4))
    parts = ("scales of weights must have mask 0 or 1 or 2 or 3, got 4", "nearest")
    refuse(NotImplementedError, conv(weight=GROUPED, groups=2, attr=attr), *parts)
    attr = Attr().set_output_scales(1, [1.0, 1.0])
    refuse(NotImplementedError, lin(attr), "output_scales of dst must have mask 0 or 2, got 1")
    attr = Attr().set_scales("src0", 2, torch.ones(8))
    refuse(NotImplementedError, lambda: TF.add(SRC, SRC, attr), "mask 0, got 2", "nearest")


def test_numbers_of_values() -> None:
    three = torch.ones(3)
    parts = ("must be 4 values", "got 3. Supply 4 values or change the mask")
    refuse(ValueError, lin(Attr().set_scales("weights", 1, three)), "scales of weights", *parts)
    refuse(ValueError, lin(Attr().set_scales("dst", 2, three), U8), "scales of dst", *parts)
    refuse(ValueError, lin(Attr().set_output_scales(2, three)), "output_scales of dst", *parts)
    post_ops = PostOps().append_binary("add", three, 2)
    refuse(ValueError, lin(Attr().set_post_ops(post_ops)), "binary_add:2", *parts)
    attr = Attr().set_scales("weights", 3, three)
    refuse(ValueError, conv(weight=GROUPED, groups=2, attr=attr), "scales of weights", *parts)
    attr = Attr().set_scales("src", 2, three)
    refuse(ValueError, lambda: TF.reorder(SRC, S8, attr), "must be 8 values", "got 3. Supply 8")
    attr = Attr().set_scales("src", 4, three)
    refuse(ValueError, lambda: TF.reorder(SRC, S8, attr), "must use a mask below 4", "got mask 4")


@pytest.mark.parametrize(
    "attr,named",
    [
        (Attr().set_scales("src", 0), "scales of src"),
        (Attr().set_scales("weights", 1), "scales of weights"),
        (Attr().set_scales("dst", 2), "scales of dst"),
        (Attr().set_zero_points("src", 0), "zero_points of src"),
        (Attr().set_zero_points("dst", 0), "zero_points of dst"),
        (Attr().set_output_scales(2), "output_scales of dst"),
    ],
)
def test_declared_but_missing(attr: Attr, named: str) -> None:
    parts = (f"{named} must be supplied, got only a mask. Use attr.with_values(...)",)
    refuse(ValueError, lin(attr, U8), *parts)
    refuse(ValueError, conv(attr=attr, dst_dtype=U8), *parts)
    if "weights" not in named:
        refuse(ValueError, lambda: TF.reorder(SRC, S8, attr), *parts)


def test_post_op_values_missing() -> None:
    attr = Attr().set_post_ops(PostOps().append_binary("mul", None, 2))
    parts = ("values must be present for every post-op, got none for binary_mul:2", "Supply them")
    refuse(ValueError, lin(attr), *parts)


def test_post_ops_without_a_kernel() -> None:
    relu6 = Attr().set_post_ops(PostOps().append_eltwise("clip", 0, 6))
    for name in ("add", "mul"):
        call = getattr(TF, name)
        parts = (
            f"torchq.{name}: post_ops must be empty or 'eltwise_relu', got 'eltwise_clip:0:6'",
        )
        refuse(NotImplementedError, lambda c=call: c(SRC, SRC, relu6), *parts, "lookup")
    for call, expected in (
        (lambda: TF.concat([SRC], relu6), "empty"),
        (lambda: TF.reorder(SRC, S8, relu6), "empty or one sum"),
    ):
        parts = (f"post_ops must be {expected}, got 'eltwise_clip:0:6'. Apply",)
        refuse(NotImplementedError, call, *parts)


def test_sources_of_sums() -> None:
    attr = Attr().set_post_ops(PostOps().append_sum(0.5))
    parts = ("torchq.linear: post_op_srcs must be 1 tensors", "'sum:0.5', got 0. Pass")
    refuse(ValueError, lin(attr, U8), *parts)
    signed = [torch.zeros(2, 4, dtype=S8)]
    parts = ("post_op_srcs[0] must be torch.uint8", "got torch.int8. Give append_sum its dtype")
    refuse(TypeError, lin(attr, U8, post_op_srcs=signed), *parts)
    attr = Attr().set_post_ops(PostOps().append_sum(0.5, 0, "s8"))
    wide = [torch.zeros(2, 5, dtype=S8)]
    parts = ("post_op_srcs[0] must have shape [2, 4]", "got [2, 5]. A sum has the shape of dst")
    refuse(ValueError, lin(attr, U8, post_op_srcs=wide), *parts)
    assert lin(attr, U8, post_op_srcs=signed)() is not None


# Dtypes


def test_output_scales_are_only_for_integer_computation() -> None:
    parts = ("src must be torch.uint8 or torch.int8 with output_scales", "only for integer")
    remedy = ("got torch.float32", "Quantize src, or drop the output scales")
    refuse(ValueError, lin(SCALED, src=SRC.float()), "torchq.linear: ", *parts, *remedy)
    floating = conv(src=IMAGE.float(), attr=SCALED)
    refuse(ValueError, floating, "torchq.conv2d: ", *parts, *remedy)


@pytest.mark.parametrize("dtype", (F32, S32, torch.int64, torch.bool), ids=str)
def test_source_dtype(dtype: torch.dtype) -> None:
    src, image = SRC.to(dtype), IMAGE.to(dtype)
    parts = (f"src must be torch.uint8 or torch.int8, got {dtype}. Quantize it first",)
    refuse(TypeError, lin(src=src), "torchq.linear: ", *parts)
    refuse(TypeError, conv(src=image), "torchq.conv2d: ", *parts)
    refuse(TypeError, lambda: TF.pad(image, (1, 1)), "torchq.pad: ", *parts)
    for name in ("add", "mul"):
        call = getattr(TF, name)
        refuse(TypeError, lambda c=call: c(SRC, src, LOW0), f"torchq.{name}: src1 must be")
    refuse(TypeError, lambda: TF.concat([SRC, src]), "torchq.concat: src1 must be")


@pytest.mark.parametrize("dtype", (torch.float64, torch.int64, torch.bool), ids=str)
def test_source_dtype_of_pools_and_reductions(dtype: torch.dtype) -> None:
    image, name = IMAGE.to(dtype), str(dtype).removeprefix("torch.")
    parts = (f"src must be uint8, int8, int32 or float32, got {name}. Convert it first",)
    refuse(TypeError, lambda: TF.max_pool(image, 2), "torchq.max_pool: ", *parts)
    refuse(TypeError, lambda: TF.avg_pool(image, 2), "torchq.avg_pool: ", *parts)
    refuse(TypeError, lambda: TF.adaptive_avg_pool(image, 1), "torchq.adaptive_avg_pool", *parts)
    refuse(TypeError, lambda: TF.reduction(image, "sum", 1), "torchq.reduction: ", *parts)


LOW0 = Attr().set_scales("src0", 0, 0.5)


def test_weight_dtype_and_shape() -> None:
    parts = ("weight must be int8, got float32. Quantize it first", "quantize_weight")
    refuse(TypeError, lin(weight=WEIGHT.float()), *parts)
    refuse(TypeError, conv(weight=KERNEL.float()), *parts)
    refuse(ValueError, lin(weight=KERNEL), "weight must be (out_features, in_features), got")
    parts = ("torchq.conv2d: weight must be (OC, C/groups, kernel...) with 4 dims", "got [4, 8]")
    refuse(ValueError, conv(weight=WEIGHT), *parts, "Use conv1d")
    refuse(ValueError, conv(weight=KERNEL[0]), *parts[:1], "got [8, 3, 3]")


@pytest.mark.parametrize("dtype", (torch.int64, torch.float64, torch.bool), ids=str)
def test_bias_dtype(dtype: torch.dtype) -> None:
    parts = (
        "torchq.linear: bias must be float32, bfloat16, float16, int8 or uint8 (real units)",
        f"or int32 (accumulator units), got {dtype}. Convert",
    )
    refuse(TypeError, lin(bias=F32_BIAS.to(dtype)), *parts)


@pytest.mark.parametrize("dtype", (torch.int8, U8), ids=str)
def test_biases_of_8_bits_are_in_real_units(dtype: torch.dtype) -> None:
    bias = torch.arange(4, dtype=dtype) * 30
    assert torch.equal(lin(SCALED, bias=bias)(), lin(SCALED, bias=bias.float())())


def test_bias_shape_and_size() -> None:
    for bias in (torch.zeros(5), torch.zeros(1, 4), torch.zeros(())):
        parts = ("bias must have shape [4]", f"got {list(bias.shape)}. Check")
        refuse(ValueError, lin(bias=bias), *parts)
    limit = 2**31 - 1 - 255 * 128 * 8
    for attr in (LOW, SCALED):
        assert lin(attr, bias=S32_BIAS + limit)() is not None
        parts = (f"int32 bias must be at most {limit}", f"got {limit + 1}. Use a float32 bias")
        refuse(ValueError, lin(attr, bias=S32_BIAS - limit - 1), "torchq.linear: ", *parts)


@pytest.mark.parametrize("dtype", (torch.int64, torch.float64, torch.float8_e5m2), ids=str)
def test_destination_dtype(dtype: torch.dtype) -> None:
    calls = {
        "linear": lin(dst=dtype),
        "conv2d": conv(dst_dtype=dtype),
        "quantize": lambda: TF.quantize(F32_BIAS, 1.0, 0, dtype),
        "requantize": lambda: TF.requantize(SRC, 1.0, 0, 1.0, 0, dtype),
        "reorder": lambda: TF.reorder(SRC, dtype),
        "add": lambda: TF.add(SRC, SRC, Attr(), dtype),
        "concat": lambda: TF.concat([SRC], dst_dtype=dtype),
    }
    for op, call in calls.items():
        parts = (f"torchq.{op}: dst_dtype must be one of torch.uint8", f"got {dtype}. The nearest")
        refuse(NotImplementedError, call, *parts)


def test_float_destinations_have_no_scale() -> None:
    for attr in (Attr().set_scales("dst", 0, 0.5), Attr().set_zero_points("dst", 0, 3)):
        parts = ("dst must be an integer to have a scale or zero point", "got dst_dtype")
        refuse(ValueError, lin(attr), "torchq.linear: ", *parts, "Leave them out")
    attr = Attr().set_output_scales(0, 0.5).set_zero_points("dst", 0, 3)
    refuse(ValueError, lin(attr), "torchq.linear: ", *parts)
    parts = ("torchq.reorder: dst_zero_point must lie in [0, 0]",)
    refuse(ValueError, lambda: TF.reorder(SRC, torch.float32, attr), *parts)
    v3 = Attr().set_scales("dst", 0, 0.5).set_zero_points("dst", 0, 3)
    refuse(ValueError, lambda: TF.reorder(SRC, torch.float32, v3), *parts, "got 3. Leave it out")
    attr.post_ops.append_sum()
    old = torch.zeros(SRC.shape)
    refuse(ValueError, lambda: TF.reorder(SRC, torch.float32, attr, old), *parts)
    attr = Attr().set_zero_points("src", 0, 5)
    parts = ("torchq.reorder: src_zero_point must lie in [0, 0]",)
    refuse(ValueError, lambda: TF.reorder(torch.ones(2), torch.uint8, attr), *parts)


# Values and shapes


def test_zero_points_lie_in_range() -> None:
    for dst, point, limits in ((U8, -1, "[0, 255]"), (U8, 256, "[0, 255]"), (S8, 128, "[-128, ")):
        attr = Attr().set_zero_points("dst", 0, point)
        parts = (f"zero point of a {dst} dst must be in {limits}", f"got {point}. Pass")
        refuse(ValueError, lin(attr, dst), "torchq.linear: ", *parts)
    attr = Attr().set_zero_points("src", 0, 256)
    refuse(ValueError, lin(attr), "torchq.linear: src_zero_point must lie in [0, 255]", "got 256")
    parts = ("torchq.pad: zero_point of a torch.uint8 src must be in [0, 255], got 300. Pass",)
    refuse(ValueError, lambda: TF.pad(SRC, (1, 1), 300), *parts)


def test_numbers_are_checked() -> None:
    x = torch.ones(3)
    refuse(TypeError, lambda: TF.quantize(x, 1.0, 3.5), "quantize: zero_point must be an integer")
    refuse(TypeError, lambda: TF.quantize(x, "1"), "quantize: scale must be a number, got '1'")
    for scale in (float("nan"), float("inf"), 1e39):
        refuse(ValueError, lambda s=scale: TF.quantize(x, s), "scale must be finite in float32")
    for scale in (0.0, -1.0):
        parts = ("torchq.quantize: scale must be finite and greater than 0", "Check")
        refuse(ValueError, lambda s=scale: TF.quantize(x, s), *parts)
    refuse(TypeError, lambda: TF.quantize(SRC, 1.0), "src must be float32, got uint8. Convert")
    refuse(TypeError, lambda: TF.dequantize(x, 1.0), "src must be uint8, int8 or int32, got")
    refuse(ValueError, lambda: TF.quantize_weight(x, 1.0, 6), "bits must be 7 or 8, got 6. Use")
    refuse(ValueError, lambda: TF.quantize(x, torch.ones(2)), "scale must broadcast against src")


def test_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    refuse(RuntimeError, lambda: TF.quantize(x, 1.0), "src requires grad", "torch.no_grad()")
    refuse(RuntimeError, lambda: TF.reorder(x, U8, LOW), "src requires grad", "torch.no_grad()")
    with torch.no_grad():
        assert TF.quantize(x, 1.0).tolist() == [1, 1, 1]


def test_shapes_of_sources() -> None:
    """A packed weight is padded to fours; only its own shape tells 7 features from 8."""
    for weight in (WEIGHT, pack_linear(WEIGHT)):
        parts = ("torchq.linear: src must be (*, 8) for weight [4, 8]", "got [2, 7]. Check")
        refuse(ValueError, lin(src=SRC[:, :7], weight=weight), *parts)
        refuse(ValueError, lin(src=SRC[0, 0], weight=weight), "got []. Check")
    for weight in (KERNEL, pack_conv(KERNEL)):
        parts = ("torchq.conv2d: src must have 8 channels for weight", "got 7 in [1, 7, 5, 5]")
        refuse(ValueError, conv(src=IMAGE[:, :7], weight=weight), *parts)
        refuse(ValueError, conv(src=IMAGE[0], weight=weight), "got [8, 5, 5]. Add a batch dim")
    refuse(ValueError, conv(src=IMAGE[..., :2, :2]), "smaller than the kernel", "Enlarge")


def test_packed_for_another_layer() -> None:
    packed = pack_conv(KERNEL)
    parts = ("must be packed for groups=1, dilation=(2, 2), got groups=1, dilation=(1, 1). Call",)
    refuse(ValueError, conv(weight=packed, dilation=2), "torchq.conv2d: weight", *parts)
    refuse(ValueError, conv(weight=pack_conv(GROUPED, 2)), "for groups=1", "got groups=2")
    refuse(ValueError, conv(weight=pack_linear(WEIGHT)), "with 4 dims, got [4, 8]. Use conv1d")
    refuse(ValueError, lin(weight=packed), "for weight [4, 8, 3, 3], a matrix, got [2, 8]")
    refuse(
        ValueError, conv(weight=KERNEL[:3], groups=2), "groups must divide the 3 output channels"
    )


def test_windows() -> None:
    parts = "torchq.conv2d: {} must be one integer or 2, one per spatial dimension, got {}. Check"
    for name in ("stride", "padding", "dilation", "padding_end"):
        refuse(ValueError, conv(**{name: (1, 1, 1)}), parts.format(name, (1, 1, 1)))
    refuse(ValueError, conv(padding="same"), parts.format("padding", "'same'"))
    refuse(ValueError, conv(stride=1.5), "torchq.conv2d: stride must be one integer")
    refuse(ValueError, conv(stride=0), "torchq.conv: stride must be at least 1", "got 0")
    for call in (TF.max_pool, TF.avg_pool):
        parts = (f"torchq.{call.__name__}: kernel_size must be one integer or 2", "got [2]. Check")
        refuse(ValueError, lambda c=call: c(IMAGE, [2]), *parts)
        parts = ("src must be (N, C, spatial...)", "got [2, 8]. Add a batch dimension")
        refuse(ValueError, lambda c=call: c(SRC, 2), f"torchq.{call.__name__}: ", *parts)
        refuse(ValueError, lambda c=call: c(IMAGE, 2, 1, 2), "at most half of the kernel", "Pad")
    refuse(ValueError, lambda: TF.adaptive_avg_pool(SRC, 1), "got [2, 8]. Add a batch dimension")
    refuse(ValueError, lambda: TF.adaptive_avg_pool(IMAGE, 0), "at least 1", "got [0, 0]")


def test_elementwise_shapes() -> None:
    three = torch.zeros(2, 3, dtype=U8)
    for call in (TF.add, TF.mul):
        parts = (f"torchq.{call.__name__}: src0 and src1 must have shapes that broadcast", "[2, 3]")
        refuse(ValueError, lambda c=call: c(SRC, three, Attr()), *parts, "Dims must agree")
    refuse(ValueError, lambda: TF.concat([SRC, three], dim=0), "agree in every dimension but 0")
    refuse(ValueError, lambda: TF.concat([SRC], dim=2), "dim must lie in [-2, 1]", "got 2")
    refuse(ValueError, lambda: TF.concat([]), "srcs must be at least one tensor", "got 0")


def test_lookup_tables() -> None:
    per_tensor = QParams.per_tensor(0.1)
    points = torch.zeros(2, dtype=S32)
    per_channel = QParams(torch.tensor([0.1, 0.2]), points, U8, 1)
    for name, pair in (("src", (per_channel, per_tensor)), ("dst", (per_tensor, per_channel))):
        parts = (f"torchq.lookup_table: {name} must be per tensor, got 2 scales. Use QParams",)
        refuse(NotImplementedError, lambda p=pair: TF.lookup_table(torch.tanh, *p), *parts)
    parts = ("function must map each of 256 values to one, got [] for [256]. Pass",)
    refuse(ValueError, lambda: TF.lookup_table(torch.sum, per_tensor, per_tensor), *parts)
    refuse(ValueError, lambda: TF.lookup(SRC, SRC[0]), "table must be 256 contiguous values")

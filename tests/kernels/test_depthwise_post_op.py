# SPDX-License-Identifier: Apache-2.0
"""A depthwise convolution in the post-ops of a convolution: two steps of the oracle, bit for bit.

tests/conformance compares it with oneDNN's own fusion.
"""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same, assert_same_deployed
from cases import random_q
from torch import Tensor, nn

import torchq
import torchq.functional as TF
import torchq.nn as tnn
from torchq import Attr, PostOps, QParams
from torchq.attributes.post_ops import foldable

# kernel, stride, padding, and sizes: as oneDNN has it, and the general form
WINDOWS = [
    (3, 1, 1, (7, 6)),
    (3, 2, 1, (7, 6)),
    (3, 2, 1, (1, 2)),
    (5, 3, 2, (9, 4)),
    (2, 1, 0, (5, 5)),
    (2, 2, 0, (5, 4)),
    (1, 2, 0, (3, 3)),
    (3, 1, 1, (11,)),
    (3, 2, 1, (3, 4, 5)),
]
CONV = {1: TF.conv1d, 2: TF.conv2d, 3: TF.conv3d}


def scale(low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape)


def case(
    window: tuple[int, int, int, tuple[int, ...]],
    stored: torch.dtype,
    dst_dtype: torch.dtype,
    before: str = "",
    behind: str = "",
    channels: int = 19,
    taps: int = 1,
    weight_dtype: torch.dtype = S8,
) -> tuple[Tensor, Tensor]:
    """torchq's answer and the oracle's."""
    kernel, stride, padding, size = window
    nd, src_dtype = len(size), (U8, S8)[kernel % 2]
    src = random_q((2, 6, *size), src_dtype, 1)
    weight = random_q((channels, 6, *[taps] * nd), S8, 2)
    filters = random_q((channels, 1, *[kernel] * nd), weight_dtype, 3)
    bias, dw_bias = torch.randn(channels) * 0.5, torch.randint(-900, 900, (channels,), dtype=S32)
    scales = {"src": 0.02, "weights": scale(0.005, 0.01, channels), "dst": 0.03}
    scales |= {"dw_weights": scale(0.005, 0.02, channels)}
    zeros = {"src": 7, "dst": 3 if stored == S8 else 90}
    if dst_dtype != F32:
        scales["dw_dst"], zeros["dw_dst"] = 0.05, 11
    if weight_dtype == U8:
        zeros["dw_weights"] = random_q((channels,), U8, 4).int()
    name = "u8" if stored == U8 else "s8"
    step = f"dw_conv:{kernel}:{stride}:{padding}:{name}:s32"
    attr = Attr()
    for arg, value in scales.items():
        attr.set_scales(arg, int(isinstance(value, Tensor)), value)
    for arg, zero in zeros.items():
        attr.set_zero_points(arg, int(isinstance(zero, Tensor)), zero)
    text = "+".join(filter(None, [before, step, behind]))
    attr.set_post_ops(PostOps.parse(text, [filters, dw_bias]))
    out = [-(-n // stride) for n in size]
    olds = [random_q((2, channels, *size), stored, 5)] if "sum" in before else []
    behind_olds = [random_q((2, channels, *out), S8, 6)] if "sum" in behind else []
    got = CONV[nd](
        src, weight, bias, padding=taps // 2, attr=attr, dst_dtype=dst_dtype,
        post_op_srcs=[*olds, *behind_olds],
    )  # fmt: skip
    ones, same = [1] * nd, [taps // 2] * nd
    mid = reference.conv(
        src, weight, bias, 7, stride=ones, padding=(same, same), dilation=ones,
        src_scale=scales["src"], weight_scale=scales["weights"], dst_scale=scales["dst"],
        dst_zero_point=zeros["dst"], dst_dtype=stored, post_ops=before, post_op_srcs=olds,
    )  # fmt: skip
    end = [(o - 1) * stride + kernel - n - padding for n, o in zip(size, out, strict=True)]
    shifted = filters.double()
    if weight_dtype == U8:
        shifted -= zeros["dw_weights"].double().reshape(-1, *[1] * (nd + 1))
    expected = reference.conv(
        mid, shifted, dw_bias, zeros["dst"], stride=[stride] * nd, padding=([padding] * nd, end),
        dilation=ones, groups=channels, src_scale=scales["dst"],
        weight_scale=scales["dw_weights"], dst_scale=scales.get("dw_dst"),
        dst_zero_point=zeros.get("dw_dst", 0), dst_dtype=dst_dtype, post_ops=behind,
        post_op_srcs=behind_olds,
    )  # fmt: skip
    assert list(got.shape[2:]) == out
    return got, expected


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("stored", [U8, S8], ids=["u8", "s8"])
def test_against_the_oracle(window: Any, stored: torch.dtype, isa: str):
    for dst in (U8, S8, F32, S32):
        assert_same(*case(window, stored, dst, "eltwise_relu", "eltwise_clip:-3:2.5"))


def test_chains_on_both_sides(isa: str):
    """Float chains, sums in front of and behind the step, kernels above 1, uint8 filters."""
    for taps in (1, 3):
        for weight_dtype in (S8, U8):
            both = ("eltwise_relu:0.1+sum:0.03:5", "sum:0.25:0:s8+eltwise_relu:0.25")
            assert_same(*case(WINDOWS[1], U8, U8, *both, taps=taps, weight_dtype=weight_dtype))
    assert_same(*case(WINDOWS[0], S8, U8, channels=1))


def test_text():
    filters = random_q((4, 1, 3, 3), S8)
    chain = PostOps().append_eltwise("relu").append_dw_conv(filters, torch.zeros(4), stride=2)
    chain.append_eltwise("tanh")
    assert str(chain) == "eltwise_relu+dw_conv:3:2:1:u8:f32+eltwise_tanh"
    assert str(PostOps().append_dw_conv(filters)) == "dw_conv:3:1:1"
    assert (
        str(PostOps().append_dw_conv(None, kernel=5, padding=2, dtype="s8")) == "dw_conv:5:1:2:s8"
    )
    again = PostOps.parse(str(chain), chain.values)
    assert again == chain and hash(again) == hash(chain)
    assert again != PostOps.parse(str(chain), [filters + 1, torch.zeros(4)])
    assert PostOps.parse(str(chain)).with_values(chain.values) == chain
    assert not foldable(chain, U8)
    attr = Attr().set_scales("dw_dst", 0, 0.5).set_scales("dw_weights", 1, [1, 2, 3, 4])
    attr.set_scales("dst", 0, 0.1).set_zero_points("dw_dst", 0, 3).set_post_ops(chain)
    text = (
        "scales:dst:0+dw_weights:1+dw_dst:0 zero_points:dw_dst:0 "
        "post_ops:eltwise_relu+dw_conv:3:2:1:u8:f32+eltwise_tanh"
    )
    assert str(attr) == text
    scales = {"dst": 0.1, "dw_dst": 0.5, "dw_weights": [1, 2, 3, 4]}
    parsed = Attr.parse(
        text, scales=scales, zero_points={"dw_dst": 3}, post_ops=[filters, torch.zeros(4)]
    )
    assert parsed == attr
    filters.zero_()
    assert bool(chain.values[0].any()), "the chain has a copy"


def test_masks_behind_the_step_index_its_destination():
    """A full operand of 4 x 4 behind a stride of 2 on 7 x 8."""
    src, weight = random_q((1, 3, 7, 8), U8), random_q((4, 3, 1, 1), S8)
    chain = PostOps().append_dw_conv(random_q((4, 1, 3, 3), S8), stride=2)
    chain.append_binary("add", torch.arange(16.0), 12)
    attr = Attr().set_scales("dst", 0, 40).set_post_ops(chain)
    attr.check("dst", (1, 4, 7, 8))
    plain = Attr().set_scales("dst", 0, 40)
    plain.post_ops.append_dw_conv(chain.values[0], stride=2)
    shift = torch.arange(16.0).reshape(4, 4)
    assert_same(TF.conv2d(src, weight, attr=attr), TF.conv2d(src, weight, attr=plain) + shift)


SRC, WEIGHT = random_q((1, 3, 7, 8), U8), random_q((4, 3, 1, 1), S8)


def test_unsupported_forms():
    filters = random_q((4, 1, 3, 3), S8)
    step = PostOps().append_dw_conv(filters)
    attr = Attr().set_post_ops(step)
    for call in (
        lambda: TF.linear(SRC.flatten(2).mT, WEIGHT.flatten(1), attr=attr),
        lambda: TF.conv_transpose2d(SRC, WEIGHT.mT.reshape(3, 4, 1, 1), attr=attr),
        lambda: TF.matmul(SRC[0, 0], torch.zeros(8, 4, dtype=S8), attr=attr),
        lambda: TF.conv2d(
            SRC,
            WEIGHT,
            attr=Attr().set_post_ops(PostOps.parse("dw_conv:3:1:1+dw_conv:3:1:1", [filters] * 2)),
        ),
    ):
        with pytest.raises(NotImplementedError, match=r"one dw_conv behind a convolution.*nearest"):
            call()
    for fault, message in (
        (Attr().set_output_scales(0, 0.5), "must have scales, got output_scales"),
        (Attr().set_scales("dst", 2, [1, 2, 3, 4]), "scales of dst must have mask 0, got 2"),
        (Attr().set_zero_points("dw_dst", 2, [1, 2, 3, 4]), "zero_points of dw_dst must have mask"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            TF.conv2d(SRC, WEIGHT, attr=fault.set_post_ops(step))
    for weight in (random_q((4, 1, 3, 1), S8), random_q((4, 2, 3, 3), S8), random_q((4, 1), S8)):
        with pytest.raises(NotImplementedError, match=r"weight must be \(C, 1, k...\).*nearest"):
            PostOps().append_dw_conv(weight)
    with pytest.raises(NotImplementedError, match=r"dtype must be torch.uint8 or torch.int8"):
        PostOps().append_dw_conv(filters, dtype=F32)
    wide = PostOps().append_dw_conv(random_q((4, 1, 2, 2), S8), stride=2, padding=1)
    with pytest.raises(NotImplementedError, match=r"must give ceil\(size / 2\).*padding is 0"):
        TF.conv2d(SRC, WEIGHT, attr=Attr().set_post_ops(wide))


def test_errors():
    filters = random_q((4, 1, 3, 3), S8)
    step = PostOps().append_dw_conv(filters)
    for fault, message in (
        (Attr().set_scales("dw_weights", 1, [1, 2, 3]), "scales of dw_weights must be 4 values"),
        (Attr().set_scales("src1", 0, 1), "must set only .*dw_dst, got scales of src1"),
    ):
        with pytest.raises(ValueError, match=message):
            TF.conv2d(SRC, WEIGHT, attr=fault.set_post_ops(step))
    with pytest.raises(ValueError, match=r"must set only .*, got scales of dw_dst"):
        TF.conv2d(SRC, WEIGHT, attr=Attr().set_scales("dw_dst", 0, 1))
    with pytest.raises(ValueError, match=r"values must be present.*dw_conv:3:1:1"):
        TF.conv2d(SRC, WEIGHT, attr=Attr.parse("post_ops:dw_conv:3:1:1"))
    for shape in ((5, 1, 3, 3), (4, 1, 3)):
        attr = Attr().set_post_ops(PostOps().append_dw_conv(random_q(shape, S8)))
        with pytest.raises(
            ValueError, match=r"weight of dw_conv must be \(4, 1, k...\) with 4 dims"
        ):
            TF.conv2d(SRC, WEIGHT, attr=attr)
    with pytest.raises(ValueError, match="bias must have shape"):
        attr = Attr().set_post_ops(PostOps().append_dw_conv(filters, torch.zeros(3)))
        TF.conv2d(SRC, WEIGHT, attr=attr)
    with pytest.raises(TypeError, match=r"weight must be torch.uint8 or torch.int8, got"):
        PostOps().append_dw_conv(filters.float())
    with pytest.raises(TypeError, match=r"bias must be float32 .* or int32"):
        PostOps().append_dw_conv(filters, filters[:, 0, 0, 0])
    for padding in (3, -1):
        with pytest.raises(ValueError, match=r"padding must be in \[0, 2\]"):
            PostOps().append_dw_conv(filters, padding=padding)
    with pytest.raises(ValueError, match="stride must be in"):
        PostOps().append_dw_conv(filters, stride=0)
    for text in ("dw_conv", "dw_conv:3", "dw_conv:3:1:1:u8:f32:1"):
        with pytest.raises(ValueError, match="must have the form dw_conv:<kernel>:<stride>"):
            PostOps.parse(text)
    with pytest.raises(ValueError, match="at position 12, got 'x': kernel must be an integer"):
        PostOps.parse("sum+dw_conv:x:1:1")
    for values, error, message in (
        ([], ValueError, "values must be 2 tensors"),
        ([filters, 3.0], TypeError, "takes tensors"),
        ([filters, filters[:, 0, 0, 0].int()], ValueError, "must be dw_conv:3:1:1:u8:f32, got"),
        ([filters[..., :2, :2], torch.zeros(4)], ValueError, "must be dw_conv:3:1:1:u8:f32, got"),
    ):
        with pytest.raises(error, match=message):
            PostOps.parse("dw_conv:3:1:1:u8:f32").with_values(values)


# The module

IN, MID, OUT = (
    QParams.per_tensor(0.021, 117),
    QParams.per_tensor(0.05, 20),
    QParams.per_tensor(0.03, -9, S8),
)


def module(stride: int = 2, dst: QParams | None = OUT, behind: str = "") -> tnn.QConv2d:
    depthwise = nn.Conv2d(24, 24, 3, stride, 1, groups=24)
    chain = PostOps.parse(behind or "eltwise_relu:0.1")
    dw = tnn.QConv2d.from_float(depthwise, MID, dst, post_ops=chain)
    before = PostOps.parse("eltwise_clip:0:6")
    return tnn.QConv2d.from_float(nn.Conv2d(8, 24, 1), IN, MID, post_ops=before, dw=dw)


@pytest.mark.parametrize("dst", [None, OUT], ids=["f32", "s8"])
@pytest.mark.parametrize("stride", [1, 2])
def test_module_is_what_its_attr_says(dst: QParams | None, stride: int):
    m = module(stride, dst)
    src = random_q((2, 8, 9, 10), U8)
    dtype = F32 if dst is None else S8
    got = m(src)
    assert_same(got, TF.conv2d(src, m.packed(), m.bias, attr=m.attr, dst_dtype=dtype))
    step = f"post_ops:eltwise_clip:0:6+dw_conv:3:{stride}:1:u8:f32+eltwise_relu:0.1"
    assert str(m.attr).endswith(step) and str(m.attr) in repr(m)
    plain = [m.dw, m]
    m.dw = None
    assert_same(got, plain[0](m(src)))


def test_module_residual_goes_to_the_depthwise():
    m = module(behind="sum:0.5")
    src, old = random_q((2, 8, 9, 10), U8), random_q((2, 24, 5, 5), S8)
    got = TF.conv2d(src, m.packed(), m.bias, attr=m.attr, dst_dtype=S8, post_op_srcs=[old])
    assert_same(m(src, old), got)


def test_module_under_compile_script_export_and_saved(tmp_path: Any):
    model, src = nn.Sequential(module()).eval(), torch.randn(2, 8, 9, 10)
    expected = model(src)
    assert_same_deployed(model, (src,), expected)
    torchq.save(model, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", nn.Sequential(nn.Identity()))
    assert_same(loaded(src), expected)
    assert str(loaded[0].attr) == str(model[0].attr)
    other = nn.Sequential(module())
    other.load_state_dict(model.state_dict())
    assert_same(other(src), expected)


@pytest.mark.parametrize("where", ["in front", "behind", "both"])
def test_operands_come_with_the_call(where: str):
    """They give what the same values in the chain give; the number that a half lacks is told."""
    src, weight = random_q((2, 4, 5, 6), U8), random_q((6, 4, 1, 1), S8)
    filters, old = random_q((6, 1, 3, 3), S8), random_q((2, 6, 5, 6), U8, 5)

    def chain(values: Tensor | None) -> Attr:
        attr = Attr().set_scales("src", 0, 0.1).set_scales("weights", 0, 0.02)
        attr.set_scales("dst", 0, 0.2).set_scales("dw_weights", 0, 0.1)
        steps = attr.post_ops
        if where != "behind":
            steps.append_binary("add", values, 15)
        steps.append_sum(0.5, 3, U8).append_dw_conv(filters)
        if where != "in front":
            steps.append_binary("mul", values, 15)
        return attr

    operand = torch.rand(2, 6, 5, 6)
    known = [operand, old, operand]
    srcs = known[: {"in front": 2, "both": 3}.get(where, 3)][where == "behind" :]
    expected = TF.conv2d(src, weight, attr=chain(operand), post_op_srcs=[old])
    assert_same(TF.conv2d(src, weight, attr=chain(None), post_op_srcs=srcs), expected)
    for wrong in (srcs[:-1], [*srcs, operand]):
        with pytest.raises(ValueError, match=r"torchq.conv2d: post_op_srcs must be \d tensors"):
            TF.conv2d(src, weight, attr=chain(None), post_op_srcs=wrong)


def test_missing_values_are_refused():
    src, weight = random_q((2, 4, 5, 6), U8), random_q((6, 4, 1, 1), S8)
    for chain in (
        PostOps().append_dw_conv(None),
        PostOps().append_binary("add", None, 2).append_dw_conv(random_q((6, 1, 3, 3), S8)),
        PostOps().append_dw_conv(random_q((6, 1, 3, 3), S8)).append_prelu(None, 2),
    ):
        with pytest.raises(ValueError, match="values must be present for every post-op"):
            TF.conv2d(src, weight, attr=Attr().set_post_ops(chain))


def test_module_errors():
    dw = tnn.QConv2d.from_float(nn.Conv2d(24, 24, 3, 1, 1, groups=24), MID, OUT)
    with pytest.raises(ValueError, match="dw must take what this module gives, 24 channels"):
        tnn.QConv2d.from_float(nn.Conv2d(8, 24, 1), IN, IN, dw=dw)
    with pytest.raises(ValueError, match="dw must take what this module gives, 16 channels"):
        tnn.QConv2d.from_float(nn.Conv2d(8, 16, 1), IN, MID, dw=dw)
    with pytest.raises(
        NotImplementedError, match="must have no sum and no operand at run time, got 'sum'"
    ):
        chain = PostOps().append_sum()
        tnn.QConv2d.from_float(nn.Conv2d(8, 24, 1), IN, MID, post_ops=chain, dw=dw)
    for other in (
        nn.Conv2d(24, 24, 3, 1, 1),
        nn.Conv2d(24, 24, 3, 1, 0, groups=24),
        nn.Conv2d(24, 24, 2, 1, 1, groups=24),
        nn.Conv2d(24, 24, 3, (1, 2), 1, groups=24),
        nn.Conv2d(24, 24, 3, 1, 1, dilation=2, groups=24),
    ):
        wrong = tnn.QConv2d.from_float(other, MID, OUT)
        with pytest.raises(NotImplementedError, match=r"dw must be a QConv2d, depthwise.*nearest"):
            tnn.QConv2d.from_float(nn.Conv2d(8, 24, 1), IN, MID, dw=wrong)
    with pytest.raises(NotImplementedError, match="one dw_conv behind a convolution"):
        chain = PostOps().append_dw_conv(random_q((24, 1, 3, 3), S8))
        tnn.QConv2d.from_float(nn.Conv2d(8, 24, 1), IN, MID, post_ops=chain)

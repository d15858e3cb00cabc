# SPDX-License-Identifier: Apache-2.0
"""Statements of oneDNN's int8 documents, by name: formulas, masks and printed numbers.

Source 1: Primitive Attributes: Quantization (v1, output scales). Source 2: Int8 Inference. Source
3: the v3 specification (separate scales and zero points). Source 4: Nuances of int8 Computations.
"""

from __future__ import annotations

from fractions import Fraction

import cases
import pytest
import torch
import torch.nn.functional as F
from calls import F32, S8, S32, U8, assert_same
from torch import Tensor

import torchq.functional as TF
from torchq import Attr, PostOps
from torchq.functional.packing import pack_conv, pack_linear


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Downconversion with saturation and rounding half to even."""
    limits = torch.iinfo(dtype)
    return torch.round(x).clamp(limits.min, limits.max).to(dtype)


def multiply(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """The v1 reorder of source 2: ``round(Q * x)``."""
    return TF.reorder(x, dtype, Attr().set_output_scales(0, factor))


# Source 2: the quantization example

Q_SRC = 255 / 15
Q_WEIGHT = 127 / 9.8
ACTIVATIONS = torch.tensor([15.0, 14.0, 15.0, 8.0, 11.0])
WEIGHTS = torch.tensor([-5.1, 6.8, -1.2, 9.8])
BIAS = torch.tensor([2.4, -5.2, -8.0])


def test_source2_example_rounds_half_to_even() -> None:
    assert Q_SRC == 17
    assert multiply(ACTIVATIONS, Q_SRC, U8).tolist() == [255, 238, 255, 136, 187]
    assert multiply(WEIGHTS, Q_WEIGHT, S8).tolist() == [-66, 88, -16, 127]
    assert multiply(BIAS, Q_SRC * Q_WEIGHT, S32).tolist() == [529, -1146, -1762]
    # v3 gives the scales: real units per step
    assert TF.quantize(ACTIVATIONS, 1 / Q_SRC).tolist() == [255, 238, 255, 136, 187]
    assert TF.quantize_weight(WEIGHTS, 1 / Q_WEIGHT).tolist() == [-66, 88, -16, 127]
    assert TF.quantize(BIAS, 1 / (Q_SRC * Q_WEIGHT), 0, S32).tolist() == [529, -1146, -1762]


def test_source2_prints_truncations() -> None:
    """Its text says rounding by MXCSR (half to even); -15, 528 and -1145 are cut off instead."""
    assert (WEIGHTS.double() * Q_WEIGHT).trunc().tolist() == [-66, 88, -15, 127]
    assert (BIAS.double() * Q_SRC * Q_WEIGHT).trunc().tolist() == [528, -1145, -1762]


def test_source2_int32_result_is_bound_to_the_product_of_the_factors() -> None:
    """``X_s32 = W_s8 . a_u8 + b_s32``, about ``Q_a Q_w X_f32``."""
    src, weight = ACTIVATIONS[None, :4], WEIGHTS[None]
    bias = multiply(BIAS[:1], Q_SRC * Q_WEIGHT, S32)
    q_src, q_weight = multiply(src, Q_SRC, U8), multiply(weight, Q_WEIGHT, S8)
    result = TF.linear(q_src, q_weight, bias, dst_dtype=S32)
    assert result.item() == 255 * -66 + 238 * 88 + 255 * -16 + 136 * 127 + 529
    real = F.linear(src, weight, BIAS[:1])
    # half a step of a weight for each activation, and of the bias
    bound = (0.5 * q_src.sum() + 0.5) / (Q_SRC * Q_WEIGHT)
    assert abs(result.item() / (Q_SRC * Q_WEIGHT) - real.item()) < bound


@pytest.mark.parametrize("mask,count", [(0, 1), (2, 4), (3, 8)])
def test_source2_masks_of_a_tensor_goihw(mask: int, count: int) -> None:
    """T[G0, O1, I2, H3, W4]: mask 2 selects O (shared by the groups), mask 3 groups and O."""
    groups, outputs = 2, 4
    tensor = torch.randn(groups, outputs, 3, 3, 3)
    factors = torch.linspace(10, 50, count)
    selected = {0: (1, 1), 2: (1, outputs), 3: (groups, outputs)}[mask]
    each = factors.reshape(selected).expand(groups, outputs)
    assert Attr.expected_values(mask, tensor.shape) == count

    q = TF.reorder(tensor, S8, Attr().set_output_scales(mask, factors))
    for g in range(groups):
        for o in range(outputs):
            assert_same(q[g, o], convert(tensor[g, o] * each[g, o], S8))

    src = cases.random_u8((1, 6, 5, 5))
    attr = Attr().set_scales("weights", mask, 1 / factors)
    dst = TF.conv2d(src, q.flatten(0, 1), groups=groups, attr=attr)
    acc = TF.conv2d(src, q.flatten(0, 1), groups=groups, dst_dtype=S32)
    scale = (1 / factors).reshape(selected).expand(groups, outputs).reshape(1, -1, 1, 1)
    assert_same(dst, acc.float() * scale)


# Source 1: output scales


def test_source1_examples_1_and_2_a_grouped_convolution() -> None:
    """Weights in hwigo memory, one scale per group and output channel; then the convolution."""
    groups, outputs, inputs, height, width = 4, 6, 5, 3, 3
    user_weight = torch.randn(height, width, inputs, groups, outputs).permute(3, 4, 2, 0, 1)
    user_src = torch.randn(2, groups * inputs, 9, 8)
    real = F.conv2d(user_src, user_weight.flatten(0, 1), padding=1, groups=groups)

    # Example 1: wei_s8(g, oc, ic, kh, kw) <- 1 / scale(g, oc) * wei_f32(g, oc, ic, kh, kw)
    weight_scales = user_weight.abs().amax((2, 3, 4)).flatten() / 127
    mask = 1 << 0 | 1 << 1
    weight = TF.reorder(user_weight, S8, Attr().set_output_scales(mask, 1 / weight_scales))
    assert weight.stride() == user_weight.stride()
    assert weight.abs().amax((2, 3, 4)).eq(127).all()

    # Example 2: dst_s8 = convert(output_scale(oc) * conv_s32(src_s8, wei_s8))
    src_scale, dst_scale = user_src.abs().max() / 127, real.abs().max() / 127
    src = TF.quantize(user_src, src_scale, 0, S8)
    output_scales = src_scale * weight_scales / dst_scale
    attr = Attr().set_output_scales(1 << 1, output_scales)
    packed = pack_conv(weight.flatten(0, 1), groups)
    dst = TF.conv2d(src, packed, padding=1, groups=groups, attr=attr, dst_dtype=S8)

    exact = F.conv2d(
        src.double() * src_scale,
        weight.flatten(0, 1).double() * weight_scales.double().reshape(-1, 1, 1, 1),
        padding=1,
        groups=groups,
    )
    assert (dst * dst_scale - exact).abs().max() <= 0.5001 * dst_scale
    noise = (dst * dst_scale - real).square().mean() / real.square().mean()
    assert -10 * torch.log10(noise) > 30


@pytest.mark.parametrize("mask", (0, 1 << 1))
@pytest.mark.parametrize("dst_dtype", (U8, S8, S32, F32), ids=str)
def test_source1_formula(dst_dtype: torch.dtype, mask: int) -> None:
    """``dst(n, oc, oh, ow) = convert(output_scale(oc) * conv_s32(src, weights))``."""
    src, weight = cases.random_s8((2, 6, 7, 7)), cases.random_s8((5, 6, 3, 3), 1)
    scales = torch.linspace(1e-3, 3e-3, 5 if mask else 1)
    acc = TF.conv2d(src, weight, dst_dtype=S32)
    assert_same(acc, F.conv2d(src.double(), weight.double()).int())
    real = acc.float() * scales.reshape(1, -1, 1, 1)
    attr = Attr().set_output_scales(mask, scales)
    dst = TF.conv2d(src, weight, attr=attr, dst_dtype=dst_dtype)
    assert_same(dst, real if dst_dtype == F32 else convert(real, dst_dtype))


def test_source1_output_scales_come_before_the_post_ops() -> None:
    """``dst = 1 / s_dst * f(s_src * s_weight * conv_s32)``: the post-op's scale is 1 / s_dst.

    Powers of two, so that every step is exact. The document's f is tanh.
    """
    src, weight = cases.random_s8((3, 20)), cases.random_s8((7, 20), 1)
    acc = TF.linear(src, weight, dst_dtype=S32)
    post_ops = PostOps().append_eltwise("relu", alpha=0.25, scale=1 / 0.5)
    attr = Attr().set_output_scales(0, 2**-10).set_post_ops(post_ops)
    expected = 2 * F.leaky_relu(acc * 2**-10, 0.25)
    assert_same(TF.linear(src, weight, None, attr, S8), convert(expected, S8))


def test_source1_output_scales_multiply_the_bias() -> None:
    src, weight = cases.random_u8((3, 20)), cases.random_s8((7, 20), 1)
    bias = torch.arange(-3, 4) * 1000
    acc = TF.linear(src, weight, dst_dtype=S32) + bias
    attr = Attr().set_output_scales(2, torch.full((7,), 2.0**-9))
    for dtype in (S32, F32):
        dst = TF.linear(src, weight, bias.to(dtype), attr, S8)
        assert_same(dst, convert(acc * 2.0**-9, S8))


def test_source1_output_scales_only_for_integer_computation() -> None:
    """The same layer in float32 refuses them."""
    attr = Attr().set_output_scales(0, 0.5)
    weight = torch.ones(3, 4, dtype=S8)
    with pytest.raises(ValueError, match="only for integer computation"):
        TF.linear(torch.ones(2, 4), weight, attr=attr)
    with pytest.raises(ValueError, match="only for integer computation"):
        TF.conv1d(torch.ones(2, 4, 5), weight[:, :, None], attr=attr)


def test_source1_dynamic_quantization_in_three_steps() -> None:
    """Compute in s32, find the largest, requantize."""
    src, weight = cases.random_s8((5, 40)), cases.random_s8((9, 40), 1)
    acc = TF.linear(src, weight, dst_dtype=S32)
    scale = acc.abs().max() / 127
    dst = TF.reorder(acc, S8, Attr().set_scales("dst", 0, scale))
    assert dst.abs().max() == 127
    assert (dst * scale - acc).abs().max() <= 0.5001 * scale


# Source 3: separate scales and zero points


@pytest.mark.parametrize("src_zero_point", (0, 117, 255))
def test_source3_formula(src_zero_point: int) -> None:
    """``zp_dst + 1 / s_dst * relu(s_src * s_wei(oc) * (conv_s32 - zp_src * comp(oc)) + bias)``.

    comp(oc) sums the weights. Powers of two, so that every step is exact in any order.
    """
    src, weight = cases.random_u8((2, 8, 6, 6)), cases.random_s8((5, 8, 3, 3), 1)
    src_scale, dst_scale, dst_zero_point = 0.25, 0.5, 9
    weight_scale = torch.tensor([2.0**-8, 2.0**-7, 2.0**-9, 2.0**-8, 2.0**-6])
    bias = torch.tensor([0.5, -3.0, 0.0, 7.25, -1.0])
    packed = pack_conv(weight)
    comp = packed.compensation.sum(0)
    assert torch.equal(comp, weight.sum((1, 2, 3)))

    def per_channel(values: Tensor) -> Tensor:
        return values.reshape(1, -1, 1, 1)

    acc = F.conv2d(src.double(), weight.double()) - src_zero_point * per_channel(comp)
    real = F.relu(src_scale * per_channel(weight_scale) * acc + per_channel(bias))
    attr = Attr().set_scales("src", 0, src_scale).set_scales("weights", 1, weight_scale)
    attr.set_scales("dst", 0, dst_scale).set_zero_points("dst", 0, dst_zero_point)
    attr.set_zero_points("src", 0, src_zero_point)
    attr.post_ops.append_eltwise("relu")
    dst = TF.conv2d(src, packed, bias, attr=attr, dst_dtype=U8)
    assert_same(dst, convert(dst_zero_point + real / dst_scale, U8))


def test_source3_padding_is_real_zero() -> None:
    """Padding contributes 0, not the zero point: comp sums over the valid taps only."""
    src, weight = cases.random_u8((2, 8, 5, 6)), cases.random_s8((5, 8, 3, 3), 1)
    attr = Attr().set_zero_points("src", 0, 117)
    dst = TF.conv2d(src, weight, padding=2, attr=attr, dst_dtype=S32)
    assert_same(dst, F.conv2d(src.double() - 117, weight.double(), padding=2).int())


# Source 4: nuances of int8 computations


def saturating_pairs(a: list[int], b: list[int]) -> int:
    """vpmaddubsw, vpmaddwd, vpaddd: pair sums saturate to 16 bits."""
    pairs = [a[i] * b[i] + a[i + 1] * b[i + 1] for i in (0, 2)]
    return sum(min(max(pair, -(2**15)), 2**15 - 1) for pair in pairs)


EXACT = [
    # src dtype, src, weight, documented saturated result, exact result
    (U8, [255, 255, 0, 0], [127, 127, 0, 0], 32767, 64770),
    (S8, [127, 127, 0, 0], [127, 127, 0, 0], 255, 32258),
]


@pytest.mark.parametrize("dtype,src,weight,documented,exact", EXACT, ids=("u8s8", "s8s8"))
def test_source4_saturation_examples_are_exact(
    isa: str, dtype: torch.dtype, src: list[int], weight: list[int], documented: int, exact: int
) -> None:
    shift = 128 if dtype == S8 else 0
    shifted = [value + shift for value in src]
    assert saturating_pairs(shifted, weight) - shift * sum(weight) == documented

    row, matrix = torch.tensor([src]).to(dtype), torch.tensor([weight] * 17).to(S8)
    expected = torch.full((1, 17), exact, dtype=S32)
    assert_same(TF.linear(row, matrix, dst_dtype=S32), expected, isa)
    conv = TF.conv2d(row[..., None, None], matrix[..., None, None], dst_dtype=S32)
    assert_same(conv[..., 0, 0], expected, isa)
    # the four taps of one kernel
    depthwise = TF.conv1d(row.expand(17, 4)[None], matrix[:, None], groups=17, dst_dtype=S32)
    assert_same(depthwise[..., 0], expected, isa)


def test_source4_s8s8_is_u8s8_minus_a_compensation(isa: str) -> None:
    """``Y = X W = (X + 128) W - 128 W``."""
    src, weight = cases.random_s8((6, 70)), cases.random_s8((33, 70), 1)
    shifted = (src.int() + 128).to(U8)
    packed = pack_linear(weight)
    compensation = 128 * packed.compensation[0]
    assert_same(compensation, 128 * weight.int().sum(1).int())
    dst = TF.linear(src, packed, dst_dtype=S32)
    assert_same(dst, TF.linear(shifted, packed, dst_dtype=S32) - compensation, isa)
    assert_same(dst, (src.long() @ weight.long().t()).int(), isa)


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (2, 7), (4, 7), (2, 13), (7, 7)], ids=str)
@pytest.mark.parametrize("dtype", (U8, S8), ids=str)
def test_source4_average_pooling(isa: str, dtype: torch.dtype, kernel: tuple[int, int]) -> None:
    """An s32 sum over the window, divided by kh * kw; 14, 26 and 28 have no good reciprocal."""
    src = cases.random_q((1, 3, 14, 26), dtype)
    windows = src.long().unfold(2, kernel[0], kernel[0]).unfold(3, kernel[1], kernel[1])
    sums = windows.sum((-1, -2))
    quotients = [round(Fraction(s, kernel[0] * kernel[1])) for s in sums.flatten().tolist()]
    expected = torch.tensor(quotients).reshape(sums.shape).to(dtype)
    assert_same(TF.avg_pool(src, kernel), expected, isa)

# SPDX-License-Identifier: Apache-2.0
"""Statements of the source documents about post-ops: a named test for each, on every tier."""

from __future__ import annotations

import pytest
import torch
from cases import random_q
from torch import Tensor

import torchq.functional as TF
from torchq import Attr

U8, S8, F32 = torch.uint8, torch.int8, torch.float32


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    return random_q((9, 40), U8, 1), random_q((21, 40), S8, 2)


def accumulator(src: Tensor, weight: Tensor) -> Tensor:
    return src.double() @ weight.double().t()


def close_but_for_ties(got: Tensor, real: Tensor, dtype: torch.dtype) -> None:
    """Equal to the rounded float64 chain, unless that lies within 1e-4 of a tie."""
    limits = torch.iinfo(dtype)
    want = torch.round(real).clamp(limits.min, limits.max)
    tie = ((real - torch.floor(real)) - 0.5).abs() < 1e-4
    assert ((got.double() == want) | tie).all()
    assert tie.double().mean() < 0.01
    assert got.unique().numel() > 5


def test_tanh_sum_scale_shift(operands: tuple[Tensor, Tensor], isa: str):
    """dst = s_lin * (alpha * (s_sum * dst + s_tanh * tanh(s_conv * conv)) + beta)."""
    src, weight = operands
    old = random_q((9, 21), S8, 3)
    s_conv, s_tanh, s_sum, s_lin, alpha, beta = 3e-5, 40.0, 0.5, 1.25, 0.75, -6.0
    attr = Attr().set_output_scales(0, s_conv)
    attr.post_ops.append_eltwise("tanh", scale=s_tanh).append_sum(s_sum)
    attr.post_ops.append_eltwise("linear", alpha, beta, s_lin)
    got = TF.linear(src, weight, attr=attr, dst_dtype=S8, post_op_srcs=[old])
    tanh = torch.tanh(s_conv * accumulator(src, weight))
    close_but_for_ties(got, s_lin * (alpha * (s_sum * old.double() + s_tanh * tanh) + beta), S8)


def test_tanh_with_output_scale_and_eltwise_scale(operands: tuple[Tensor, Tensor], isa: str):
    """v1: output_scale = s_src * s_w dequantizes, the eltwise scale 1 / s_dst quantizes."""
    src, weight = operands
    s_src, s_w, s_dst = 0.01, 0.003, 1 / 127
    attr = Attr().set_output_scales(0, s_src * s_w)
    attr.post_ops.append_eltwise("tanh", scale=1 / s_dst)
    got = TF.linear(src, weight, attr=attr, dst_dtype=S8)
    close_but_for_ties(got, torch.tanh(s_src * s_w * accumulator(src, weight)) / s_dst, S8)


def test_output_scales_are_for_integer_computation_only(operands: tuple[Tensor, Tensor]):
    src, weight = operands
    with pytest.raises(ValueError, match=r"only for integer computation, got torch\.float32"):
        TF.linear(src.float(), weight, attr=Attr().set_output_scales(0, 0.5))


def test_dst_scale_comes_after_the_post_ops(operands: tuple[Tensor, Tensor], isa: str):
    """v3: post-ops act in real units; dst's scale and zero point are applied last."""
    src, weight = operands
    attr = Attr().set_scales("src", 0, 0.01).set_scales("weights", 0, 0.003)
    attr.set_scales("dst", 0, 0.01).set_zero_points("dst", 0, 128)
    attr.post_ops.append_eltwise("tanh")
    got = TF.linear(src, weight, attr=attr, dst_dtype=U8)
    real = torch.tanh(0.01 * 0.003 * accumulator(src, weight))
    close_but_for_ties(got, real / 0.01 + 128, U8)


def requantized(real: Tensor) -> Tensor:
    """Between the two post-ops: round(x / 0.05) in -100..100, then 0.05 times that."""
    return torch.round(real / 0.05).clamp(-100, 100) * 0.05


def test_requantization_by_linear_round_clip(operands: tuple[Tensor, Tensor], isa: str):
    src, weight = operands
    attr = Attr().set_output_scales(0, 2**-14)
    post_ops = attr.post_ops.append_eltwise("linear", 20.0).append_eltwise("round")
    post_ops.append_eltwise("clip", -100, 100).append_eltwise("linear", 0.5)
    got = TF.linear(src, weight, attr=attr, dst_dtype=F32)
    real = requantized(accumulator(src, weight) * 2**-14)
    assert torch.equal(got.double(), torch.round(real / 0.05) * 0.5)
    assert got.unique().numel() > 20


def test_requantization_by_binary(operands: tuple[Tensor, Tensor], isa: str):
    """The scale and the shift per channel are binary post-ops."""
    src, weight = operands
    scale, shift = torch.linspace(0.5, 2, 21), torch.linspace(-3, 3, 21)
    attr = Attr().set_output_scales(0, 2**-9)
    attr.post_ops.append_eltwise("relu", 0.5).append_binary("mul", scale, 2)
    attr.post_ops.append_binary("add", shift, 2).append_eltwise("round")
    got = TF.linear(src, weight, attr=attr, dst_dtype=S8)
    real = accumulator(src, weight) * 2**-9
    real = torch.where(real > 0, real, 0.5 * real)
    close_but_for_ties(got, real * scale.double() + shift.double(), S8)


def test_requantization_by_the_scale_of_sum(operands: tuple[Tensor, Tensor], isa: str):
    """The other branch arrives with its own scale and zero point: sum takes both to real units."""
    src, weight = operands
    old = random_q((9, 21), U8, 4)
    attr = Attr().set_scales("weights", 0, 2e-4).set_scales("dst", 0, 0.05)
    attr.post_ops.append_eltwise("swish", 1.0).append_sum(0.02, 117, U8)
    got = TF.linear(src, weight, attr=attr, dst_dtype=S8, post_op_srcs=[old])
    real = accumulator(src, weight) * 2e-4
    real = real * torch.sigmoid(real) + 0.02 * (old.double() - 117)
    close_but_for_ties(got, real / 0.05, S8)

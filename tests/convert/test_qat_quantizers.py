# SPDX-License-Identifier: Apache-2.0
"""Quantizers of quantization-aware training: values of the int8 ops, gradients of the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchq
from torchq.qat.quantizer import ActivationQuantizer, Quantizer, WeightQuantizer, affine

U8, S8 = (0, 255), (-128, 127)


def recorded(
    data: Tensor, integers: tuple[int, int] = U8, symmetric: bool = False, learn: bool = False,
    freeze_after: int | None = None,
) -> ActivationQuantizer:  # fmt: skip
    quantizer = ActivationQuantizer(integers, symmetric, learn, freeze_after)
    quantizer(data)
    quantizer.begin()
    return quantizer


def per_sample_formula(x: Tensor, scale: Tensor, zero_point: float, low: int, high: int) -> Tensor:
    """LSQ by autograd: a clamp, a rounding that passes gradients on, a scale with a smaller one."""
    count = x[0].numel()
    factor = 1 / (count * (high - zero_point)) ** 0.5
    scale = scale * factor + (scale - scale * factor).detach()
    v = torch.clamp(x / scale, low - zero_point, high - zero_point)
    v = v + (v.round() - v).detach()
    return v * scale


@pytest.mark.parametrize(
    ("integers", "symmetric"), [(U8, False), (U8, True), (S8, True), ((0, 127), False)]
)
@pytest.mark.parametrize("shift", [0.0, 0.7, 5.0])
def test_values_are_those_of_quantize_and_dequantize(
    integers: tuple[int, int], symmetric: bool, shift: float
) -> None:
    x = torch.randn(64, 257) + shift
    quantizer = recorded(x[:8], integers, symmetric).eval()
    scale, zero_point = quantizer.affine(x)
    edge = (torch.arange(-300, 300) + 0.5 - zero_point) * scale  # ties
    x = torch.cat([x.flatten(), edge, edge.nextafter(edge + 1), edge.nextafter(edge - 1)])
    dtype, zero = (torch.int8 if integers == S8 else torch.uint8), zero_point.int()
    q = torchq.functional.quantize(x, scale, zero, dtype).clamp(*integers)
    want = torchq.functional.dequantize(q, scale, zero)
    assert torch.equal(quantizer(x), want)


@pytest.mark.parametrize("integers", [U8, S8, (0, 127)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_are_those_of_calibration(integers: tuple[int, int], symmetric: bool) -> None:
    dtype, bits = (torch.int8 if integers == S8 else torch.uint8), 7 if integers[1] == 127 else 8
    bits = 8 if integers == S8 else bits
    for low, high in [(-1.0, 3.0), (0.2, 5.0), (-4.0, -1.0), (-2.5, 2.5), (0.0, 0.0)]:
        want = torchq.quantization.qparams.choose_qparams(low, high, dtype, bits, symmetric)
        scale, zero_point = affine(torch.tensor(low), torch.tensor(high), integers, symmetric)
        assert torch.equal(scale, want.scale) and int(zero_point) == int(want.zero_point)


def test_gradients_go_straight_through() -> None:
    quantizer = recorded(torch.tensor([-1.0, 1.55])).eval()  # steps of 0.01, zero point 100
    x = torch.tensor([-2.0, -1.004, -1.006, 0.0, 0.7, 1.554, 1.556, 9.0], requires_grad=True)
    weight = torch.arange(1.0, 9.0)
    (quantizer(x) * weight).sum().backward()
    # where the nearest level is one of the 256
    assert torch.equal(x.grad, weight * torch.tensor([0.0, 1, 0, 1, 1, 1, 0, 0]))


@pytest.mark.parametrize("zero", [0, 37])
def test_learned_scale_of_an_activation_has_the_gradient_of_lsq(zero: int) -> None:
    x = (torch.randn(6, 5, 4) * 2).requires_grad_()
    quantizer = recorded(x.detach(), learn=True)
    with torch.no_grad():
        quantizer.scale.copy_(torch.tensor(0.011))  # clips at both ends
        quantizer.zero_point.copy_(torch.tensor(float(zero)))
    grad = torch.randn(6, 5, 4)
    quantizer(x).backward(grad)
    other, scale = x.detach().clone().requires_grad_(), torch.tensor(0.011, requires_grad=True)
    per_sample_formula(other, scale, zero, *U8).backward(grad)
    torch.testing.assert_close(quantizer.scale.grad, scale.grad, rtol=2e-4, atol=1e-6)
    inside = (other > (0 - zero) * scale) & (other < (255 - zero) * scale)
    assert 0.2 < float(inside.float().mean()) < 0.95
    assert torch.equal(x.grad, grad * inside)


@pytest.mark.parametrize("axis", [0, 1, None])
def test_learned_scales_of_a_weight_have_the_gradients_of_lsq(axis: int | None) -> None:
    """By the paper's cases, not by autograd: r(v) - v inside, -Qn and Qp outside."""
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float32)
    quantizer = WeightQuantizer(weight, (-127, 127), axis, learn=True)
    with torch.no_grad():
        quantizer.scale.mul_(0.5)  # clips
    grad = torch.randn_like(weight)
    weight.requires_grad_()
    quantizer(weight).backward(grad)
    shape = [1] * 4
    if axis is not None:
        shape[axis] = -1
    scale = quantizer.scale.detach().double().reshape(shape)
    v = weight.detach().double() / scale
    cases = torch.where(v <= -127, -127.0, torch.where(v >= 127, 127.0, v.round() - v))
    count = weight.numel() // quantizer.scale.numel()
    want = (cases * grad).sum_to_size(scale.shape).reshape(quantizer.scale.shape)
    want = want / (count * 127) ** 0.5
    torch.testing.assert_close(quantizer.scale.grad.double(), want, rtol=1e-4, atol=1e-5)
    assert torch.equal(weight.grad, grad * (v.abs() < 127))


def test_scales_follow_the_weight() -> None:
    weight = torch.randn(4, 9)
    quantizer = WeightQuantizer(weight, (-127, 127), 0, learn=False)
    assert not list(quantizer.parameters()) and not quantizer.state_dict()
    rounded = quantizer(weight * 3)
    steps = rounded / (3 * weight.abs().amax(1, keepdim=True) / 127)
    assert float((steps - steps.round()).abs().max()) < 1e-4
    assert torch.equal(steps.abs().amax(1).round(), torch.full((4,), 127.0))


def test_ranges_move_in_training_and_freeze() -> None:
    quantizer = recorded(torch.tensor([-1.0, 2.0]), freeze_after=2)
    quantizer(torch.tensor([-3.0, 2.0]))
    assert quantizer.min_value.item() == pytest.approx(-1.2) and quantizer.max_value == 2.0
    quantizer.eval()(torch.tensor([-50.0, 50.0]))
    assert quantizer.min_value.item() == pytest.approx(-1.2)
    quantizer.train()(torch.tensor([-1.2, torch.inf]))  # counts as a batch, and moves nothing
    assert quantizer.max_value == 2.0
    quantizer(torch.tensor([-50.0, 50.0]))  # frozen
    assert quantizer.min_value.item() == pytest.approx(-1.2) and quantizer.steps == 3


def test_empty_and_bfloat16_sources() -> None:
    quantizer = recorded(torch.randn(8, 4))
    assert quantizer(torch.empty(0, 4)).shape == (0, 4)
    x = torch.randn(8, 4).bfloat16().requires_grad_()
    result = quantizer(x)
    result.sum().backward()
    assert result.dtype == x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("learn", [False, True])
def test_fixed_form_computes_the_same(learn: bool) -> None:
    x, weight = torch.randn(64, 8), torch.randn(8, 8)
    for quantizer, src in (
        (recorded(x, learn=learn), x),
        (WeightQuantizer(weight, (-127, 127), 0, learn), weight),
    ):
        assert isinstance(quantizer, Quantizer)
        torch.testing.assert_close(quantizer.eval().fixed(src)(src), quantizer(src))


def test_a_second_derivative_is_refused() -> None:
    quantizer, x = recorded(torch.randn(8)), torch.randn(8, requires_grad=True)
    (first,) = torch.autograd.grad(quantizer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("learn", [False, True])
def test_all_state_moves_to_another_device(learn: bool) -> None:
    """No operation mixes devices, and none waits for a value."""
    weight = WeightQuantizer(torch.randn(4, 4), (-127, 127), 0, learn).to("meta")
    quantizer = recorded(torch.randn(8), learn=learn, freeze_after=3).to("meta")
    for one, shape in ((weight, (4, 4)), (quantizer, (8,))):
        src = torch.randn(shape, device="meta", requires_grad=True)
        one(src).sum().backward()
        assert src.grad.shape == shape and src.grad.is_meta


def test_repr() -> None:
    assert "0..255, learned scale" in repr(recorded(torch.randn(4), learn=True))
    assert "-127..127, axis=0" in repr(WeightQuantizer(torch.randn(4, 4), (-127, 127), 0, False))

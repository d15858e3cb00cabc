# SPDX-License-Identifier: Apache-2.0
"""FakeQuantize: its definition, the rules T1 to T6, torch's fake quantization, deployment."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import FakeQuantize, QParams

U8, S8 = torch.uint8, torch.int8


def definition(x: float, il: float, ih: float, ol: float, oh: float, levels: int) -> float:
    """One value, in Python's numbers; its round is half to even."""
    if x <= min(il, ih):
        return ol
    if x > max(il, ih):
        return oh
    return round((x - il) / (ih - il) * (levels - 1)) / (levels - 1) * (oh - ol) + ol


def values(low: float, high: float, count: int = 400) -> Tensor:
    span = abs(high - low)
    inside = torch.linspace(min(low, high) - span / 4, max(low, high) + span / 4, count)
    return torch.cat([inside, torch.tensor([low, high, 0.0, 3e38, -3e38])])


BOUNDS = [
    (-1.0, 1.0, -1.0, 1.0, 256),
    (0.0, 6.0, 0.0, 255.0, 256),
    (-2.0, 2.0, -128.0, 127.0, 256),
    (0.5, 3.0, -4.0, 7.0, 16),
    (1.0, -1.0, -1.0, 1.0, 256),  # T5: inverted
    (2.0, 2.0, -1.0, 1.0, 256),  # T5: empty
    (-1.0, 1.0, 1.0, -1.0, 2),
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_definition_per_tensor(bounds: tuple[Any, ...]) -> None:
    il, ih, ol, oh, levels = bounds
    src = values(il, ih)
    expected = [definition(x, il, ih, ol, oh, levels) for x in src.tolist()]
    dst = FakeQuantize(il, ih, ol, oh, levels)(src)
    assert torch.equal(dst, torch.tensor(expected, dtype=torch.float64).float())


def test_rounding_is_half_to_even() -> None:
    src = torch.tensor([0.5, 1.5, 2.5, 254.5])
    assert FakeQuantize(0.0, 255.0)(src).tolist() == [0, 2, 2, 254]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_definition_per_channel(axis: int) -> None:
    low, high = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 4.0, -2.0])
    out_low = torch.tensor([-1.0, 3.0, 0.0])
    fq = FakeQuantize(low, high, out_low, 5.0, 32, axis=axis)
    src = torch.randn(3, 3, 3) * 3
    dst = fq(src)
    for c in range(3):
        one = FakeQuantize(low[c], high[c], out_low[c], 5.0, 32)
        assert torch.equal(dst.select(axis, c), one(src.select(axis, c)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_keeps_shape_and_dtype_and_nan(dtype: torch.dtype) -> None:
    fq = FakeQuantize(-1.0, 1.0)
    for shape in ((), (0,), (2, 3)):
        dst = fq(torch.zeros(shape, dtype=dtype))
        assert dst.shape == shape and dst.dtype == dtype
    nan = fq(torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype))
    assert nan[0].isnan() and nan[1:].tolist() == [1, -1]


# The rules


def test_t1_needs_integer_zero_points() -> None:
    fq = FakeQuantize(-1.3, 2.0)
    assert not float(fq.input_zero_point).is_integer()
    assert "must be an integer (T1)" in fq.why_float()
    with pytest.raises(ValueError, match=r"qparams: the zero point of the input must be an inte"):
        fq.to_quantized()
    out = FakeQuantize(0.0, 2.0, -1.3, 2.0)
    assert "zero point of the output must be an integer (T1)" in out.why_float()
    # with integers, the same values, but for ties in float32
    low, high = (0.1 * (q - 7) for q in (0, 255))
    fq = FakeQuantize(low, high)
    assert fq.why_float() == "" and float(fq.input_zero_point) == pytest.approx(7, abs=1e-9)
    assert_converts(fq, U8)


def test_t2_symmetric_bounds_have_no_integer_zero_point() -> None:
    fq = FakeQuantize(-2.0, 2.0)
    assert fq.input_zero_point.item() == 127.5
    assert "for 128 let input_low = -input_high / (1 - 2 / levels) (T2)" in fq.why_float()
    tuned = FakeQuantize(-1.0078740157480315 * 2, 2.0)
    assert tuned.input_zero_point.item() == pytest.approx(128, abs=1e-12)
    assert -2.0 / (1 - 2 / 256) == -(128 / 127) * 2 == -1.0078740157480315 * 2
    as_float32 = FakeQuantize(torch.tensor(-1.0078740157480315 * 2), torch.tensor(2.0))
    for fq in (tuned, as_float32):
        quantize, dequantize = fq.qparams()
        assert quantize == dequantize and quantize.dtype == S8 and quantize.zero_point == 0
        assert_converts(fq, S8)


def test_t3_int8_is_uint8_minus_128() -> None:
    fq = FakeQuantize(-128 / 64, 127 / 64)
    (u8, _), (s8, _) = fq.qparams(U8), fq.qparams(S8)
    assert u8.scale == s8.scale and u8.zero_point == 128 and s8.zero_point == 0
    src = values(-2, 2)
    q = [fq.to_quantized(dtype)[0](src).int() for dtype in (U8, S8)]
    assert torch.equal(q[0] - 128, q[1])
    assert torch.equal(q[0], torch.round(src.double() * 64 + 128).clamp(0, 255).int())
    assert torch.equal(q[1], torch.round(src.double() * 64).clamp(-128, 127).int())


def test_t4_output_that_is_quantized_already() -> None:
    assert FakeQuantize(0.0, 6.0, 0.0, 255.0).quantized_output == U8
    assert FakeQuantize(-2.0, 2.0, -128.0, 127.0).quantized_output == S8
    for bounds in ((0.0, 254.0), (-127.0, 127.0), (0.0, 1.0), (-1.0, 254.0)):
        assert FakeQuantize(0.0, 6.0, *bounds).quantized_output is None
    assert FakeQuantize(0.0, 6.0, 0.0, 255.0, levels=128).quantized_output is None

    quantize, dequantize = FakeQuantize(0.0, 6.0, 0.0, 255.0).qparams()
    assert quantize.dtype == U8 and quantize.zero_point == 0
    assert dequantize == QParams.per_tensor(1.0, 0, U8)
    fq = FakeQuantize(-128 / 64, 127 / 64, -128.0, 127.0)
    quantize, dequantize = fq.qparams()
    assert quantize.zero_point == 0 and dequantize == QParams.per_tensor(1.0, 0, S8)
    assert_converts(fq, S8)


@pytest.mark.parametrize("bounds", [(1.0, -1.0, -1.0, 1.0), (0.5, 0.5, -1.0, 1.0)], ids=str)
def test_t5_inverted_bounds_keep_the_definition(bounds: tuple[float, ...]) -> None:
    fq = FakeQuantize(*bounds)
    assert fq(torch.tensor([2.0, -2.0])).tolist() == [1.0, -1.0]
    assert "(T5)" in fq.why_float()
    with pytest.raises(ValueError, match="input_low must be below input_high"):
        fq.qparams()
    assert "(T5)" in FakeQuantize(0.0, 1.0, 1.0, 0.0).why_float()


def test_t6_zero_low_is_unsigned_and_positive_low_stays_float() -> None:
    fq = FakeQuantize(0.0, 6.0)
    assert fq.input_zero_point == 0 == fq.output_zero_point
    quantize, _ = fq.qparams()
    assert quantize.dtype == U8 and quantize.zero_point == 0
    assert_converts(fq, U8)
    assert "(T6), got -51" in FakeQuantize(1.0, 6.0).why_float()
    assert "(T6), got 306" in FakeQuantize(-6.0, -1.0).why_float()
    with pytest.raises(ValueError, match=r"outside 0..255 \(T6\)"):
        FakeQuantize(1.0, 6.0).to_quantized()


def assert_converts(fq: FakeQuantize, dtype: torch.dtype) -> None:
    """Equal in every value whose float64 quotient is not within float32's reach of a tie."""
    converted = fq.to_quantized(dtype)
    src = torch.cat([values(float(fq.input_low), float(fq.input_high), 2000), torch.randn(2000)])
    exact = src.double() / fq.input_scale + fq.input_zero_point
    clear = (exact - exact.floor() - 0.5).abs() > 1e-3
    assert clear.sum() > 3000
    error = (converted(src) - fq(src)).abs()
    assert error[clear].max() <= 1e-6 * max(abs(fq.output_low), abs(fq.output_high))
    assert error.max() <= 1.001 * fq.output_scale
    assert converted[0](src).dtype == dtype


def test_seven_bits() -> None:
    fq = FakeQuantize(0.0, 127 * 0.25, levels=128)
    quantize, _ = fq.qparams()
    assert quantize.bits == 7 and quantize.scale == 0.25
    src = torch.linspace(-3, 40, 1001)
    assert torch.equal(fq.to_quantized()(src), fq(src))
    assert fq.to_quantized()[0](src).max() == 127
    assert "levels must be 256 (8 bits) or 128 (7 bits), got 255" in (
        FakeQuantize(-1.0, 1.0, levels=255).why_float()
    )


def test_per_channel_weights() -> None:
    scale = torch.tensor([0.5, 0.125, 2.0])
    fq = FakeQuantize(-128 * scale, 127 * scale, axis=0)
    quantize, dequantize = fq.qparams()
    assert quantize == dequantize and quantize.axis == 0
    assert torch.equal(quantize.scale, scale) and quantize.dtype == S8
    src = torch.randn(3, 4000) * 50
    assert torch.equal(fq.to_quantized()(src), fq(src))
    assert torch.equal(fq.to_quantized()[0](src), (src / scale[:, None]).round().clamp(-128, 127))
    with pytest.raises(ValueError, match="must have 3 channels in dimension 0, got"):
        fq.to_quantized()(src.t())
    same = FakeQuantize(torch.zeros(3), torch.full((3,), 6.0), axis=1)
    assert isinstance(same.to_quantized(), nn.Sequential)


@pytest.mark.parametrize("axis", [1, -1])
def test_per_channel_activations(axis: int, tmp_path: Path) -> None:
    scale = torch.tensor([0.5, 0.125, 2.0, 1.0])
    zero = torch.tensor([0, 7, 128, 255])
    fq = FakeQuantize.from_affine(scale, zero, 0, 255, axis)
    src = torch.randn(2, 4, 3, 4) * 50
    model = fq.to_quantized()
    assert torch.equal(model(src), fq(src))
    quantize, dequantize = model
    assert torch.equal(torch.jit.script(model)(src), fq(src))
    assert torch.equal(torch.export.export(model, (src,)).module()(src), fq(src))
    for module, arg in ((quantize, src), (dequantize, quantize(src))):
        again = type(module).from_spec(module.read_spec())
        again.load_state_dict(module.state_dict())
        assert torch.equal(again(arg), module(arg)) and again.axis == axis
    torchq.save(model, tmp_path / "model")
    assert torch.equal(
        torchq.load(tmp_path / "model", nn.Sequential(nn.ReLU(), nn.ReLU()))(src), fq(src)
    )


# The bridge from torch


def torch_affine(src: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    if scale.numel() == 1:
        return torch.fake_quantize_per_tensor_affine(src, float(scale), int(zero), low, high)
    return torch.fake_quantize_per_channel_affine(src, scale, zero, 0, low, high)


@pytest.mark.parametrize("low,high", [(0, 255), (-128, 127), (0, 127), (-127, 127)])
@pytest.mark.parametrize("channels", [1, 4])
def test_from_affine_equals_torch_off_ties(low: int, high: int, channels: int) -> None:
    scale = torch.rand(channels) + 0.01
    zero = torch.randint(low, high, (channels,), dtype=torch.int32)
    fq = FakeQuantize.from_affine(scale, zero, low, high, 0 if channels > 1 else None)
    src = torch.randn(channels, 3000) * 60
    quotient = src.double() / scale.double()[:, None]
    clear = (quotient - quotient.floor() - 0.5).abs() > 1e-3
    error = (fq(src) - torch_affine(src, scale, zero, low, high)).abs()
    assert error[clear].max() <= 1e-4 and clear.float().mean() > 0.99


@pytest.mark.parametrize("zero_point", [0, 1, 128, 129])
def test_torch_rounds_before_adding_the_zero_point(zero_point: int) -> None:
    """At ties and for odd zero points the two differ by one step; oneDNN's order is ours."""
    src = torch.arange(-4, 5) + 0.5
    ours = FakeQuantize.from_affine(1.0, zero_point, 0, 255)(src)
    theirs = torch.fake_quantize_per_tensor_affine(src, 1.0, zero_point, 0, 255)
    inside = src > -zero_point
    expected = torch.round(src + zero_point) - zero_point
    assert torch.equal(ours[inside], expected[inside])
    difference = (ours - theirs)[inside].abs()
    assert difference.eq(zero_point % 2).all()


def test_from_torch_modules() -> None:
    ao = pytest.importorskip("torch.ao.quantization")
    for make, axis in (
        (ao.FakeQuantize, None),
        (ao.default_per_channel_weight_fake_quant, 0),
        (ao.default_fused_act_fake_quant, None),
    ):
        module = make()
        data = torch.randn(5, 40)
        module(data)
        fq = FakeQuantize.from_torch(module)
        assert fq.axis == axis
        module.disable_observer()
        step = module.scale.reshape(-1, 1).double()
        quotient = data.double() / step
        clear = (quotient - quotient.floor() - 0.5).abs() > 1e-3
        assert (fq(data) - module(data)).abs()[clear].max() <= 1e-5
        module.disable_fake_quant()
        with pytest.raises(ValueError, match="must have fake_quant_enabled"):
            FakeQuantize.from_torch(module)
    with pytest.raises(TypeError, match="got ReLU without scale"):
        FakeQuantize.from_torch(nn.ReLU())


def test_from_torch_keeps_the_scale() -> None:
    for scale in torch.rand(50):
        quantize, dequantize = FakeQuantize.from_affine(scale, 31, 0, 255).qparams()
        assert quantize == dequantize == QParams.per_tensor(float(scale), 31)


# Deployment


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.per_channel = FakeQuantize(-torch.arange(1.0, 5), torch.arange(1.0, 5), axis=1)
        self.per_tensor = FakeQuantize(0.0, 2.0, levels=16)

    def forward(self, x: Tensor) -> Tensor:
        return self.per_tensor(self.per_channel(self.conv(x)))


def test_scripts_traces_exports_compiles_and_saves(tmp_path: Path) -> None:
    model, src = Net().eval().requires_grad_(False), torch.randn(2, 3, 8, 8)
    expected = model(src)
    assert torch.equal(torch.jit.script(model)(src), expected)
    assert torch.equal(torch.jit.trace(model, src)(src), expected)
    assert torch.equal(torch.export.export(model, (src,)).module()(src), expected)
    assert torch.equal(torch.compile(model, backend="aot_eager")(src), expected)
    torch.jit.script(model).save(tmp_path / "net.pt")
    assert torch.equal(torch.jit.load(tmp_path / "net.pt")(src), expected)
    torchq.save(model, tmp_path / "net.torchq")
    other = Net()
    other.per_channel.input_low.zero_()
    assert torch.equal(torchq.load(tmp_path / "net.torchq", other)(src), expected)
    assert torch.equal(copy.deepcopy(model)(src), expected)


def test_bounds_stay_float64() -> None:
    fq = FakeQuantize(-0.1, 0.7)
    before = fq.input_low.clone()
    for convert in (fq.half, fq.float, fq.double, fq.share_memory):
        convert()
        assert torch.equal(fq.input_low, before) and fq.input_low.dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"'input_low' of the state must be torch.float64"):
        fq.load_state_dict({k: v.float() for k, v in fq.state_dict().items()})


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0.0, float("nan")), "input_high must be finite, got nan"),
        ((0.0, 1.0, None, None, 1), r"levels must be an int in \[2, 65536\], got 1"),
        ((0.0, 1.0, None, None, 256.0), "levels must be an int"),
        ((torch.zeros(3), torch.ones(2), None, None, 256, 1), "must have 1 or 3 values"),
        ((torch.zeros(3), 1.0), "axis must be the channel dimension for 3 values"),
        ((torch.zeros(0), 1.0), r"input_low must be finite, got \[\]"),
    ],
)
def test_construction_errors(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"torchq.FakeQuantize: .*{message}"):
        FakeQuantize(*arguments)


def test_call_errors() -> None:
    fq = FakeQuantize(torch.zeros(3), torch.ones(3), axis=1)
    for shape in ((3,), (2, 1, 4), (2, 4)):
        with pytest.raises(ValueError, match="src must have 3 channels in dimension 1"):
            fq(torch.zeros(shape))
    with pytest.raises(TypeError, match=r"src must be floating point, got torch.uint8"):
        fq(torch.zeros(2, 3, dtype=U8))
    with pytest.raises(ValueError, match="scale must be > 0, got 0"):
        FakeQuantize.from_affine(0.0, 0, 0, 255)
    with pytest.raises(ValueError, match=r"quant_max must be above quant_min, got 5..5"):
        FakeQuantize.from_affine(1.0, 0, 5, 5)


def test_bounds_and_axis_of_another_type():
    for wrong in (None, "1", object()):
        with pytest.raises(TypeError, match=r"input_high must be a number .* got .*\. Calibrate"):
            FakeQuantize(-1.0, wrong)
    for wrong in (1.0, "1", True):
        with pytest.raises(TypeError, match=r"axis must be an int or None, got .*\. Pass"):
            FakeQuantize(-1.0, 1.0, axis=wrong)

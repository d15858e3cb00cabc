# SPDX-License-Identifier: Apache-2.0
"""Models trained with fake quantizers: their scales are taken, and nothing needs calibration."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from flows import found, graph_of, names
from models import Wired
from torch import Tensor, nn
from torch.nn.utils import parametrize

import torchq
import torchq.nn as tnn
from torchq import FakeQuantize, QConfig

X = (2, 8, 12, 12)


def u8(high: float, zero_point: int = 0, **kwargs: Any) -> FakeQuantize:
    """256 levels; ``high`` is what 255 steps span."""
    return FakeQuantize.from_affine(high / 255, zero_point, 0, 255, **kwargs)


def s8(bound: float, low: int = -128) -> FakeQuantize:
    return FakeQuantize.from_affine(bound / 127, 0, low, 127)


def weight_fake(weight: Tensor, axis: int = 0, low: int = -128) -> FakeQuantize:
    bound = weight.detach().abs().movedim(axis, 0).flatten(1).amax(1)
    return FakeQuantize.from_affine(bound / 127, torch.zeros_like(bound), low, 127, axis)


def convert(model: nn.Module, *inputs: Tensor, **kwargs: Any) -> nn.Module:
    """Without calibration."""
    return torchq.convert(torchq.prepare(model.eval(), inputs, **kwargs))


def check(model: nn.Module, *inputs: Tensor, step: float, **kwargs: Any) -> nn.Module:
    """Equal to the model in float64 but for ties that float32 decides otherwise."""
    converted = convert(model, *inputs, **kwargs)
    with torch.no_grad():
        want = model.double()(*[x.double() for x in inputs])
    model.float()
    got = converted(*inputs)
    steps = ((got.double() - want) / step).abs()
    assert float(steps.max()) < 1.01, "off by more than one step"
    assert float((steps > 0.01).double().mean()) < 2e-3, "off by one too often"
    return converted


class Weighted(nn.Conv2d):
    """Fake-quantizes its weight in forward."""

    def __init__(self, *args: Any, low: int = -128, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fake = weight_fake(self.weight, low=low)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.fake(self.weight), self.bias)


def network(first: FakeQuantize, second: FakeQuantize, third: FakeQuantize) -> nn.Module:
    return nn.Sequential(
        first, Weighted(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), second,
        nn.MaxPool2d(2), Weighted(16, 8, 3), third,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        (u8(6, 128), u8(5), u8(4, 128)),
        (s8(3), s8(4), s8(2)),
        (s8(3, -127), s8(4, -127), s8(2, -127)),  # 255 levels
        (FakeQuantize.from_affine(6 / 127, 64, 0, 127), FakeQuantize.from_affine(0.04, 0, 0, 127),
         FakeQuantize.from_affine(0.03, 60, 0, 127)),
        (u8(6, 128), FakeQuantize.from_affine(0.3, 0, 0, 15), FakeQuantize(-1.5, 1.5 * 14 / 16,
                                                                           levels=16)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("config", [QConfig(), QConfig(activation_dtype=torch.int8)])
def test_scales_are_kept(
    first: FakeQuantize, second: FakeQuantize, third: FakeQuantize, config: QConfig
) -> None:
    model, x = models.randomize(network(first, second, third)), 2 * torch.randn(X)
    converted = check(model, x, step=float(third.output_scale), config=config)
    assert names(converted) == ["Quantize", "QConv2d", "QMaxPool2d", "QConv2d", "Dequantize"]
    for conv, dst in zip(found(converted, tnn.QConv2d), (second, third), strict=True):
        torch.testing.assert_close(conv.dst_scale.double(), dst.output_scale, rtol=1e-6, atol=0)


def test_weight_scales_are_kept_through_batch_norm() -> None:
    """The integers are those of training; a factor changes the scale only."""
    model = models.randomize(network(u8(6, 128), u8(5), u8(4, 128)))
    conv, norm = model[1], model[2]
    nn.init.uniform_(norm.weight, -1.5, 1.5)  # also below zero
    converted = convert(model, torch.randn(X))
    (layer,) = found(converted, tnn.QConv2d)[:1]
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    steps = conv.fake(conv.weight) / conv.fake.output_scale.reshape(-1, 1, 1, 1)
    assert torch.equal(layer.packed().unpack(), steps.round().to(torch.int8))
    want = (conv.fake.output_scale * factor.abs()).float()
    torch.testing.assert_close(layer.weight_scale, want, rtol=1e-6, atol=0)


def test_lowest_weight_times_a_negative_factor() -> None:
    """-128 steps become 128, which int8 has not: the channel gets a scale that fits."""
    conv = Weighted(8, 4, 1, bias=False)
    with torch.no_grad():
        conv.weight.fill_(0.01)
        conv.weight[0, 0] = -1.28
        conv.fake = FakeQuantize.from_affine(0.01, 0, -128, 127)
    model = Wired(lambda m, x: m.out(m.conv(m.src(x)) * -1.0), src=u8(2), conv=conv, out=u8(3, 128))
    x = torch.zeros(1, 8, 1, 1)
    x[0, 0] = 1
    got, want = convert(model, x)(x), model(x)
    assert float((got - want).abs().max()) <= 3 / 255 + 1e-6
    assert float(want[0, 0]) > 1.2


@pytest.mark.parametrize("signed", [False, True])
def test_integers_and_explicit_dequantization(signed: bool) -> None:
    """A fake quantizer that only quantizes, then a subtraction and a multiplication."""
    low, high = (-128.0, 127.0) if signed else (0.0, 255.0)
    src = FakeQuantize(-1.28, 1.27, low, high)
    zero = 0.0 if signed else 128.0
    model = Wired(
        lambda m, x: m.dst(m.conv((m.src(x) - zero) * 0.01)),
        src=src, conv=Weighted(8, 8, 3, padding=1), dst=u8(3, 128),
    )  # fmt: skip
    x = torch.randn(X)
    converted = check(model, x, step=3 / 255)
    assert names(converted) == ["Quantize", "QConv2d", "Dequantize"]
    assert abs(float(graph_of(converted).conv.src_scale) - 0.01) < 1e-6


def test_a_layer_that_emits_integers() -> None:
    """The destination's scale is the input's, what it stands for the output's."""
    model = Wired(
        lambda m, x: m.b(m.fake(m.a(m.src(x))) * 0.02), src=u8(6, 128), a=Weighted(8, 8, 3),
        fake=FakeQuantize(0, 2.55, 0, 255), b=nn.Conv2d(8, 4, 3),
    )  # fmt: skip
    x = torch.randn(X)
    converted = convert(model, x)
    assert names(converted) == ["Quantize", "QConv2d", "QConv2d"]
    assert abs(float(graph_of(converted).a.dst_scale) - 0.01) < 1e-6
    assert abs(float(graph_of(converted).b.src_scale) - 0.02) < 1e-6
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x), rtol=0.05, atol=0.02)


def test_functions_of_torch() -> None:
    weight = torch.randn(8, 8, 3, 3)
    scale = weight.abs().amax((1, 2, 3)) / 127

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(weight), nn.Parameter(scale)
            self.register_buffer("zeros", torch.zeros(8, dtype=torch.int32))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.fake_quantize_per_tensor_affine(x, 0.03, 100, 0, 255)
            scale, zeros = self.scale.float(), self.zeros
            w = torch.fake_quantize_per_channel_affine(self.weight, scale, zeros, 0, -128, 127)
            y = F.relu(F.conv2d(x, w, padding=1))
            return torch.fake_quantize_per_tensor_affine(y, 0.06, 0, 0, 255)

    x = torch.randn(X)
    converted = check(Model(), x, step=0.06)
    assert names(converted) == ["Quantize", "QConv2d", "Dequantize"]
    torch.testing.assert_close(graph_of(converted).conv2d.weight_scale, scale)


def test_parametrized_weight() -> None:
    conv, linear = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
    for module in (conv, linear):
        fake = weight_fake(module.weight)
        parametrize.register_parametrization(module, "weight", fake, unsafe=True)
    model = Wired(
        lambda m, x: m.c(m.linear(m.b(m.conv(m.a(x)).mean((2, 3))))),
        conv=conv, linear=linear, a=u8(6, 128), b=u8(1, 128), c=u8(1, 128),
    )  # fmt: skip
    converted = check(model, torch.randn(X), step=1 / 255)
    assert names(converted) == ["Quantize", "QConv2d", "Quantize", "QLinear", "Dequantize"]
    fake = linear.parametrizations.weight[0]
    torch.testing.assert_close(graph_of(converted).linear.weight_scale, fake.output_scale.float())


@pytest.mark.parametrize(
    "pool", [lambda x: x.mean((2, 3), keepdim=True), lambda x: F.avg_pool2d(x, 12)]
)
def test_means(pool: Any) -> None:
    """On the levels of the fake quantizer behind them, or else of the one in front."""
    for behind in ([], [u8(0.5, 3)]):
        model = Wired(
            lambda m, x: m.last(m.conv(m.behind(pool(m.src(x))))),
            src=u8(6, 128), behind=nn.Sequential(*behind), conv=Weighted(8, 4, 1), last=u8(1, 128),
        )  # fmt: skip
        x = torch.randn(X)
        converted = check(model, x, step=1 / 255) if behind else convert(model, x)
        (mean,) = found(converted, tnn.QAdaptiveAvgPool2d, tnn.QAvgPool2d)
        scale = 0.5 / 255 if behind else 6 / 255
        torch.testing.assert_close(mean.dst_scale, torch.tensor([scale]))


def test_mean_before_few_levels_is_rounded_once() -> None:
    """Not to the levels in front first; 16 levels are no 8-bit tensor of their own."""
    few = FakeQuantize.from_affine(0.07, 4, 0, 15)
    model = Wired(
        lambda m, x: m.last(m.conv(m.few(m.src(x).mean((2, 3), keepdim=True)))),
        src=u8(6, 128), few=few, conv=Weighted(8, 4, 1), last=u8(1, 128),
    )  # fmt: skip
    check(model, torch.randn(64, 8, 12, 12), step=1 / 255)


def test_requantization_and_branches() -> None:
    """Fake quantizers of int8 values with other scales, and results that are read as float32."""

    def forward(m: Any, x: Tensor) -> Any:
        y = m.first(m.conv(m.src(x)))
        return y, m.last(m.conv(m.second(y)) + m.second(y))

    model = Wired(forward, src=u8(6, 128), conv=Weighted(8, 8, 3, padding=1), first=u8(4, 100),
                  second=u8(2, 110), last=u8(6, 120))  # fmt: skip
    x = torch.randn(X)
    converted = convert(model.eval(), x)
    with torch.no_grad():
        want, got = model(x), converted(x)
    for a, b, step in zip(want, got, (4 / 255, 6 / 255), strict=True):
        assert float((a - b).abs().max()) < 2.01 * step
    assert "FakeQuantize" not in names(converted)


def test_concatenation_of_different_scales() -> None:
    model = Wired(
        lambda m, x: m.d(m.conv(m.c(torch.cat([m.a(x), m.b(x)], 1)))),
        a=u8(2, 128), b=u8(6, 128), c=u8(6, 128), d=u8(5, 128), conv=Weighted(16, 8, 3),
    )  # fmt: skip
    check(model, 2 * torch.randn(X), step=5 / 255)


# What cannot be taken


def test_reasons() -> None:
    """A fake quantizer without an int8 form stays, and the report says why."""
    channels = FakeQuantize.from_affine(torch.rand(8) + 0.01, torch.zeros(8), -128, 127, axis=1)
    off_zero = FakeQuantize(0.5, 3.0)
    model = Wired(lambda m, x: m.conv(m.b(m.a(x))), a=channels, b=off_zero, conv=nn.Conv2d(8, 4, 3))
    x = torch.randn(X)
    converted = torchq.quantize(model.eval(), [x])
    rows = {row.name: row for row in torchq.explain(converted).rows}
    assert "it has a scale per channel" in rows["a"].reason and not rows["a"].quantized
    assert "must contain zero" in rows["b"].reason
    assert rows["conv"].quantized
    fine = nn.Sequential(FakeQuantize.from_affine(1e-3, 0, 0, 65535), nn.Conv2d(8, 4, 3)).eval()
    reason = torchq.explain(torchq.prepare(fine, x)).rows[0].reason
    assert reason == "it has 65536 levels, and int8 has 256"


def test_weight_with_a_zero_point() -> None:
    """Its integers do not fit int8: quantized anew, and the report says so."""
    conv = nn.Conv2d(8, 8, 3)
    fake = FakeQuantize.from_affine(0.0005, 20, 0, 255)
    parametrize.register_parametrization(conv, "weight", fake, unsafe=True)
    x = torch.randn(X)
    model = Wired(lambda m, x: m.conv(m.src(x)), src=u8(6, 128), conv=conv).eval()
    converted = convert(model, x)
    rows = {row.name: row for row in torchq.explain(converted).rows}
    assert "has a zero point that int8 cannot do without: it is quantized anew" in (
        rows["conv"].reason
    )
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x), rtol=0.05, atol=0.05)


def test_what_is_not_fake_quantized_needs_data() -> None:
    model = nn.Sequential(u8(6, 128), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).eval()
    with pytest.raises(RuntimeError, match="prepared must be calibrated"):
        convert(model, torch.randn(X))


def test_float_layer_behind_a_fake_quantizer() -> None:
    """Rounding is not lost where nothing reads the value as int8."""
    model = nn.Sequential(u8(6, 128), nn.Softmax(1), u8(1), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(X)
    converted = convert(model, x)
    assert names(converted)[:2] == ["Quantize", "Dequantize"]
    torch.testing.assert_close(converted(x), model(x), rtol=0.02, atol=5e-3)

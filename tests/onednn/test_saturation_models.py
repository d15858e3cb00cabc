# SPDX-License-Identifier: Apache-2.0
"""Emulated pair saturation of modules and whole models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_saturation import S8, U8, random
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq import PostOps, QConfig, QParams, saturation
from torchq.functional.packing import pack_conv
from torchq.models.attached import computing_modules
from torchq.onednn.saturation import (
    emulate_module,
    prove,
    seven_bits,
)

CHAINS = [
    "",
    "eltwise_relu",
    "sum:0.5+eltwise_clip:-2:3",
    "binary_mul:2+eltwise_relu:0.1+binary_add:2",
]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("src", [QParams.per_tensor(0.02, 9), QParams.per_tensor(0.03, -4, S8)])
@pytest.mark.parametrize("dst", [None, QParams.per_tensor(0.05, 30)], ids=["f32", "u8"])
def test_without_saturation_a_module_equals_its_kernel(
    chain: str, src: QParams, dst: QParams | None
) -> None:
    values = [torch.linspace(0.5, 2, 8)] * chain.count("binary")
    post_ops = PostOps.parse(chain, values)
    linear = tnn.QLinear.from_float(nn.Linear(20, 8), src, dst, bits=7, post_ops=post_ops)
    conv = nn.Conv2d(6, 8, 3, 2, 1, groups=2)
    if src.dtype == S8:  # even weights lose nothing when halved
        conv.weight.data = torch.randint(-15, 16, conv.weight.shape) * 2.0
        conv.weight.data[:, 0, 0, 0] = 126.0
        conv.weight.data *= 0.001
    qconv = tnn.QConv2d.from_float(
        conv, src, dst, bits=7 if src.dtype == U8 else 8, post_ops=post_ops
    )
    if src.dtype == S8:
        even = torch.round(conv.weight.detach() / 0.001).to(S8)
        qconv = tnn.QConv2d(
            pack_conv(even, 2), torch.tensor(0.001), conv.bias, src, dst, post_ops,
            stride=2, padding=1,
        )  # fmt: skip
    for module, shape in ((linear, (7, 20)), (qconv, (2, 6, 9, 7))):
        x = random(shape, src.dtype)
        exact = module(x, residual := None) if "sum" not in chain else None
        if exact is None:
            like = torch.Size((7, 8)) if shape == (7, 20) else torch.Size((2, 8, 5, 4))
            residual = torch.randn(like) if dst is None else random(tuple(like), U8)
            exact = module(x, residual)
        ours = emulate_module(module, x, residual)
        assert ours.dtype == exact.dtype and ours.shape == exact.shape
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.relu(self.conv(x))).flatten(1))


def converted(config: QConfig, flow: Any = torchq) -> tuple[nn.Module, list[Tensor]]:
    model = Net().eval()
    with torch.no_grad():
        model.conv.weight.abs_()  # large sums of one sign
    data = [torch.rand(4, 8, 10, 10) * 3 for _ in range(2)]
    return flow.quantize(model, data, data[0], config), data


def test_a_model_that_saturates_is_reported() -> None:
    qmodel, data = converted(QConfig(activation_dtype=U8, activation_symmetric=False))
    before = [qmodel(x) for x in data]
    report = saturation.emulate(qmodel, data)
    assert [layer.name for layer in report.layers] == ["conv", "fc"]
    conv = report.layers[0]
    assert conv.src == "u8" and conv.pairs == 2 * 4 * 16 * (3 * 10 - 2) ** 2 * 4
    assert conv.outputs == 2 * 4 * 16 * 100
    assert 0 < conv.saturating < conv.pairs and 0 < conv.changed <= conv.outputs
    assert 0 < conv.sqnr < 60 and conv.worst > 0
    assert not conv.proof.safe.all() and math.isfinite(report.sqnr)
    text = str(report)
    assert "Pairs are consecutive k within a tap" in text and "pairs saturating" in text
    assert f"{100 * conv.saturating / conv.pairs:.4g} %" in text
    # the model is as it was
    assert all(torch.equal(qmodel(x), y) for x, y in zip(data, before, strict=True))
    assert next(iter(seven_bits(qmodel))) == "conv"
    assert "weight_bits=7 or activation_bits=7 rules it out" in seven_bits(qmodel)["conv"]


def test_layers_of_a_swapped_model_have_their_names() -> None:
    """Those that ``overrides`` and the rows of ``explain`` know."""
    qmodel, data = converted(QConfig(activation_symmetric=False), torchq.eager)
    report = saturation.emulate(qmodel, data)
    assert [layer.name for layer in report.layers] == ["conv", "fc"]
    assert list(seven_bits(qmodel)) == ["conv", "fc"]
    assert not report.not_emulated and report.layers[0].changed > 0
    assert torchq.explain(qmodel).details.keys() == {"conv", "fc"}


def test_each_way_to_run_a_model_has_what_that_one_kept() -> None:
    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x) * self.calls

    torch.manual_seed(0)
    data = [torch.rand(4, 8, 10, 10)] * 2
    seven = QConfig(activation_dtype=U8, activation_symmetric=False, weight_bits=7)
    qmodel = torchq.eager.quantize(Counts().eval(), data, data[0], seven)
    assert saturation.emulate(qmodel, data).sqnr > 120  # floats, added in another order
    assert not hasattr(qmodel, "calls")


@pytest.mark.parametrize("bits", [{"weight_bits": 7}, {"activation_bits": 7}], ids=str)
def test_seven_bits_rule_it_out(bits: dict[str, int]) -> None:
    qmodel, data = converted(QConfig(activation_dtype=U8, activation_symmetric=False, **bits))
    report = saturation.emulate(qmodel, data)
    assert all(layer.saturating == layer.changed == 0 for layer in report.layers)
    assert all(layer.sqnr == math.inf for layer in report.layers)
    assert "exact" in str(report)
    assert seven_bits(qmodel) == {}


def test_s8_halves_convolutions_but_not_linears() -> None:
    qmodel, data = converted(QConfig(activation_dtype=S8))
    report = saturation.emulate(qmodel, data)
    conv, fc = report.layers
    assert conv.src == fc.src == "s8" and conv.proof.halved and not fc.proof.halved
    assert conv.saturating == 0 and conv.changed > 0 and 20 < conv.sqnr < 80
    assert "weights halved" in str(report)
    assert "oneDNN without VNNI halves these weights" in seven_bits(qmodel)["conv"]
    module: Any = computing_modules(qmodel)["conv"]
    module.weight_scale.fill_(2.0**-9)  # divides exactly
    module.refold()
    conv = saturation.emulate(qmodel, data).layers[0]
    weight = module.packed().unpack().float() * module.weight_scale.reshape(-1, 1, 1, 1)
    # quantized weights times their scale, taken as float weights, are halved alike
    again = saturation.emulate(qmodel, data, {"conv": weight})
    assert again.layers[0].changed == conv.changed
    shifted = saturation.emulate(qmodel, data, {"conv": weight * 1.004})
    assert shifted.layers[0].noise != conv.noise


@pytest.mark.parametrize("dtype", [U8, S8], ids=["u8", "s8"])
def test_transposed_modules(dtype: torch.dtype) -> None:
    src, dst = QParams.per_tensor(0.02, 9, dtype), QParams.per_tensor(0.05, 30)
    layer = nn.ConvTranspose2d(6, 8, 3, 2, 1, 1, groups=2)
    with torch.no_grad():
        layer.weight.abs_()
    x = random((2, 6, 5, 4), dtype)
    module = tnn.QConvTranspose2d.from_float(layer, src, dst, bits=8)
    report = saturation.emulate(nn.Sequential(module, tnn.Dequantize(dst)), [x])
    (row,) = report.layers
    assert not report.not_emulated and row.changed > 0 and row.sqnr > 3
    assert (row.saturating > 0) == (dtype == U8) and row.proof.halved == (dtype == S8)
    assert row.proof.largest.numel() == 8
    seven = tnn.QConvTranspose2d.from_float(layer, src, dst, bits=7)
    if dtype == U8:
        torch.testing.assert_close(emulate_module(seven, x), seven(x), rtol=0, atol=0)
        assert prove(seven.packed(), U8).safe.all()
    scale = torch.full((8,), 2.0**-7)
    module.weight_scale.copy_(scale)
    module.refold()
    weight = module.packed().unpack() * 2.0**-7
    assert torch.equal(emulate_module(module, x), emulate_module(module, x, None, weight))


def test_errors() -> None:
    with pytest.raises(ValueError, match="quantized linears, convolutions or recurrent"):
        saturation.emulate(nn.ReLU(), [random((2, 4), U8)])
    with pytest.raises(TypeError, match="must be a QLinear, QConv or QConvTranspose, got ReLU"):
        emulate_module(nn.ReLU(), random((2, 4), U8))
    qmodel, _ = converted(QConfig())
    with pytest.raises(ValueError, match="at least one batch"):
        saturation.emulate(qmodel, [])

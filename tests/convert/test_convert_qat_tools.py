# SPDX-License-Identifier: Apache-2.0
"""Models that torch.ao and torchao prepared for training: their scales are taken."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from flows import found, graph_of, names
from torch import Tensor, nn

import torchq
import torchq.nn as tnn

X = (2, 8, 12, 12)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.relu2 = nn.ReLU(), nn.ReLU()
        self.add = torch.ao.nn.quantized.FloatFunctional()
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(8 * 36, 5)
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y = self.pool(self.relu2(self.add.add(y, x)))
        return self.dequant(self.fc(y.flatten(1)))


def trained(model: nn.Module) -> nn.Module:
    for _ in range(3):
        model(torch.randn(X))
    return model.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fx", "eager", "eager-fused", "symmetric"])
def test_models_of_torch_ao(kind: str, tmp_path: Path) -> None:
    """Prepared by torch for training, converted here; observers switched on change nothing."""
    tq = torch.ao.quantization
    model, x = models.randomize(Residual()).train(), torch.randn(X)
    if kind == "fx":
        from torch.ao.quantization import quantize_fx

        mapping = tq.get_default_qat_qconfig_mapping("x86")
        qat = trained(quantize_fx.prepare_qat_fx(model, mapping, (x,)))
    else:
        model.qconfig = tq.get_default_qat_qconfig("x86")
        if kind == "symmetric":
            activation = tq.FakeQuantize.with_args(
                observer=tq.MovingAverageMinMaxObserver, quant_min=-128, quant_max=127,
                dtype=torch.qint8, qscheme=torch.per_tensor_symmetric,
            )  # fmt: skip
            model.qconfig = tq.QConfig(activation, tq.default_per_channel_weight_fake_quant)
        if kind == "eager-fused":
            model = tq.fuse_modules_qat(model, [["conv1", "bn1", "relu"], ["conv2", "bn2"]])
        qat = trained(tq.prepare_qat(model))
    before = {k: v.clone() for k, v in qat.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = torchq.convert(torchq.prepare(qat, x))
    assert all(torch.equal(v, before[k]) for k, v in qat.state_dict().items())
    qat.apply(tq.disable_observer)
    with torch.no_grad():
        want = qat(x)
    got, last = converted(x), found(converted, tnn.QLinear)[-1]
    # torch rounds before it adds the zero point, and sums in float32: a step now and then
    assert float(((got - want) / last.dst_scale).abs().max()) < 3.01
    rows = torchq.explain(converted).rows
    assert all(row.quantized for row in rows), [row for row in rows if not row.quantized]
    torchq.save(converted, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model")(x), got)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("off", [False, True])
def test_observers_of_torch_ao_pass_values_on(off: bool, tmp_path: Path) -> None:
    """Observers, and fake quantizers that are switched off, are no part of graphs and files."""
    tq, x = torch.ao.quantization, torch.randn(X)
    model = nn.Sequential(tq.QuantStub(), nn.Conv2d(8, 8, 3), nn.ReLU()).train()
    model.qconfig = tq.get_default_qat_qconfig("x86") if off else tq.get_default_qconfig("x86")
    watched = tq.prepare_qat(model) if off else tq.prepare(model.eval())
    watched(x)
    watched.apply(tq.disable_fake_quant).eval()
    converted = torchq.quantize(watched, [x], strict=True)
    kinds = {type(m).__module__ for m in graph_of(converted).modules()}
    assert not any("torch.ao" in kind for kind in kinds)
    with torch.no_grad():
        assert torchq.sqnr(watched(x), converted(x)) > 35
    torchq.save(converted, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", watched)(x), converted(x))


def torchao_qat(activation: bool, dtype: torch.dtype, granularity: Any, symmetric: bool) -> Any:
    ao = pytest.importorskip("torchao.quantization")
    qat = pytest.importorskip("torchao.quantization.qat")
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).train()
    tokens = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    options = {"group_size": 8} if granularity == "per_group" else {"granularity": granularity}
    weights = qat.IntxFakeQuantizeConfig(dtype, is_symmetric=symmetric, **options)
    config = qat.QATConfig(
        activation_config=tokens if activation else None, weight_config=weights, step="prepare"
    )
    ao.quantize_(model, config)
    with torch.no_grad():
        model[0].weight[0, 0] = -3.0  # the lowest level, which amax / 127 would miss
    return model.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("activation", [True, False], ids=["tokens", "weights"])
@pytest.mark.parametrize(
    ("granularity", "dtype", "symmetric"),
    [
        ("per_channel", torch.int8, True),
        ("per_channel", torch.int8, False),
        ("per_channel", torch.int4, True),
        ("per_group", torch.int4, True),
    ],
)
def test_models_of_torchao(
    activation: bool, granularity: str, dtype: torch.dtype, symmetric: bool
) -> None:
    """Tokens make dynamic layers; the weights of a channel keep their scale."""
    model = torchao_qat(activation, dtype, granularity, symmetric)
    data = [torch.randn(4, 32) for _ in range(3)]
    converted = torchq.quantize(model, data, strict=True)
    kinds = names(converted)
    assert "IntxFakeQuantizer" not in kinds and "FakeQuantize" not in kinds
    layers = found(converted, tnn.DynamicQLinear if activation else tnn.QLinear)
    assert len(layers) == 2
    if granularity == "per_channel" and symmetric:
        model(data[0])
        scale = model[0].weight_fake_quantizer.scale.flatten()
        torch.testing.assert_close(layers[0].weight_scale, scale)
    with torch.no_grad():
        for x in (*data, data[0][:1]):
            assert torchq.sqnr(model(x), converted(x)) > 35


class Rounded(nn.Module):
    """Branches on a value where ``own`` is set, so that it is not captured."""

    def __init__(self, own: bool, weights: bool) -> None:
        super().__init__()
        qat = pytest.importorskip("torchao.quantization.qat")
        config = qat.IntxFakeQuantizeConfig(torch.int8, "per_channel", is_dynamic=False)
        rounding = qat.fake_quantizer.IntxFakeQuantizer(config)
        linear = qat.FakeQuantizedLinear(32, 32, weight_config=config)
        first = linear if weights else nn.Linear(32, 32)
        self.layers = nn.Sequential(first, nn.Identity() if weights else rounding, nn.Linear(32, 8))
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        if self.own and float(x.sum()) > 1e9:
            x = -x
        result: Tensor = self.layers(x)
        return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("own", [True, False], ids=["parts", "whole"])
@pytest.mark.parametrize("weights", [True, False], ids=["weights", "activations"])
def test_scales_that_torchao_fixed_are_in_files(weights: bool, own: bool, tmp_path: Path) -> None:
    """They were in no state: a loaded model chose others in its first call."""
    model, x = Rounded(own, weights).eval(), torch.randn(4, 32)
    with torch.no_grad():
        model(x)
        model.layers[0].weight.mul_(1.5)  # a step of training
    converted = torchq.quantize(model, [x])
    torchq.save(converted, tmp_path / "m")
    loaded = torchq.load(tmp_path / "m", model)
    for src in (3 * x, x, (3 * x)[None].expand(4, 4, 32) if weights else x):
        assert torch.equal(loaded(src), converted(src))
    with pytest.raises(ValueError, match=r"fake_quantizer\.scale' is|layers\.1\.scale' is"):
        torchq.load(tmp_path / "m", Rounded(own, weights).eval())

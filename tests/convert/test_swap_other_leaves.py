# SPDX-License-Identifier: Apache-2.0
"""Layers that others wrap, share, inherit from or compute the weight of, without a graph."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flows import converted
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import torchq
import torchq.nn as tnn
from torchq import QConfig, eager


def rows() -> Tensor:
    return torch.randn(2, 3, 8)


class Inheriting(nn.LSTM):
    pass


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn, self.out = rnn, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


RECURRENT = {
    "inherits": lambda: Inheriting(8, 8, batch_first=True),
    "parametrized": lambda: parametrizations.weight_norm(
        nn.GRU(8, 8, batch_first=True), "weight_hh_l0"
    ),
}


@pytest.mark.parametrize("config", [QConfig(), QConfig(dynamic=True)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_modules(name: str, config: QConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Recurrent(RECURRENT[name]()).eval(), [rows() for _ in range(3)]
    result = converted(eager, model, data, config=config, strict=True)
    assert type(result.rnn) is (tnn.QLSTM if name == "inherits" else tnn.QGRU)
    torchq.save(result, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", model)(data[0]), result(data[0]))


class Lora(nn.Module):
    """As peft wraps a layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, width = base_layer, base_layer.in_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.lora_A["default"], self.lora_B["default"]
        return self.base_layer(x) + b(a(x.to(a.weight.dtype))).to(self.weight.dtype)


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.same = nn.Linear(8, 8), nn.Linear(8, 8)
        self.same.weight = self.enc.weight
        self.again = self.enc

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.same(self.again(self.enc(x))), self.enc.weight.t())


OTHERS = {
    "lora": (lambda: nn.Sequential(Lora(nn.Linear(8, 8)), nn.Linear(8, 5)), 4),
    "tied": (TiedAutoencoder, 2),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 5))), 1),
    "old weight_norm": (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 5))), 1),
    "spectral_norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 5))), 1),
}


@pytest.mark.parametrize("config", [QConfig(), QConfig(dynamic=True)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_leaves(name: str, config: QConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, count = OTHERS[name]
    model, data = make().eval(), [rows() for _ in range(3)]
    kind, state = [type(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    result = converted(eager, model, data, config=config, strict=True)
    assert type(result) is type(model)
    assert sum(isinstance(m, tnn.QuantizedLeaf) for m in result.modules()) == count
    torchq.save(result, tmp_path / "model")
    for other in (torchq.load(tmp_path / "model", model), pickle.loads(pickle.dumps(result))):
        assert torch.equal(other(data[0]), result(data[0]))
    assert kind == [type(m) for m in model.modules()]  # the original is as it was
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert name != "tied" or result.again is result.enc


@pytest.mark.parametrize("config", [QConfig(), QConfig(dynamic=True)], ids=["static", "dynamic"])
def test_hooks_of_leaves_stay(config: QConfig) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)).eval(), rows()
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda m, args, kwargs: seen.append("in"), with_kwargs=True)
    model[0].register_forward_hook(lambda m, args, y: y * 2)
    model[1].register_forward_hook(lambda m, args, y: y[0])
    result = converted(eager, model, [x], config=config, strict=True)
    for one in (result, copy.deepcopy(result), model):
        seen.clear()
        assert one(x).shape == (2, 3, 8) and seen == ["in"]


class Transposing(nn.Module):
    """As transformers' Conv1D, whose weight is [inputs, outputs]."""

    def __init__(self) -> None:
        super().__init__()
        self.nf = 5
        self.weight, self.bias = nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()[:-1] + (self.nf,)  # noqa: RUF005
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


def test_weights_have_the_shape_of_the_float_module() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Transposing()).eval(), rows()
    leaf = converted(eager, model, [x], strict=True)[0]
    assert leaf.weight.shape == (8, 5) and leaf.nf == 5
    torch.testing.assert_close(leaf.weight + 0, model[0].weight.detach(), rtol=0, atol=0.02)

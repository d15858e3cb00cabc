# SPDX-License-Identifier: Apache-2.0
"""Modules with classes and forwards of their own, swapped or traced."""

from __future__ import annotations

import pickle
import types
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


class Only3x3(nn.Conv2d):
    """Nothing but the way it is made is its own."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1, padding_mode="zeros")


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        mean, std = self.weight.mean((1, 2, 3), True), self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / std, self.bias, self.stride, self.padding)


class Dense(nn.Module):
    def __init__(self, inputs: int, channels: int, transposed: bool = False) -> None:
        super().__init__()
        shape = (inputs, channels) if transposed else (channels, inputs)
        self.w, self.b = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(channels))


class Padded(nn.Conv2d):
    """Its ``padding`` is that of an image, which is added elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride)


class Indexed(nn.Linear):
    """Has what those that take its place call what they hold."""

    def __init__(self) -> None:
        super().__init__(8, 5)
        self.layer, self.module, self.config = 2, 3, "none"


class Plain(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w, bias=self.b)


class Transposed(Dense):
    """As GPT-2 has it."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()[:-1] + (self.w.shape[1],)  # noqa: RUF005
        return torch.addmm(self.b, x.view(-1, x.size(-1)), self.w).view(shape)


class Matrix(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return self.b + x @ self.w


class Clipped(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w, self.b).clamp(max=0.5)


class Scaled(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * 3, self.w, self.b)


class Twice(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.w, self.b), self.w)


class Squared(Dense):
    """Its weight is what its source makes of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.w * x.mean()) + self.b


class Turned(Dense):
    """The reshape behind it moves values elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w, self.b).view(self.w.shape[0], -1)


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 3


class Inner(nn.Conv2d):
    def _conv_forward(self, *args: Tensor) -> Tensor:
        return super()._conv_forward(*args) * 3


def patched(module: nn.Module) -> nn.Module:
    """As libraries do that add to modules which are there already."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 3

    module.forward = types.MethodType(forward, module)
    return module


class Swapped(nn.Module):
    """Its Python code acts on values, so that it cannot be traced."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        return y * 2 if float(y.sum()) > 1e9 else y


def image() -> Tensor:
    return torch.randn(2, 4, 7, 7)


def rows() -> Tensor:
    return torch.randn(2, 3, 8)


ONE_LAYER = {
    "inherited": (lambda: Only3x3(4), image, tnn.QConv2d),
    "standardized": (lambda: Standardized(4, 6, 3, stride=2, bias=False), image, tnn.QConv2d),
    "padded": (lambda: Padded(4, 6, 3, padding=1), image, tnn.QConv2d),
    "indexed": (Indexed, rows, tnn.QLinear),
    "linear": (lambda: Plain(8, 5), rows, tnn.QLinear),
    "transposed": (lambda: Transposed(8, 8, True), rows, tnn.QLinear),
    "matmul": (lambda: Matrix(8, 5, True), rows, tnn.QLinear),
}
MORE = {
    "clipped": (lambda: Clipped(8, 5), rows),
    "scaled": (lambda: Scaled(8, 5), rows),
    "twice": (lambda: Twice(8, 8), rows),
    "of_source": (lambda: Squared(8, 8, True), rows),
    "turned": (lambda: Turned(8, 8), rows),
    "call": (lambda: Called(8, 5), rows),
    "inside": (lambda: Inner(4, 4, 3), image),
    "patched": (lambda: patched(nn.Linear(8, 5)), rows),
}


@pytest.mark.parametrize("name", ONE_LAYER)
def test_code_that_is_one_layer(name, tmp_path) -> None:
    make, source, cls = ONE_LAYER[name]
    torch.manual_seed(0)
    model, data = Swapped(make()).eval(), [source() for _ in range(3)]
    result = converted(torchq, model, data, strict=True)
    assert type(result.part.layer) is cls and type(model.part) is not cls
    (row,) = torchq.explain(result).rows
    assert row.quantized and row.is_matmul and row.kind == type(model.part).__name__
    torchq.save(result, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model)
    assert torch.equal(loaded(data[0]), result(data[0]))
    converted(torchq, model.part, data)


@pytest.mark.parametrize("name", MORE)
def test_code_that_is_more(name) -> None:
    """It stays float where modules are swapped, and computes the same where it is traced."""
    make, source = MORE[name]
    torch.manual_seed(0)
    model, data = Swapped(make()).eval(), [source() for _ in range(3)]
    result = converted(torchq, model, data)
    assert type(result.part) is type(model.part)
    assert not torchq.explain(result).rows[0].quantized
    for flow in (torchq, eager):
        converted(flow, nn.Sequential(model.part, nn.ReLU()).eval(), data)


def test_dynamic_layers() -> None:
    """A language model's layers, in one configuration and the other."""
    torch.manual_seed(0)
    model = Swapped(nn.Sequential(Transposed(8, 8, True), Plain(8, 5))).eval()
    data = [rows() for _ in range(3)]
    result = converted(torchq, model, data, config=QConfig(dynamic=True), strict=True)
    assert [type(m.layer) for m in result.part] == [tnn.DynamicQLinear] * 2


def test_weights_that_others_read() -> None:
    """They read the module's own, which stays."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Transposed(8, 8, True), Plain(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x)) @ self.a.w
            return y * 2 if float(y.sum()) > 1e9 else y

    torch.manual_seed(0)
    result = converted(torchq, Tied().eval(), [rows() for _ in range(3)])
    assert type(result.a) is Transposed and type(result.b.layer) is tnn.QLinear


def test_arguments_by_name() -> None:
    """The quantized layer's is called as that of torch.nn."""

    class Named(Swapped):
        def forward(self, x: Tensor) -> Tensor:
            y = self.part(x=x)
            return y * 2 if float(y.sum()) > 1e9 else y

    result = converted(torchq, Named(Plain(8, 5)).eval(), [rows() for _ in range(3)])
    assert type(result.part) is Plain
    assert torchq.explain(result).rows[0].reason == "called with other arguments than its source"


class Asks(Swapped):
    """Reads the shapes of a transposed convolution from 4 channels to 6."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.part.bias.shape == (6,) and self.part.weight.shape[0] == 4
        return super().forward(x)


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "output_padding": 1}, {"groups": 2}], ids=str
)
def test_transposed_convolutions(options: dict[str, int], computed: bool, tmp_path: Path) -> None:
    """As the others: int8 with what code asks of them, pickled and saved."""

    torch.manual_seed(0)
    part = nn.ConvTranspose2d(4, 6, 3, padding=1, **options)
    model = Asks(parametrizations.weight_norm(part) if computed else part).eval()
    data = [image() for _ in range(3)]
    result = converted(torchq, model, data, strict=True)
    (row,) = torchq.explain(result).rows
    assert row.quantized and row.is_matmul and type(result.part.layer) is tnn.QConvTranspose2d
    torchq.save(result, tmp_path / "model")
    for copied in (pickle.loads(pickle.dumps(result)), torchq.load(tmp_path / "model", model)):
        assert torch.equal(copied(data[0]), result(data[0]))


def test_weights_tied_to_an_embedding() -> None:
    """The embedding is a class of the user, which looks rows up by a function."""

    class ScaledEmbedding(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3

    torch.manual_seed(0)
    model = Swapped(nn.Sequential(ScaledEmbedding(10, 8), nn.Linear(8, 10))).eval()
    model.part[1].weight = model.part[0].weight
    data = [torch.randint(0, 10, (2, 5)) for _ in range(3)]
    result = converted(torchq, model, data, strict=True)
    assert type(result.part[1].layer) is tnn.QLinear
    assert result.part[0].weight is not model.part[0].weight


@pytest.mark.parametrize("flow", [torchq, eager])
def test_patched_recurrent_module(flow) -> None:
    def forward(self: nn.LSTM, x: Tensor) -> Tensor:
        return type(self).forward(self, x)[0] * 3

    torch.manual_seed(0)
    lstm = nn.LSTM(8, 8, batch_first=True)
    lstm.forward = types.MethodType(forward, lstm)
    model = nn.Sequential(lstm, nn.Linear(8, 5)).eval()
    result = converted(flow, model, [rows() for _ in range(3)])
    assert not torchq.explain(result).rows[0].quantized

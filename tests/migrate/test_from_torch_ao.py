# SPDX-License-Identifier: Apache-2.0
"""Models of torch.ao: the same integers and scales, and results within one step."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from calls import assert_same
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import quantize_fx

import torchq

RANGE = ao.HistogramObserver.with_args(reduce_range=True)
ONE_SCALE = ao.QConfig(activation=RANGE, weight=ao.default_weight_observer)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.ao says in each call that it is going
        yield


@pytest.fixture(params=("qnnpack", "x86"))
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = request.param
    yield request.param
    torch.backends.quantized.engine = before


class Between(nn.Module):
    """A module between stubs, as torch.ao's eager mode wants it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.quant, self.module, self.dequant = ao.QuantStub(), module, ao.DeQuantStub()

    def forward(self, src: Tensor) -> Tensor:
        return self.dequant(self.module(self.quant(src)))


def eager(model: nn.Module, src: Tensor, backend: str = "x86") -> nn.Module:
    model = model.eval()
    model.qconfig = ao.get_default_qconfig(backend)
    prepared = ao.prepare(model)
    prepared(src)
    return ao.convert(prepared)


def by_fx(model: nn.Module, *srcs: Tensor, backend: str = "x86") -> nn.Module:
    mapping = ao.get_default_qconfig_mapping(backend)
    prepared = quantize_fx.prepare_fx(model.eval(), mapping, srcs)
    prepared(*srcs)
    return quantize_fx.convert_fx(prepared)


def step_of(model: Any) -> float:
    """The last scale of a model."""
    scales = [float(m.scale) for m in model.modules() if hasattr(m, "scale")]
    return scales[-1]


def assert_within(a: Tensor, b: Tensor, step: float) -> None:
    worst = float((a - b).abs().max())
    assert worst <= 1.001 * step, f"{worst / step} steps"


# One module


def with_config(module: nn.Module, weight: Any) -> nn.Module:
    module.qconfig = ao.QConfig(activation=RANGE, weight=weight)
    return module


SRC = torch.randn(2, 8, 12, 12, generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
MODULES = {
    "conv": nn.Conv2d(8, 6, 3, stride=2, padding=1),
    "depthwise": nn.Conv2d(8, 8, 3, groups=8),
    "reflect": nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect"),
    "conv, relu": nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU()),
    "linear": nn.Linear(12, 5),
    "BatchNorm2d": nn.BatchNorm2d(8),
    "LayerNorm": nn.LayerNorm(12),
    "GroupNorm": nn.GroupNorm(2, 8),
    "InstanceNorm2d": nn.InstanceNorm2d(8),
    "Hardswish": nn.Hardswish(),
    "ELU": nn.ELU(),
    "LeakyReLU": nn.LeakyReLU(0.2),
    "Sigmoid": nn.Sigmoid(),
    "Tanh": nn.Tanh(),
    "Hardsigmoid": nn.Hardsigmoid(),
    "ReLU6": nn.ReLU6(),
    "Dropout": nn.Dropout(),
    "MaxPool2d": nn.MaxPool2d(2),
    "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d(3),
    "AvgPool2d": nn.AvgPool2d(2),
    "Upsample": nn.Upsample(scale_factor=2, mode="bilinear"),
    "GELU": nn.GELU(),
    "Hardtanh": nn.Hardtanh(-0.5, 0.7),
    "PixelShuffle": nn.PixelShuffle(2),
}


@pytest.mark.parametrize("example", (False, True), ids=("leaves", "graph"))
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, example: bool):
    old = eager(Between(MODULES[name]), SRC)
    new = torchq.from_torch_ao(old, SRC if example else None)
    assert type(new) is Between
    differ = (new(SRC) - old(SRC)).abs() > 1e-6
    assert float(differ.float().mean()) < 0.002  # at ties of float32
    assert_within(new(SRC), old(SRC), step_of(old))


@pytest.mark.parametrize("dims", (1, 2))
def test_transposed(dims: int):
    """On qnnpack: on x86 torch.ao's transposed convolutions are far from what they mean."""
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, "qnnpack"
    layer = getattr(nn, f"ConvTranspose{dims}d")(8, 4, 3, stride=2, output_padding=1)
    layer.qconfig = ONE_SCALE
    src = torch.randn(2, 8, *[7] * dims)
    old = eager(Between(layer), src, "qnnpack")
    for example in (None, src):
        new = torchq.from_torch_ao(old, example)
        assert_within(new(src), old(src), step_of(old))
    torch.backends.quantized.engine = before


def test_prelu():
    """Beside its meaning: torch.ao's own kernel is off by many steps."""
    layer = with_config(nn.PReLU(), ao.default_observer)
    old = eager(Between(layer), SRC)
    quant, prelu = old.quant, old.module
    rounded = torch.fake_quantize_per_tensor_affine(
        SRC, float(quant.scale), int(quant.zero_point), 0, 255
    )
    expected = torch.fake_quantize_per_tensor_affine(
        torch.prelu(rounded, prelu.weight.dequantize()), prelu.scale, prelu.zero_point, 0, 255
    )
    assert_within(torchq.from_torch_ao(old)(SRC), expected, prelu.scale)


# Whole models


class Functions(nn.Module):
    """Sums, products and concatenations, as torch.ao wants them in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        for name in ("sum", "relu", "product", "cat"):
            self.add_module(name, FloatFunctional())
        self.head = nn.Linear(16, 4)

    def forward(self, src: Tensor) -> Tensor:
        src = self.quant(src)
        one, two = self.first(src), self.second(src)
        both = self.relu.add_relu(self.sum.add(one, two), src)
        both = self.cat.cat([both, self.product.mul(one, two)], 1)
        return self.dequant(self.head(both.mean((2, 3))))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.n = nn.BatchNorm2d(channels)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, groups=2)

    def forward(self, src: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.n(self.a(src)))) + src)


class Various(nn.Module):
    """Functions that FX makes calls in torch.ops.quantized of, or calls on quantized tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.tanh = nn.Conv2d(8, 8, 3), Block(8), nn.Tanh()
        self.head = nn.Linear(16, 4)

    def forward(self, src: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(self.block(self.stem(src)), 0.2)
        x = torch.cat([x, torch.sigmoid(x)], 1)
        x = nn.functional.hardswish(nn.functional.max_pool2d(x, 2)) * x.mean((2, 3), keepdim=True)
        return self.head(nn.functional.adaptive_avg_pool2d(self.tanh(x), 1).flatten(1))


def cnn() -> nn.Module:
    layers = nn.Conv2d(8, 8, 3), nn.ReLU(), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 4))


@pytest.mark.parametrize("example", (False, True), ids=("leaves", "graph"))
@pytest.mark.parametrize("model", (Functions, Various, cnn), ids=("eager", "fx", "cnn"))
def test_models(engine: str, model: Any, example: bool):
    make = eager if model is Functions else by_fx
    old = make(model(), SRC, backend=engine)
    new = torchq.from_torch_ao(old, SRC if example else None)
    # a step where a product lies at a tie of torch.ao's float32, and what follows from that
    assert_within(new(SRC), old(SRC), 2 * step_of(old))
    rows = [row for row in torchq.explain(new).rows if row.is_matmul]
    assert rows and all(row.quantized for row in rows)
    if example:
        (graph,) = torchq.explain(new).graphs
        assert graph.graph_calls == 1 and graph.own_calls == 0
        assert_same(type(new).forward(new, SRC), new(SRC))  # the code, where guards do not hold


@pytest.mark.parametrize("example", (False, True), ids=("leaves", "graph"))
def test_weights_keep_their_integers_and_scales(example: bool):
    old = eager(Functions(), SRC)
    new = torchq.from_torch_ao(old, SRC if example else None)
    for name in ("first", "second", "head"):
        theirs, ours = getattr(old, name).weight(), getattr(new, name)[0].layer
        assert_same(ours.packed().unpack(), theirs.int_repr())
        assert_same(ours.weight_scale, theirs.q_per_channel_scales().float())
        assert_same(ours.src_scale, torch.tensor([step(old, name)]))


def step(old: Any, name: str) -> float:
    """Scale of the source of a layer of Functions."""
    return float(old.cat.scale if name == "head" else old.quant.scale)


def test_saved_and_pickled(tmp_path: Path):
    new = torchq.from_torch_ao(by_fx(cnn(), SRC), SRC)
    torchq.save(new, tmp_path / "model")
    assert_same(torchq.load(tmp_path / "model")(SRC), new(SRC))
    for each in (new, torchq.from_torch_ao(by_fx(cnn(), SRC))):
        buffer = io.BytesIO()
        torch.save(each, buffer)
        buffer.seek(0)
        assert_same(torch.load(buffer, weights_only=False)(SRC), each(SRC))


def test_functions_of_packed_weights():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(4))
            self.kernel = nn.Parameter(torch.randn(4, 8, 3))
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            conv = nn.functional.conv1d(x, self.kernel, self.shift, (2,), (1,), (1,), 1)
            return torch.relu(conv), nn.functional.linear(y, self.weight, self.bias)

    srcs = torch.randn(2, 8, 9), torch.randn(3, 16)
    old = by_fx(Functional(), *srcs)
    for example in (None, srcs):
        for a, b in zip(torchq.from_torch_ao(old, example)(*srcs), old(*srcs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


class Branches(nn.Module):
    """Code that torch.fx does not trace, nor torch.export."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.first, self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, src: Tensor) -> Tensor:
        src = self.quant(src if float(src.sum()) > 0 else -src)
        return self.last(self.dequant(self.head(self.first(src))))


def test_code_that_does_not_trace():
    model, src = Branches(), torch.randn(3, 8)
    model.last.qconfig = None
    model.qconfig = ao.get_default_qconfig("x86")
    prepared = ao.prepare(model.eval())
    prepared(src)
    old = ao.convert(prepared)
    with pytest.raises(ValueError, match="example_inputs must be given"):
        torchq.from_torch_ao(old)
    new = torchq.from_torch_ao(old, src)
    torch.testing.assert_close(new(src), old(src), rtol=0, atol=1e-6)
    rows = {row.name: row for row in torchq.explain(new).rows}
    assert rows["first.0"].quantized and rows["head.0"].quantized and not rows["last"].quantized
    assert "float in the model" in rows["last"].reason


class Shared(nn.Module):
    """Modules that are called with several scales."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.conv, self.pool, self.last = nn.Conv2d(8, 8, 1), nn.AvgPool2d(2), nn.Conv2d(8, 8, 1)

    def forward(self, src: Tensor) -> Tensor:
        src = self.pool(self.quant(src))
        return self.dequant(self.pool(self.last(self.conv(self.conv(src)))))


def test_modules_with_several_scales():
    old = eager(Shared(), SRC)
    for example in (None, SRC):
        new = torchq.from_torch_ao(old, example)
        assert_within(new(SRC), old(SRC), 2 * step_of(old))  # such averages are not rounded
    rows = {row.name: row for row in torchq.explain(torchq.from_torch_ao(old)).rows}
    assert not rows["conv.0"].quantized and "example_inputs" in rows["conv.0"].reason
    assert rows["last.0"].quantized


# What is not taken


def test_not_taken():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
            self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 4)

        def forward(self, src: Tensor) -> Tensor:
            return self.dequant(self.head(self.lstm(self.quant(src))[0]))

    old = eager(Recurrent(), torch.randn(3, 2, 8))
    with pytest.raises(ValueError, match=r"'lstm', a quantized\.LSTM: nothing here"):
        torchq.from_torch_ao(old)
    half = ao.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), dtype=torch.float16)
    with pytest.raises(ValueError, match=r"'0', a quantized\.dynamic\.Linear.*'1', a .*LSTM"):
        torchq.from_torch_ao(half)
    with pytest.raises(ValueError, match="without any"):
        torchq.from_torch_ao(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(TypeError, match=r"torch\.jit\.script"):
        torchq.from_torch_ao(torch.jit.script(nn.Linear(4, 4)))


def test_the_model_stays():
    old = eager(Functions(), SRC)
    expected = old(SRC)
    torchq.from_torch_ao(old, SRC)
    assert_same(old(SRC), expected)

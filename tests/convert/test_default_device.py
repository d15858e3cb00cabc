# SPDX-License-Identifier: Apache-2.0
"""torchq computes on the CPU, and on its source's device, whatever torch's defaults are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._device import _device_constructors

import torchq
import torchq.functional as TF
from tests.support.slow import rest_slow
from torchq import FakeQuantize

U8 = torch.uint8
X = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8)
Q, WEIGHT, ONE = (
    torch.arange(48, dtype=U8).reshape(2, 3, 8),
    torch.ones(5, 8, dtype=torch.int8),
    torch.ones(2, 3),
)


class Net(nn.Module):
    """Layers, functions and constants of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.up, self.pool = nn.PReLU(8), nn.ConvTranspose2d(8, 8, 2, 2), nn.MaxPool2d(2)
        self.mix, self.fc = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        x = F.leaky_relu(self.pool(self.up(x)), 0.1) + 0.5
        rows = self.mix(x.flatten(2).transpose(1, 2)) * self.table
        rows = torch.cat([F.gelu(rows), F.prelu(rows, self.table[:1])], 1)
        rows = F.scaled_dot_product_attention(rows[:, None], rows[:, None], rows[:, None])
        return self.fc(F.layer_norm(rows, (8,)).mean((1, 2)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


def fake_quantized() -> nn.Module:
    return nn.Sequential(FakeQuantize(-1.0, 1.0), nn.Linear(8, 8), FakeQuantize(-2.0, 2.0))


MODELS = {"net": (Net, X), "recurrent": (Recurrent, ROWS), "fake": (fake_quantized, ROWS)}


@contextmanager
def elsewhere() -> Iterator[None]:
    """The default device is another one; meta stands for cuda."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.filterwarnings("ignore:torchq.convert. nothing runs")
@pytest.mark.parametrize("way", ["static", "dynamic", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_flows_and_files(kind: str, way: str, tmp_path: Path) -> None:
    make, x = MODELS[kind]
    torch.manual_seed(0)
    model = make().eval()
    flow = torchq.eager if way == "eager" else torchq
    config = torchq.QConfig(dynamic=way == "dynamic")
    expected = flow.quantize(model, [x, x * 0.5], x, config)
    with elsewhere():
        qmodel = flow.quantize(model, [x, x * 0.5], x, config)
        assert torch.equal(qmodel(x), expected(x))
        torchq.save(qmodel, tmp_path / "model")
        assert torch.equal(torchq.load(tmp_path / "model", model)(x), expected(x))
        assert torchq.explain(qmodel).rows == torchq.explain(expected).rows
        prepared = torchq.calibrate(flow.prepare(model, x, config), [x])
        assert torchq.compare(prepared, flow.convert(prepared), [x])
        if kind == "net" and way == "static":
            torchq.saturation.emulate(qmodel, [x])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONFIGS = {
    "fast": torchq.QConfig(),
    "best": torchq.QConfig(recipe="best"),
    "int4": torchq.QConfig(dynamic=True, weight_bits=4, recipe="accurate"),
    "percentile": torchq.QConfig(activation_observer="percentile"),
}


@pytest.mark.filterwarnings("ignore:torchq.convert. nothing runs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("config", rest_slow(CONFIGS, "best"))
def test_default_dtypes_change_no_bit(
    config: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make, x = MODELS[kind]
    torch.manual_seed(0)
    model, data = make().eval(), [x, x * 0.5]
    expected = torchq.quantize(model, data, config=CONFIGS[config])
    with default_dtype(dtype):
        qmodel = torchq.quantize(model, data, config=CONFIGS[config])
        assert torch.equal(qmodel(x), expected(x))
        torchq.save(qmodel, tmp_path / "model")
        assert torch.equal(torchq.load(tmp_path / "model", model)(x), expected(x))
        assert torchq.explain(qmodel).rows == torchq.explain(expected).rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("learn", rest_slow([False, True], True))
def test_default_dtypes_and_training(learn: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net()

    def trained() -> Tensor:
        qat = torchq.prepare_qat(model, X, learn_scales=learn)
        optimizer = torch.optim.SGD(qat.parameters(), 1e-3)
        qat(X).square().mean().backward()
        optimizer.step()
        result: Tensor = torchq.convert(qat.eval())(X)
        return result

    expected = trained()
    with default_dtype(dtype):
        assert torch.equal(trained(), expected)


CALLS = {
    "quantize": lambda: TF.quantize(ONE, 0.1, 3),
    "dequantize": lambda: TF.dequantize(Q, 0.1, 3),
    "requantize": lambda: TF.requantize(Q, 0.1, 3, 0.2, 4),
    "reorder": lambda: TF.reorder(Q, torch.float32),
    "reorder_scaled": lambda: TF.reorder(
        ONE, U8, attr=torchq.Attr().set_scales("dst", 0, 0.1).set_zero_points("dst", 0, 3)
    ),
    "eltwise": lambda: TF.eltwise(Q, "relu"),
    "add": lambda: TF.add(Q, Q, torchq.Attr()),
    "binary": lambda: TF.binary(Q, Q, "add"),
    "sum": lambda: TF.sum([Q, Q], [0.5, 2.0]),
    "concat": lambda: TF.concat([Q, Q]),
    "shuffle": lambda: TF.shuffle(Q[:, :2], 1, 2),
    "softmax": lambda: TF.softmax(Q, -1),
    "reduction": lambda: TF.reduction(Q, "mean", [1]),
    "max_pool": lambda: TF.max_pool(Q, 2),
    "avg_pool": lambda: TF.avg_pool(Q, 2),
    "linear": lambda: TF.linear(Q, WEIGHT),
    "matmul": lambda: TF.matmul(Q, WEIGHT.t()),
    "conv1d": lambda: TF.conv1d(Q, WEIGHT[:, :3, None].contiguous()),
    "gemm": lambda: TF.gemm_u8s8s32(Q[0], WEIGHT.t(), co=7),
    "dynamic": lambda: TF.requantize_dynamic(WEIGHT.int(), 0.1),
    "attention": lambda: TF.attention(Q, Q, Q),
}


@pytest.mark.parametrize("default", [elsewhere, lambda: default_dtype(torch.bfloat16)])
@pytest.mark.parametrize("name", CALLS)
def test_functions_take_numbers(name: str, default: Any) -> None:
    expected = CALLS[name]()
    with default():
        got = CALLS[name]()
    several = isinstance(got, tuple)
    for one, other in zip(
        got if several else [got], expected if several else [expected], strict=True
    ):
        assert torch.equal(one, other)


REAL = {"zeros", "ones", "empty", "rand", "randn", "full", "eye", "linspace", "scalar_tensor"}
"""Factories of the default dtype, whatever they are given; full and tensor depend on numbers."""


def test_every_factory_names_a_device_and_a_dtype() -> None:
    """Calls, conversion and loading must not follow the default device, and not the dtype."""
    names = {function.__name__ for function in _device_constructors()}
    own = {"fake_quantize.py", "factories.py"}  # a float module; what the user's code makes
    left = []
    for path in Path(torchq.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            module = call.func.value
            if isinstance(module, ast.Name) and module.id == "torch" and call.func.attr in names:
                given = {keyword.arg for keyword in call.keywords}
                unnamed = "device" not in given
                unnamed |= call.func.attr in REAL and not given & {"dtype", "generator"}
                if unnamed and path.name not in own:
                    left.append(f"{path.name}:{call.lineno}")
    assert not left

# SPDX-License-Identifier: Apache-2.0
"""Models in bfloat16 and float16, and float32 ones under autocast."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
import torchq.functional as TF
from tests.support.slow import rest_slow

BF16, F16 = torch.bfloat16, torch.float16
each_half = pytest.mark.parametrize("half", [BF16, F16], ids=["bf16", "f16"])


def close(a: Tensor, b: Tensor, decibels: float = 25) -> None:
    assert a.dtype == b.dtype
    assert torchq.sqnr(a.float(), b.float()) > decibels


@pytest.fixture(autouse=True)
def _seeded(_same_start: None) -> Any:
    with torch.no_grad():
        yield


class Block(nn.Module):
    """Convolutions, a residual, a pool, a norm, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.pool, self.norm = nn.MaxPool2d(2), nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = torch.relu(self.body(y) + y)
        y = self.up(self.pool(y)).flatten(2).transpose(1, 2)
        y = self.norm(y)
        y = y + self.attend(y, y, y, need_weights=False)[0]
        return self.head(y).softmax(-1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.rnn = kind(16, 24, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(48, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(ids))[0])


IMAGES = [torch.randn(2, 3, 8, 8).to(BF16) for _ in range(4)]  # which float16 holds, too
IDS = [torch.randint(0, 50, (3, 7)) for _ in range(4)]
MODELS: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "block": (Block, IMAGES),
    "lstm": (lambda: Recurrent(nn.LSTM), IDS),
    "gru": (lambda: Recurrent(nn.GRU), IDS),
}
DYNAMIC = torchq.QConfig(dynamic=True)
RECIPES = {recipe: torchq.QConfig(recipe=recipe) for recipe in ("accurate", "best")}
INT4 = torchq.QConfig(dynamic=True, weight_bits=4, recipe="best", embedding_bits=4)
FLOWS: dict[str, Callable[[nn.Module, list[Any]], nn.Module]] = {
    "quantize": lambda m, data: torchq.quantize(m, data, strict=True),
    "dynamic": lambda m, data: torchq.quantize(m, None, data[0], DYNAMIC),
    "eager": lambda m, data: torchq.eager.quantize(m, data, data[0]),
    "quantize_dynamic": lambda m, data: torchq.quantize_dynamic(m),
    "accurate": lambda m, data: torchq.quantize(m, data, config=RECIPES["accurate"]),
    "best": lambda m, data: torchq.quantize(m, data, config=RECIPES["best"]),
}


def inputs(data: list[Any], dtype: torch.dtype) -> list[Any]:
    return [x.to(dtype) if x.is_floating_point() else x for x in data]


@each_half
@pytest.mark.parametrize("flow", rest_slow(FLOWS, "quantize", "dynamic"))
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, flow: str, half: torch.dtype) -> None:
    """They keep their class, their result's dtype and its values, as their float32 twins do."""
    make, data = MODELS[name]
    model, data = make().eval().to(half), inputs(data, half)
    converted = FLOWS[flow](model, data)
    assert type(converted) is type(model)
    got, expected = converted(data[0]), model(data[0])
    close(expected, got, 22)
    assert any(row.quantized for row in torchq.explain(converted).rows)
    graphs = torchq.explain(converted).graphs
    assert all(graph.graph_calls and not graph.own_calls for graph in graphs)
    wide = inputs(data, torch.float32)
    twin = FLOWS[flow](copy.deepcopy(model).float(), wide)
    quantized = [{r.name for r in torchq.explain(m).rows if r.quantized} for m in (converted, twin)]
    assert quantized[0] == quantized[1]
    close(twin(wide[0]).to(half), got, 22)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(24, 10), (5, 24)),
    "conv1d": (nn.Conv1d(4, 8, 3), (2, 4, 9)),
    "conv2d": (nn.Conv2d(8, 8, 3, groups=8, padding=1), (2, 8, 6, 5)),
    "conv2d reflect": (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (2, 4, 6, 5)),
    "conv3d": (nn.Conv3d(3, 5, 2), (2, 3, 4, 4, 4)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (2, 4, 5, 5)),
}


# Convolutions have a dynamic form where they are asked for: test_dynamic_convolutions. Recipes
# multiply a source in its own dtype by factors.
TWINS = [(name, flow) for name in LAYERS for flow in ("quantize", "eager")]
TWINS += [("linear", flow) for flow in ("dynamic", "quantize_dynamic")]


@each_half
@pytest.mark.parametrize(("name", "flow"), TWINS)
def test_one_layer_is_its_float32_twin_rounded(name: str, flow: str, half: torch.dtype) -> None:
    layer, shape = LAYERS[name]
    model = nn.Sequential(copy.deepcopy(layer)).eval().to(half)
    data = [torch.randn(shape).to(half) for _ in range(3)]
    converted = FLOWS[flow](model, data)
    twin = FLOWS[flow](copy.deepcopy(model).float(), [x.float() for x in data])
    assert torch.equal(converted(data[0]), twin(data[0].float()).to(half))
    close(model(data[0]), converted(data[0]))
    leaf = converted[0]
    assert leaf.weight.dtype == half and leaf.bias.dtype == half
    assert torch.equal(leaf.weight.clone(), twin[0].weight.to(half))


@each_half
def test_dynamic_convolutions(half: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3)).eval().to(half), IMAGES[0].to(half)
    converted = torchq.quantize_dynamic(model, {nn.Conv2d})
    twin = torchq.quantize_dynamic(copy.deepcopy(model).float(), {nn.Conv2d})
    assert torch.equal(converted(x), twin(x.float()).to(half))


@each_half
@pytest.mark.parametrize("flow", rest_slow(FLOWS, "quantize", "dynamic"))
def test_every_way_to_keep_and_run(flow: str, half: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10))
    model = model.eval().to(half)
    data = [torch.randn(6, 24).to(half) for _ in range(3)]
    converted = FLOWS[flow](model, data)
    expected = converted(data[0])
    close(model(data[0]), expected)
    torchq.save(converted, tmp_path / "file")
    fresh = FLOWS[flow](copy.deepcopy(model), data)
    fresh.load_state_dict(converted.state_dict())
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(converted), buffer)
    buffer.seek(0)
    every = {
        "pickle": pickle.loads(pickle.dumps(converted)),
        "file": torchq.load(tmp_path / "file", model),
        "state": fresh,
        "script": torch.jit.load(buffer),
        "compiled": torch.compile(converted, fullgraph=True, backend="aot_eager"),
        "exported": torch.export.export(converted, (data[0],)).module(),
    }
    for name, one in every.items():
        assert torch.equal(one(data[0]), expected), name


class Mixed(nn.Module):
    """A body in bfloat16, a norm and a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = nn.Linear(16, 32).to(BF16), nn.Linear(32, 32).to(BF16)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.more(torch.relu(self.body(x.to(BF16))))
        return self.head(self.norm(y.float()))


@pytest.mark.parametrize("flow", rest_slow(FLOWS, "quantize", "dynamic"))
def test_mixed_dtypes(flow: str) -> None:
    model = Mixed().eval()
    data = [torch.randn(4, 16) for _ in range(3)]
    converted = FLOWS[flow](model, data)
    close(model(data[0]), converted(data[0]))
    assert sum(row.quantized for row in torchq.explain(converted).rows if row.is_matmul) == 3
    assert converted.body(data[0].to(BF16)).dtype == BF16


@each_half
@pytest.mark.parametrize("flow", rest_slow(FLOWS, "quantize", "dynamic"))
def test_autocast(flow: str, half: torch.dtype) -> None:
    """Autocast has the same effect on quantized layers as on float ones, for either dtype."""
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32),
                          nn.Linear(32, 10)).eval()  # fmt: skip
    data = [torch.randn(6, 24) for _ in range(3)]
    outside = FLOWS[flow](model, data)
    with torch.autocast("cpu", half):
        inside = FLOWS[flow](model, data)
        got = inside(data[0])
        close(model(data[0]), got)
        close(model(data[0].to(half)), inside(data[0].to(half)))
        assert torch.equal(outside(data[0]), got)
        last = inside[4](torch.randn(3, 32))
        assert last.dtype == half
    assert torch.equal(outside(data[0]), inside(data[0]))
    assert inside(data[0]).dtype == torch.float32


@each_half
def test_autocast_in_one_layer(half: torch.dtype) -> None:
    """The float32 result, rounded: sources are not rounded first."""
    converted = torchq.quantize_dynamic(nn.Sequential(nn.Linear(24, 10)).eval())
    x = torch.randn(5, 24)
    with torch.autocast("cpu", half):
        got = converted(x)
    assert torch.equal(got, converted(x).to(half))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))) + x


@each_half
@pytest.mark.parametrize("flow", rest_slow(FLOWS, "quantize", "dynamic"))
def test_autocast_of_a_residual(flow: str, half: torch.dtype) -> None:
    """The sum with float32 is float32, also where the addition is a part of the layer."""
    model, x = Residual().eval(), torch.randn(6, 24)
    converted = FLOWS[flow](model, [x])
    with torch.autocast("cpu", half):
        close(model(x), converted(x))


@each_half
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_results(kind: type[nn.RNNBase], half: torch.dtype) -> None:
    """Results and states of either dtype, packed sequences, and cells."""
    model = nn.ModuleList([kind(6, 8)]).eval().to(half)[0]
    q = torchq.quantize_dynamic(nn.Sequential(model))[0]
    twin = torchq.quantize_dynamic(nn.Sequential(copy.deepcopy(model).float()))[0]
    x, h = torch.randn(5, 2, 6).to(half), torch.randn(1, 2, 8).to(half)
    state = (h, h) if kind is nn.LSTM else h
    wide = (h.float(), h.float()) if kind is nn.LSTM else h.float()
    for got, expected in zip(_flat(q(x, state)), _flat(twin(x.float(), wide)), strict=True):
        assert torch.equal(got, expected.to(half))
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3])
    assert q(packed)[0].data.dtype == half


def _flat(result: Any) -> list[Tensor]:
    y, state = result
    return [y, *(state if isinstance(state, tuple) else (state,))]


@each_half
def test_cells(half: torch.dtype) -> None:
    cell, x = nn.LSTMCell(6, 8).to(half).eval(), torch.randn(3, 6).to(half)
    q = torchq.quantize_dynamic(nn.Sequential(cell), {nn.LSTMCell})[0]
    for got, expected in zip(q(x), cell(x), strict=True):
        close(expected, got)


def test_conversion_of_a_quantized_model_is_refused() -> None:
    converted = torchq.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval())
    with pytest.raises(TypeError, match=r"Convert the float model, to torch\.bfloat16 say"):
        converted.bfloat16()


@each_half
def test_tools(half: torch.dtype, tmp_path: Path) -> None:
    model, images = Block().eval().to(half), inputs(IMAGES, half)
    prepared = torchq.calibrate(torchq.prepare(model, images[0]), images)
    converted = torchq.convert(prepared)
    layers = torchq.compare(prepared, converted, images[:1]).layers
    assert len(layers) > 5 and all(layer.sqnr > 15 for layer in layers)
    name = str(half).removeprefix("torch.")
    assert f"x is {name} of shape" in str(torchq.explain(converted))
    assert torchq.sensitivity(model, images, images[0], progress=False)
    with pytest.raises(NotImplementedError, match=rf"gives {name}: quantize model.float\(\)"):
        torchq.to_onnx(converted, tmp_path / "model.onnx", images[0])


@each_half
def test_tables_and_4_bits_with_a_recipe(half: torch.dtype, tmp_path: Path) -> None:
    model = Recurrent(nn.LSTM).eval().to(half)
    converted = torchq.quantize(model, IDS, config=INT4)
    close(model(IDS[0]), converted(IDS[0]), 12)
    torchq.save(converted, tmp_path / "file")
    assert torch.equal(torchq.load(tmp_path / "file", model)(IDS[0]), converted(IDS[0]))


def test_factors_and_products_beyond_float16() -> None:
    """The source of a smoothed layer is multiplied in float32."""
    factor, x = torch.ones(32), torch.randn(4, 32).half()
    factor[3], factor[5], x[:, 3], x[:, 5] = 2.0**20, 4.0, 0.0, 30000.0
    codes, scale = TF.quantize_weight_int4(torch.randn(10, 32), 32)
    int8 = torchq.packing.pack_linear(torch.randint(-127, 128, (10, 32), dtype=torch.int8))
    int4 = torchq.packing.pack_linear_int4(codes, scale)
    for layer in (
        torchq.nn.DynamicQLinear(int8, torch.full((1,), 1e-4), None, "per_row", factor),
        torchq.nn.DynamicQLinearInt4(int4, None, factor),
    ):
        assert torch.equal(layer(x), layer(x.float()).half())


@each_half
def test_training_and_choosing(half: torch.dtype) -> None:
    """They take data and models in these dtypes, and training keeps them."""
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 10)).eval().to(half)
    data = [torch.randn(6, 24).to(half) for _ in range(3)]

    def agreement(other: nn.Module) -> float:
        return min(float(torchq.sqnr(model(data[0]), other(data[0]))), 99.0)

    assert torchq.tune(model, data, agreement, 60.0).trials
    assert len(torchq.sensitivity(model, data, data[0])) == 2
    qat = torchq.prepare_qat(model, data[0], learn_scales=True)
    with torch.enable_grad():
        qat(data[0]).float().sum().backward()
    assert {p.dtype for p in qat.parameters() if p.dim() > 1} == {half}
    close(qat.eval()(data[0]), torchq.convert(qat)(data[0]))

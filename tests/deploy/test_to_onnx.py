# SPDX-License-Identifier: Apache-2.0
"""ONNX files of converted models: ONNX Runtime and OpenVINO give what the model gives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onnx_runtime import session
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import torchq
import torchq.nn as tnn
from benchmarks.models import NETWORKS
from tests.support.slow import rest_slow
from torchq import PostOps, QParams
from torchq.graphs.module import QuantizedGraph

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.usefixtures("one_thread")

U8 = QParams.per_tensor(0.02, 120, torch.uint8)
S8 = QParams.per_tensor(0.03, -5, torch.int8)
DST = QParams.per_tensor(0.025, 100, torch.uint8)


def run(path: Path, inputs: list[Tensor], optimized: bool = True) -> list[Tensor]:
    runtime = session(path, optimized)
    names = [given.name for given in runtime.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(result) for result in runtime.run(None, feeds)]


def graph(module: nn.Module, srcs: list[QParams | None], dst: QParams | None, *more: Any) -> Any:
    """A converted graph of one module between int8 tensors; a source None is float32."""
    made, modules, args = fx.Graph(), {"layer": module}, list[Any]()
    for i, src in enumerate(srcs):
        args.append(made.placeholder(f"src{i}"))
        if src is not None:
            modules[f"quantize{i}"] = tnn.Quantize(src)
            args[i] = made.call_module(f"quantize{i}", (args[i],))
    result = made.call_module("layer", (args,) if isinstance(module, tnn.QCat) else (*args, *more))
    if dst is not None:
        modules["dequantize"] = tnn.Dequantize(dst)
        result = made.call_module("dequantize", (result,))
    made.output(result)
    return QuantizedGraph(modules, made)


def any_values(params: QParams | None, shape: tuple[int, ...]) -> Tensor:
    """All integers of a type, as real values."""
    if params is None:
        return torch.randn(shape)
    low, high = params.integers
    return (torch.randint(low, high + 1, shape) - params.zero_point) * params.scale


def of_layer(cls: Any, module: nn.Module, shape: Any, **options: Any) -> Any:
    return lambda src: (cls.from_float(module, src, DST, **options), [src], DST, [shape])


def of_pool(cls: Any, *args: Any, **options: Any) -> Any:
    return lambda src: (cls(src, *args, **options), [src], src, [(2, 5, 10, 10)])


def of_two(make: Callable[[list[QParams]], nn.Module], second: tuple[int, ...]) -> Any:
    return lambda src: (make([src, S8]), [src, S8], DST, [(2, 3, 6, 8), second])


def chain() -> PostOps:
    return PostOps()


SUM = chain().append_sum(float(S8.scale), int(S8.zero_point), torch.int8).append_eltwise("relu")
FLOAT_SUM = chain().append_sum(1.0, 0, "f32").append_prelu(torch.rand(32), 2)
PRELU = chain().append_prelu(torch.rand(8), 2).append_eltwise("clip", -1.0, 2.5)
CASES: dict[str, Callable[[QParams], tuple[nn.Module, list[Any], QParams | None, list[Any]]]] = {
    "conv1d": of_layer(tnn.QConv1d, nn.Conv1d(16, 8, 4, padding="same"), (2, 16, 9)),
    "conv2d": of_layer(tnn.QConv2d, nn.Conv2d(16, 8, 3, 2, 1), (2, 16, 9, 9)),
    "conv3d": of_layer(tnn.QConv3d, nn.Conv3d(4, 8, 3), (2, 4, 5, 6, 7)),
    "grouped": of_layer(tnn.QConv2d, nn.Conv2d(16, 8, 3, groups=4), (2, 16, 9, 9), affine=True),
    "depthwise": of_layer(tnn.QConv2d, nn.Conv2d(16, 16, 3, groups=16), (2, 16, 9, 9)),
    "dilated": of_layer(
        tnn.QConv2d, nn.Conv2d(8, 8, 3, dilation=2), (2, 8, 9, 9), granularity="per_tensor"
    ),
    "prelu and clip": of_layer(tnn.QConv2d, nn.Conv2d(8, 8, 3), (2, 8, 9, 9), post_ops=PRELU),
    "transposed": of_layer(
        tnn.QConvTranspose2d, nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), (2, 8, 5, 5)
    ),
    "transposed, grouped": of_layer(
        tnn.QConvTranspose2d, nn.ConvTranspose2d(8, 6, 3, 2, groups=2), (2, 8, 5, 5), affine=True
    ),
    "transposed 1d": of_layer(tnn.QConvTranspose1d, nn.ConvTranspose1d(8, 6, 4, 2), (2, 8, 5)),
    "linear": of_layer(tnn.QLinear, nn.Linear(64, 32), (7, 64)),
    "linear, 3 dims": of_layer(tnn.QLinear, nn.Linear(64, 32, bias=False), (2, 7, 64)),
    "residual": lambda src: (
        tnn.QLinear.from_float(nn.Linear(64, 32), src, DST, post_ops=SUM),
        [src, S8], DST, [(7, 64), (7, 32)],
    ),
    "float residual": lambda src: (
        tnn.QLinear.from_float(nn.Linear(64, 32), src, DST, post_ops=FLOAT_SUM),
        [src, None], DST, [(7, 64), (7, 32)],
    ),
    "max pool": of_pool(tnn.QMaxPool2d, 3, 2, 1, 1, True),
    "average": of_pool(tnn.QAvgPool2d, 3, 2, 1, False, False),
    "average, ceil": of_pool(tnn.QAvgPool2d, 3, 2, 1, True, True),
    "average of all": of_pool(tnn.QAdaptiveAvgPool2d, 1),
    "average to its own scale": lambda src: (
        tnn.QAvgPool2d(src, 2, dst=DST), [src], DST, [(2, 5, 8, 8)],
    ),
    "resample": of_pool(tnn.QResample, None, [2, 3]),
    "add": of_two(lambda srcs: tnn.QAdd(srcs, DST, relu=True), (2, 3, 1, 1)),
    "mul": of_two(lambda srcs: tnn.QMul(srcs, DST), (2, 3, 6, 8)),
    "cat": of_two(lambda srcs: tnn.QCat(srcs, DST), (2, 2, 6, 8)),
    "matmul": of_two(
        lambda srcs: tnn.QMatMul(srcs, DST, chain().append_eltwise("linear", 0.2, 0.0)),
        (2, 3, 8, 5),
    ),
}  # fmt: skip


def check_steps(q: Any, inputs: list[Tensor], step: float, path: Path) -> None:
    torchq.to_onnx(q, path, tuple(inputs))
    expected = q(*inputs)
    assert len(expected.unique()) > 7
    for optimized in (False, True):
        (result,) = run(path, inputs, optimized)
        assert float((result - expected).abs().max()) < 1.001 * step


@pytest.mark.parametrize("src", [U8, S8], ids=["u8", "s8"])
@pytest.mark.parametrize("name", CASES)
def test_a_module_differs_by_one_step_at_most(name: str, src: QParams, tmp_path: Path) -> None:
    module, srcs, dst, shapes = CASES[name](src)
    inputs = [any_values(p, s) for p, s in zip(srcs, shapes, strict=True)]
    q = graph(module, srcs, dst)
    check_steps(q, inputs, float(DST.scale if dst is None else dst.scale), tmp_path / "m.onnx")


@pytest.mark.parametrize("src", [U8, S8], ids=["u8", "s8"])
@pytest.mark.parametrize(
    "function",
    [F.silu, F.gelu, torch.sigmoid, torch.tanh, F.hardswish, F.hardsigmoid, F.elu, F.mish,
     F.softplus, F.leaky_relu, torch.sin],
)  # fmt: skip
def test_tables(function: Any, src: QParams, tmp_path: Path) -> None:
    """A known function is exported as such, any other one as a table of its values."""
    q = graph(tnn.QLookup(function, src, DST), [src], DST)
    check_steps(q, [any_values(src, (7, 64))], float(DST.scale), tmp_path / "m.onnx")
    used = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert ("Gather" in used) == (function is torch.sin)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"transposed_key": True}])
def test_attention(options: dict[str, bool], tmp_path: Path) -> None:
    """Weights are float there, and have 8 bits here."""
    module = tnn.QAttention([U8, U8, S8], S8, tnn.AttentionOptions(**options))
    shape = (2, 3, 12, 16)
    key = (2, 3, 16, 12) if "transposed_key" in options else shape
    inputs = [any_values(p, s) for p, s in zip([U8, U8, S8], [shape, key, shape], strict=True)]
    check_steps(graph(module, [U8, U8, S8], S8), inputs, float(S8.scale), tmp_path / "m.onnx")


def test_rows_that_see_no_key_are_zero(tmp_path: Path) -> None:
    mask = torch.zeros(12, 12)
    mask[3] = -torch.inf
    q = graph(tnn.QAttention([U8, U8, S8], S8), [U8, U8, S8, None], S8)
    shape = (1, 2, 12, 16)
    inputs = [*(any_values(p, shape) for p in (U8, U8, S8)), mask]
    check_steps(q, inputs, float(S8.scale), tmp_path / "m.onnx")
    assert not run(tmp_path / "m.onnx", inputs)[0][:, :, 3].any()


def test_seven_bits(tmp_path: Path) -> None:
    src = QParams(U8.scale, torch.tensor(60, dtype=torch.int32), torch.uint8, None, 7)
    q = graph(tnn.QAdd([src, S8], src), [src, S8], src)
    inputs = [4 * any_values(src, (2, 3, 6, 8)), any_values(S8, (2, 3, 6, 8))]
    check_steps(q, inputs, float(src.scale), tmp_path / "m.onnx")


# Networks


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.skip = nn.BatchNorm2d(16), nn.Conv2d(3, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.b(torch.relu(self.a(x)))) + self.skip(x))
        return self.head(y.mean([2, 3]))


class Mobile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depth = nn.Conv2d(8, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.reduce, self.up = nn.Conv2d(32, 8, 1), nn.ConvTranspose2d(16, 4, 2, 2)

    def forward(self, x: Tensor) -> Any:
        y = F.relu6(self.depth(F.relu6(self.expand(x))))
        y = torch.cat([x + self.reduce(y), F.avg_pool2d(x, 3, 1, 1)], 1)
        return {"up": torch.sigmoid(self.up(y)), "pooled": F.max_pool2d(y, 2)[:, 2:]}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        x = x + self.out(y)
        return x + self.narrow(F.gelu(self.wide(x)))


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Flatten(),
        nn.Linear(8 * 25, 5),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "plain": (plain, (2, 3, 30, 30), (5, 3, 30, 30)),
    "residual": (Residual, (2, 3, 12, 12), (3, 3, 16, 20)),
    "mobile": (Mobile, (2, 8, 12, 12), (3, 8, 16, 20)),
    "attention": (Attention, (2, 10, 32), (3, 17, 32)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 7, 32), (3, 9, 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_with_other_sizes(name: str, tmp_path: Path) -> None:
    make, shape, other = MODELS[name]
    model = make().eval()
    q = torchq.quantize(model, [torch.randn(shape) for _ in range(4)])
    torchq.to_onnx(q, tmp_path / "m.onnx", torch.randn(shape))
    for sizes in (shape, other):
        x = torch.randn(sizes)
        results = run(tmp_path / "m.onnx", [x])
        for expected, result in zip(tree_leaves(q(x)), results, strict=True):
            assert torchq.sqnr(expected, result) > 28


@pytest.mark.parametrize(
    "name",
    rest_slow(["mobilenet_v3", "shufflenet_v2", "convnext_t", "vit_b_16"], "mobilenet_v3"),
)
def test_networks(name: str, tmp_path: Path) -> None:
    network = NETWORKS[name]
    if not network.available:
        pytest.skip(f"{name} needs {network.requires}")
    batches = network.calibration(small=True)
    q = torchq.quantize(network.build(small=True), batches, batches[0][:1])
    x = network.inputs(3, small=True)
    torchq.to_onnx(q, tmp_path / "m.onnx", x)
    assert torchq.sqnr(q(x), run(tmp_path / "m.onnx", [x], optimized=False)[0]) > 35
    assert torchq.sqnr(q(x), run(tmp_path / "m.onnx", [x])[0]) > 30


@pytest.mark.parametrize("name", ["residual", "mobile"])
def test_openvino(name: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    make, shape, _ = MODELS[name]
    x = torch.randn(shape)
    q = torchq.quantize(make().eval(), [x])
    torchq.to_onnx(q, tmp_path / "m.onnx", x)
    model = openvino.Core().read_model(tmp_path / "m.onnx")
    model.reshape(list(shape))
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled([x.numpy()])
    for expected, output in zip(tree_leaves(q(x)), compiled.outputs, strict=True):
        assert torchq.sqnr(expected, torch.from_numpy(results[output])) > 28


# The file


def test_the_graph_is_made_of_pairs(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 30, 30)
    torchq.to_onnx(torchq.quantize(plain().eval(), [x]), tmp_path / "m.onnx", x)
    model = onnx.load(tmp_path / "m.onnx")
    made = {name: node for node in model.graph.node for name in node.output}
    constants = {c.name: onnx.numpy_helper.to_array(c) for c in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type in ("Conv", "MatMul")]
    assert len(products) == 3
    for node in products:
        assert [made[name].op_type for name in node.input[:2]] == ["DequantizeLinear"] * 2
        assert constants[made[node.input[1]].input[0]].dtype == "int8"
    (given,) = model.graph.input
    sizes = [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim]
    assert sizes == ["input_0", 3, "input_2", "input_3"]
    assert model.opset_import[0].version == 13


def test_scales_of_grouped_transposed_convolutions_need_opset_21(tmp_path: Path) -> None:
    module, srcs, dst, shapes = CASES["transposed, grouped"](U8)
    torchq.to_onnx(graph(module, srcs, dst), tmp_path / "m.onnx", any_values(U8, shapes[0]))
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 21


def test_a_loaded_graph(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 12, 12)
    q = torchq.quantize(Residual().eval(), [x])
    torchq.save(q, tmp_path / "m.torchq")
    torchq.to_onnx(q, tmp_path / "a.onnx", {"x": x})
    torchq.to_onnx(torchq.load(tmp_path / "m.torchq"), tmp_path / "b.onnx", x)
    assert torch.equal(run(tmp_path / "a.onnx", [x])[0], run(tmp_path / "b.onnx", [x])[0])


def test_what_has_no_form_is_named(tmp_path: Path) -> None:
    lstm = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 16)).eval()
    x, path = torch.randn(4, 2, 8), tmp_path / "m.onnx"
    with pytest.raises(NotImplementedError, match=r"torchq\.to_onnx: '1'.*QLSTM.*recurrent"):
        torchq.to_onnx(torchq.quantize(lstm, [x]), path, x)
    pool = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2)).eval()
    x = torch.randn(1, 3, 9, 9)
    with pytest.raises(NotImplementedError, match=r"adaptive_avg_pool2d.*must give size 1, got \["):
        torchq.to_onnx(torchq.quantize(pool, [x]), path, x)
    q = graph(tnn.QAttention([U8] * 3, S8, tnn.AttentionOptions(enable_gqa=True)), [U8] * 3, S8)
    heads = torch.rand(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=r"'layer'.*fewer heads"):
        torchq.to_onnx(q, path, (heads, heads, heads))
    assert not list(tmp_path.iterdir())


def test_a_model_without_one_graph(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    config = torchq.QConfig(dynamic=True, weight_bits=4)
    dynamic = torchq.quantize(model, example_inputs=x, config=config)
    with pytest.raises((NotImplementedError, ValueError), match="calibration data"):
        torchq.to_onnx(dynamic, tmp_path / "m.onnx", x)
    with pytest.raises(ValueError, match="one graph for its whole call, got Sequential"):
        torchq.to_onnx(model, tmp_path / "m.onnx", x)
    with pytest.raises(ValueError, match=r"example_inputs must take the graph.*shape"):
        torchq.to_onnx(torchq.quantize(model, [x]), tmp_path / "m.onnx", x[0])


@pytest.mark.parametrize("recipe", ["fast", "best"])
def test_dynamic_linear_layers_read_float_sources(recipe: Any, tmp_path: Path) -> None:
    """With a residual and factors of SmoothQuant; the weight is int8 in the file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).eval()
    data = [torch.randn(8, 64) * torch.linspace(0.1, 20, 64) for _ in range(4)]
    config = torchq.QConfig(dynamic=True) if recipe == "fast" else torchq.QConfig(recipe=recipe)
    qmodel = torchq.quantize(model, data, data[0], config)
    torchq.to_onnx(qmodel, tmp_path / "m.onnx", data[0])
    (found,) = run(tmp_path / "m.onnx", [data[1]])
    assert torchq.sqnr(model(data[1]), found) > 35
    assert (tmp_path / "m.onnx").stat().st_size < 64 * 96 + 96 * 32 + 6000


@pytest.mark.parametrize("dynamo", [False, True])
def test_torch_onnx_export_names_to_onnx(dynamo: bool, tmp_path: Path) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    x = torch.randn(4, 8)
    q = torchq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), [x])
    with pytest.raises(Exception, match=r"torchq\.to_onnx\(model, path, example_inputs\)"):
        torch.onnx.export(q, (x,), str(tmp_path / "m.onnx"), dynamo=dynamo)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    q = torchq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), [x])
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install torchq-cpu\[onnx\]"):
        torchq.to_onnx(q, tmp_path / "m.onnx", x)


class Pooled(nn.Module):
    """Attention of the first row over every other one, of which torch.export excludes one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, ::2]
        return self.attention(x[:, :1], x, x)[0][:, 0]


def test_a_guard_that_allows_one_fixes_no_size(tmp_path: Path) -> None:
    qmodel = torchq.quantize(Pooled().eval(), [x := torch.randn(50, 5, 8)])
    assert " or x.shape[1] is 1" in str(torchq.explain(qmodel).graphs)
    torchq.to_onnx(qmodel, tmp_path / "model.onnx", x)
    (source,) = onnx.load(tmp_path / "model.onnx").graph.input
    assert [d.dim_value for d in source.type.tensor_type.shape.dim] == [0, 0, 8]

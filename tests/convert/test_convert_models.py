# SPDX-License-Identifier: Apache-2.0
"""Whole models: right results, what is fused, and what is int8."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import flows
import fx_models
import models
import pytest
import torch
import torch.nn.functional as F
from flows import CONFIGS, graph_of, sqnr, tensors
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq import QConfig
from torchq.graphs.direct import CHECK
from torchq.quantization.ranges import activation_range

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {f"eager_{name}": case for name, case in models.CASES.items()} | fx_models.CASES
# Where a graph has more than leaves: functions, and weights that other code reads.
COUNTS = {"exposed": (2, 2), "keyword_layer": (1, 1), "forward_directly": (2, 2),
          "attention": (3, 3), "transformer": (8, 8)}  # fmt: skip


def build(name: str) -> tuple[nn.Module, list[Tensor]]:
    return flows.build(CASES[name])


def check(name: str, config: QConfig | None = None, bound: float = 25.0) -> nn.Module:
    make, shape, *counts = CASES[name]
    int8, total = COUNTS.get(name.removeprefix("eager_"), counts)
    case = make, shape, int8, total
    return flows.check(
        case, torchq.prepare, torchq.convert, config, bound, batches=name in fx_models.CASES
    )


@pytest.mark.parametrize("name", CASES)
def test_networks(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", ["shuffle", "hswish_se"])
@pytest.mark.parametrize("config", ["u7", "s8", "s8-affine", "per-tensor", "minmax"])
def test_configurations(name: str, config: str) -> None:
    chosen = CONFIGS[config]
    graph = graph_of(check(name, chosen, bound=18.0))
    low, high = activation_range(chosen.activation_dtype, chosen.activation_bits)

    def look(module: nn.Module, args: Any, result: Tensor) -> None:
        for tensor in (*tensors(args), result):
            if not tensor.is_floating_point():
                assert tensor.dtype == chosen.activation_dtype
                assert low <= int(tensor.min()) and int(tensor.max()) <= high

    for module in graph.modules():
        if isinstance(module, tnn.QModule):
            module.register_forward_hook(look)
    graph(build(name)[1][0] * 100)  # beyond all that was calibrated


def convert(name: str, **kwargs: Any) -> nn.Module:
    model, data = build(name)
    return torchq.quantize(model, data, **kwargs)


def calls(converted: nn.Module) -> list[str]:
    """Returns the graph's steps in order, without checks: module classes, function names."""
    graph, found = graph_of(converted), []
    for node in graph.graph.nodes:
        if node.name.startswith(CHECK):
            continue
        if node.op == "call_module":
            found.append(type(graph.get_submodule(node.target)).__name__)
        elif node.op in ("call_function", "call_method") and "torchq_check" not in node.name:
            found.append(str(getattr(node.target, "__name__", node.target)))
    return found


CONV = "QConv2d"
GRAPHS = {
    "resnet": [CONV, "QMaxPool2d", *[CONV] * 5, "QAdaptiveAvgPool2d", "size", "reshape", "QLinear"],
    "mobilenet_v2": [*[CONV] * 7, "QAdaptiveAvgPool2d", "flatten", "QLinear"],
    "hswish_se": [CONV, CONV, "QAdaptiveAvgPool2d", CONV, CONV, "QMul", "QLookup", CONV],
    "causal": [*["QConv1d"] * 4, "getitem"],
    "eager_add_both": ["Quantize", CONV, CONV, CONV],
    "eager_called_twice": [CONV, CONV, CONV],
    "eager_stubs": [CONV, CONV, "sin"],
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_what_the_graph_computes(name: str) -> None:
    """Everything is fused, and no tensor is dequantized between two int8 operations."""
    assert calls(convert(name)) == GRAPHS[name]


@pytest.mark.parametrize("name", ["shuffle", "unet", "dense", "split", "token"])
def test_stays_int8(name: str) -> None:
    """Concatenations, shuffles and views are int8 between layers."""
    converted = convert(name)
    names = calls(converted)
    assert names.count("Quantize") <= 1 and "cat" not in names
    assert names.count("Dequantize") == (1 if name == "split" else 0)  # for what it returns


def test_concatenation_shares_parameters() -> None:
    """Concatenation copies bytes if nothing else reads the sources."""
    cat = graph_of(convert("shuffle")).get_submodule("cat")
    assert isinstance(cat, tnn.QCat)
    assert len(set(cat.scales.tolist())) == 1 or len(set(cat.scales[1:].tolist())) == 1


def test_residual_of_a_float_value_is_float() -> None:
    """A float32 residual is added without quantizing it."""
    model = models.Wired(lambda m, x: m.a(x) + x, a=models.conv()).eval()
    x = torch.randn(models.IMAGE)
    converted = torchq.quantize(model, [x])
    assert "sum:1:0:f32" in graph_of(converted).a.post_ops


def test_a_model_that_is_not_captured() -> None:
    """Its layers are int8 all the same."""
    converted = convert("eager_item")
    assert type(converted) is models.Wired and isinstance(converted.a, tnn.QuantizedLeaf)
    assert "the whole is not captured: its code acts on the values" in str(
        torchq.explain(converted)
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eager_pool_indices",
         {"p.max_pool2d_with_indices": "max_pool2d_with_indices has no int8 form"}),
        ("eager_unbatched", {"a": "its source [8, 10, 10] has no batch dimension"}),
        ("eager_never_called", {"b": "not called with example_inputs"}),
        ("resnet", {"layer1.relu": "fused into layer1.conv1", "layer2.add":
                    "fused into layer2.down.0", "layer2.down.1": "fused into layer2.down.0"}),
    ],
)  # fmt: skip
def test_reasons(name: str, expected: dict[str, str]) -> None:
    got = {row.name: row.reason for row in torchq.explain(convert(name)).rows}
    assert {key: got[key] for key in expected} == expected


# Overrides and strictness


def test_overrides() -> None:
    kept = convert("resnet", overrides={"layer1.conv1": None, "layer2.relu_1": None})
    assert isinstance(kept.layer1.conv1, nn.Conv2d) and "relu" in calls(kept)
    other = {"*.conv1": QConfig(weight_bits=7), "layer1.conv2.dst": None}
    graph = graph_of(convert("resnet", overrides=other))
    assert graph.layer1.conv1.packed().unpack().abs().max() == 63
    assert graph.layer1.conv2.dst_dtype == torch.float32


@pytest.mark.parametrize("name", ["causal", "eager_item", "eager_root"])
def test_overrides_that_match_nothing(name: str) -> None:
    known = "The model is one module" if name == "eager_root" else "Names begin with '"
    with pytest.raises(ValueError, match=rf"'blok\*' matches none. {known}"):
        torchq.prepare(build(name)[0], build(name)[1][0], overrides={"blok*": None})


def test_strict() -> None:
    convert("eager_reflect", strict=True)
    convert("eager_attention", strict=True)
    model = models.Wired(lambda m, x, w: F.conv2d(m.a(x), w), a=models.conv()).eval()
    inputs = torch.randn(models.IMAGE), torch.randn(4, 8, 1, 1)
    why = r"1 convolution, linear or rec.*conv2d: its weight is computed at run time"
    with pytest.raises(RuntimeError, match=why):
        torchq.quantize(model, [inputs], strict=True)
    torchq.quantize(model, [inputs], strict=True, overrides={"conv2d": None})


def test_errors() -> None:
    model, data = build("eager_sequential")
    with pytest.raises(RuntimeError, match=r"prepared must be calibrated.*torchq.calibrate"):
        torchq.convert(torchq.prepare(model, data[0]))
    with pytest.raises(TypeError, match="got one Tensor"):
        torchq.quantize(model, data[0])
    with pytest.raises(ValueError, match="at least one batch"):
        torchq.quantize(model, [])
    with pytest.raises(ValueError, match="must be a float model"):
        torchq.prepare(torchq.quantize(model, data), data[0])
    with pytest.raises(ValueError, match="training mode"):
        torchq.prepare(model.train(), data[0])


def test_data_that_can_be_read_once() -> None:
    model, data = build("causal")
    once = torchq.quantize(model, (batch for batch in data))
    assert torch.equal(once(data[0]), torchq.quantize(model, data, data[0])(data[0]))


def test_prepared_can_be_copied_and_converted_twice() -> None:
    model, data = build("causal")
    prepared = torchq.prepare(model, data[0])
    other = copy.deepcopy(prepared)
    for one in (prepared, other):
        torchq.calibrate(one, data)
    results = [torchq.convert(p)(data[0]) for p in (prepared, other, prepared)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_inputs_by_keyword_and_constants() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor | None = None, scale: bool = True) -> Tensor:
            y = F.relu(self.a(x))
            if mask is not None:
                y = y * mask
            return y * 2 if scale else y

    model, x = Model().eval(), torch.randn(4, 8)
    for inputs in ({"x": x}, {"x": x, "scale": False}, {"mask": torch.ones(4, 8), "x": x}):
        converted = torchq.quantize(model, [inputs])
        with torch.no_grad():
            assert sqnr(model(**inputs), converted(**inputs)) > 30
    with pytest.warns(UserWarning, match="argument 'mask' is a tensor of torch.float32, not None"):
        converted = torchq.quantize(model, [{"x": x}])
        masked = converted(x, mask := torch.rand(4, 8))
    with torch.no_grad():
        assert sqnr(model(x, mask), masked) > 30


def test_no_warnings() -> None:
    model, data = build("causal")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        str(torchq.explain(torchq.quantize(model, data, strict=True)))


def test_what_is_all_int8_loads_without_the_float_model(tmp_path: Path) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(288, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.relu(self.conv(x)).flatten(1))

    x = torch.randn(2, 3, 8, 8)
    converted = torchq.quantize(Network().eval(), [x], x)
    torchq.save(converted, tmp_path / "model.torchq")
    assert torch.equal(torchq.load(tmp_path / "model.torchq")(x), converted(x))


def test_whole_numbers_for_lists_of_floats() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(self.conv(x).softmax(1), scale_factor=(2, 2))

    x = torch.randn(1, 3, 4, 4)
    model = torchq.quantize(Net().eval(), [x], x)
    assert torch.equal(torch.jit.script(model)(x), model(x))


class Collections(nn.Module):
    """Arguments that hold tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, xs: list[Tensor], named: dict[str, Tensor], times: int = 2) -> Tensor:
        return (self.a(xs[0]) + self.b(named["y"])) * times


def test_arguments_that_hold_tensors(tmp_path: Path) -> None:
    model = Collections().eval()
    args = ([torch.randn(4, 8)], {"y": torch.randn(4, 8)})
    converted = torchq.quantize(model, [args], args)
    path = tmp_path / "model.safetensors"
    torchq.save(converted, path)
    copies = (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)))
    for other in (*copies, torchq.load(path, model)):
        assert torch.equal(other(*args), converted(*args))
    flat = args[0][0], args[1]["y"]  # as graphs take them
    for graph in (torchq.load(path), torch.jit.script(converted)):
        assert torch.equal(graph(*flat), converted(*args))

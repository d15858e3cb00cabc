# SPDX-License-Identifier: Apache-2.0
"""The flow on a traced graph: right results, what is fused, and what is int8."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import flows
import fx_models
import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flows import CONFIGS, sqnr, tensors
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq import QConfig
from torchq.fx import CaptureError
from torchq.fx import prepare as prepare_graph
from torchq.fx.tracing.guards import expect_float, expect_tensor

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {f"eager_{name}": case for name, case in models.CASES.items()} | fx_models.CASES
# What tracing sees more of (functions, keywords), or less (a stash), than swapping modules does.
COUNTS = {"exposed": (2, 2), "keyword_layer": (1, 1), "forward_directly": (2, 2),
          "view_then_write": (1, 2), "attention": (3, 3), "transformer": (8, 8),
          "reflect": (2, 2)}  # fmt: skip


def build(name: str) -> tuple[nn.Module, list[Tensor]]:
    return flows.build(CASES[name])


def check(name: str, config: QConfig | None = None, bound: float = 25.0) -> nn.Module:
    make, shape, *counts = CASES[name]
    int8, total = COUNTS.get(name.removeprefix("eager_"), counts)
    case = make, shape, int8, total
    converted = flows.check(case, prepare_graph, torchq.convert, config, bound)
    assert isinstance(converted, torch.fx.GraphModule)
    return converted


@pytest.mark.parametrize("name", [name for name in CASES if name != "eager_item"])
def test_networks(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", ["resnet", "shuffle", "unet", "hswish_se", "dense"])
@pytest.mark.parametrize("config", ["u7", "s8", "s8-affine", "per-tensor", "minmax"])
def test_configurations(name: str, config: str) -> None:
    chosen = CONFIGS[config]
    converted = check(name, chosen, bound=18.0)
    low, high = torchq.qparams.activation_range(chosen.activation_dtype, chosen.activation_bits)

    def look(module: nn.Module, args: Any, result: Tensor) -> None:
        for tensor in (*tensors(args), result):
            if not tensor.is_floating_point():
                assert tensor.dtype == chosen.activation_dtype
                assert low <= int(tensor.min()) and int(tensor.max()) <= high

    for module in converted.modules():
        if isinstance(module, tnn.QModule):
            module.register_forward_hook(look)
    converted(build(name)[1][0] * 100)  # beyond all that was calibrated


def convert(name: str, **kwargs: Any) -> nn.Module:
    model, data = build(name)
    return torchq.quantize(model, data, **kwargs)


def calls(converted: nn.Module) -> list[str]:
    """What the graph computes, in order: classes of modules, names of functions."""
    assert isinstance(converted, torch.fx.GraphModule)
    found, checks = [], (expect_float, expect_tensor)
    for node in converted.graph.nodes:
        if node.op == "call_module":
            found.append(type(converted.get_submodule(node.target)).__name__)
        elif node.op in ("call_function", "call_method") and node.target not in checks:
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
    "eager_stubs": ["Quantize", CONV, CONV, "sin"],
    "swapped_inside": ["QLinear", "Untraceable", "QLinear"],
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
    """Where nobody else reads the sources, concatenating copies bytes."""
    cat = convert("shuffle").get_submodule("cat")
    assert isinstance(cat, tnn.QCat)
    assert len(set(cat.scales.tolist())) == 1 or len(set(cat.scales[1:].tolist())) == 1


def test_residual_of_a_float_value_is_float() -> None:
    """What exists as float32 is added as it is."""
    model = models.Wired(lambda m, x: m.a(x) + x, a=models.conv()).eval()
    x = torch.randn(models.IMAGE)
    converted = torchq.quantize(model, [x])
    assert "sum:1:0:f32" in converted.a.post_ops


@pytest.mark.parametrize("name", fx_models.CASES)
def test_other_batch_sizes(name: str) -> None:
    model, data = build(name)
    converted = torchq.quantize(model, data)
    with torch.no_grad():
        for x in (torch.cat(data), data[0][:1]):
            for a, b in zip(tensors(model(x)), tensors(converted(x)), strict=True):
                assert sqnr(a, b) > 20


# What cannot be traced


def test_guard_on_a_size() -> None:
    """Code that acted on a size is right for such sizes, and raises for others."""
    model, data = build("odd")
    converted = torchq.quantize(model, data)
    for other, message in ((torch.randn(2, 8, 8, 8), "was True, got False"),
                           (torch.randn(8, 9, 9), "was 4, got 3")):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"traced where a size or condition {message}"):
            converted(other)


def test_top_level_that_cannot_be_traced() -> None:
    model, data = build("eager_item")
    with pytest.raises(CaptureError, match="acts on values in a tensor"):
        prepare_graph(model, data[0])
    with pytest.warns(UserWarning, match=r"Wired cannot be traced: .*modules are swapped"):
        converted = torchq.quantize(model, data)
    assert isinstance(converted, models.Wired)
    assert "modules were swapped: Wired cannot be traced" in str(torchq.explain(converted))


def test_graph_that_differs_is_refused() -> None:
    """The class of what tracing passes is no Tensor, although isinstance says so."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(y if type(y) is Tensor else y * 2)

    model = models.Wired(forward, a=models.conv(), b=models.conv()).eval()
    with pytest.raises(CaptureError, match=r"something else .*`type\(x\) is torch.Tensor`"):
        prepare_graph(model, torch.randn(models.IMAGE))

    def counts(m: Any, x: Tensor) -> Tensor:
        m.calls = getattr(m, "calls", 0) + 1
        return m.a(x) * m.calls

    with pytest.raises(CaptureError, match="what earlier calls left in 'calls'"):
        prepare_graph(models.Wired(counts, a=models.conv()).eval(), torch.randn(models.IMAGE))


def test_reasons_say_where() -> None:
    """What stands for a size is nobody's business, unless it is named."""
    steps = models.Wired(
        lambda m, x: m.a(x) * float(np.log([x.shape[0]])[0]), a=models.conv()
    ).eval()
    with pytest.raises(CaptureError, match=r"gives a size .*log method \(test_fx\.py:\d+\)$"):
        prepare_graph(steps, torch.randn(models.IMAGE))
    signs = models.Wired(lambda m, x: m.a(x) if x.sum() > 0 else x, a=models.conv()).eval()
    with pytest.raises(CaptureError, match=r"^its .* tensor \(gt\) \(test_fx\.py:\d+\)$"):
        prepare_graph(signs, torch.randn(models.IMAGE))


def test_reasons_of_submodules() -> None:
    rows = {row.name: row for row in torchq.explain(convert("float_inside")).rows}
    assert "it cannot be traced: its Python code" in rows["f"].reason
    rows = {row.name: row for row in torchq.explain(convert("swapped_inside")).rows}
    assert rows["inner.lin1"].quantized and rows["inner.lin2"].quantized
    assert "it cannot be traced: its Python code" in rows["inner"].reason
    assert "its modules were swapped" in rows["inner"].reason and not rows["inner"].is_matmul


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eager_pool_indices", {"p": "its options have no int8 form"}),
        ("eager_unbatched", {"a": "its source [8, 10, 10] has no batch dimension"}),
        ("eager_never_called", {"b": "not called with example_inputs"}),
        ("eager_attention", {"mha.out_proj": "its parameters are used outside of it"}),
        ("eager_user_hook", {"1": "it has forward hooks, which would be lost"}),
        ("eager_view_then_write",
         {"relu": "its memory is written in place while the old values are still read"}),
        ("resnet", {"layer1.relu": "fused into layer1.conv1", "layer2.add":
                    "fused into layer2.down.0", "layer2.down.1": "fused into layer2.down.0"}),
    ],
)  # fmt: skip
def test_reasons(name: str, expected: dict[str, str]) -> None:
    got = {row.name: row.reason for row in torchq.explain(convert(name)).rows}
    assert {key: got[key] for key in expected} == expected


# Overrides and strictness


def test_overrides() -> None:
    converted = convert("resnet", overrides={"layer1.conv1": None, "layer2.relu_1": None})
    assert isinstance(converted.layer1.conv1, nn.Conv2d)
    assert "relu" in calls(converted)
    converted = convert("resnet", overrides={"*.conv1": QConfig(weight_bits=7)})
    assert converted.layer1.conv1.packed().unpack().abs().max() == 63
    converted = convert("resnet", overrides={"layer1.conv1.dst": None})
    assert converted.layer1.conv1.dst_dtype == torch.float32
    with pytest.raises(ValueError, match=r"\['blok\*'\] match none.*layer1.conv1"):
        convert("resnet", overrides={"blok*": None})


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
    model, data = build("resnet")
    with pytest.raises(RuntimeError, match=r"'stem.dst'|'stem'.*torchq.calibrate"):
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
    model, data = build("mobilenet_v2")
    once = torchq.quantize(model, (batch for batch in data))
    assert torch.equal(once(data[0]), torchq.quantize(model, data, data[0])(data[0]))


def test_prepared_can_be_copied_and_converted_twice() -> None:
    model, data = build("resnet")
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
    with pytest.raises(RuntimeError, match="was None, got a tensor"):
        torchq.quantize(model, [{"x": x}])(x, torch.ones(4, 8))


def test_no_warnings() -> None:
    model, data = build("resnet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        str(torchq.explain(torchq.quantize(model, data, strict=True)))


def test_what_is_all_int8_loads_without_the_float_model(tmp_path) -> None:
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


def test_eager_looks_modules_up_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nn.Module.__getattr__, which is slow; hooks and replaced modules count."""
    x = torch.randn(2, 4, 8, 8)
    inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1)))
    model = torchq.quantize(nn.Sequential(inner, nn.Conv2d(4, 2, 1)).eval(), [x], x)
    expected, asked, seen = model(x), list[str](), list[nn.Module]()
    getattr_ = nn.Module.__getattr__
    with monkeypatch.context() as patch:
        patch.setattr(
            nn.Module, "__getattr__", lambda self, name: asked.append(name) or getattr_(self, name)
        )
        assert torch.equal(model(x), expected)
    assert not {"0", "1"} & set(asked)
    last = model.get_submodule("1")
    last.register_forward_hook(lambda module, args, dst: seen.append(module))
    assert torch.equal(model(x), expected) and seen == [last]
    setattr(model, "1", nn.Identity())
    assert model(x).shape == (2, 4, 8, 8) and seen == [last]
    assert "_modules" not in model.code


def test_names_that_the_generated_code_uses_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, torch: Tensor) -> Tensor:
            return self.a(torch) + self.b(torch)

    x = torch.randn(4, 8)
    model = torchq.quantize(Net().eval(), [x], x)
    assert torch.equal(torch.jit.script(model)(x), model(x))


def test_submodules_whose_names_python_cannot_write() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.add_module("class", nn.Linear(8, 4))
    x = torch.randn(4, 8)
    with pytest.warns(UserWarning, match="Sequential cannot be traced"):
        converted = torchq.quantize(model.eval(), [x], x)
    assert converted(x).shape == (4, 4)


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
    """Arguments that TorchScript has to know the types of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, xs: list[Tensor], named: dict[str, Tensor], times: int = 2) -> Tensor:
        return (self.a(xs[0]) + self.b(named["y"])) * times


def test_types_of_arguments_are_saved(tmp_path) -> None:
    model = Collections().eval()
    args = ([torch.randn(4, 8)], {"y": torch.randn(4, 8)})
    converted = torchq.quantize(model, [args], args)
    path = tmp_path / "model.safetensors"
    torchq.save(converted, path)
    copies = (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)))
    for other in (*copies, torchq.load(path, model), torchq.load(path)):
        assert torch.equal(torch.jit.script(other)(*args), converted(*args))

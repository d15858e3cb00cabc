# SPDX-License-Identifier: Apache-2.0
"""Models that are graphs already, of torch.fx and torch.export; and those of other int8 tools."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, fx, nn

import torchq


class Network(nn.Module):
    """A buffer, a nested module, a residual, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)
        self.register_buffer("scale", torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.bn(self.a(x)))
        y = self.body(y) + y
        return {"out": self.head((y * self.scale).mean((2, 3)))}


def exported(model: nn.Module, x: Tensor) -> Any:
    auto = torch.export.Dim.AUTO
    return torch.export.export(model, (x,), dynamic_shapes=({0: auto, 2: auto, 3: auto},))


GRAPHS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "symbolic_trace": lambda model, x: fx.symbolic_trace(model),
    "exported_module": lambda model, x: exported(model, x).module(),
    "exported_program": exported,
    "inside": lambda model, x: nn.Sequential(fx.symbolic_trace(model)).eval(),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_models(name: str, tmp_path: Path) -> None:
    model, x = models.randomize(Network()), torch.randn(4, 3, 8, 8)
    given = GRAPHS[name](model, x)
    converted = torchq.quantize(given, [x, torch.randn(4, 3, 8, 8)], strict=True)
    assert sum(row.is_matmul for row in torchq.explain(converted).rows) == 3
    for inputs in (x, x[:1], torch.randn(3, 3, 6, 7)):
        with torch.no_grad():
            want = model(inputs)["out"]
        assert torchq.sqnr(want, converted(inputs)["out"]) > 25
    torchq.save(converted, tmp_path / "model")
    want = converted(x)["out"]
    for other in (
        copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)),
        torch.jit.script(converted), torchq.load(tmp_path / "model"),
    ):  # fmt: skip
        assert torch.equal(other(x)["out"], want)


def test_a_program_of_fixed_sizes_refuses_others() -> None:
    model, x = models.randomize(Network()), torch.randn(4, 3, 8, 8)
    converted = torchq.quantize(torch.export.export(model, (x,)), [x])
    assert torchq.sqnr(model(x)["out"], converted(x)["out"]) > 25
    with pytest.raises(RuntimeError, match="dim 0 of input 0 must be 4"):
        converted(x[:2])


def test_parts_named_as_attributes_of_graphs() -> None:
    """``graph`` and ``code`` are properties of every GraphModule."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph, self.code = nn.Linear(8, 8), torch.rand(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.graph(x) * self.code

    model, x = Named().eval(), torch.randn(4, 8)
    converted = torchq.quantize(model, [x], strict=True)
    with torch.no_grad():
        assert torchq.sqnr(model(x), converted(x)) > 30


def _float() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def _by_fx(x: Tensor) -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    prepared = quantize_fx.prepare_fx(_float(), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    return quantize_fx.convert_fx(prepared).eval()


def _by_eager(x: Tensor) -> nn.Module:
    tq = torch.ao.quantization
    model = nn.Sequential(tq.QuantStub(), _float(), tq.DeQuantStub()).eval()
    model.qconfig = tq.get_default_qconfig("x86")
    prepared = tq.prepare(model)
    prepared(x)
    return tq.convert(prepared)


def _dynamic(x: Tensor) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(_float(), {nn.Linear}, torch.qint8)


def _by_torchao(x: Tensor) -> nn.Module:
    ao = pytest.importorskip("torchao.quantization")
    model = _float()
    ao.quantize_(model, ao.Int8DynamicActivationInt8WeightConfig())
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "tool"),
    [
        (_by_fx, "torch.ao"), (_by_eager, "torch.ao"), (_dynamic, "torch.ao"),
        (_by_torchao, "torchao"),
    ],
)  # fmt: skip
def test_models_of_other_tools_are_refused(make: Any, tool: str) -> None:
    x = torch.randn(4, 32)
    with pytest.raises(ValueError, match=rf"{tool} has quantized it already. Prepare the model"):
        torchq.quantize(make(x), [x])


def test_functions_of_aten() -> None:
    """Also those that torch.nn does not call."""

    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.w = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.convolution(x, self.k, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
            y = torch.ops.aten.linear(torch.ops.aten.conv2d(x, self.k), self.w) + y
            y = torch.tensordot(y, self.w, dims=([3], [1]))
            return torch.baddbmm(self.w, y[:, 0], y[:, 1])

    model, x = Functions().eval(), torch.randn(2, 3, 8, 8)
    converted = torchq.quantize(model, [x], strict=True)
    assert sum(row.is_matmul for row in torchq.explain(converted).rows) == 4
    with torch.no_grad():
        assert torchq.sqnr(model(x), converted(x)) > 25

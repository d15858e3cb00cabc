# SPDX-License-Identifier: Apache-2.0
"""The float model runs as rarely as its checks allow, and calibration runs each batch once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import torchq
from torchq.convert.swap.leaf_plans import Leaves
from torchq.planning.plan import Plan


class Counted(nn.Module):
    """Counts the runs of its code on tensors with values."""

    runs = 0

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Tensor) -> Tensor:
        Counted.runs += not isinstance(src, FakeTensor)
        return self.model(src)


class Attention(nn.Module):
    """One head, whose result has a range that depends on the number of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, src: Tensor) -> Tensor:
        scores = self.query(src) @ self.key(src).mT / 32**0.5
        return self.output(scores.softmax(-1) @ self.value(src))


@pytest.fixture(autouse=True)
def _from_zero() -> Iterator[None]:
    Counted.runs = 0
    torch.manual_seed(0)
    yield


def counted(model: nn.Module) -> nn.Module:
    return Counted(model).eval()


def test_prepare_runs_the_float_model_four_times():
    """Once to record, once with observed leaves, once for what it keeps, once with a size of 1."""
    torchq.prepare(counted(nn.Sequential(nn.Linear(16, 8), nn.ReLU())), torch.randn(4, 16))
    assert Counted.runs == 4


def test_an_example_of_one_row_takes_one_run_more():
    """With a batch of two, whose results are compared with those of the graph."""
    torchq.prepare(counted(nn.Linear(16, 8)), torch.randn(1, 16))
    assert Counted.runs == 5


@pytest.mark.parametrize("make", [Attention, lambda: nn.Sequential(nn.Linear(32, 8), nn.Tanh())])
def test_calibration_runs_the_graph_alone(make):
    batches = [torch.randn(2, 20, 32) for _ in range(3)]
    prepared = torchq.prepare(counted(make()), batches[0])
    Counted.runs = 0
    torchq.calibrate(prepared, batches, progress=False)
    assert Counted.runs == 0
    torchq.convert(prepared, strict=True)


def test_layers_that_graphs_have_as_dynamic_ones_are_dynamic_for_own_code():
    qmodel = torchq.quantize(counted(Attention()), [torch.randn(2, 20, 32) for _ in range(3)])
    rows = {row.name: row for row in torchq.explain(qmodel).rows}
    assert rows["model.output"].reason.startswith("dynamic: ")
    names = [type(layer).__name__ for layer in qmodel.get_submodule("model.output").modules()]
    assert "DynamicQLinear" in names


def test_earlier_calibrations_load_that_observed_these_layers(tmp_path: Path, monkeypatch):
    model, batches = counted(Attention()), [torch.randn(2, 20, 32) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "dynamic_names", set())
        patch.setattr(Leaves, "_why_dynamic", lambda *args: "")
        earlier = torchq.prepare(model, batches[0])
    assert earlier.model.output.observer is not None
    torchq.save_calibration(torchq.calibrate(earlier, batches, progress=False), tmp_path / "seen")
    loaded = torchq.load_calibration(torchq.prepare(model, batches[0]), tmp_path / "seen")
    qmodel, expected = torchq.convert(loaded), torchq.quantize(model, batches)
    assert torch.equal(qmodel(batches[0]), expected(batches[0]))
    kept_float = torchq.prepare(model, batches[0], overrides={"model.output": None})
    with pytest.raises(ValueError, match=r"prepared must have the observers"):
        torchq.load_calibration(kept_float, tmp_path / "seen")

# SPDX-License-Identifier: Apache-2.0
"""A prepared model may be pickled before or after calibration, and go on elsewhere."""

import io
import pickle
from types import FunctionType
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QConfig

# Residuals and functions, shared and called-twice modules, attention, recurrent ones, no graph.
NAMES = ("add_int8_residual", "called_twice", "transformer", "tied", "lstm", "item", "bn_variants")


def build(name: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    make, shape, _, _ = models.CASES[name]
    return models.randomize(make()), [torch.randn(shape) for _ in range(2)]


class Pickler(pickle.Pickler):
    """Leaves out the functions that the models here hold, which pickle refuses; no other ones."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.left_out: list[FunctionType] = []

    def persistent_id(self, value: Any) -> int | None:
        local = isinstance(value, FunctionType) and "<" in value.__qualname__
        if not local or value.__module__.startswith("torchq"):
            return None
        self.left_out.append(value)
        return len(self.left_out) - 1


class Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, file: io.BytesIO, left_out: list[FunctionType]) -> None:
        super().__init__(file)
        self.left_out = left_out

    def persistent_load(self, number: int) -> FunctionType:
        return self.left_out[number]


def again(prepared: nn.Module) -> nn.Module:
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(prepared)
    file.seek(0)
    return Unpickler(file, pickler.left_out).load()


@pytest.mark.parametrize("name", NAMES)
def test_goes_on_where_it_was(name: str) -> None:
    model, data = build(name)
    prepared = torchq.prepare(model, data[0])
    copied = again(prepared)  # without data
    assert str(torchq.explain(copied)) == str(torchq.explain(prepared))
    torchq.calibrate(prepared, data[:1])
    torchq.calibrate(copied, data[:1])
    copied = torchq.calibrate(again(copied), data[1:])
    want = torchq.convert(torchq.calibrate(prepared, data[1:]))
    got = torchq.convert(copied)
    assert str(torchq.explain(got)) == str(torchq.explain(want))
    states = got.state_dict(), want.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert torch.equal(got(data[0]), want(data[0]))


@pytest.mark.parametrize("config", [QConfig(dynamic=True), QConfig("moving_average")])
def test_configurations(config: QConfig) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Linear(4, 4)).eval()
    x = torch.randn(3, 8)
    prepared = torchq.prepare(model, x, config, {"2": None})
    torchq.calibrate(prepared, [x])
    assert torch.equal(torchq.convert(again(prepared))(x), torchq.convert(prepared)(x))


def test_shares_what_was_shared() -> None:
    """The parameters of the graph and of the model that the plan keeps are the same ones."""
    linear = nn.Linear(8, 8)
    prepared = torchq.prepare(nn.Sequential(linear, nn.ReLU(), linear).eval(), torch.randn(2, 8))
    file = io.BytesIO()
    torch.save(prepared, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    assert len(list(copied.parameters())) == len(list(prepared.parameters())) == 2
    assert not copied.training
    with pytest.raises(RuntimeError, match="prepared must be calibrated"):
        torchq.convert(copied)

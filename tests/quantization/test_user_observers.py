# SPDX-License-Identifier: Apache-2.0
"""Observers that users write, in both flows."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import torchq
from torchq.quantization.observers import HistogramObserver, MinMaxObserver, Observer
from torchq.quantization.qparams import choose_qparams

FLOWS = [torchq, torchq.eager]
BATCHES = [torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(-2, 3, 32).reshape(4, 8)]


class Plain(Observer):
    """No ``__init__``; widens the base's buffers."""

    def _record(self, values):
        self._widen(*self._min_max(values))


class Assigned(Observer):
    """Assigns new tensors and keeps a counter."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self._add_buffer("total", 0.0)

    def _record(self, values):
        self.calls += 1
        self.total = self.total + values.abs().sum()
        self.min_value = torch.minimum(self.min_value, values.min())
        self.max_value = torch.maximum(self.max_value, values.max())


class Listed(Observer):
    """Keeps a list and no buffer; chooses the range by itself."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _record(self, values):
        self.seen.append(values.flatten().clone())

    def _range(self, integers, symmetric):
        seen = torch.cat(self.seen)
        return seen.min(), seen.max()


@dataclass
class Data(Observer):
    """A dataclass: its ``__init__`` calls no other, and it compares by value."""

    share: float = 1.0
    lows: list = field(default_factory=list)

    def _record(self, values):
        self.lows.append(float(values.min()))
        self._widen(*self._min_max(values * self.share))


class Inner(Observer):
    """Records in a module of its own, and in another observer."""

    def __init__(self):
        super().__init__()
        self.part, self.other = Tally(), MinMaxObserver()

    def _record(self, values):
        self.part.count += values.numel()
        self.other(values)

    def _range(self, integers, symmetric):
        assert self.part.count
        return self.other.min_value, self.other.max_value


class Tally(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0


class Forwarded(Observer):
    """Overrides what is public instead."""

    def forward(self, x):
        self.low, self.high = float(x.min()), float(x.max())
        return x

    def qparams(self, dtype=torch.uint8, bits=8, symmetric=False):
        return choose_qparams(min(self.low, -2.0), max(self.high, 3.0), dtype, bits)


def closure():
    seen = []

    class Closed(Observer):
        def _record(self, values):
            seen.append(values.numel())
            self._widen(*self._min_max(values))

    return Closed()


def quantized(flow, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    config = torchq.QConfig(activation_observer=make)
    prepared = flow.prepare(model, BATCHES[0], config)
    flow.calibrate(prepared, BATCHES[:1])
    flow.calibrate(copy.deepcopy(prepared), BATCHES)  # a copy records for itself
    flow.calibrate(prepared, BATCHES[1:])
    return flow.convert(prepared)


@pytest.mark.parametrize("flow", FLOWS, ids=["fx", "eager"])
@pytest.mark.parametrize("make", [Plain, Assigned, Listed, Data, Inner, closure])
def test_records_as_the_built_in_one(flow, make):
    expected = quantized(flow, MinMaxObserver)
    result = quantized(flow, make)
    torch.testing.assert_close(result(BATCHES[1]), expected(BATCHES[1]), rtol=0, atol=0)


@pytest.mark.parametrize("flow", FLOWS, ids=["fx", "eager"])
def test_overriding_the_public_methods_is_enough(flow):
    model = nn.Sequential(nn.Linear(8, 2)).eval()
    config = torchq.QConfig(activation_observer=Forwarded)
    result = flow.quantize(model, BATCHES, BATCHES[0], config)
    torch.testing.assert_close(result(BATCHES[1]), model(BATCHES[1]), rtol=0, atol=0.1)


@pytest.mark.parametrize("flow", FLOWS, ids=["fx", "eager"])
def test_without_record_raises(flow):
    class Bare(Observer):
        pass

    model = nn.Sequential(nn.Linear(8, 2)).eval()
    config = torchq.QConfig(activation_observer=Bare)
    prepared = flow.prepare(model, BATCHES[0], config)
    with pytest.raises(NotImplementedError, match=r"Bare of '\w+'.*must implement _record"):
        flow.calibrate(prepared, BATCHES)


@pytest.mark.parametrize("flow", FLOWS, ids=["fx", "eager"])
def test_without_range_raises(flow):
    """Values that an observer keeps elsewhere are not seen; the error does not blame the data."""

    class Kept(Observer):
        def _record(self, values):
            self.largest = float(values.abs().max())

    model = nn.Sequential(nn.Linear(8, 2)).eval()
    config = torchq.QConfig(activation_observer=Kept)
    with pytest.raises(NotImplementedError, match=r"Kept of '\w+'.*must implement _range"):
        flow.quantize(model, BATCHES, BATCHES[0], config)


def test_without_merge_raises():
    one, other = Plain(), Plain()
    other(BATCHES[0])
    with pytest.raises(NotImplementedError, match=r"Plain must implement _merge"):
        one.merge(other)


def test_range_of_a_histogram_subclass_counts_before_functions():
    class Narrow(HistogramObserver):
        def _range(self, integers, symmetric):
            return -0.5, 0.5

    observer = Narrow()
    observer(BATCHES[0])
    assert observer.qparams_before(torch.sigmoid) == observer.qparams()


def test_the_state_of_the_model_is_still_put_back():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.calls = nn.Linear(8, 2), 0

        def forward(self, x):
            self.calls += 1
            return self.fc(x)

    config = torchq.QConfig(activation_observer=Assigned)
    prepared = torchq.eager.prepare(Counter().eval(), BATCHES[0], config)
    torchq.calibrate(prepared, BATCHES)
    assert prepared.calls == 0 and prepared.fc.observer.calls == 2

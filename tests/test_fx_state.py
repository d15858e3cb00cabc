# SPDX-License-Identifier: Apache-2.0
"""What models keep between calls: what depends on it is as in the model, call for call.

A graph keeps nothing. What depends on earlier calls is therefore swapped, not traced; caches of
what shapes decide, and what nobody reads, are traced as ever.
"""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flows import sqnr
from models import Wired
from state_cases import KEPT, TRACED, batches, build, follows, quantized
from torch import Tensor, fx, nn

import torchq


@pytest.mark.parametrize("name", KEPT)
def test_results_of_earlier_calls_count(name: str) -> None:
    model, data = build(name), batches()
    with pytest.warns(UserWarning, match="its results depend on what earlier calls left in '"):
        converted = torchq.quantize(model, data, data[0])
    assert "2 of 2 convolutions and linears run in int8" in str(torchq.explain(converted))
    another = copy.deepcopy(converted)
    found = follows(model, converted, data)
    assert all(torch.equal(another(x), y) for x, y in zip(data, found, strict=True))


@pytest.mark.parametrize("name", TRACED)
def test_what_shapes_decide_is_traced(name: str) -> None:
    model, data = build(name), batches()
    converted = torchq.quantize(model, data, data[0])
    assert isinstance(converted, fx.GraphModule)
    follows(model, converted, data)
    if name in ("grid_by_shape", "cached_function"):  # the batch is part of a key
        with pytest.raises(RuntimeError, match="size or condition was"):
            converted(data[0][:3])
    else:
        follows(model, converted, [data[0][:3]])


@pytest.mark.parametrize("name", KEPT)
def test_only_the_submodule_that_keeps_something_is_swapped(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), build(name), nn.ReLU(), nn.Linear(8, 4))
    data = batches()
    prepared = torchq.calibrate(torchq.prepare(model.eval(), data[0]), data)
    first, second = torchq.convert(prepared), torchq.convert(prepared)
    assert isinstance(first, fx.GraphModule)
    rows = {row.name: row for row in torchq.explain(first).rows}
    assert all(rows[key].quantized for key in ("0", "2.a", "2.b", "4"))
    follows(copy.deepcopy(model), first, data)  # and leaves the second where it is
    follows(model, second, data)


def test_a_leaf_without_layers_stays_float_with_its_reason() -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x if self.last is None else 0.5 * (x + self.last)
            return self.last

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Smooth(), nn.Linear(8, 4)).eval()
    converted = torchq.quantize(model, batches(), strict=True)
    (row,) = (row for row in torchq.explain(converted).rows if row.name == "1")
    assert not row.quantized
    assert "what earlier calls left in 'last', which a graph does not keep" in row.reason
    follows(model, converted, batches())


OUTSIDE: dict[str, Any] = {}


@pytest.mark.parametrize("kind", ["dict", "closure"])
def test_state_outside_of_the_modules(kind: str) -> None:
    """Neither copied nor put back, but never lost; and no node is left in it."""
    OUTSIDE["last"] = None
    last: Tensor | None = None

    def in_closure(m: Any, x: Tensor) -> Tensor:
        nonlocal last
        y = m.a(x)
        before, last = last, y
        return m.b(y if before is None else y + before)

    def in_dict(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        before, OUTSIDE["last"] = OUTSIDE["last"], y
        return m.b(y if before is None else y + before)

    torch.manual_seed(0)
    forward = in_dict if kind == "dict" else in_closure
    model, data = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(), batches()
    with pytest.warns(UserWarning, match="what earlier calls left outside of its modules"):
        prepared = torchq.prepare(model, data[0])
    assert type(OUTSIDE["last"] if kind == "dict" else last) is Tensor
    converted = torchq.convert(torchq.calibrate(prepared, data))

    def run(network: nn.Module) -> list[Tensor]:
        nonlocal last
        OUTSIDE["last"] = last = None
        with torch.no_grad():
            return [network(x) for x in data]

    assert all(sqnr(a, b) > 25 for a, b in zip(run(model), run(converted), strict=True))


class Kept:
    """Somebody's object."""


class Slots:
    __slots__ = ("grid",)


@pytest.mark.parametrize("kind", ["class", "object", "slots"])
def test_no_node_stays_in_what_a_trace_fills_once(kind: str) -> None:
    """A grid of the input's size, made in the first call; a class is read through a cache."""
    holder: Any = {"class": type("Kept", (), {}), "object": Kept(), "slots": Slots()}[kind]
    holder.grid = None

    def forward(m: Any, x: Tensor) -> Tensor:
        if holder.grid is None:
            holder.grid = torch.arange(x.shape[0]).float()[:, None] / 8
        y = m.a(x)
        for _ in range(20):
            y = y + holder.grid
        return y

    torch.manual_seed(0)
    model, data = Wired(forward, a=nn.Linear(8, 8)).eval(), batches()
    prepared = torchq.prepare(model, data[0])
    assert type(holder.grid) is Tensor
    follows(model, torchq.convert(torchq.calibrate(prepared, data)), data)


@functools.lru_cache
def grid_of(size: int) -> Tensor:
    return torch.arange(size).float()[:, None] / 8


def test_functions_cached_by_size_are_traced_again_and_again() -> None:
    torch.manual_seed(0)
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    model = Wired(lambda m, x: m.b(m.a(x) + grid_of(x.shape[0])), **layers).eval()
    data = batches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            follows(model, torchq.quantize(model, data, data[0]), data)
        torchq.analysis.sensitivity(model, data[:1], data[0])


def test_modules_that_are_swapped_on_request() -> None:
    """The second call reads as float what the first one passed from layer to layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        m.calls += 1
        return m.b(y if m.calls == 1 else y * 2)

    torch.manual_seed(0)
    model, data = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(), batches()
    model.calls = 0
    follows(model, torchq.eager.quantize(model, data, data[0]), data)


def test_nothing_moves_on_in_the_models_that_are_looked_at() -> None:
    model, data = build("attribute"), batches()
    prepared = torchq.calibrate(torchq.prepare(build("count"), data[0]), data)
    assert prepared.count == 0
    torchq.analysis.sensitivity(model, data[:1], data[0])
    assert model.cache is None
    converted = quantized(model, data)
    torchq.analysis.profile(model, converted, data[0], rounds=1)
    assert model.cache is None and converted.cache is None


def test_how_often_a_model_runs() -> None:
    """A large model takes minutes a run."""
    runs = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = 0

        def forward(self, x: Tensor) -> Tensor:
            self.last = x + 0.5 * self.last
            return self.last

    def forward(m: Any, x: Tensor) -> Tensor:
        runs.append(x)
        return m.b(m.keeps(m.a(x)))

    model = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), keeps=nn.Identity()).eval()
    torchq.prepare(model, torch.randn(2, 8))
    assert len(runs) == 3
    runs.clear()
    model.keeps = Keeps().eval()
    torchq.prepare(model, torch.randn(2, 8))
    assert len(runs) == 6  # 1 + 2, 1 and 1 without what it keeps, and 1 to be traced around that


@dataclass
class Scores:
    scores: Tensor
    calls: int = 0


@dataclass
class Doubled:
    scores: Tensor

    def __post_init__(self) -> None:
        self.scores = self.scores * 2


class Returns(nn.Module):
    """A dataclass, of what calls before count for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.kind, self.calls = nn.Linear(8, 8), kind, 0

    def forward(self, x: Tensor) -> Any:
        if self.kind == "doubled":
            return Doubled(self.a(x))
        self.calls += 1
        if self.kind == "count":
            return Scores(self.a(x), self.calls)
        return Scores(self.a(x) * self.calls)


@pytest.mark.parametrize("kind", ["doubled", "count", "factor"])
def test_what_is_in_a_dataclass_is_compared(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Returns(kind).eval(), batches()[0]
    prepared = torchq.prepare(model, x)
    assert not hasattr(prepared, "graph_module")
    for _ in range(2):
        a, b = prepared(x), model(x)
        assert torch.equal(a.scores, b.scores) and vars(a).get("calls") == vars(b).get("calls")

# SPDX-License-Identifier: Apache-2.0
"""Swapped models whose code asks what its layers are, or changes them: right or an error."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import sqnr
from torch import Tensor, nn

import torchq
from torchq import eager


class Asks(nn.Module):
    """Calls ``code(self, x, way)``; acts on values, so that it cannot be traced."""

    def __init__(self, code: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.code = code
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor, way: int = 0) -> Tensor:
        y: Tensor = self.code(self, x, way)
        return y * 2 if float(y.sum()) > 1e9 else y


class Named(nn.Linear):
    """A class that says something of itself."""

    gain = 3.0


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.task = nn.Parameter(torch.randn(2, 8, 8)), 0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[self.task])


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.n = nn.Parameter(torch.randn(8, 8)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return F.linear(x, self.weight if self.n < 3 else -self.weight)


def is_linear(m: Asks, x: Tensor, way: int) -> Tensor:
    return m.a(x) * 0.5 + 1 if isinstance(m.a, nn.Linear) else m.a(x)


def is_exactly(m: Asks, x: Tensor, way: int) -> Tensor:
    return m.a(x) * 0.5 + 1 if type(m.a) is nn.Linear else m.a(x)


def has_weight(m: Asks, x: Tensor, way: int) -> Tensor:
    return m.a(x) * (3 if hasattr(m.a, "in_channels") else getattr(m.a, "gain", 1.0))


def sequence(m: Asks, x: Tensor, way: int) -> Tensor:
    return m.s(x) if isinstance(m.s, nn.Sequential) else m.s(x) * 2


def no_bias(m: Asks, x: Tensor, way: int) -> Tensor:
    return m.a(x) + 1 if m.a.bias is None else m.a(x)


def task(m: Asks, x: Tensor, way: int) -> Tensor:
    m.a.task = way
    y: Tensor = m.a(x)
    return y


def pads(m: Asks, x: Tensor, way: int) -> Tensor:
    if way:
        m.a.padding = (way,)
    y: Tensor = m.a(x)
    return y


def weight(m: Asks, x: Tensor, way: int) -> Tensor:
    if way:
        m.a.weight = nn.Parameter(torch.ones(8, 8))
    y: Tensor = m.a(x)
    return y


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def pair() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU())


def converted(model: nn.Module, x: Tensor, *more: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = torchq.quantize(model, [(x, *more), (2 * x, *more)], (x, *more))
    with torch.no_grad():
        assert sqnr(model(x, *more), result(x, *more)) > 25
    return result


@pytest.mark.parametrize(
    ("code", "parts", "int8"),
    [
        (is_linear, lambda: {"a": linear()}, 1),
        (is_exactly, lambda: {"a": linear()}, 0),
        (sequence, lambda: {"s": pair()}, 1),
        (has_weight, lambda: {"a": Named(8, 8)}, 1),
        (no_bias, lambda: {"a": nn.Linear(8, 8, bias=False)}, 1),
        (task, lambda: {"a": Counts()}, 0),
    ],
    ids=["class", "type", "sequence", "attribute", "bias", "counter"],
)
def test_questions(code, parts, int8) -> None:
    torch.manual_seed(0)
    model, x = Asks(code, **parts()).eval(), torch.randn(4, 8)
    result = converted(model, x)
    rows = [row for row in torchq.explain(result).rows if row.is_matmul]
    assert sum(row.quantized for row in rows) == int8
    with torch.no_grad():
        for _ in range(4):  # counters go on
            assert sqnr(model(x), result(x)) > 25


@pytest.mark.parametrize(
    ("code", "layer", "shape"),
    [
        (task, Task, (4, 8)),
        (pads, lambda: nn.Conv1d(8, 8, 3), (2, 8, 9)),
        (weight, linear, (4, 8)),
    ],
)
def test_changes_raise(code, layer, shape) -> None:
    torch.manual_seed(0)
    model, x = Asks(code, a=layer()).eval(), torch.randn(shape)
    result = converted(model, x)
    with pytest.raises(AttributeError, match=r"of a layer must be what it was in torchq.prepare"):
        result(x, 1)


def test_parts_of_sequences_with_names() -> None:
    """Code may call them one by one."""

    def code(m: Asks, x: Tensor, way: int) -> Tensor:
        y: Tensor = m.s.last(m.s.first(x).relu() * 0.9) if way else m.s(x)
        return y

    torch.manual_seed(0)
    parts = OrderedDict(first=linear(), relu=nn.ReLU(), last=linear())
    model, x = Asks(code, s=nn.Sequential(parts)).eval(), torch.randn(4, 8)
    result = converted(model, x)
    with torch.no_grad():
        assert sqnr(model(x, 1), result(x, 1)) > 25


def test_looking_for_a_layer_does_not_run_it() -> None:
    """In a part of a traced model that keeps its own code."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.register_buffer("step", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.step.add_(1)
            return F.linear(x, self.weight * self.step)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.out = Asks(task, a=Steps(), b=linear()), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.part(x))

    torch.manual_seed(0)
    model, x = Outer().eval(), torch.randn(4, 8)
    result = torchq.quantize(model, [x, 2 * x])
    with torch.no_grad():
        for _ in range(3):
            assert sqnr(model(x), result(x)) > 25
    assert result.get_submodule("part.a").step == 3


@pytest.mark.parametrize("name", ["noise", "dropout", "kept"])
def test_constants_that_are_none(name: str) -> None:
    """What is random, and what a part that keeps something makes of a parameter."""

    class Kept(nn.Module):
        n = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return x * self.n

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.kept = linear(), linear(), Kept()
            self.p = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            made = {
                "noise": lambda: torch.randn_like(self.p),
                "dropout": lambda: F.dropout(self.p, 0.5, True),
                "kept": lambda: self.kept(self.p),
            }[name]()
            return self.b(self.a(x) + made)

    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 8)
    result = torchq.quantize(model, [x, 2 * x, 3 * x])
    with torch.no_grad():
        for seed in range(3):  # as often as calibrated: what is kept grows
            torch.manual_seed(seed)
            want = model(x)
            torch.manual_seed(seed)
            assert sqnr(want, result(x)) > 22


@pytest.mark.parametrize(
    "cut",
    [
        lambda y: torch.unsafe_chunk(y, 3),
        lambda y: torch.unsafe_split(y, 2),
        lambda y: torch.chunk(y, dim=0, chunks=3),
    ],
)
def test_other_numbers_of_parts(cut) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return sum(self.b(part).sum(0) for part in cut(self.a(x)))

    torch.manual_seed(0)
    model = Net().eval()
    result = torchq.quantize(model, [torch.randn(4, 8) for _ in range(3)])
    more = torch.randn(6, 8)
    with torch.no_grad():
        try:
            got = result(more)
        except (RuntimeError, ValueError):
            return
        assert sqnr(model(more), got) > 25


def test_eager_flow_by_itself() -> None:
    torch.manual_seed(0)
    model, x = Asks(is_exactly, a=linear()).eval(), torch.randn(4, 8)
    result = eager.quantize(model, [(x,)], (x,))
    (row,) = torchq.explain(result).rows
    assert row.reason == "the model's code does something else with another kind of layer"
    with pytest.raises(RuntimeError, match="strict=True, but 1 convolution"):
        eager.quantize(model, [(x,)], (x,), strict=True)


def test_overrides_name_functions_in_parts_that_keep_their_code() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.out = Asks(lambda m, x, way: m.a(x) @ m.b.p, a=linear()), linear()
            self.part.b = nn.ParameterDict({"p": torch.randn(8, 8)})

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.part(x))

    torch.manual_seed(0)
    model, x = Outer().eval(), torch.randn(4, 8)
    result = torchq.quantize(model, [x], overrides={"part.matmul": None}, strict=True)
    rows = {row.name: row for row in torchq.explain(result).rows}
    assert rows["part.a"].quantized and rows["part.matmul"].requested
    with pytest.raises(ValueError, match=r"\['part.mul'\] match none.*'out', 'part.a'"):
        torchq.prepare(model, x, overrides={"part.mul": None})

# SPDX-License-Identifier: Apache-2.0
"""Models whose code asks what its layers are, or changes them: right, or an error."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import sqnr
from torch import Tensor, nn

import torchq
from torchq import eager
from torchq.convert.swap import compare
from torchq.report import reasons


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
    result = eager.quantize(model, [(x, *more), (2 * x, *more)], (x, *more))
    with torch.no_grad():
        assert sqnr(model(x, *more), result(x, *more)) > 25
    return result


@pytest.mark.parametrize(
    ("code", "parts", "int8"),
    [
        (is_linear, lambda: {"a": linear()}, 0),
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


def test_eager_flow_by_itself() -> None:
    torch.manual_seed(0)
    model, x = Asks(is_exactly, a=linear()).eval(), torch.randn(4, 8)
    result = eager.quantize(model, [(x,)], (x,))
    (row,) = torchq.explain(result).rows
    assert row.reason == "the model's code does something else with another kind of layer"
    with pytest.raises(RuntimeError, match="strict=True, but 1 convolution"):
        eager.quantize(model, [(x,)], (x,), strict=True)


class Block(nn.Module):
    """Asks for the class of one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return y + x if type(self.b) is nn.Linear else y


def raises(m: Asks, x: Tensor, way: int) -> Tensor:
    if not isinstance(m.a, nn.Linear):
        raise RuntimeError("what is this?")
    return m.b(m.a(x))


def writes(m: Asks, x: Tensor, way: int) -> Tensor:
    m.a.weight.data.clamp_(-0.2, 0.2)
    return m.b(m.a(x))


@pytest.mark.parametrize("code", [raises, writes])
def test_only_the_culprit_stays_float(code) -> None:
    torch.manual_seed(0)
    model, x = Asks(code, a=linear(), b=linear()).eval(), torch.randn(4, 8)
    rows = {row.name: row for row in torchq.explain(converted(model, x)).rows}
    assert rows["b"].quantized and rows["a"].reason == reasons.OTHER_CODE


def test_culprits_in_blocks_are_found_with_few_runs(monkeypatch) -> None:
    """Those of one class share their fate."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(8)), linear()).eval(), torch.randn(4, 8)
    runs: list[bool] = []
    agrees = compare.Comparison.agrees

    def counted(self: Any, prepared: nn.Module) -> bool:
        runs.append(agrees(self, prepared))
        return runs[-1]

    monkeypatch.setattr(compare.Comparison, "agrees", counted)
    result = eager.quantize(model, [x], x)
    names = {r.name for r in torchq.explain(result).rows if r.reason == reasons.OTHER_CODE}
    assert names == {f"{i}.b" for i in range(8)} and len(runs) < 8
    with pytest.raises(RuntimeError, match=r"strict=True, but 8 .*0\.b: the model's code does"):
        eager.quantize(model, [x], x, strict=True)

# SPDX-License-Identifier: Apache-2.0
"""Python's operators between what a layer gives, constants and numbers: traced, saved, scripted."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.convert.graph_module import QuantizedGraph

REALS = torch.linspace(1, 4, 8)
INTS = torch.arange(8) % 3 + 1
MATRIX = torch.eye(8) * 0.5


def ints(y: Tensor) -> Tensor:
    return (y * 4).round().int().clamp(0, 7)


class Net(nn.Module):
    """``function(y, real, integer, matrix)`` between two layers."""

    def __init__(self, function: Callable[..., Any], constants: str) -> None:
        super().__init__()
        self.function, self.constants = [function], constants
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        if constants == "buffers":
            for name, value in (("real", REALS), ("integer", INTS), ("matrix", MATRIX)):
                self.register_buffer(name, value.clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = y + y.sign() * 0.5
        if self.constants == "buffers":
            made = self.function[0](y, self.real, self.integer, self.matrix)
        else:
            made = self.function[0](y, REALS, INTS, MATRIX)
        result: Tensor = self.b(made * 1.0)
        return result


CASES: dict[str, Callable[..., Any]] = {
    "neg": lambda y, t, i, w: -y,
    "pos": lambda y, t, i, w: +y,
    "abs": lambda y, t, i, w: abs(y),
    "invert": lambda y, t, i, w: ~ints(y),
    "invert mask": lambda y, t, i, w: ~(y > t),
    "floor": lambda y, t, i, w: y + math.floor(y[0, 0]),
    "matmul": lambda y, t, i, w: y @ w,
    "rmatmul": lambda y, t, i, w: (w @ y.t()).t(),
    "imatmul": lambda y, t, i, w: operator.imatmul(y * 1.0, w),
}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _op, _in = getattr(operator, _name), getattr(operator, f"i{_name}")
    CASES |= {
        _name: lambda y, t, i, w, op=_op: op(y.abs(), t),
        f"r{_name}": lambda y, t, i, w, op=_op: op(t, y),
        f"{_name} 2": lambda y, t, i, w, op=_op: op(y, 2),
        f"2 {_name}": lambda y, t, i, w, op=_op: op(2, y),
        f"i{_name}": lambda y, t, i, w, op=_in: op(y.abs() + 0.1, t),
        f"i{_name} 2": lambda y, t, i, w, op=_in: op(y.abs() + 0.1, 2),
    }
for _name in ("lshift", "rshift", "and_", "or_", "xor"):
    _op, _in = getattr(operator, _name), getattr(operator, f"i{_name.strip('_')}")
    CASES |= {
        _name: lambda y, t, i, w, op=_op: op(ints(y), i),
        f"r{_name}": lambda y, t, i, w, op=_op: op(i, ints(y)),
        f"{_name} 1": lambda y, t, i, w, op=_op: op(ints(y), 1),
        f"1 {_name}": lambda y, t, i, w, op=_op: op(1, ints(y)),
        f"i{_name}": lambda y, t, i, w, op=_in: op(ints(y), i.int()),
    }
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _op = getattr(operator, _name)
    CASES |= {
        _name: lambda y, t, i, w, op=_op: op(y, t),
        f"r{_name}": lambda y, t, i, w, op=_op: op(t, y),
        f"2 {_name}": lambda y, t, i, w, op=_op: op(2, y),
    }


@pytest.mark.parametrize("constants", ["buffers", "globals"])
@pytest.mark.parametrize("name", CASES)
def test_operators(name: str, constants: str, tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Net(CASES[name], constants).eval(), torch.randn(4, 8)
    prepared = torchq.calibrate(torchq.prepare(model, x), [x, 2 * x])
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), model(x), equal_nan=True)
        converted = torchq.convert(prepared)
        assert isinstance(converted, QuantizedGraph)
        torchq.save(converted, tmp_path / "model")
        want = converted(x)
        for one in (torchq.load(tmp_path / "model"), torch.jit.script(converted)):
            torch.testing.assert_close(one(x), want, rtol=0, atol=0, equal_nan=True)

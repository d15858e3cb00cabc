# SPDX-License-Identifier: Apache-2.0
"""What a model leaves in its caller's tensors, lists and dicts, the converted one leaves there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import sqnr, tensors
from models import Wired
from torch import Tensor, nn

import torchq

WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {}


def way(function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    WAYS[function.__name__] = function
    return function


@way
def operator(m: Any, x: Any, other: Any) -> Any:
    x += 1
    x *= 2
    return m.a(x)


@way
def item(m: Any, x: Any, other: Any) -> Any:
    x[:, 0] = 0
    return m.a(x)


@way
def item_of_a_layer(m: Any, x: Any, other: Any) -> Any:
    y = m.a(x)
    x[:, 1:3] = y[:, 1:3]
    return m.b(y)


@way
def both_kinds(m: Any, x: Any, other: Any) -> Any:
    x.mul_(2)
    x[0] += 1
    x.relu_()
    return m.a(x), x


@way
def sum_of_a_layer(m: Any, x: Any, other: Any) -> Any:
    y = m.a(x)
    x.add_(y)
    return m.b(x)


@way
def view(m: Any, x: Any, other: Any) -> Any:
    x.view(-1)[:8].add_(m.a(x)[0])
    return m.b(x)


@way
def function(m: Any, x: Any, other: Any) -> Any:
    return m.a(F.relu(x, inplace=True))


@way
def cache(m: Any, x: Any, other: Any) -> Any:
    y = m.a(x)
    other["state"][:, 1] = y
    return m.b(y)


@way
def key(m: Any, x: Any, other: Any) -> Any:
    other["more"] = m.a(x)
    return m.b(other["more"])


@pytest.mark.parametrize("flow", ["traced", "swapped"])
@pytest.mark.parametrize("name", WAYS)
def test_arguments_are_written_as_by_the_float_model(name: str, flow: str) -> None:
    torch.manual_seed(0)
    model = Wired(WAYS[name], a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    data = [(torch.randn(4, 8), {"state": torch.zeros(4, 3, 8)}) for _ in range(6)]
    quantize: Any = torchq.quantize if flow == "traced" else torchq.eager.quantize
    converted = quantize(model, copy.deepcopy(data), copy.deepcopy(data[0]))
    for found in (converted, pickle.loads(pickle.dumps(converted))):
        given, got = copy.deepcopy(data[1]), copy.deepcopy(data[1])
        with torch.no_grad():
            expected, result = model(*given), found(*got)
        assert given[1].keys() == got[1].keys()
        pairs = zip(tensors((expected, given)), tensors((result, got)), strict=True)
        assert all(torch.equal(a, b) or sqnr(a, b) > 25 for a, b in pairs)


def test_layers_behind_a_written_argument_are_int8() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x -= 0.5
        y: Tensor = m.b(m.a(x).relu_())
        return y

    model, x = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    converted = torchq.quantize(model, [x.clone()])
    assert [row.quantized for row in torchq.explain(converted).rows if row.is_matmul] == [True] * 2
    for found in (converted, torch.jit.script(converted)):
        written = x.clone()
        found(written)
        assert torch.equal(written, x - 0.5)

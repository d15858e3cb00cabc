# SPDX-License-Identifier: Apache-2.0
"""Linears and convolutions of constants: computed once, where nobody sees the difference."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import graph_of, sqnr
from models import Wired
from torch import Tensor, nn

import torchq

ONCE = "nothing that it reads depends on the inputs: it is computed once"


def _model(forward: Callable[..., Any]) -> nn.Module:
    """A linear, and a small network for a table of positions."""
    torch.manual_seed(0)
    model = Wired(forward, a=nn.Linear(8, 8))
    if forward in (projected, rounded):
        model.other = nn.Parameter(torch.randn(8, 8))
        return model.eval()
    model.bias = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8))
    if forward is convolved:
        model.conv = nn.Conv1d(5, 5, 3, padding=1)
    model.register_buffer("table", torch.randn(5, 2))
    model.register_buffer("index", torch.arange(40) % 5)
    return model.eval()


def added(m: Any, x: Tensor) -> Tensor:
    return m.a(x) + torch.sigmoid(m.bias(m.table)).mean(0)


def gathered(m: Any, x: Tensor) -> Tensor:
    return m.a(x)[:, None] + m.bias(m.table)[m.index]


def convolved(m: Any, x: Tensor) -> Tensor:
    return m.a(x) + m.conv(m.bias(m.table)[None])[0, 0]


def in_parts(m: Any, x: Tensor) -> Tensor:
    scale, shift = m.bias(m.table).chunk(2, -1)
    return m.a(x) * torch.cat([scale, shift], -1)[0]


def projected(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.relu(m.a(x)), m.other @ m.other.t())


@pytest.mark.parametrize("forward", [added, gathered, convolved, in_parts, projected])
@torch.no_grad()
def test_once(forward: Callable[..., Any], tmp_path: Path) -> None:
    model, data = _model(forward), [torch.randn(16, 8) for _ in range(3)]
    prepared = torchq.prepare(model, data[0])
    owners = {op.base for op in graph_of(prepared).plan.ops.values()}
    assert owners.isdisjoint({"bias.0", "bias.2", "conv"})
    other = pickle.loads(pickle.dumps(prepared))
    for x in data:
        assert torch.equal(prepared(x), model(x)) and torch.equal(other(x), model(x))
    quantized = torchq.convert(torchq.calibrate(prepared, data), strict=True)
    torchq.save(quantized, tmp_path / "model")
    for x in (data[1], data[1][:1], torch.cat(data)):
        got = quantized(x)
        assert sqnr(model(x), got) > 25
        assert torch.equal(torchq.load(tmp_path / "model")(x), got)
    rows = {row.name: row for row in torchq.explain(quantized).rows}
    if forward is not projected:
        assert rows["bias.0"].reason == ONCE and not rows["bias.0"].is_matmul
    assert sum(row.is_matmul for row in rows.values()) == (2 if forward is projected else 1)


@torch.no_grad()
def test_what_is_returned_is_made_in_each_call() -> None:
    """A caller may write to it."""
    model = _model(lambda m, x: (m.a(x) + (table := m.bias(m.table))[0], table))
    x = torch.randn(16, 8)
    quantized = torchq.quantize(model, [x])
    want, (dst, table) = model(x), quantized(x)
    assert sqnr(want[0], dst) > 25 and sqnr(want[1], table) > 25
    table.zero_()
    assert torch.equal(quantized(x)[0], dst)


def rounded(m: Any, x: Tensor) -> Tensor:
    weight = torch.fake_quantize_per_tensor_affine(m.other @ m.other.t(), 0.5, 0, -127, 127)
    return F.linear(m.a(x), weight)


def test_a_weight_that_was_rounded_keeps_its_scale() -> None:
    """The fake quantizer of a product of matrices says what the scale is."""
    model, x = _model(rounded), torch.randn(4, 8)
    quantized = torchq.quantize(model, [x], x)
    assert {float(s) for s in graph_of(quantized).linear.weight_scale.reshape(-1)} == {0.5}

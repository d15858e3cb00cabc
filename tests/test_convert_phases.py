# SPDX-License-Identifier: Apache-2.0
"""Fourier features: a matmul stays float where sine and cosine take many periods of it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Wired
from torch import Tensor, nn

import torchq

REASON = "8 bits of what it reads are too coarse for phases of up to"


def product(m: Any, x: Tensor) -> Tensor:
    phases = 2 * math.pi * (x @ m.b.weight.t())
    return torch.cat([torch.sin(phases), phases.cos()], -1)


def layer(m: Any, x: Tensor) -> Tensor:
    phases = m.b(x)[:, None].mul(6.0) + 0.5
    return torch.cat([phases.sin().squeeze(1), phases[:, 0].cos()], -1)


class Encoded(nn.Module):
    """A linear layer of such features."""

    def __init__(self, features: Callable[[Any, Tensor], Tensor], scale: float) -> None:
        super().__init__()
        self.b, self.fc, self.features = nn.Linear(2, 16), nn.Linear(32, 8), features
        nn.init.normal_(self.b.weight, std=scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(self, x))


def decibels(model: nn.Module, quantized: nn.Module, x: Tensor) -> float:
    want = model(x).detach()
    noise = (quantized(x) - want).square().sum()
    return float(10 * torch.log10(want.square().sum() / noise))


@pytest.mark.parametrize("features", [product, layer])
@pytest.mark.parametrize(("scale", "is_float"), [(0.1, False), (20.0, True)])
def test_fourier_features(
    features: Callable[[Any, Tensor], Tensor], scale: float, is_float: bool
) -> None:
    torch.manual_seed(0)
    model = Encoded(features, scale).eval()
    data = [torch.rand(64, 2) * 2 - 1 for _ in range(4)]
    prepared = torchq.calibrate(torchq.prepare(model, data[0]), data)
    for one in (prepared, pickle.loads(pickle.dumps(prepared))):
        quantized = torchq.convert(one)
        rows = [row for row in torchq.explain(quantized).rows if row.is_matmul]
        assert [REASON in row.reason for row in rows] == [is_float, False]
        assert [row.quantized for row in rows] == [not is_float, True]
        assert decibels(model, quantized, data[1]) > 25


def test_a_sine_behind_a_layer_is_its_table() -> None:
    """As in networks of sines: a few periods are right in int8."""
    torch.manual_seed(0)
    model = Wired(lambda m, x: m.b(torch.sin(3 * m.a(x))), a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    data = [torch.randn(32, 8) for _ in range(4)]
    quantized = torchq.quantize(model.eval(), data)
    assert all(row.quantized for row in torchq.explain(quantized).rows)
    assert decibels(model, quantized, data[1]) > 25

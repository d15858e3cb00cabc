# SPDX-License-Identifier: Apache-2.0
"""Fourier features and rotary embeddings: what sine and cosine read where 8 bits are too coarse."""

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


def decibels(model: nn.Module, quantized: nn.Module, *inputs: Tensor) -> float:
    want = model(*inputs).detach()
    noise = (quantized(*inputs) - want).square().sum()
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


PERIODIC: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "waves": lambda x: [x.sin(), x.cos()],
    "polar": lambda x: [*torch.view_as_real(torch.polar(torch.ones_like(x), x)).unbind(-1)],
    "complex": lambda x: [*torch.view_as_real(torch.exp(1j * x)).unbind(-1)],
    "remainder": lambda x: [x % 6.0, torch.remainder(x + 1, 6.0)],
    "fraction": lambda x: [(x / 6).frac(), torch.fmod(x, 6.0)],
    "sinc": lambda x: [torch.sinc(x / 3), torch.tan(x / 40)],
}


class Uncaptured(Encoded):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool(x.sum() < 1e9) else -x)


@pytest.mark.parametrize("way", ["graph", "own code", "layers"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PERIODIC)
def test_periodic_functions_in_any_code(name: str, dynamic: bool, way: str) -> None:
    torch.manual_seed(0)
    cls = Uncaptured if way == "own code" else Encoded
    model = cls(lambda m, x: torch.cat(PERIODIC[name](40 * m.b(x)), -1), 1.0).eval()
    data = [torch.rand(64, 2) * 2 - 1 for _ in range(3)]
    flow, config = (torchq.eager if way == "layers" else torchq), torchq.QConfig(dynamic=dynamic)
    quantized = flow.quantize(model, data, data[0], config)
    rows = {row.name: row for row in torchq.explain(quantized).rows}
    assert REASON in rows["b"].reason and not rows["b"].quantized and rows["fc"].quantized
    assert decibels(model, quantized, data[1]) > 25


def test_a_sine_behind_a_layer_is_its_table() -> None:
    """As in networks of sines: a few periods are right in int8."""
    torch.manual_seed(0)
    model = Wired(lambda m, x: m.b(torch.sin(3 * m.a(x))), a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    data = [torch.randn(32, 8) for _ in range(4)]
    quantized = torchq.quantize(model.eval(), data)
    assert all(row.quantized for row in torchq.explain(quantized).rows)
    assert decibels(model, quantized, data[1]) > 25


class Rotary(nn.Module):
    """Queries and keys turned by their positions: of all tokens, or as an argument gives them."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.qk, self.out, self.spelling = nn.Linear(32, 64), nn.Linear(8, 8), spelling
        self.register_buffer("frequencies", 10000 ** (-torch.arange(4) / 4))

    def angles(self, x: Tensor, positions: Tensor | None) -> Tensor:
        steps = torch.arange(x.shape[1]) if positions is None else positions
        if self.spelling == "outer":
            angles = torch.outer(steps.float(), self.frequencies)
        elif self.spelling == "einsum":
            angles = torch.einsum("i,j->ij", steps.to(self.frequencies.dtype), self.frequencies)
        else:
            angles = (self.frequencies[None, :, None] @ steps[..., None, :].float()).mT
        return torch.cat((angles, angles), -1)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        angles = self.angles(x, positions)
        cos, sin = angles.cos(), angles.sin()
        q, k = self.qk(x).unflatten(-1, (2, 4, 8)).permute(2, 0, 3, 1, 4)

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        return self.out(turned(q)) + turned(k)


@pytest.mark.parametrize("spelling", ["outer", "einsum", "matmul", "positions"])
@torch.no_grad()
def test_rotary_embeddings_beyond_what_was_calibrated(spelling: str) -> None:
    """Values that depend only on sizes and positions stay float: no data gives their range."""
    model = Rotary(spelling).eval()

    def inputs(length: int) -> tuple[Tensor, ...]:
        x = 2 * torch.randn(2, length, 32)
        return (x, torch.arange(length)[None]) if spelling == "positions" else (x,)

    quantized = torchq.quantize(model, [inputs(16) for _ in range(4)], strict=True)
    assert decibels(model, quantized, *inputs(2048)) > 25

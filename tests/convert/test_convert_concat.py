# SPDX-License-Identifier: Apache-2.0
"""Concatenations of what others read as well: whose scale and zero point they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import graph_of, names, sqnr
from models import Wired, randomize
from torch import Tensor, nn

import torchq
import torchq.nn as tnn

X = (2, 8, 9, 9)


def concatenations(converted: nn.Module) -> list[tnn.QCat]:
    return [module for module in graph_of(converted).modules() if isinstance(module, tnn.QCat)]


def shares(cat: tnn.QCat) -> bool:
    """Returns True if the concatenation copies bytes."""
    return len(set(zip(cat.scales.tolist(), cat.zero_points.tolist(), strict=True))) == 1


class Dense(nn.Module):
    """Each layer appends two channels to what it read."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8 + 2 * depth, 8, 1)
        self.layers = nn.ModuleList(nn.Conv2d(8 + 2 * i, 2, 3, padding=1) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.cat([x, layer(F.relu(x))], 1)
        return self.last(x)


def test_a_chain_shares_and_loses_nothing_on_its_way() -> None:
    """The concatenated values are those of the first, bit for bit."""
    x = torch.randn(4, *X[1:])
    converted = torchq.quantize(randomize(Dense(12)), [x], x)
    cats = concatenations(converted)
    assert len(cats) == 12 and all(map(shares, cats))
    results: list[Tensor] = []
    for module in (graph_of(converted).first, cats[-1]):
        module.register_forward_hook(lambda m, args, dst: results.append(dst))
    converted(x)
    assert torch.equal(results[0], results[1][:, :8])


@pytest.mark.parametrize(
    ("factor", "shared"),
    [(1.0, True), (1.2, True), (1.25, False), (30.0, False)],
)
def test_a_narrow_source_keeps_its_steps(factor: float, shared: bool) -> None:
    """It has two readers, the concatenation one: the limit is the square root of 3 / 2."""
    model = Wired(
        lambda m, x: (m.c(y := m.a(x)), m.d(torch.cat([y, factor * y], 1))),
        a=nn.Conv2d(8, 8, 1), c=nn.Conv2d(8, 8, 1), d=nn.Conv2d(16, 8, 1),
    )  # fmt: skip
    x = torch.randn(4, *X[1:])
    config = torchq.QConfig(activation_observer="minmax")
    converted = torchq.quantize(randomize(model), [x], x, config)
    (cat,) = concatenations(converted)
    scales = cat.scales.tolist()
    assert (scales[0] == scales[2]) == shared and scales[1] == scales[2]
    with torch.no_grad():
        assert all(sqnr(a, b) > 35 for a, b in zip(model(x), converted(x), strict=True))


def test_a_source_is_not_clipped() -> None:
    """A range of the same size elsewhere is not that of the source."""
    model = Wired(
        lambda m, x: (m.c(y := torch.sigmoid(m.a(x))), m.d(torch.cat([y, m.b(x).clamp(-1, 0)], 1))),
        a=nn.Conv2d(8, 2, 1), b=nn.Conv2d(8, 200, 1), c=nn.Conv2d(2, 8, 1), d=nn.Conv2d(202, 8, 1),
    )  # fmt: skip
    x = torch.randn(4, *X[1:])
    converted = torchq.quantize(randomize(model), [x], x)
    (cat,) = concatenations(converted)
    assert not shares(cat)
    with torch.no_grad():
        assert all(sqnr(a, b) > 30 for a, b in zip(model(x), converted(x), strict=True))


def test_fake_quantizers_keep_their_scale() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.fake_quantize_per_tensor_affine(m.a(x), 1 / 32, 128, 0, 255)
        return m.c(y), m.d(torch.cat([y, m.b(x)], 1))

    model = Wired(
        forward,
        a=nn.Conv2d(8, 8, 1), b=nn.Conv2d(8, 8, 1), c=nn.Conv2d(8, 8, 1), d=nn.Conv2d(16, 8, 1),
    )  # fmt: skip
    x = torch.randn(4, *X[1:])
    (cat,) = concatenations(torchq.quantize(randomize(model), [x], x))
    assert float(cat.scales[0]) == 1 / 32
    assert float(cat.scales[2]) != 1 / 32


def test_expanded_sources() -> None:
    """A class token and a global context, repeated for a batch and for every position."""
    model = Wired(
        lambda m, x: m.b(torch.cat([m.p["t"].expand(x.shape[0], -1, -1), y := m.a(x),
                                    y.mean(1, True).expand_as(y)], 1)),
        a=nn.Linear(8, 8), b=nn.Linear(8, 4), p=nn.ParameterDict({"t": torch.randn(1, 1, 8)}),
    )  # fmt: skip
    x = torch.randn(4, 6, 8)
    converted = torchq.quantize(model.eval(), [x, 2 * x], strict=True)
    assert names(converted).count("QCat") == 1
    for given in (x[:1], torch.randn(3, 9, 8)):
        with torch.no_grad():
            assert sqnr(model(given), converted(given)) > 28


class Cached(nn.Module):
    """Attention whose keys are appended to a cache, which begins empty."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.cat([torch.tensor([]), self.key(x)], dim=-2)
        return (self.query(x) @ keys.transpose(-1, -2)).softmax(-1) @ keys


def test_an_empty_tensor_in_front_is_left_out() -> None:
    model, x = randomize(Cached()), torch.randn(2, 6, 16)
    converted = torchq.quantize(model, [x], x)
    assert not concatenations(converted)
    for other in (x, torch.randn(3, 9, 16)):
        assert sqnr(converted(other), model(other)) > 15
    assert torchq.explain(converted).graphs[0].own_calls == 0


@pytest.mark.parametrize("copy", [lambda x: torch.cat([x]), torch.clone], ids=["cat", "clone"])
def test_views_of_a_copy_that_are_returned_keep_the_copy(copy: Any) -> None:
    """Callers may write to them; the arguments of the call stay as they were."""
    model = Wired(lambda m, x: (m.a(x), copy(x).transpose(0, 1).view(-1)), a=nn.Linear(4, 4))
    x = torch.randn(1, 4)
    given = x.clone()
    converted = torchq.quantize(model.eval(), [x], x, strict=True)
    converted(given)[1].zero_()
    assert torch.equal(given, x)

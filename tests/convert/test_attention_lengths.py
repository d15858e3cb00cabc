# SPDX-License-Identifier: Apache-2.0
"""Attention with biases made of positions is as accurate at other lengths as where calibrated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flows import names
from torch import Tensor, nn

import torchq

HEADS, WIDTH = 4, 64


class Attention(nn.Module):
    """``weigh(module, scores)`` gives the weights of the values."""

    def __init__(self, weigh: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table, self.weigh = nn.Embedding(32, HEADS), weigh

    def distances(self, length: int) -> Tensor:
        positions = torch.arange(length)
        return positions - positions[:, None]

    def relative(self, length: int) -> Tensor:
        """By a table of clipped distances, as T5, MPNet and Swin have."""
        index = self.distances(length).clamp(-16, 15) + 16
        return self.table(index).permute(2, 0, 1)

    def slopes(self, length: int) -> Tensor:
        """In proportion to the distance, as ALiBi and BLOOM have."""
        steep = 2.0 ** -torch.arange(1, HEADS + 1)
        return steep[:, None, None] * self.distances(length).abs()

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        weights = self.weigh(self, q @ k.mT)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


FUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "table": lambda m, s: (s / 4 + m.relative(s.size(-1))).softmax(-1),
    "slopes": lambda m, s: (s / 4 - m.slopes(s.size(-1))).softmax(-1),
    "scaled with the bias": lambda m, s: ((s + m.relative(s.size(-1))) / 4).softmax(-1),
    "causal": lambda m, s: (
        (s / 4 + m.relative(s.size(-1)))
        .masked_fill(m.distances(s.size(-1)) > 0, float("-inf"))
        .softmax(-1)
    ),
}
ALONE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "clipped scores": lambda m, s: (s / 4).clamp(-1, 1).softmax(-1),
    "division": lambda m, s: (s / 4).exp() / (s / 4).exp().sum(-1, keepdim=True),
    "sigmoid": lambda m, s: (s / 4).sigmoid() / s.size(-1),
}


@pytest.mark.parametrize("calibrated", [75, 300])
@pytest.mark.parametrize("name", [*FUSED, *ALONE])
def test_errors_do_not_grow_with_other_lengths(name: str, calibrated: int) -> None:
    torch.manual_seed(0)
    model, mean = Attention((FUSED | ALONE)[name]).eval(), torch.randn(WIDTH)
    data = [torch.randn(2, calibrated, WIDTH) + mean for _ in range(3)]
    converted = torchq.quantize(model, data)
    assert ("QAttention" in names(converted)) == (name in FUSED)
    with torch.no_grad():
        found = {
            length: torchq.sqnr(model(x), converted(x))
            for length in (10, calibrated, 1000)
            for x in [torch.randn(8 if length < 99 else 1, length, WIDTH) + mean]
        }
    # Averages over few positions have larger errors, whatever scales they are made with.
    assert min(found.values()) > found[calibrated] - 5, found
    (graph,) = torchq.explain(converted).graphs
    assert (graph.graph_calls, graph.own_calls) == (3, 0)


class Einsums(Attention):
    """The products as XLNet writes them, whose results have other orders than their operands."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x.transpose(0, 1)).view(t, b, 3, HEADS, c // HEADS).unbind(2)
        weights = torch.einsum("ibnd,jbnd->bnij", q, k).div(4).softmax(-1)
        mixed = torch.einsum("bnij,jbnd->ibnd", weights, v)
        return self.out(mixed.reshape(t, b, c)).transpose(0, 1)


def test_operands_of_einsums_have_sizes() -> None:
    """The average goes as the number of its positions, so its reader has no fixed scale."""
    model = Einsums(lambda m, s: s).eval()
    converted = torchq.quantize(model, [torch.randn(2, 75, WIDTH) for _ in range(3)])
    assert "QAttention" in names(converted)
    reasons = {row.name: row.reason for row in torchq.explain(converted).rows}
    assert "depends on sizes" in reasons["out"] and "depends" not in reasons["qkv"]

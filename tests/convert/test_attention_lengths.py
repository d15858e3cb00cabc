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
from torchq.report import reasons

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


class WithState(nn.Module):
    """A decoder in small: it returns an object with its keys, so no graph holds the whole."""

    class State:
        def __init__(self, seen: Tensor) -> None:
            self.seen = seen

    def __init__(self, spelled: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.spelled = nn.LayerNorm(WIDTH), spelled

    def forward(self, x: Tensor) -> tuple[Tensor, State]:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.spelled:
            mixed = torch.matmul((q @ k.mT / 4).softmax(-1).to(v.dtype), v)
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        mixed = mixed.transpose(1, 2).reshape(b, t, c).contiguous()
        return self.norm(x + self.out(mixed)), self.State(k)


@pytest.mark.parametrize("spelled", [False, True])
def test_the_models_own_code_attends(spelled: bool) -> None:
    """In code without a graph, what reads an average is dynamic, as in a graph."""
    torch.manual_seed(0)
    model, mean = WithState(spelled).eval(), torch.randn(WIDTH)
    data = [torch.randn(2, 500, WIDTH) + mean for _ in range(3)]
    converted = torchq.quantize(model, data)
    report = torchq.explain(converted)
    assert not report.graphs
    rows = {row.name: row for row in report.rows}
    assert rows["out"].quantized
    assert rows["out"].reason == f"{reasons.DYNAMIC}{reasons.LENGTH}"
    assert {rows[name].reason for name in "qkv"} == {""}
    assert type(converted.out).__name__ == "QuantizedLeaf"
    with torch.no_grad():
        few, many = (
            torchq.sqnr(model(x)[0], converted(x)[0])
            for length in (4, 500)
            for x in [torch.randn(8, length, WIDTH) + mean]
        )
    assert few > many - 3


def test_an_override_keeps_such_a_layer_static() -> None:
    model, data = WithState(False).eval(), [torch.randn(2, 75, WIDTH) for _ in range(3)]
    converted = torchq.quantize(model, data, overrides={"out": torchq.QConfig()})
    rows = {row.name: row.reason for row in torchq.explain(converted).rows}
    assert rows["out"] == ""


def test_a_dynamic_configuration_needs_no_other_reason() -> None:
    model, data = WithState(False).eval(), [torch.randn(2, 75, WIDTH) for _ in range(3)]
    converted = torchq.quantize(model, data, config=torchq.QConfig(recipe="accurate"))
    rows = {row.name: row for row in torchq.explain(converted).rows}
    assert rows["out"].quantized and "depends" not in rows["out"].reason


class FixedLength(Attention):
    """Its positions are parameters, so each call has as many as the example."""

    def __init__(self) -> None:
        super().__init__(lambda m, s: (s / 4).softmax(-1))
        self.positions = nn.Parameter(torch.randn(20, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions)


def test_graph_and_layer_agree_where_the_length_is_fixed() -> None:
    """The graph has one scale for the average, and so has the layer: they share the weight."""
    converted = torchq.quantize(FixedLength().eval(), [torch.randn(2, 20, WIDTH) for _ in "abc"])
    rows = {row.name: row.reason for row in torchq.explain(converted).rows}
    assert rows["out"] == ""
    assert "Dynamic" not in repr(converted)

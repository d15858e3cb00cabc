# SPDX-License-Identifier: Apache-2.0
"""A weight is quantized once: graphs and the model's own code read the same integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QConfig
from torchq.convert.dispatch import dispatches


class Block(nn.Module):
    """A hidden layer behind a norm, of which one channel is many times as large as the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        with torch.no_grad():
            self.norm.weight[5] = 30

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class Images(nn.Module):
    """Batch norms with negative and zero factors, and a layer that two of them follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.other, self.up = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 8, 2, 2)
        for norm in (self.norm, self.other):
            nn.init.normal_(norm.weight)
        with torch.no_grad():
            self.norm.weight[2] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.up(torch.relu(self.other(self.conv(x))))


def outliers() -> tuple[nn.Module, list[Tensor]]:
    return nn.Sequential(Block(64), Block(64)).eval(), [torch.randn(32, 64) for _ in range(4)]


def images() -> tuple[nn.Module, list[Tensor]]:
    return Images().eval(), [torch.randn(4, 8, 12, 12) for _ in range(4)]


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, list[Tensor]]], QConfig]] = {
    "outliers": (outliers, QConfig()),
    "ranges": (outliers, QConfig(activation_observer="minmax")),
    "dynamic": (outliers, QConfig(dynamic=True)),
    "accurate": (outliers, QConfig(recipe="accurate")),
    "best, 4 bits": (outliers, QConfig(recipe="best", weight_bits=4)),
    "norms": (images, QConfig()),
}


def weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the packed weights of leaves, and of graphs, by the names of the layers."""
    leaves = {
        name: leaf.layer.weight  # type: ignore[union-attr]
        for name, leaf in model.named_modules()
        if isinstance(leaf, torchq.nn.QuantizedLeaf)
    }
    (dispatch,) = dispatches(model)
    graph: Any = dispatch.graph
    own = {
        n: m.weight
        for n, m in graph.named_modules()
        if isinstance(vars(m).get("_buffers", {}).get("weight"), Tensor)
    }
    return leaves, own


@pytest.mark.parametrize("name", CASES)
def test_graphs_read_the_weights_of_leaves(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, config = CASES[name]
    model, data = make()
    q = torchq.quantize(model, data, config=config)
    torchq.save(q, tmp_path / "q")
    loaded = torchq.load(tmp_path / "q", make()[0])
    for converted in (q, loaded):
        leaves, own = weights(converted)
        assert leaves and leaves.keys() <= own.keys()
        shared = {n for n in leaves if leaves[n].data_ptr() == own[n].data_ptr()}
        assert shared == leaves.keys()
    assert torch.equal(loaded(data[0]), q(data[0]))


@pytest.mark.parametrize("name", CASES)
def test_the_own_code_computes_the_same(name: str) -> None:
    """The sources of its layers are divided by the factors that the weights have."""
    torch.manual_seed(0)
    make, config = CASES[name]
    model, data = make()
    q = torchq.quantize(model, data, config=config)
    expected, by_graph = model(data[0]), q(data[0])
    with torch.no_grad():
        own = type(q).forward(q, data[0])
    assert torchq.sqnr(expected, own) > torchq.sqnr(expected, by_graph) - 3
    for layer, leaf in q.named_modules():
        if isinstance(leaf, torchq.nn.QuantizedLeaf):
            assert torchq.sqnr(model.get_submodule(layer).weight, leaf.weight) > 15


def test_scales_of_all_channels_need_copies() -> None:
    """One scale for a weight whose channels have factors: the integers have them, too."""
    torch.manual_seed(0)
    model, data = images()
    q = torchq.quantize(model, data, config=QConfig(weight_granularity="per_tensor"))
    (row,) = (row for row in torchq.explain(q).rows if row.name == "conv")
    assert "its weight has 3 int8 copies: a batch norm is in its integers" in row.reason
    assert torchq.sqnr(model(data[0]), q(data[0])) > 20

# SPDX-License-Identifier: Apache-2.0
"""Calls of a converted model with other sizes than the example's, and the guards on sizes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import MISSES, calls, near, values, wired
from models import Wired
from torch import Tensor, nn

import torchq


def unrolled(m: Any, x: Tensor) -> Tensor:
    h = m.a(x[:, 0])
    for t in range(1, x.shape[1]):
        h = torch.tanh(m.b(h) + x[:, t])
    return h


def windows(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.b(m.a(part).relu()).mean(1) for part in x.split(2, 1)]).sum(0)


def by_size(m: Any, x: Tensor) -> Tensor:
    y = m.b(m.a(x).relu())
    return y * 2 if x.shape[1] > 6 else -y


def alone(m: Any, x: Tensor) -> Tensor:
    """Acts on a batch of one, which torch.export does not see."""
    y = m.b(m.a(x).relu())
    return y[:, :2] if x.shape[0] == 1 else y


def positions(m: Any, x: Tensor) -> Tensor:
    ramp = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(0)
    if ramp.shape[0] != x.shape[0]:
        ramp = ramp.expand(x.shape[0], -1)
    return m.b(m.a(x).relu()) + ramp.unsqueeze(-1) / x.shape[1]


def resized(m: Any, x: Tensor) -> Tensor:
    n = x.shape[1] // 2 * 3
    y = nn.functional.interpolate(m.a(x).transpose(1, 2), size=n).transpose(1, 2)
    return m.b(y)


@functools.lru_cache
def grid(length: int) -> Tensor:
    return torch.linspace(0, 1, length)[:, None]


def cached(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x) + grid(x.shape[1]))


@pytest.mark.parametrize("example", [(3, 5), (1, 7)])
@pytest.mark.parametrize(
    "code",
    [unrolled, windows, by_size, alone, positions, resized, cached],
    ids=lambda f: f.__name__,
)
@pytest.mark.filterwarnings(f"ignore:.*{MISSES}")
def test_other_batches_and_lengths(code: Callable[..., Any], example: tuple[int, int]) -> None:
    """Right for every size, by whichever code runs."""
    model = wired(code)
    lengths = [7, 2, 3, 5] if code is not by_size else [7, 5]
    data = [values(*example, 8) for _ in range(9)] + [values(40, n, 8) for n in lengths]
    converted = torchq.quantize(model, data)
    for batch, length in (example, (1, 7), (4, 5), (2, 2), (3, 9), (1, 3), (0, 5)):
        near(model, converted, values(batch, length, 8))


def test_a_size_that_the_code_acts_on_is_a_guard() -> None:
    model = wired(unrolled)
    converted = torchq.quantize(model, [values(50, 5, 8)])
    with pytest.warns(UserWarning, match=r"\.shape\[1\] is 5, but .* has \[2, 4,"):
        near(model, converted, values(2, 4, 8))
    near(model, converted, values(6, 5, 8))
    (graph,) = torchq.explain(converted).graphs
    assert (graph.graph_calls, graph.own_calls) == (1, 1)
    assert graph.guards == ("srcs[0] is float32 of shape [any, 5, 8]",)


def counted(m: Any, x: Tensor) -> Tensor:
    n = len(x)
    return m.b(m.a(x).relu()).reshape(n, -1)


def test_the_warning_tells_the_line_that_fixes_a_size() -> None:
    model = wired(counted)
    converted = torchq.quantize(model, [values(50, 5, 8)])
    line = rf"; {Path(__file__).name}:\d+ \(n = len\(x\)\) fixes this size"
    with pytest.warns(UserWarning, match=line):
        near(model, converted, values(2, 5, 8))


@pytest.mark.parametrize("code", [counted, alone])
@pytest.mark.filterwarnings(f"ignore:.*{MISSES}")
def test_an_example_of_one_row_takes_its_graph(code: Callable[..., Any]) -> None:
    """Its code treats a batch of one in its own way, and so does the graph."""
    model = wired(code)
    converted = torchq.quantize(model, [values(1, 40, 8), values(1, 30, 8)])
    near(model, converted, values(1, 5, 8))
    near(model, converted, values(3, 5, 8))
    assert calls(converted) == (1, 1)


@pytest.mark.parametrize("gain", [1.0, 30.0])
def test_an_example_of_one_row_may_lose_its_batch(gain: float) -> None:
    """``squeeze()`` drops the batch of one row; a gain of some channels has them equalized."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 64), "b": nn.Linear(64, 5)})
    with torch.no_grad():
        model["a"].weight[::7] *= gain
        model["b"].weight[:, ::7] /= gain
    pooled = Wired(lambda m, x: m.b(m.a(x.mean(2, keepdim=True).squeeze()).relu()), **model).eval()
    converted = torchq.quantize(pooled, [values(1, 8, n) for n in range(5, 25)])
    for batch in (1, 4):
        near(pooled, converted, values(batch, 8, 9))
    assert calls(converted) == (2, 0)


def test_scripted_and_loaded_graphs_check_their_guards(tmp_path: Path) -> None:
    """They have no other code, so that a call that the graph is not for raises."""
    model, x = wired(unrolled), values(50, 5, 8)
    converted = torchq.quantize(model, [x])
    torchq.save(converted, tmp_path / "model")
    for found in (torchq.load(tmp_path / "model"), torch.jit.script(converted)):
        assert torch.equal(found(x[:3]), converted(x[:3]))
        for other in (values(3, 6, 8), values(3, 5), torch.zeros(3, 5, 8, dtype=torch.uint8)):
            with pytest.raises((AssertionError, torch.jit.Error), match="must meet its guards"):
                found(other)


def pooled(m: Any, x: Tensor) -> Tensor:
    """By a query of its own, over every other row: torch.export excludes a single one."""
    x = x[:, ::2]
    found, _ = m.attention(m.probe.repeat(x.shape[0], 1, 1), x, x)
    return m.head(found[:, 0])


def test_a_size_of_one_takes_the_graph_where_results_are_the_same() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Wired(pooled, attention=attention, head=nn.Linear(8, 8)).eval()
    model.probe = nn.Parameter(torch.randn(1, 1, 8))
    converted = torchq.quantize(model, [values(50, 5, 8), values(50, 1, 8)])
    (graph,) = torchq.explain(converted).graphs
    assert graph.guards[0] == "srcs[0] is float32 of shape [any, 1 or 3 to 131586, 8]"
    for batch, length in ((1, 1), (1, 3), (4, 1)):
        near(model, converted, values(batch, length, 8))
    assert calls(converted) == (3, 0)
    assert torch.equal(torch.jit.script(converted)(x := values(4, 1, 8)), converted(x))


def padded(m: Any, x: Tensor) -> Tensor:
    table = nn.functional.pad(m.table, (0, 0, 0, x.shape[1] - 2))
    return m.b(m.a(x) + table)


def test_sizes_decide_how_a_parameter_is_padded() -> None:
    model = wired(padded)
    model.table = nn.Parameter(torch.rand(2, 8))
    converted = torchq.quantize(model, [values(50, 5, 8)], strict=True)
    for batch, length in ((3, 5), (2, 7)):
        near(model, converted, values(batch, length, 8))
    assert calls(converted) == (2, 0)


class Windows(nn.Module):
    """Pads images to whole windows, twice, as Swin does in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        for size, layer in zip((8, 6, 4), self.layers, strict=True):
            rest = [-length % size for length in images.shape[2:]]
            images = nn.functional.pad(images, (0, rest[1], 0, rest[0]))
            batch, channels, height, width = images.shape
            images = images.reshape(batch, channels, height // size, size, width // size, size)
            images = layer(images.permute(0, 2, 4, 3, 5, 1).reshape(-1, size * size, channels))
            images = images.reshape(-1, height // size, width // size, size, size, channels)
            images = images.permute(0, 5, 1, 3, 2, 4).reshape(batch, channels, height, width)
        return images


@pytest.mark.slow
def test_sizes_of_long_expressions_are_fixed() -> None:
    torch.manual_seed(0)
    model, data = Windows().eval(), [torch.randn(2, 3, 21, 30) for _ in range(4)]
    converted = torchq.quantize(model, data)
    guards = torchq.explain(converted).graphs[0].guards
    assert guards[0] == "images is float32 of shape [any, 3, 21, 30]"
    for shape in ((5, 3, 21, 30), (2, 3, 22, 30)):
        x = torch.randn(shape)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torchq.sqnr(model(x), converted(x)) > 25
        told = [str(w.message) for w in caught]
        fixed = "the capture, which takes minutes where it is free, fixes this size"
        assert [fixed in text for text in told] == ([True] if shape[2] == 22 else [])

# SPDX-License-Identifier: Apache-2.0
"""What a model's Python code does with the number of rows: right for other batches, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flows import sqnr
from models import Wired
from torch import Tensor, nn

import torchq


class Cached(nn.Module):
    """Keeps what it made for the last shape; expands to the batch what is the same in all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shape, self.ramp = nn.Linear(8, 4), None, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        positions = torch.arange(length).unsqueeze(0)
        if positions.shape[0] != batch:
            positions = positions.expand(batch, -1)
        y = self.a(x) + positions.unsqueeze(-1)
        if self.shape != y.shape:
            self.shape, self.ramp = y.shape, torch.linspace(0, 1, length)[:, None]
        return y + self.ramp


@pytest.mark.parametrize(
    ("called", "example", "right"),
    [(0, 2, {1, 2, 3, 4, 6}), (3, 2, {1, 2, 3, 4, 6}), (1, 4, {1, 2, 3, 4, 6}), (2, 2, {1, 2}),
     (1, 1, {1}), (2, 1, {1, 2})],
)  # fmt: skip
def test_batches_that_code_asks_for_in_vain(called: int, example: int, right: set[int]) -> None:
    """Single batches for which the graph is right pass; whoever takes another path raises."""
    model, x = Cached().eval(), torch.randn(example, 7, 8)
    if called:
        model(torch.randn(called, 7, 8))
    prepared = torchq.prepare(model, x)
    quantized = torchq.convert(torchq.calibrate(prepared, [x]))
    scripted = torch.jit.script(quantized)
    for batch in (1, 2, 3, 4, 6):
        x = torch.randn(batch, 7, 8)
        if batch in right:
            assert torch.equal(prepared(x), model(x))
            assert torch.equal(scripted(x), quantized(x))
        else:
            for refusing in (prepared, quantized, scripted):
                with pytest.raises((RuntimeError, torch.jit.Error), match="size or condition was"):
                    refusing(x)
    if called == example:  # so the graph has what was kept for 7
        with pytest.raises(RuntimeError, match=r"was 7, got 9, .*\(test_fx_batches.py:\d+\)"):
            quantized(torch.randn(example, 9, 8))
    else:
        x = torch.randn(example, 9, 8)
        assert torch.equal(prepared(x), model(x))


class Remembers(nn.Module):
    """Keeps tables by shape, for good: in a cache of Python's, or in a dict."""

    @functools.lru_cache(maxsize=1)  # noqa: B019 - as libraries have it
    def table(self, shape: torch.Size) -> Tensor:
        return torch.arange(shape[1]).cumsum(0) * self.scale

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale, self.tables = nn.Linear(8, 4), 0.5, dict[Any, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) + self.table(x.shape)[:, None]
        key = y.shape
        if key not in self.tables:
            self.tables[key] = torch.linspace(0, 1, x.shape[1])
        return y * self.tables[key][:, None] + self.table(x.shape)[:, None]


# Each adds to a layer what is the same for all of a batch, which looks like a batch of one.
SHARED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "parameter": lambda m, x: m.a(x) + m.positions[:, : x.size(1)],
    "embedding": lambda m, x: m.a(x) + m.table(torch.arange(x.size(1)).unsqueeze(0)),
    "mean": lambda m, x: m.a(x) + x.mean(0, keepdim=True),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_the_same_for_all_of_a_batch_of_one(name: str) -> None:
    torch.manual_seed(0)
    positions = nn.Parameter(torch.randn(1, 50, 8))
    model = Wired(SHARED[name], a=nn.Linear(8, 8), positions=positions, table=nn.Embedding(50, 8))
    model.eval()
    converted = torchq.quantize(model, [torch.randn(1, 40, 8)])
    x = torch.randn(4, 5, 8).clamp(-2, 2)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 25


def test_positions_beside_a_mask_that_is_no_batch() -> None:
    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return (m.a(x) + m.positions[:, : x.size(1)]) * mask.mean()

    positions = nn.Parameter(torch.randn(1, 50, 8))
    model = Wired(forward, a=nn.Linear(8, 8), positions=positions).eval()
    mask = torch.rand(40, 40)
    converted = torchq.quantize(model, [(torch.randn(1, 40, 8), mask)])
    x = torch.randn(4, 40, 8).clamp(-2, 2)
    with torch.no_grad():
        assert sqnr(model(x, mask), converted(x, mask)) > 25


def test_sums_are_fused_for_a_batch_of_one() -> None:
    model = Wired(lambda m, x: m.b(m.a(x)) + m.a(x), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    converted = torchq.quantize(model, [torch.randn(1, 40, 8)])
    assert not any(isinstance(m, torchq.nn.QAdd) for m in converted.modules())
    x = torch.randn(4, 5, 8).clamp(-2, 2)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 25


@pytest.mark.parametrize("called", [False, True])
def test_caches_by_shape(called: bool) -> None:
    """A shape that is traced is no key, as who does not find it compares it with nothing."""
    model, x = Remembers().eval(), torch.randn(2, 7, 8)
    if called:
        model(x)
    prepared = torchq.prepare(model, x)
    quantized = torchq.convert(torchq.calibrate(prepared, [x]))
    assert "unhashable: a size that is traced" in quantized.torchq_note
    for shape in ((2, 7, 8), (3, 5, 8), (1, 9, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(prepared(x), model(x))
    assert all(type(t) is Tensor for t in model.tables.values())


def in_chunks(fc: Any, x: Tensor) -> Tensor:
    return torch.cat([fc(x[:8]), *[fc(x[i : i + 8]) * 2 for i in range(8, len(x), 8)]])


def by_rows(fc: Any, x: Tensor) -> Tensor:
    y = fc(x)
    return y.flip(0) if len(y) != 1 else y


def repeated_text(fc: Any, x: Tensor) -> Tensor:
    return fc(x) * len("a" * len(x))


def repeated_items(fc: Any, x: Tensor) -> Tensor:
    return fc(x) * sum(x.size(1) * (0.5,)) + sum([1.5] * (x.size(0) - 1))


def by_length(fc: Any, x: Tensor) -> Tensor:
    return fc(x).reshape(len(x), -1).sum(1) + torch.ones(1).expand(len(x))


def not_taken(fc: Any, x: Tensor) -> Tensor:
    y = fc(x)
    if x.shape[0] == 2:
        return y
    return y * 2 if x.shape[0] > 8 else y


def other_size(fc: Any, x: Tensor) -> Tensor:
    return fc(x)[:, :2] if x.shape[0] != x.shape[1] else fc(x)


def longer(fc: Any, x: Tensor) -> Tensor:
    return fc(x)[:, :7] if x.shape[0] == 1 else fc(x)


def others_longer(fc: Any, x: Tensor) -> Tensor:
    return fc(x)[:, :7] if x.shape[0] != 1 else fc(x)


def halves(fc: Any, x: Tensor) -> Tensor:
    return fc(x)[:2] if x.shape[0] != 1 else fc(x)


def two_ways(fc: Any, x: Tensor) -> Tensor:
    """Only where both conditions hold, or none, it is what some examples give."""
    alone, seven = x.shape[0] == 1, x.shape[0] * x.shape[1] == 7
    return fc(x) * (1 if bool(alone) == bool(seven) else 2)


def asks_more(fc: Any, x: Tensor) -> Tensor:
    if x.shape[0] != 2:
        return fc(x)[:, :7] if x.shape[1] == 9 else fc(x)
    return fc(x)


def either(fc: Any, x: Tensor) -> Tensor:
    return fc(x) * (2 if x.shape[0] == 1 or x.shape[1] == 7 else 1)


def products(fc: Any, x: Tensor) -> Tensor:
    b, t = x.shape[:2]
    return fc(x) * (2 if b * t > 16 and t > 8 else 1)


def expands(fc: Any, x: Tensor) -> Tensor:
    b, t = x.shape[:2]
    w = torch.ones(1, 1, 4)
    return fc(x).sum(1) + (w.expand(b, t, 4) if b > 1 else w).sum(1)


def in_a_set(fc: Any, x: Tensor) -> Tensor:
    return fc(x) * (2 if x.shape[1] in {3, 9} else 1)


def in_a_dict(fc: Any, x: Tensor) -> Tensor:
    return fc(x) * {3: 2, 9: 4}.get(x.shape[1], 1)


def alike(fc: Any, x: Tensor) -> Tensor:
    return fc(x) * len({x.shape[0], x.shape[1]})


def refuses(fc: Any, x: Tensor) -> Tensor:
    if x.shape[0] not in (1, 2, 3):
        raise ValueError("1 to 3")
    return fc(x)


def asserts(fc: Any, x: Tensor) -> Tensor:
    torch._assert(x.shape[0] <= 3, "1 to 3")
    return fc(x)


def in_windows(fc: Any, x: Tensor) -> Tensor:
    return torch.stack([fc(part).mean(1) for part in x.split(2, 1)]).sum(0)


def by_frames(fc: Any, x: Tensor) -> Tensor:
    y = fc(x).unbind(1)
    return y[0] + sum(frame * i for i, frame in enumerate(y[1:], 1))


def by_samples(fc: Any, x: Tensor) -> Tensor:
    return torch.stack([fc(sample) for sample in torch.unbind(x)])


def in_at_most(fc: Any, x: Tensor) -> Tensor:
    parts = torch.chunk(x, 4, dim=1)
    return torch.stack([fc(part).mean(1) / len(parts) for part in parts]).sum(0)


class Applies(nn.Module):
    """A function of a layer and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(8, 4), [function]

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self.fc, x)


@pytest.mark.parametrize("example", [(1, 7), (2, 7), (2, 2), (4, 7)])
@pytest.mark.parametrize("function", [
    in_chunks, by_rows, by_length, not_taken, other_size, longer, others_longer, halves, asks_more,
    two_ways, either, products, expands, in_a_set, in_a_dict, alike, in_windows, by_frames,
    by_samples, in_at_most, repeated_text, repeated_items,
])  # fmt: skip
def test_batches_never_take_the_wrong_path(function: Any, example: tuple[int, int]) -> None:
    """A graph raises or gives what the model gives, for every batch and length."""
    model = Applies(function).eval()
    prepared = torchq.prepare(model, torch.randn(*example, 8))
    assert hasattr(prepared, "graph_module")  # traced
    passed = 0
    for batch in range(1, 18):
        for length in (2, 3, 7, 9):
            x = torch.randn(batch, length, 8)
            try:
                got = prepared(x)
            except RuntimeError as error:
                assert "size or condition was" in str(error)
                continue
            assert torch.equal(got, model(x)), x.shape
            passed += 1
    assert passed


def test_a_tensors_length_is_no_constant() -> None:
    model, x = Applies(by_length).eval(), torch.randn(2, 7, 8)
    prepared = torchq.prepare(model, x)
    scripted = torch.jit.script(torchq.convert(torchq.calibrate(prepared, [x])))
    for shape in ((1, 7, 8), (3, 2, 8), (5, 9, 8)):
        x = torch.randn(shape)
        assert torch.equal(prepared(x), model(x))
        assert scripted(x).shape == shape[:1]


@pytest.mark.parametrize("function", [refuses, asserts])
def test_what_the_model_refuses_is_refused(function: Any) -> None:
    prepared = torchq.prepare(Applies(function).eval(), torch.randn(2, 7, 8))
    for batch in (4, 5, 7):
        with pytest.raises(RuntimeError, match="size or condition was"):
            prepared(torch.randn(batch, 7, 8))


class Asks(nn.Module):
    """Acts on a number made of sizes."""

    def __init__(self, question: Callable[[Any], bool], factor: int) -> None:
        super().__init__()
        self.a, self.question, self.factor = nn.Linear(8, 4), [question], factor

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (self.factor if self.question[0](x.shape) else 1)


@pytest.mark.parametrize(
    ("question", "factor"),
    [
        (lambda s: s[0] == 1, 2),
        (lambda s: s[0] > 2, 2),
        (lambda s: s[0] * s[1] == 14, 2),
        (lambda s: s[0] * s[1] == 14, 1),  # which other lengths may make one
    ],
)
def test_batches_that_make_a_difference(question: Callable[[Any], bool], factor: int) -> None:
    """Never another result than the model's."""
    model, x = Asks(question, factor).eval(), torch.randn(2, 7, 8)
    prepared = torchq.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    with pytest.raises(RuntimeError, match="size or condition was"):
        for batch in (1, 3):
            prepared(torch.randn(batch, 7, 8))

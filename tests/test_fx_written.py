# SPDX-License-Identifier: Apache-2.0
"""Constants that a model makes in its forward and then writes results to: each call has its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flows import sqnr
from models import Wired
from torch import Tensor, nn

import torchq

# Each gets what two layers give, (6, 4), and makes a result of it.
WAYS: dict[str, Callable[[Any, Any], Any]] = {}


def way(function: Callable[[Any, Any], Any]) -> None:
    WAYS[function.__name__] = function


@way
def rows(a: Any, b: Any) -> Any:
    out = torch.zeros(2, 4)
    out[0] = a.sum(0)
    out[1] = b.mean(0)
    return out


@way
def rows_that_are_read(a: Any, b: Any) -> Any:
    out = torch.ones(3, 4)
    before = out * 2
    out[0], out[1, :2] = a.sum(0), b.mean(0)[2:]
    parts = [(out - 1.0).relu(), before, 1.0 - out.flip(0), out.view(4, 3).T[:2]]
    return torch.cat(parts) * out.size(0) + out.shape[1]


@way
def operator(a: Any, b: Any) -> Any:
    total = torch.zeros(4)
    total += a.sum(0)
    total *= 2
    total -= b.mean(0)
    return total


@way
def operator_under_another_name(a: Any, b: Any) -> Any:
    total = torch.full((4,), 0.5)
    other = total
    total += a.sum(0)
    other += b.sum(0)
    return total + 1, other


@way
def method(a: Any, b: Any) -> Any:
    total = torch.zeros(4)
    total.add_(a.sum(0)).mul_(0.5)
    total.sub_(b.mean(0))
    return total.shape[0] * total, nn.functional.relu(total)


@way
def read_before(a: Any, b: Any) -> Any:
    base = torch.arange(4.0)
    shifted = a + base
    base += b.sum(0)
    return shifted, base


@way
def in_a_list(a: Any, b: Any) -> Any:
    kept = [torch.zeros(4), torch.zeros(4)]
    for i, part in enumerate((a, b)):
        kept[i] += part.sum(0)
    return torch.stack(kept)


@way
def out_argument(a: Any, b: Any) -> Any:
    out, again = torch.empty(6, 4), torch.zeros(2, 4)
    torch.add(a, b, out=out)
    torch.index_put_(again, (torch.tensor([1]),), b.sum(0))
    return out, again * 2


@pytest.mark.parametrize("name", WAYS)
def test_each_call_writes_to_a_tensor_of_its_own(name: str, tmp_path: Path) -> None:
    model = Wired(lambda m, x: WAYS[name](m.a(x), m.b(x)), a=nn.Linear(8, 4), b=nn.Linear(8, 4))
    model.eval().requires_grad_(False)
    torch.manual_seed(0)
    data = [torch.rand(6, 8) for _ in range(4)]
    converted = torchq.quantize(model, data, strict=True)
    assert not hasattr(converted, "torchq_note")  # it was traced
    torchq.save(converted, tmp_path / "model")
    exported = torch.export.export(converted, (data[0],)).module()
    forms = [
        converted, torchq.load(tmp_path / "model"), pickle.loads(pickle.dumps(converted)),
        torch.jit.script(converted), torch.jit.freeze(torch.jit.script(converted)), exported,
    ]  # fmt: skip
    expected = [leaves(model(x)) for x in data]
    first: list[list[Tensor]] = []
    for form in forms:
        found = [leaves(form(x)) for x in data]  # all of them, and then looked at
        for given, wanted in zip(found, expected, strict=True):
            assert all(sqnr(w, g) > 30 for g, w in zip(given, wanted, strict=True))
        first = first or found
        for given, wanted in zip(found, first, strict=True):
            assert all(map(torch.equal, given, wanted))


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def test_constants_of_which_a_view_is_written_to_are_not_shared() -> None:
    def several(m: Any, x: Tensor) -> Any:
        values, places = torch.empty(4), torch.empty(4, dtype=torch.long)
        torch.max(m.a(x), 0, out=(values, places))
        return values

    def row(m: Any, x: Tensor) -> Any:
        out = torch.zeros(2, 4)
        first = out[0]
        first += m.a(x).sum(0)
        return out

    torch.manual_seed(0)
    data = [torch.rand(6, 8) for _ in range(4)]
    for forward in (several, row):
        model = Wired(forward, a=nn.Linear(8, 4)).eval().requires_grad_(False)
        with pytest.warns(UserWarning, match="cannot be traced"):
            converted = torchq.quantize(model, data)
        found = [converted(x) for x in data]
        assert all(sqnr(model(x), y) > 30 for x, y in zip(data, found, strict=True))


def test_what_a_constant_shares_its_memory_with_is_not_copied() -> None:
    """Writes that the example's calls do not show, since they add zeros there."""

    def rarely(y: Tensor) -> Tensor:
        return torch.relu(y.sum(0) - 60)

    def view(m: Any, x: Tensor) -> Tensor:
        out = torch.zeros(2, 4)
        row = out[0]
        row += rarely(m.a(x))
        return out + m.b(x).sum(0)

    def data(m: Any, x: Tensor) -> Tensor:
        out = torch.zeros(4)
        out.data.add_(rarely(m.a(x)))
        return out + m.b(x).sum(0)

    def array(m: Any, x: Tensor) -> Tensor:
        values = np.zeros(4, dtype=np.float32)
        torch.from_numpy(values).add_(rarely(m.a(x)))
        return torch.from_numpy(values) + m.b(x).sum(0)

    torch.manual_seed(0)
    for forward in (view, data, array):
        model = Wired(forward, a=nn.Linear(8, 4), b=nn.Linear(8, 4)).eval().requires_grad_(False)
        with pytest.warns(UserWarning, match="writes to a constant tensor"):
            prepared = torchq.prepare(model, torch.rand(6, 8))
        for factor in (1, 300, 1):
            x = torch.randn(6, 8) * factor
            assert torch.equal(prepared(x), model(x)), forward.__name__


@pytest.mark.parametrize("where", ["list", "dict", "buffer"])
def test_what_was_there_before_the_call_is_no_constant(where: str) -> None:
    """Rows of a cache, more of them in one call than in the next."""

    def forward(m: Any, x: Tensor) -> Tensor:
        cache = m.cache if where == "buffer" else m.cache[0]
        cache[: len(x)] = m.a(x)
        return cache.sum(0) + m.b(x)

    torch.manual_seed(0)
    model = Wired(forward, a=nn.Linear(8, 4), b=nn.Linear(8, 4)).eval().requires_grad_(False)
    cache = torch.zeros(10, 4)
    if where == "buffer":
        model.register_buffer("cache", cache)
    else:
        model.cache = [cache] if where == "list" else {0: cache}
    with pytest.warns(UserWarning, match="cannot be traced"):
        prepared = torchq.prepare(model, torch.randn(6, 8))
    model = copy.deepcopy(model)
    for batch in (6, 3, 9, 2):
        x = torch.randn(batch, 8)
        assert torch.equal(prepared(x), model(x)), batch


def test_a_returned_constant_is_each_calls_own() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        ramp = torch.arange(40.0).view(10, 4)[: x.size(0)]
        return m.a(x), torch.zeros(()), [ramp, torch.ones(1).expand(len(x))]

    torch.manual_seed(0)
    x = torch.randn(6, 8)
    converted = torchq.quantize(Wired(forward, a=nn.Linear(8, 4)).eval(), [x])
    assert not hasattr(converted, "torchq_note")  # it was traced
    for form in (converted, torch.jit.script(converted)):
        for batch in (6, 3):
            _, loss, (ramp, ones) = form(x[:batch])
            assert torch.equal(ramp.flatten(), torch.arange(4.0 * batch))
            assert int(loss) == 0 and ones.tolist() == [1.0] * batch
            loss.add_(1)
            ramp.zero_()


def test_a_list_as_long_as_a_tensor_is_guarded() -> None:
    """``[None] * len(x)``, which code writes to."""

    def forward(m: Any, x: Tensor) -> Any:
        parts: list[Any] = [None] * len(x)
        for i in range(len(x)):
            parts[i] = m.a(x[i])
        return torch.stack(parts)

    x = torch.rand(6, 8)
    converted = torchq.quantize(Wired(forward, a=nn.Linear(8, 4)).eval(), [x])
    assert not hasattr(converted, "torchq_note") and converted(x).shape == (6, 4)
    with pytest.raises(RuntimeError, match="size or condition was 6, got 3"):
        converted(x[:3])


def test_arrays_are_indices(tmp_path: Path) -> None:
    """numpy's, as code that makes triangular weights has them."""
    below = np.tril_indices(4, -1)

    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        y[:, np.array([1, 3])] = 0.5
        lower = m.b(x).view(-1, 4, 4)[:, below[0], below[1]]
        return y[..., np.array([True, False, True, True])], lower

    model = Wired(forward, a=nn.Linear(8, 4), b=nn.Linear(8, 16)).eval().requires_grad_(False)
    torch.manual_seed(0)
    data = [torch.rand(6, 8) for _ in range(4)]
    converted = torchq.quantize(model, data)
    assert not hasattr(converted, "torchq_note")
    torchq.save(converted, tmp_path / "model")
    x = data[1][:5]
    for found in (converted, torchq.load(tmp_path / "model"), torch.jit.script(converted)):
        assert all(sqnr(w, g) > 30 for w, g in zip(model(x), found(x), strict=True))


def test_another_method_of_the_model_is_not_in_its_graph() -> None:
    class Speaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.a(x)

        def generate(self, x: Tensor) -> Any:
            return self(x) * 2

    model, x = Speaks().eval().requires_grad_(False), torch.rand(4, 8)
    converted: Any = torchq.quantize(model, [x])
    assert not hasattr(converted, "generate")
    with pytest.raises(AttributeError, match=r"'Speaks'.*'generate'.*torchq\.eager") as raised:
        converted.generate(x)
    assert raised.value.name == "generate"
    prepared = torchq.eager.calibrate(torchq.eager.prepare(model, x), [x])
    swapped: Any = torchq.eager.convert(prepared)
    assert sqnr(model.generate(x), swapped.generate(x)) > 25

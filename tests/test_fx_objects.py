# SPDX-License-Identifier: Apache-2.0
"""Objects in which models keep something: shared, compared, copied or left alone."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flows import sqnr
from models import Wired
from state_cases import batches, follows, quantized
from torch import Tensor, fx, nn

import torchq
from torchq.convert.model_state import changed


class Slotted:
    """Without a __dict__."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Any = None


class Writes(nn.Module):
    """Leaves what it computes for another module."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.layer, self.shared = nn.Linear(8, 8), shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        before, self.shared.last = self.shared.last, y
        return y if before is None else y + before


class Reads(Writes):
    """Computes something else, without an error, where there is nothing."""

    def forward(self, x: Tensor) -> Tensor:
        last = self.shared.last
        return self.layer(x) + (0 if last is None or bool(last.sum() == 0) else last)


@pytest.mark.parametrize("kind", [Slotted, lambda: SimpleNamespace(last=None)])
@pytest.mark.parametrize("flow", [torchq, torchq.eager])
def test_modules_that_share_what_they_keep(flow: Any, kind: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    shared, data = kind(), batches()
    model = nn.Sequential(Writes(shared), Reads(shared)).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = flow.calibrate(flow.prepare(model, data[0]), data)
    assert prepared[0].shared is prepared[1].shared is not shared
    assert prepared[0].shared.last is None
    converted = flow.convert(prepared)
    assert converted[0].shared is converted[1].shared
    follows(model, converted, data)
    if flow is torchq:
        why = "what its submodule '0' changes when it is called is shared with another one"
        assert why in str(caught[0].message)


def test_modules_that_share_what_nobody_changes_are_prepared_one_by_one() -> None:
    torch.manual_seed(0)
    settings, data = SimpleNamespace(last=torch.ones(8), sizes=[8]), batches()
    model = nn.Sequential(Reads(settings), nn.Linear(8, 8), Reads(settings)).eval()
    converted = torchq.quantize(model, data, data[0])
    assert isinstance(converted, fx.GraphModule)
    follows(model, converted, data)


def test_an_object_that_changes_still_refers_to_the_module() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.state.calls += 1
        return m.b(m.state.layer(x) * (1 + m.state.calls % 2))

    torch.manual_seed(0)
    model, data = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(), batches()
    model.state = SimpleNamespace(layer=model.a, calls=0)
    converted = quantized(model, data)
    assert converted.state.layer is converted.a
    follows(model, converted, data)


def test_objects_are_compared_by_what_a_copy_is_made_of() -> None:
    def state(value: Any) -> Any:
        slots = Slotted()
        slots.last = [value]
        return {"": {"kept": slots, "same": b"bytes", "part": functools.partial(max, 1)}}

    assert changed(state(1), state(1)) == {}
    assert changed(state(1), state(2)) == {"": ["kept"]}
    twice = [1000]
    one, other = {"": {"kept": [twice, twice]}}, {"": {"kept": [[1000], [1001]]}}
    assert changed(one, other) == {"": ["kept"]} == changed(other, one)
    assert changed({"": {"lock": Lock()}}, {"": {"lock": Lock()}}) == {"": ["lock"]}


@pytest.mark.parametrize("kind", ["sparse", "meta", "quantized"])
def test_tensors_of_every_kind_may_be_kept(kind: str) -> None:
    """A graph's adjacency matrix, say; what cannot be compared does not stop a conversion."""
    graph = {
        "sparse": lambda: torch.eye(4).to_sparse(),
        "meta": lambda: torch.empty(4, 4, device="meta"),
        "quantized": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.quint8),
    }[kind]
    torch.manual_seed(0)
    model = Wired(
        lambda m, x: m.b(torch.sparse.mm(m.graph, m.a(x)) if kind == "sparse" else m.a(x)),
        a=nn.Linear(8, 8), b=nn.Linear(8, 8),
    ).eval()  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what is in beta or goes away
        model.graph = graph()
        converted = torchq.quantize(model, batches())
        follows(model, converted, batches())


class Codes(nn.Module):
    """Has a coder that no copy can have, which copies of it make anew."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.coder, self.last = nn.Linear(8, 8), [Lock()], [0.0]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "coder": [None]}

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x)


def test_what_cannot_be_copied_stays_itself() -> None:
    torch.manual_seed(0)
    model = Wired(lambda m, x: m.codes(m.a(x)), a=nn.Linear(8, 8), codes=Codes()).eval()
    converted = torchq.quantize(model, batches())
    assert isinstance(converted.codes.b, torchq.nn.QLinear)
    follows(model, converted, batches())


class Counts(nn.Module):
    """What it keeps in one list with a file decides what later calls do."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.bag = nn.Linear(8, 8), [sys.stdout, 0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Counts:
        copied = Counts()
        copied.b, copied.bag = copy.deepcopy(self.b, memo), list(self.bag)
        return copied.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        self.bag[1] += 1
        return self.b(x) if self.bag[1] < 50 else self.b(x).relu()


def test_what_changes_beside_a_file_is_seen() -> None:
    torch.manual_seed(0)
    model, data = Counts().eval(), batches()
    with pytest.warns(UserWarning, match="depend on what earlier calls left in 'bag'"):
        converted = torchq.quantize(model, data)
    follows(model, converted, [data[i % 2] for i in range(60)])


class Counter:
    def __init__(self) -> None:
        self.calls, self.me = 0, self


@pytest.mark.parametrize("kind", ["list", "dict", "object", "nested"])
def test_counters_inside_of_other_things(kind: str) -> None:
    """A graph would not see the call from which on the model computes something else."""

    def forward(m: Any, x: Tensor) -> Tensor:
        match kind:
            case "list":
                m.kept[1] += 1
                count = m.kept[1]
            case "dict":
                m.kept["calls"] += 1
                count = m.kept["calls"]
            case "object":
                m.kept.calls += 1
                count = m.kept.calls
            case _:
                m.kept[0]["c"].calls += 1
                count = m.kept[0]["c"].calls
        return m.b(x) if count < 50 else m.b(x).relu()

    kept = {"list": [None, 0], "dict": {"calls": 0}, "object": Counter(), "nested": [{}]}[kind]
    if kind == "nested":
        kept[0]["c"] = Counter()  # type: ignore[index]
    torch.manual_seed(0)
    model, data = Wired(forward, b=nn.Linear(8, 8)).eval(), batches()
    model.kept = kept
    with pytest.warns(UserWarning, match="depend on what earlier calls left in 'kept'"):
        converted = torchq.quantize(model, data)
    follows(model, converted, [data[i % 2] for i in range(60)])


class Locked(nn.Module):
    """Counts under a lock, which copies of it make anew; ``acts`` on values, or is traced."""

    def __init__(self, acts: bool = False) -> None:
        super().__init__()
        self.layer, self.acts = nn.Linear(8, 8), acts
        self.calls, self.history, self.lock = 0, [0], Lock()
        self.same = self.history

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=Lock())

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls += 1
            self.history.append(self.calls)
        return self.layer(x) if not self.acts or float(x.sum()) < 1e9 else x


@pytest.mark.parametrize("acts", [False, True])
def test_counters_beside_a_lock(acts: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Locked(acts), nn.ReLU(), Locked(acts)).eval()
    converted = torchq.quantize(model, batches())
    assert isinstance(converted, fx.GraphModule)
    assert all(row.quantized for row in torchq.explain(converted).rows if row.is_matmul)
    follows(model, converted, batches())


@dataclass(slots=True)
class Slots:
    """What models take and return, without a __dict__."""

    x: Tensor
    more: Tensor | None = None


def test_results_of_classes_with_slots() -> None:
    model, x = Wired(lambda m, x: Slots(m.a(x), more=x + 1), a=nn.Linear(8, 8)).eval(), batches()[0]
    converted = torchq.quantize(model, [x])
    assert isinstance(converted, fx.GraphModule)
    expected, found = model(x), converted(x)
    assert type(found) is Slots and torch.equal(found.more, expected.more)
    assert sqnr(expected.x, found.x) > 25


def test_arguments_of_classes_with_tensors() -> None:
    model = Wired(lambda m, given: m.a(given.x).relu(), a=nn.Linear(8, 8)).eval()
    with pytest.warns(UserWarning, match="is a Slots that holds tensors"):
        converted = torchq.quantize(model, [(Slots(x),) for x in batches()])
    assert all(row.quantized for row in torchq.explain(converted).rows if row.is_matmul)
    for x in batches():
        assert sqnr(model(Slots(x)), converted(Slots(x))) > 25


class DynamicCache:
    """What a model of transformers returns beside its result, here without methods."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


def test_a_cache_that_is_returned_is_named_with_the_way_around_it() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, use_cache: bool = True) -> Any:
            y = self.a(x)
            return (self.b(y), DynamicCache(y)) if use_cache else (self.b(y),)

    model = Caching().eval()
    with pytest.warns(UserWarning, match=r"class DynamicCache, .*pass use_cache=False in example"):
        swapped = torchq.quantize(model, batches())
    converted = torchq.quantize(model, [{"x": x, "use_cache": False} for x in batches()])
    assert isinstance(converted, fx.GraphModule)
    for x in batches():
        expected, cache = model(x)
        found, kept = swapped(x)
        assert sqnr(expected, found) > 25 and sqnr(cache.keys, kept.keys) > 25
        assert sqnr(expected, converted(x, use_cache=False)[0]) > 25
        with pytest.raises(RuntimeError, match="was False, got True"):
            converted(x)


class _Hinge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Any:
        ctx.dim = dim
        found = torch.clamp(x - x.amax(dim, keepdim=True) + 1, min=0)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


_hinge = _Hinge.apply


def test_a_function_whose_apply_was_kept_is_traced() -> None:
    """As of a sparsemax that a module's file names once."""
    model = Wired(lambda m, x: m.b(_hinge(m.a(x), -1)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.eval().requires_grad_(False)
    torch.manual_seed(0)
    data = [torch.rand(6, 8) for _ in range(4)]
    converted = torchq.quantize(model, data, strict=True)
    assert not hasattr(converted, "torchq_note")
    assert sqnr(model(data[0]), converted(data[0])) > 30

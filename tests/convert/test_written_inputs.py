# SPDX-License-Identifier: Apache-2.0
"""Models that write to what they are given, and inputs in mappings and classes of all kinds."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from flows import calls, sqnr, values
from torch import Tensor, nn

import torchq
from torchq.models.inputs import float_tensors
from torchq.models.trees import copied


class Body(nn.Module):
    """Takes the items of the caller's mapping, as the model inside sentence-transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Features(UserDict):  # type: ignore[type-arg]
    """As BatchEncoding of transformers: text, and what is no item."""

    def __init__(self, data: Any, texts: Any = None) -> None:
        super().__init__(data)
        self.texts = texts


class Batch(dict):  # type: ignore[type-arg]
    """Another class than dict."""


@dataclass
class Record:
    x: Tensor
    y: Tensor | None = None


def adds_a_key(m: Any, given: Any) -> Any:
    given["y"] = m.body(**{key: value for key, value in given.items() if key != "kind"})
    return given


def pops_a_key(m: Any, given: Any) -> Any:
    return {"y": m.body(given.pop("x"))}


def appends(m: Any, given: list[Tensor]) -> Tensor:
    given.append(m.body(given[0]))
    return sum(given)  # type: ignore[return-value]


def sets_an_attribute(m: Any, given: Record) -> Record:
    given.y = m.body(given.x if given.y is None else given.x + given.y)
    return given


WRITERS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Any]]] = {
    "dict": (adds_a_key, lambda x: {"x": x, "kind": "text"}),
    "user dict": (adds_a_key, lambda x: UserDict({"x": x, "kind": "text"})),
    "its subclass": (adds_a_key, lambda x: Features({"x": x, "kind": "text"}, object())),
    "a subclass of dict": (adds_a_key, lambda x: Batch(x=x, kind="text")),
    "pop": (pops_a_key, lambda x: UserDict(x=x, z=x)),
    "append": (appends, lambda x: [x]),
    "dataclass": (sets_an_attribute, Record),
}


def network(code: Callable[..., Any]) -> nn.Module:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()

        forward = code

    return Network().eval().requires_grad_(False)


def near(model: nn.Module, converted: nn.Module, given: Any) -> None:
    """Compare results, and what the calls leave in the inputs."""
    ((first,), _), ((second,), _) = copied((given,), {}), copied((given,), {})
    expected, found = [model(first), first], [converted(second), second]
    assert [type(x) for x in found] == [type(x) for x in expected]
    for a, b in zip(float_tensors(expected), float_tensors(found), strict=True):
        assert torch.equal(a, b) or sqnr(a, b) > 25


def held(given: Any) -> list[Any]:
    return list(given) if isinstance(given, UserDict | dict) else float_tensors(given)


@pytest.mark.parametrize("name", WRITERS)
def test_each_call_gets_fresh_inputs_and_runs_the_graph(name: str) -> None:
    """In conversion and in measurements, which leave the user's inputs as they were."""
    code, make = WRITERS[name]
    model, first = network(code), make(values(90, 8))
    before = held(first)
    data = [(first,), (first,), (make(values(4, 8)),)]
    prepared = torchq.calibrate(torchq.prepare(model, data[0]), data)
    converted = torchq.convert(prepared, strict=True)
    near(model, converted, make(values(6, 8)))
    torchq.milliseconds({"float": model, "int8": converted}, (first,), rounds=2, calls=3)
    torchq.profile(model, converted, (first,), rounds=2)
    torchq.compare(prepared, converted, [(first,)])
    (graph,) = torchq.explain(converted).graphs
    assert (graph.module, graph.own_calls) == ("body", 0) and graph.graph_calls > 10
    assert len(held(first)) == len(before)


READERS: dict[str, Callable[..., Any]] = {
    "user dict": UserDict,
    "its subclass": lambda data: Features(data, ["text"]),
    "a subclass of dict": Batch,
    "proxy": MappingProxyType,
    "nested": lambda data: {"z": [UserDict(data), None]},
}


@pytest.mark.parametrize("name", READERS)
def test_mappings_are_read_by_the_graph_of_the_whole(name: str) -> None:
    def forward(m: Any, given: Any) -> Tensor:
        given = given["z"][0] if "z" in given else given
        y = m.body(given["x"])
        return y * given["mask"] if "mask" in given else y

    make, model = READERS[name], network(forward)
    converted = torchq.quantize(model, [(make({"x": values(90, 8)}),)])
    near(model, converted, make({"x": values(3, 8)}))
    assert calls(converted) == (1, 0)
    (graph,) = torchq.explain(converted).graphs
    label = "given['z'][0]['x']" if name == "nested" else "given['x']"
    assert graph.guards[0] == f"{label} is float32 of shape [any, 8]"
    with pytest.warns(UserWarning, match="'given' holds other parts than the example's"):
        near(model, converted, make({"x": values(3, 8), "mask": torch.rand(3, 8)}))
    assert calls(converted) == (1, 1)


class Scaled(UserDict):  # type: ignore[type-arg]
    """Holds a number beside its items."""

    scale = 1.0


def test_numbers_beside_the_items_are_guarded() -> None:
    model = network(lambda m, given: m.body(given["x"]) * given.scale)

    def made(x: Tensor, scale: Any) -> Scaled:
        found = Scaled(x=x)
        found.scale = scale
        return found

    converted = torchq.quantize(model, [(made(values(90, 8), 2.0),)])
    near(model, converted, made(values(3, 8), 2.0))
    with pytest.warns(UserWarning):
        near(model, converted, made(values(3, 8), 3.0))
    assert calls(converted) == (1, 1)
    converted = torchq.quantize(model, [(made(values(90, 8), torch.ones(8)),)])
    assert "it takes a Scaled, which is no tensor" in torchq.explain(converted).note


@pytest.mark.parametrize("make", [dict, UserDict, Features, MappingProxyType])
def test_a_mapping_of_keywords(make: Any) -> None:
    model = network(lambda m, x, y: m.body(x) + y)
    data = [make({"x": values(90, 8), "y": values(90, 8)})]
    converted = torchq.quantize(model, data, strict=True)
    given = make({"x": values(3, 8), "y": values(3, 8)})
    assert sqnr(model(**given), converted(**given)) > 25
    torchq.milliseconds({"int8": converted}, given, rounds=1)
    assert calls(converted)[0] > 1


def test_copies_hold_the_same_and_share_nothing() -> None:
    x = torch.randn(2, 3, requires_grad=True) * 2
    layer = nn.Linear(2, 2)
    given = Features({"x": x, "again": [x]}, ["text"]), Record(x), layer, MappingProxyType({"x": x})
    (features, record, module, proxy), more = copied(given, {"n": 3})
    assert type(features) is Features and list(features) == ["x", "again"] and more == {"n": 3}
    assert features.texts == ["text"] and module is layer and type(proxy) is MappingProxyType
    assert features["x"] is features["again"][0] and features["x"].grad_fn is None
    for made in (features["x"], record.x, proxy["x"]):
        assert torch.equal(made, x) and made.data_ptr() != x.data_ptr()

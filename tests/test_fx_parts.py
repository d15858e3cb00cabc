# SPDX-License-Identifier: Apache-2.0
"""Items and fields of arguments: whatever the model's code asks them, no other value passes."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models import Wired
from torch import Tensor, fx, nn
from torch.utils._pytree import register_pytree_node

import torchq


class Way(enum.Enum):
    """Which one to go."""

    UP = 0
    DOWN = 1


class Pair(NamedTuple):
    """A tensor and something."""

    x: Tensor
    more: Any


@dataclass
class Fields:
    """The same."""

    x: Tensor
    more: Any

    def halved(self) -> Tensor:
        """What graphs call."""
        return self.x / 2


register_pytree_node(Fields, lambda f: ([f.x, f.more], None), lambda parts, _: Fields(*parts))

X = torch.randn(4, 8)

# how a model is given a tensor and something else, and how its code gets them
HOLDERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "dict": (lambda x, more: {"x": x, "more": more}, lambda d: (d["x"], d["more"])),
    "get": (lambda x, more: {"x": x, "more": more}, lambda d: (d.get("x"), d.get("more"))),
    "tuple": (lambda x, more: (x, more), lambda pair: (pair[0], pair[1])),
    "list": (lambda x, more: [x, more], tuple),
    "nested": (lambda x, more: (x, {"more": [more, x]}), lambda p: (p[0], p[1]["more"][0])),
    "named": (Pair, lambda pair: (pair.x, pair.more)),
    "fields": (Fields, lambda fields: (fields.x, fields.more)),
}
# the example, another value, and what the code asks
ASKED: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "true": (False, True, lambda more: more is True),
    "truth": (False, True, lambda more: more),
    "number": (1.0, None, lambda more: more is None),
    "none": (None, 1.0, lambda more: more is None),
    "enum": (Way.UP, Way.DOWN, lambda more: more is Way.DOWN),
    "equal": (Way.UP, Way.DOWN, lambda more: more == Way.DOWN),
    "text": ("b", "a", lambda more: more in ("a", "c")),
    "key": ("b", "a", {"a": 1}.get),
    "class": (2, "a", lambda more: isinstance(more, str)),
    "type": (2.5, 2, lambda more: type(more) is int),
    "tensor": (X, None, lambda more: more is None),
    "no tensor": (None, X, lambda more: more is None),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("holder", HOLDERS)
def test_items_and_fields(holder: str, asked: str) -> None:
    (made, parts), (example, other, question) = HOLDERS[holder], ASKED[asked]

    def forward(m: Any, given: Any) -> Tensor:
        x, more = parts(given)
        return m.a(x) * 2 if question(more) else m.a(x) - 1

    model = Wired(forward, a=nn.Linear(8, 8)).eval()
    converted = torchq.quantize(model, [(made(X, example),)])
    assert isinstance(converted, fx.GraphModule)
    for found in (converted, copy.deepcopy(converted)):
        expected = model(made(X, example))
        torch.testing.assert_close(found(made(X, example)), expected, atol=0.1, rtol=0)
        with pytest.raises(RuntimeError, match=r"was .*, got"):
            found(made(X, other))


WHOLE: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "tensor": (X, None, lambda given: given is None),
    "list of one": (X, [X], lambda given: isinstance(given, list)),
    "list": ([X], X, lambda given: isinstance(given, list)),
    "tuple": ((X,), [X], lambda given: isinstance(given, list)),
    "no list": ([X], None, lambda given: given is None),
    "no dict": ({"x": X}, (X,), lambda given: isinstance(given, tuple)),
    "items": ([X], [None], lambda given: all(item is None for item in given)),
}


@pytest.mark.parametrize("asked", WHOLE)
def test_whole_arguments(asked: str) -> None:
    """Which no layer reads, so that nothing else would raise."""
    example, other, question = WHOLE[asked]
    model = Wired(
        lambda m, x, given: m.a(x) * 2 if question(given) else m.a(x) - 1, a=nn.Linear(8, 8)
    ).eval()
    converted = torchq.quantize(model, [(X, example)])
    assert isinstance(converted, fx.GraphModule)
    torch.testing.assert_close(converted(X, example), model(X, example), atol=0.1, rtol=0)
    with pytest.raises(RuntimeError, match=r"was a .*, got"):
        converted(X, other)


def test_a_tensor_that_functions_take_as_none() -> None:
    def forward(m: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y = m.a(x)
        return F.linear(y * 2 if bias is None else y, m.a.weight, bias)

    model = Wired(forward, a=nn.Linear(8, 8)).eval()
    converted = torchq.quantize(model, [(X, X[0])])
    torch.testing.assert_close(converted(X, X[0]), model(X, X[0]), atol=0.1, rtol=0)
    with pytest.raises(RuntimeError, match="was a tensor, got None"):
        converted(X, None)


def test_lists_and_tuples_are_the_same_to_who_does_not_ask() -> None:
    model = Wired(lambda m, xs: m.a(xs[0]) + xs[1], a=nn.Linear(8, 8)).eval()
    converted = torchq.quantize(model, [([X, X + 1],)])
    expected = converted([X, X + 1])
    assert torch.equal(converted((X, X + 1)), expected)
    assert torch.equal(torch.jit.script(copy.deepcopy(converted))([X, X + 1]), expected)
    assert torch.equal(torch.export.export(converted, ([X, X + 1],)).module()([X, X + 1]), expected)
    torch._dynamo.reset()
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled([X, X + 1]), expected)


def test_an_input_that_is_no_tensor() -> None:
    converted = torchq.quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), [X])
    with pytest.raises(TypeError, match=r"must be torch.float32, .*got None"):
        converted(None)


def test_methods_of_arguments(tmp_path: Path) -> None:
    model = Wired(lambda m, fields: m.a(fields.halved()), a=nn.Linear(8, 8)).eval()
    converted = torchq.quantize(model, [(Fields(X, None),)])
    expected = model(Fields(X, 3))
    torch.testing.assert_close(converted(Fields(X, 3)), expected, atol=0.1, rtol=0)
    with pytest.raises(
        NotImplementedError, match=r"methods of tensors only, got halved .*torch\.save"
    ):
        torchq.save(converted, tmp_path / "model")  # which torchq.load would refuse


class Opaque(nn.Module):
    """Returns the one or the other thing, as the values of its input say."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.things = [first, second]

    def forward(self, x: Tensor) -> Any:
        return self.things[int(x.sum() < -99)]


RETURNED: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "true": (False, True, lambda thing: thing is True),
    "pair": ((X, False), (X, True), lambda pair: pair[1] is True),
    "enum": ({"way": Way.UP}, {"way": Way.DOWN}, lambda ways: ways["way"] is Way.DOWN),
    "text": (Pair(X, "a"), Pair(X, "b"), lambda pair: {"b": 1}.get(pair.more)),
    "none": (X, None, lambda thing: thing is None),
    "item": ((X, X), (X, None), lambda pair: pair[1] is None),
}


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.filterwarnings("ignore:torchq.prepare")
def test_what_opaque_modules_return(name: str) -> None:
    """The converted model asks it, or raises."""
    first, second, question = RETURNED[name]
    model = Wired(
        lambda m, x: m.a(x) * 2 if question(m.o(x)) else m.a(x) - 1,
        a=nn.Linear(8, 8), o=Opaque(first, second),
    ).eval()  # fmt: skip
    few = X.clamp(-9, 9).sort().values - 9 * (torch.arange(8) < 4)
    assert question(model.o(few)) and not question(model.o(X))
    prepared = torchq.prepare(model, X)
    converted = torchq.convert(torchq.calibrate(prepared, [X, few] if name[0] in "tpe" else [X]))
    torch.testing.assert_close(converted(X), model(X), atol=0.3, rtol=0)
    if isinstance(converted, fx.GraphModule):
        with pytest.raises(RuntimeError, match="was a tensor, got None"):
            converted(few)
    else:
        torch.testing.assert_close(converted(few), model(few), atol=0.6, rtol=0)

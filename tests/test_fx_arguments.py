# SPDX-License-Identifier: Apache-2.0
"""Arguments that are no tensors: the graph knows one value of each, and refuses others."""

from __future__ import annotations

import copy
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import sqnr
from models import Wired
from torch import Tensor, fx, nn

import torchq


class Model(nn.Module):
    """Scales, signs and shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, t: float = 1, k: int = 1, mode: str = "a", mask: Tensor | None = None
    ) -> Tensor:
        y = self.a(x) * (1.0 if t != t else t) * k
        if mask is not None:
            y = y + mask
        return y if mode == "a" else -y


ERRORS = (RuntimeError, TypeError, torch.jit.Error)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def convert(model: nn.Module, *args: Any) -> tuple[nn.Module, list[nn.Module]]:
    """The model, and its conversion: as it is, pickled, scripted."""
    model = model.eval()
    converted = torchq.quantize(model, [(X, *args)], (X, *args))
    assert isinstance(converted, torch.fx.GraphModule)
    scripted = torch.jit.script(copy.deepcopy(converted))
    return model, [converted, pickle.loads(pickle.dumps(converted)), scripted]


def check(model: nn.Module, found: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(found(X, *args), model(X, *args), atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    ("args", "message"),
    [((2.0,), "was 2.*, got 1"), ((1.0, 3), "condition was 3, got 1"),
     ((1.0, 1, "b"), "was b, got a"), ((math.nan,), "was nan, got 1")],
)  # fmt: skip
def test_a_default_stays_the_models_own(args: tuple[Any, ...], message: str) -> None:
    model, converted = convert(Model(), *args)
    for found in converted:
        check(model, found, *args)
        for fewer in range(len(args)):
            with pytest.raises(ERRORS, match=message):
                found(X, *args[:fewer])


def test_defaults_that_are_the_examples() -> None:
    model, converted = convert(Model(), 1.0, 1, "a", None)
    for found in converted:
        for args in ((), (1.0,), (1.0, 1), (1.0, 1, "a"), (1.0, 1, "a", None)):
            check(model, found, *args)


@pytest.mark.parametrize(
    ("example", "other"),
    [(2.0, 2), (2, 2.0), (True, 1), (1, True), ([1, 2], [1.0, 2]), ((True, 0), (1, 0))],
)
@pytest.mark.parametrize("left_out", [False, True])
def test_an_equal_number_of_another_class_is_another_one(
    example: Any, other: Any, left_out: bool
) -> None:
    """The code may ask for the class, as ``if scale is True`` does."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor, between: Any = None, n: Any = None) -> Tensor:
            kinds = [type(item) for item in n] if isinstance(n, list | tuple) else [type(n)]
            return self.a(x) * (1.0 if all(kind is float for kind in kinds) else -1.0)

    model = Asks().eval()
    inputs = {"x": X, "n": example} if left_out else {"x": X, "between": None, "n": example}
    converted = torchq.quantize(model, [inputs])
    assert isinstance(converted, fx.GraphModule)
    with torch.no_grad():
        assert sqnr(model(**inputs), converted(**inputs)) > 25
    with pytest.raises(RuntimeError, match=re.escape(f"was {example}, got {other}")):
        converted(**{**inputs, "n": other})


def test_a_tensor_behind_defaults() -> None:
    """A tensor that had a default is asked for, and so is what stands before it."""
    model, converted = convert(Model(), 1.0, 1, "a", X)
    for found in converted:
        check(model, found, 1.0, 1, "a", X)
        for args in ((), (1.0, 1, "a")):
            with pytest.raises(ERRORS, match=r"missing .*mask"):
                found(X, *args)
        with pytest.raises(ERRORS, match=r"was 1.*, got 2"):
            found(X, 2.0, 1, "a", X)


def test_a_default_of_another_type_has_to_be_given() -> None:
    class Optionally(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: float | None = None, *, k: int = 1) -> Tensor:
            return self.a(x) * (1.0 if scale is None else scale)

    model, converted = convert(Optionally(), 2.0)
    for found in converted:
        check(model, found, 2.0)
        with pytest.raises(ERRORS, match=r"missing .*scale"):
            found(X)


def test_no_guard_is_removed_as_unused() -> None:
    for args in ((2.0,), (1.0, 3), (1.0, 1, "b"), (math.nan,)):
        _, (found, _, _) = convert(Model(), *args)
        assert isinstance(found, torch.fx.GraphModule)
        found.graph.eliminate_dead_code()
        found.recompile()
        with pytest.raises(RuntimeError, match=r"was .*, got"):
            found(X)


def test_nan_is_nan() -> None:
    model, converted = convert(Model(), math.nan)
    for found in converted:
        check(model, found, math.nan)
        check(model, found, -math.nan)
        with pytest.raises(ERRORS, match="was nan, got 2"):
            found(X, 2.0)
    _, converted = convert(Model(), 2.0)
    for found in converted:
        with pytest.raises(ERRORS, match=r"was 2.*, got nan"):
            found(X, math.nan)


def test_infinity_is_infinity() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor, low: float = -math.inf) -> Tensor:
            return self.a(x).clamp(min=low)

    model, converted = convert(Clamped(), -math.inf)
    for found in converted:
        check(model, found)
        with pytest.raises(ERRORS, match="was -inf, got inf"):
            found(X, math.inf)


def test_none_says_what_it_got() -> None:
    _, (found, loaded, scripted) = convert(Model(), 1.0, 1, "a", None)
    for module in (found, loaded):
        for value, name in ((X, "a tensor"), (3.0, "3.0"), ("b", "b")):
            with pytest.raises(ERRORS, match=f"was None, got {name}, and"):
                module(X, 1.0, 1, "a", value)
    with pytest.raises(ERRORS, match="was None, got a tensor, and"):
        scripted(X, 1.0, 1, "a", X)
    with pytest.raises(ERRORS, match="argument 'mask' but instead found type 'float'"):
        scripted(X, 1.0, 1, "a", 3.0)


def test_other_constants_are_guarded() -> None:
    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor, size: Any = (8, 4), dtype: Any = torch.float32) -> Tensor:
            return self.a(x).reshape(size).to(dtype)

    model = Shaped().eval()
    converted = torchq.quantize(model, [(X, (2, 16), torch.float64)], (X, (2, 16), torch.float64))
    assert isinstance(converted, torch.fx.GraphModule)
    for found in (converted, pickle.loads(pickle.dumps(converted))):
        check(model, found, (2, 16), torch.float64)
        for args in ((), ((2, 16),), ((4, 8), torch.float64)):
            with pytest.raises(ERRORS, match=r"was .*, got .*knows no other"):
                found(X, *args)
    with pytest.raises(RuntimeError):  # rather than a scripted model that does not check
        torch.jit.script(converted)


def test_what_returns_none_is_none() -> None:
    """As an nn.Identity in the place of a norm that another block has."""

    def forward(m: Any, x: Tensor) -> Tensor:
        memory = m.norm(None)
        assert m.nothing(x) is None
        return m.b(x if memory is None else memory) + m.a(x)

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    model = Wired(
        forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), norm=nn.Identity(), nothing=Nothing()
    ).eval()
    x = torch.randn(3, 8)
    converted = torchq.quantize(model, [x], x)
    assert all(row.quantized for row in torchq.explain(converted).rows if row.is_matmul)
    assert isinstance(converted, fx.GraphModule)
    torch.testing.assert_close(converted(x), model(x), atol=0.1, rtol=0)
    assert torch.equal(torch.jit.script(converted)(x), converted(x))


class Pads(nn.Module):
    """Not to be traced: gives a mask only where something is padded."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return (x, x.eq(0)) if bool(x.eq(0).any()) else (x, None)


def test_none_of_an_opaque_module_is_no_constant() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x, mask = m.pads(x)
        y = m.a(x)
        return y if mask is None else y.masked_fill(mask, 9.0)

    model, x = Wired(forward, a=nn.Linear(8, 8), pads=Pads()).eval(), torch.randn(3, 8)
    prepared = torchq.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    assert torch.equal(prepared(x.relu()), model(x.relu()))


@pytest.mark.parametrize("kind", ["pair", "list", "dict", "get"])
def test_none_in_a_container_is_guarded(kind: str) -> None:
    def forward(m: Any, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            x, mask = batch["x"], batch.get("mask")
        else:
            x, mask = batch
        y = m.a(x)
        return y if mask is None else y * mask

    def batch(x: Tensor, mask: Tensor | None) -> Any:
        if kind == "get" and mask is None:
            return {"x": x}
        return {"pair": (x, mask), "list": [x, mask]}.get(kind, {"x": x, "mask": mask})

    model, x = Wired(forward, a=nn.Linear(8, 8)).eval(), torch.randn(3, 8)
    prepared = torchq.prepare(model, (batch(x, None),))
    assert torch.equal(prepared(batch(x, None)), model(batch(x, None)))
    with pytest.raises(RuntimeError, match="argument that was None, got a tensor"):
        prepared(batch(x, torch.zeros(8)))


def _scaled(y: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    y = y if scale is None else y * scale
    return y if shift is None else y + shift


ASKS: dict[str, Any] = {
    "in": lambda y, d: _scaled(y * d["scale"], shift=d["shift"]) if "shift" in d else y,
    "not in": lambda y, d: y * d["scale"] if "shift" not in d else y,
    "iterated": lambda y, d: torch.stack([y * d[key] for key in d]).sum(0),
    "keys": lambda y, d: torch.stack([y * d[key] for key in d.keys()]).sum(0),  # noqa: SIM118
    "values": lambda y, d: torch.stack([y * v for v in d.values()]).sum(0),
    "items": lambda y, d: torch.stack([y + v if k == "shift" else y * v for k, v in d.items()]),
    "expanded": lambda y, d: _scaled(y, **d),
    "length": lambda y, d: y * len(d) + d["scale"],
}


@pytest.mark.parametrize("name", ASKS)
def test_keys_that_code_asks_for_are_guarded(name: str, tmp_path: Path) -> None:
    """A dict with more in it is refused, not looked at as if it had no more."""
    model = Wired(lambda m, x, d: ASKS[name](m.a(x), d), a=nn.Linear(8, 8))
    small = {"scale": torch.rand(4, 8)}
    large = small | {"shift": torch.rand(4, 8)}
    for example, other in ((small, large), (large, small)):
        model, found = convert(model, example)
        torchq.save(found[0], tmp_path / "model")
        for converted in (*found, torchq.load(tmp_path / "model")):
            check(model, converted, example)
            with pytest.raises((RuntimeError, torch.jit.Error), match="was a dict"):
                converted(X, other)


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("asks", [
    lambda y, given: torch.stack([y * x for x in given]).sum(0),
    lambda y, given: torch.cat([y, *given], 1),
    lambda y, given: y * len(given) + given[0],
    lambda y, given: y + sum(x for x in given[1:]),
    lambda y, given: y * given[-1] if given else y,
])  # fmt: skip
def test_numbers_of_tensors_are_guarded(asks: Any, container: Any) -> None:
    model = Wired(lambda m, x, given: asks(m.a(x), given), a=nn.Linear(8, 8)).eval()
    made = [torch.rand(4, 8) for _ in range(3)]
    example = container(made[:2])
    converted = torchq.quantize(model, [(X, example)], (X, example))
    forms = [converted, torch.jit.script(copy.deepcopy(converted))]
    for found in forms if container is list else forms[:1]:  # a list of tensors, for TorchScript
        check(model, found, example)
        for n in (1, 3):
            with pytest.raises((RuntimeError, torch.jit.Error), match=r"size or condition was"):
                found(X, container(made[:n]))


def test_the_name_of_a_dtype_is_known() -> None:
    """``x.type()``, as old code asks for half precision."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(x).half() if "Half" in x.type() else m.a(x)

    model, found = convert(Wired(forward, a=nn.Linear(8, 8)))
    for converted in found:
        check(model, converted)


@pytest.mark.parametrize("asked", ["requires_grad", "is_leaf", "grad_fn", "grad"])
def test_what_code_asks_of_gradients_is_guarded(asked: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        known = getattr(x, asked)
        return m.a(x) * 2 if known is None or known is (asked == "is_leaf") else m.a(x)

    model, found = convert(Wired(forward, a=nn.Linear(8, 8)))
    leaf = X.clone().requires_grad_()
    leaf.sum().backward()
    given = leaf if asked in ("requires_grad", "grad") else leaf * 1
    for converted in found:
        check(model, converted)
        with torch.no_grad(), pytest.raises((RuntimeError, torch.jit.Error), match="got"):
            converted(given)


@pytest.mark.parametrize("same", [True, False])
def test_whether_two_arguments_are_one_tensor_is_asked_again(same: bool) -> None:
    def forward(m: Any, query: Tensor, key: Tensor) -> Tensor:
        y: Tensor = m.a(query) + m.b(key) if query is key else m.a(query) - m.b(key)
        return y

    model, other = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(), X.flip(1)
    data = [(X, X if same else other)]
    with pytest.warns(UserWarning, match="cannot be traced"):
        converted = torchq.quantize(model, data, data[0])
    for given in ((X, X), (X, other), (X, X.clone())):
        with torch.no_grad():
            assert sqnr(model(*given), converted(*given)) > 25


def test_arguments_that_may_be_one_tensor_stay_traced() -> None:
    def forward(m: Any, query: Tensor, key: Tensor) -> Tensor:
        y: Tensor = m.a(query) - m.b(key)
        return y

    model, other = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(), X.flip(1)
    converted = torchq.quantize(model, [(X, other)])
    assert isinstance(converted, torch.fx.GraphModule)
    with torch.no_grad():
        assert sqnr(model(X, X), converted(X, X)) > 20


class Streaming(nn.Module):
    """States go in and out, whole or taken apart."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.rnn, self.a, self.apart = nn.LSTM(8, 8), nn.Linear(8, 8), apart

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        if self.apart:
            h, c = hx
            hx = (self.a(h), c)
        return self.rnn(x, hx)


class Nested(nn.Module):
    """Of three kinds of holders and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: tuple[Tensor, list[Tensor], dict[str, Tensor], int]) -> Tensor:
        first, rest, named, factor = x
        return self.a(first) + self.a(rest[1]) + self.a(named["b"]) * factor


@pytest.mark.parametrize("name", ["whole", "apart", "nested"])
def test_tuples_of_tensors(name: str, tmp_path: Path) -> None:
    """TorchScript knows the type: as converted, unpickled and loaded."""
    torch.manual_seed(0)
    model = Nested() if name == "nested" else Streaming(name == "apart")
    state = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    nested = (X, [X * 2, X - 1], {"b": X * 3}, 2)
    args: Any = (nested,) if name == "nested" else (torch.randn(5, 2, 8), state)
    converted = torchq.quantize(model.eval(), [args], args)
    torchq.save(converted, tmp_path / "model")
    expected = torch.utils._pytree.tree_leaves(converted(*args))
    unpickled, loaded = pickle.loads(pickle.dumps(converted)), torchq.load(tmp_path / "model")
    for found in (converted, unpickled, loaded):
        for run in (found, torch.jit.script(copy.deepcopy(found))):
            results = torch.utils._pytree.tree_leaves(run(*args))
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

# SPDX-License-Identifier: Apache-2.0
"""Models whose code has hooks, writes in place, keeps a state, or acts on values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import MISSES, calls, near, sqnr, tensors, values, wired
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import torchq


class Features(nn.Module):
    """Adds to the features that it is given, and calls the network's ``forward`` by name."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        features["embedding"] = self.network.forward(features["x"])
        return features


def test_a_module_whose_forward_is_called_by_name_has_a_graph() -> None:
    model, x = Features().eval(), values(4, 8)
    converted = torchq.quantize(model, [({"x": x},)])
    found, expected = converted({"x": x})["embedding"], model({"x": x})["embedding"]
    assert sqnr(expected, found) > 25
    (graph,) = torchq.explain(converted).graphs
    assert (graph.module, graph.graph_calls, graph.own_calls) == ("network", 1, 0)


# Hooks


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8))).eval()


def test_hooks_of_the_model_run_around_the_graph() -> None:
    x, seen = values(4, 8), list[str]()
    model = layers()
    model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model.register_forward_hook(lambda m, args, result: {"y": result * 2})
    converted = torchq.quantize(model, [x])
    near(model, converted, x)
    handle = converted.register_forward_hook(lambda *args: seen.append("later"))
    near(model, converted, x)
    handle.remove()
    assert calls(converted) == (2, 0) and seen == ["later"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_new_hook_on_an_inner_module_sends_calls_to_own_code(everywhere: bool) -> None:
    model, x, seen = layers(), values(4, 8), list[Any]()
    converted = torchq.quantize(model, [x])
    near(model, converted, x)
    register: Any = converted[1].register_forward_hook
    handle = (register_module_forward_hook if everywhere else register)(
        lambda module, args, result: seen.append(type(result))
    )
    with pytest.warns(UserWarning, match="a submodule has a hook that is newer than the graph"):
        converted(x)
    assert seen and set(seen) == {Tensor} and calls(converted) == (1, 1)
    handle.remove()
    near(model, converted, x)
    assert calls(converted) == (2, 1)


def test_hooks_of_the_float_model_still_run() -> None:
    """One that changes the result, and one that looks: never at a tensor without data."""
    model, x, seen = layers(), values(4, 8), list[Any]()
    model[1].register_forward_hook(lambda module, args, result: result * 2)
    model[1][1].register_forward_hook(lambda module, args, result: seen.append(type(result)))
    converted = torchq.quantize(model, [x])
    assert set(seen) == {Tensor}
    seen.clear()
    near(model, converted, x)
    assert seen == [Tensor, Tensor]
    assert "'1' has a forward hook" in torchq.explain(converted).note


# What the code does


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).relu_().clone()
    y[:, 0] = 0
    y[1:] *= 2
    y.add_(1)
    return m.b(y)


def other_dtypes(m: Any, x: Tensor) -> Tensor:
    y = m.a(x.double().float()).half().float()
    z = m.b(y.to(torch.bfloat16).to(x.dtype))
    return torch.where(z > 0, z, torch.zeros((), dtype=z.dtype)) + (z > 1).to(z.dtype)


@pytest.mark.parametrize("code", [in_place, other_dtypes], ids=lambda f: f.__name__)
def test_code_inside_stays_in_the_graph(code: Callable[..., Any]) -> None:
    model, x = wired(code), values(4, 8)
    converted = torchq.quantize(model, [x], strict=True)
    before = x.clone()
    near(model, converted, x)
    near(model, converted, x[:3])
    assert calls(converted) == (2, 0) and torch.equal(x, before)


def adds_to_argument(m: Any, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
    x += 1
    return m.b(m.a(x))


def writes_to_cache(m: Any, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
    y = m.a(x)
    kept["state"][:, 1] = y
    return m.b(y)


def adds_a_key(m: Any, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
    kept["more"] = m.a(x)
    return m.b(kept["more"])


MUTATIONS = [adds_to_argument, writes_to_cache, adds_a_key]


@pytest.mark.parametrize("code", MUTATIONS, ids=lambda f: f.__name__)
def test_arguments_are_mutated_as_by_the_float_model(code: Callable[..., Any]) -> None:
    model = wired(code)
    example = values(4, 8), {"state": torch.zeros(4, 3, 8)}
    given = copy.deepcopy(example)
    prepared = torchq.prepare(model, given)
    assert torch.equal(given[0], example[0]) and given[1].keys() == example[1].keys()
    torchq.calibrate(prepared, [copy.deepcopy(example)])
    converted = torchq.convert(prepared)
    expected, found = copy.deepcopy(example), copy.deepcopy(example)
    model(*expected), converted(*found)
    assert expected[1].keys() == found[1].keys()
    pairs = list(zip(tensors(expected), tensors(found), strict=True))
    assert all(torch.equal(a, b) or sqnr(a, b) > 25 for a, b in pairs)


class Keeps(nn.Module):
    """A model whose result depends on earlier calls, by a buffer or an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind, self.last = nn.Linear(8, 8), nn.Linear(8, 8), kind, None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        if self.kind == "buffer":
            self.count += 1
            return self.b(y) * self.count
        before, self.last = self.last, y
        return self.b(y if before is None else y + 0.5 * before)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
@pytest.mark.parametrize("inner", [False, True])
def test_state_between_calls_is_the_models(kind: str, inner: bool) -> None:
    torch.manual_seed(0)
    keeps = Keeps(kind)
    model = nn.Sequential(nn.Linear(8, 8), keeps, nn.ReLU()) if inner else keeps
    model.eval().requires_grad_(False)
    data = [values(4, 8) for _ in range(3)]
    prepared = torchq.calibrate(torchq.prepare(model, data[0]), data)
    converted = torchq.convert(prepared)
    assert all(row.quantized for row in torchq.explain(converted).rows if row.is_matmul)
    assert "in each call" in torchq.explain(converted).note
    for found in (converted, torchq.convert(prepared)):
        run = copy.deepcopy(model)
        for x in data:
            near(run, found, x)


def test_a_call_in_training_mode_runs_own_code() -> None:
    model, x = wired(lambda m, x: m.b(m.a(x)).relu()), values(4, 8)
    converted = torchq.quantize(model, [x]).train()
    with pytest.warns(UserWarning, match=r"it is in training mode. Call eval\(\)"):
        converted(x)
    near(model, converted.eval(), x)
    assert calls(converted) == (1, 1)


class Replaced(nn.Module):
    """Is called otherwise than its forward says: by a decorator, a hook, or on the instance."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        if how == "hook":
            self.register_forward_pre_hook(lambda m, args, kw: ((kw["y"],), {}), with_kwargs=True)
        elif how == "instance":
            forward = self.forward
            self.forward = functools.wraps(forward)(lambda x, *labels: forward(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Decorated(Replaced):
    @staticmethod
    def _pops(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(self: Any, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
            result = forward(self, *args, **kwargs)
            return {"y": result} if return_dict else result

        return run

    @_pops
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).relu())


@pytest.mark.parametrize("how", ["hook", "instance", "decorated", "decorated example"])
@pytest.mark.filterwarnings(f"ignore:.*{MISSES}", "ignore:torchq.convert. nothing runs in int8")
def test_forwards_behind_something_else(how: str) -> None:
    torch.manual_seed(0)
    model = (Decorated if "decorated" in how else Replaced)(how).eval().requires_grad_(False)
    x = values(4, 8)
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "hook": ((), {"y": x}),
        "instance": ((x, x), {}),
        "decorated": ((x,), {"return_dict": True}),
        "decorated example": ((), {"x": x, "return_dict": True}),
    }
    args, kwargs = given[how]
    converted = torchq.quantize(model, [(x,) if how == "decorated" else args or kwargs])
    near(model, converted, *args, **kwargs)
    assert len(torchq.explain(converted).graphs) == (how in ("hook", "decorated"))


def test_python_operators_are_saved_and_scripted(tmp_path: Path) -> None:
    def forward(m: Any, x: Tensor) -> list[Tensor]:
        y, n = m.a(x), (x * 4).round().int().clamp(0, 7)
        t = torch.linspace(1, 4, 8)
        floats = [-y, abs(y), y + t, t - y, 2 - y, y * t, y / t, 2 / t, y // 2, y % t, abs(y) ** t]
        masks = [y < t, y >= 2, t == y, ~(y > t), (y > 0) & (y < t), (y > 0) ^ (x > 0)]
        ints = [~n, n << 1, 7 >> n, n & 3, n | 1, n ^ n, -n, n // 2, n % 3]
        return [m.b(y), y @ torch.eye(8), *floats, *masks, *ints]

    model, x = wired(forward), values(50, 8)
    prepared = torchq.calibrate(torchq.prepare(model, x), [x])
    for a, b in zip(model(x), prepared(x), strict=True):
        assert torch.equal(a, b)
    converted = torchq.convert(prepared)
    torchq.save(converted, tmp_path / "model")
    for found in (torchq.load(tmp_path / "model"), torch.jit.script(converted)):
        for a, b in zip(converted(x), found(x), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# Parts


class Branches(nn.Module):
    """Acts on values, so that its parts are captured and not the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = layers(), layers(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = self.two(y) if float(y.sum()) > 0 else -self.two(-y)
        return self.head(y)


def test_parts_have_graphs_where_the_whole_has_none() -> None:
    torch.manual_seed(0)
    model = Branches().eval().requires_grad_(False)
    converted = torchq.quantize(model, [values(4, 8) for _ in range(4)])
    near(model, converted, values(5, 8))
    explained = torchq.explain(converted)
    assert [g.module for g in explained.graphs] == ["one", "two"]
    assert [(g.graph_calls, g.own_calls) for g in explained.graphs] == [(1, 0)] * 2
    assert explained.note == "the whole is not captured: its code acts on the values of a tensor"
    assert {row.name: row.reason for row in explained.rows}["two.1.0"] == "fused into two.0"
    text = str(explained)
    assert "graph of 'one': 1 calls, 0 of own code; guards: input is float32 of shape" in text
    with pytest.warns(UserWarning, match=f"this call of 'two' {MISSES}"):
        converted.two(values(2, 3, 8))


def test_data_that_never_meets_the_guards_is_an_error() -> None:
    prepared = torchq.prepare(layers(), values(4, 8))
    with pytest.warns(UserWarning, match=MISSES):
        torchq.calibrate(prepared, [values(2, 4, 8)])
    with pytest.raises(RuntimeError, match="must reach the graph of the model, got no call that"):
        torchq.convert(prepared)

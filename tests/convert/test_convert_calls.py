# SPDX-License-Identifier: Apache-2.0
"""Calls of a converted model: as the float model takes them, by its graph or by its own code."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import sqnr, tensors
from models import Wired
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import MappingKey, register_pytree_node

import torchq

MISSES = "does not run its int8 graph"


class Output(OrderedDict):
    """A result as those of transformers: a dict with attributes, registered with pytree."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


register_pytree_node(
    Output,
    lambda out: (list(out.values()), list(out)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
    serialized_type_name="test_convert_calls.Output",
    flatten_with_keys_fn=lambda out: ([(MappingKey(k), v) for k, v in out.items()], list(out)),
)


class Encoder(nn.Module):
    """A text encoder: tokens, optional arguments, a result of a class, a second method."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(50, 16), nn.Embedding(2, 16)
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)
        self.head, self.config = nn.Linear(16, 3), {"name": "encoder"}

    def embed(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        return x if types is None else x + self.types(types)

    def forward(
        self,
        ids: Tensor | None = None,
        mask: Tensor | None = None,
        types: Tensor | None = None,
        hidden: bool = False,
        *,
        scale: float = 1.0,
    ) -> Any:
        x = self.embed(ids, types)
        y = self.norm(x + self.down(torch.relu(self.up(x)))) * scale
        if mask is not None:
            y = y * mask.unsqueeze(-1).to(y.dtype)
        out = Output(last=y, logits=self.head(y[:, 0]))
        if hidden:
            out["hidden"] = (x, y)
        return out

    def classify(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.forward(ids, mask, hidden=False).logits.softmax(-1)

    @property
    def width(self) -> int:
        return self.words.embedding_dim


def tokens(batch: int = 3, length: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, (batch, length)), torch.ones(batch, length, dtype=torch.long)


def values(*shape: int) -> Tensor:
    """Random numbers whose range a few batches show."""
    return torch.rand(shape) * 2 - 1


def near(model: nn.Module, converted: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Asserts that both give the same kind of result, and nearly the same numbers."""
    with torch.no_grad():
        expected = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        found = converted(*args, **kwargs)
    assert type(found) is type(expected)
    for a, b in zip(tensors(expected), tensors(found), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert a.numel() == 0 or torch.equal(a, b) or sqnr(a, b) > 25
    return found


def calls(converted: nn.Module) -> tuple[int, int]:
    """Returns how many calls took the graph of the whole model, and its own code."""
    (graph,) = torchq.explain(converted).graphs
    assert graph.module == ""
    return graph.graph_calls, graph.own_calls


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(1)
    model = Encoder().eval().requires_grad_(False)
    model.types.weight *= 0.1
    return model


@pytest.fixture(scope="module")
def quantized(encoder: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    data = [dict(zip(("ids", "mask"), tokens(), strict=True)) for _ in range(8)]
    return torchq.quantize(encoder, data)


@pytest.fixture
def converted(quantized: nn.Module) -> nn.Module:
    """A copy that has not been called yet."""
    return copy.deepcopy(quantized)


def test_class_attributes_and_methods(encoder: Encoder, converted: Any) -> None:
    assert type(converted) is Encoder and converted.config == encoder.config
    assert converted.width == 16 and converted.up.in_features == 16
    assert converted.up.weight.shape == (32, 16)
    ids, mask = tokens()
    assert torch.equal(converted.embed(ids), encoder.embed(ids))
    assert sqnr(encoder.classify(ids, mask), converted.classify(ids, mask)) > 25
    assert calls(converted) == (1, 0)  # the method's own call of forward


IDS, MASK = tokens(2, 9)
TAKEN: dict[str, tuple[bool, tuple[Any, ...], dict[str, Any]]] = {
    "keywords": (True, (), {"mask": MASK, "ids": IDS}),
    "positions": (True, (IDS, MASK), {}),
    "mixed": (True, (IDS,), {"mask": MASK}),
    "defaults": (True, (IDS, MASK, None, False), {"scale": 1.0}),
    "one of a batch": (True, (IDS[:1], MASK[:1]), {}),
    "one token": (True, (IDS[:, :1], MASK[:, :1]), {}),
    "no batch": (True, (IDS[:0], MASK[:0]), {}),
    "strided": (True, (IDS.t().contiguous().t(), MASK), {}),
    "without mask": (False, (IDS,), {}),
    "with types": (False, (IDS, MASK, MASK), {}),
    "types by keyword": (False, (IDS,), {"types": MASK}),
    "flag": (False, (IDS, MASK), {"hidden": True}),
    "number": (False, (IDS, MASK), {"scale": 0.5}),
    "number of another class": (False, (IDS, MASK), {"scale": 1}),
    "dtype": (False, (IDS.int(), MASK), {}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_optional_arguments(encoder: nn.Module, converted: nn.Module, name: str) -> None:
    by_graph, args, kwargs = TAKEN[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = near(encoder, converted, *args, **kwargs)
        near(encoder, converted, *args, **kwargs)
    assert torch.equal(out.last, out["last"]) and ("hidden" in out) == (name == "flag")
    assert calls(converted) == ((2, 0) if by_graph else (0, 2))
    assert [MISSES in str(w.message) for w in caught] == ([] if by_graph else [True])  # once


WHY = {
    "without mask": "its argument 'mask' is None, not a plain tensor",
    "with types": "its argument 'types' is a tensor of torch.int64, not None",
    "flag": "its argument 'hidden' is True, not False",
    "number": r"its argument 'scale' is 0.5, not 1.0",
    "dtype": "its argument 'ids' is torch.int32, not torch.int64",
}


@pytest.mark.parametrize("name", WHY)
def test_the_warning_names_guard_and_value(converted: nn.Module, name: str) -> None:
    _, args, kwargs = TAKEN[name]
    with pytest.warns(UserWarning, match=f"this call of Encoder {MISSES}: {WHY[name]}"):
        converted(*args, **kwargs)


@pytest.mark.parametrize("how", ["config", "argument"])
def test_strict_calls_take_the_graph_or_raise(encoder: nn.Module, how: str) -> None:
    data = [tokens() for _ in range(2)]
    config = torchq.QConfig(strict=how == "config")
    strict = torchq.quantize(encoder, data, config=config, strict=how == "argument")
    near(encoder, strict, *tokens(2, 4))
    with pytest.raises(RuntimeError, match=r"'mask' is None.* strict=True"):
        strict(IDS)
    with pytest.raises(TypeError, match="strict must be a bool"):
        torchq.QConfig(strict=1)  # type: ignore[arg-type]


def test_parameters_may_have_any_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, s1: Tensor, math: Tensor, len: float = 1.0, Tensor: Any = None) -> Any:
            return self.fc(s1.relu()) + math * len

    model = Named().eval()
    converted = torchq.quantize(model, [(values(40, 8), values(40, 8))], strict=True)
    near(model, converted, values(3, 8), math=values(3, 8))
    assert calls(converted) == (1, 0)


def test_what_the_float_model_refuses_is_its_own_error(converted: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            converted(IDS, nonsense=1)
        with pytest.raises(TypeError, match="takes from 1 to 5 positional"):
            converted(IDS, MASK, None, False, 2.0)
    assert calls(converted) == (0, 0)


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


# Sizes


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


def wired(forward: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    return Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval().requires_grad_(False)


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
    data = [values(*example, 8)] + [values(40, n, 8) for n in lengths]
    converted = torchq.quantize(model, data)
    for batch, length in (example, (1, 7), (4, 5), (2, 2), (3, 9), (1, 3), (0, 5)):
        near(model, converted, values(batch, length, 8))


def test_a_size_that_the_code_acts_on_is_a_guard() -> None:
    model = wired(unrolled)
    converted = torchq.quantize(model, [values(50, 5, 8)])
    with pytest.warns(UserWarning, match=r"\.shape\[1\] == 5 does not hold, since .* has \[2, 4,"):
        near(model, converted, values(2, 4, 8))
    near(model, converted, values(6, 5, 8))
    (graph,) = torchq.explain(converted).graphs
    assert (graph.graph_calls, graph.own_calls) == (1, 1)
    assert any(guard.endswith(".shape[1] == 5") for guard in graph.guards)


# What goes in and out

Pair = namedtuple("Pair", "x y")


@dataclass
class Plain:
    x: Tensor
    y: Tensor | None = None


@dataclass
class Known:
    x: Tensor
    y: Tensor | None = None


torch.export.register_dataclass(Known, serialized_type_name="test_convert_calls.Known")

HOLDERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "tuple": (lambda x, y: (x, y), True),
    "list": (lambda x, y: [x, y], True),
    "dict": (lambda x, y: {"x": x, "y": y}, True),
    "nested": (lambda x, y: {"x": (x, [y, None])}, True),
    "named tuple": (Pair, True),
    "registered class": (lambda x, y: Output(x=x, y=y), True),
    "registered dataclass": (Known, True),
    "dataclass": (Plain, False),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_holders_of_tensors(name: str) -> None:
    """In and out; a dataclass that torch does not know goes through the model's own code."""
    made, by_graph = HOLDERS[name]

    def forward(m: Any, given: Any) -> Any:
        x = given.x if hasattr(given, "x") else given["x"] if isinstance(given, dict) else given[0]
        x = x[0] if isinstance(x, tuple) else x
        y = m.b(m.a(x).relu())
        return made(y, x + 1)

    model, x = wired(forward), values(4, 8)
    converted = torchq.quantize(model, [(made(x, x),)])
    with torch.no_grad():
        expected, found = model(made(x, x)), converted(made(x, x))
    assert type(found) is type(expected)
    for part in ("x", "y"):
        if hasattr(expected, part):
            assert sqnr(getattr(expected, part), getattr(found, part)) > 25
    for a, b in zip(tensors(expected), tensors(found), strict=True):
        assert not isinstance(a, Tensor) or sqnr(a, b) > 25
    explained = torchq.explain(converted)
    assert len(explained.graphs) == by_graph and explained.graphs == explained.graphs[:1]
    assert by_graph or "torch.export.register_dataclass(Plain)" in explained.note
    assert all(row.quantized for row in explained.rows if row.is_matmul)


def test_results_that_are_no_tensors() -> None:
    model = wired(lambda m, x: (m.b(m.a(x)), None, "text", 3, x.shape[0], x.shape))
    converted = torchq.quantize(model, [values(90, 8)])
    out = near(model, converted, values(2, 8))
    assert out[1:] == (None, "text", 3, 2, (2, 8)) and calls(converted) == (1, 0)


def test_other_items_of_a_dict_are_not_ignored() -> None:
    def forward(m: Any, batch: dict[str, Any]) -> Tensor:
        y = m.b(m.a(batch["x"]).relu())
        return y * batch["mask"] if "mask" in batch else y

    model, x = wired(forward), values(4, 8)
    converted = torchq.quantize(model, [({"x": x},)])
    near(model, converted, {"x": x})
    with pytest.warns(UserWarning, match="holds other parts than the example's"):
        near(model, converted, {"x": x, "mask": torch.rand(4, 8)})
    assert calls(converted) == (1, 1)


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
    """What it computes depends on earlier calls: a buffer, an attribute."""

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


# Copies


def forms(model: nn.Module) -> dict[str, nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
        "loaded": torch.load(buffer, weights_only=False),
    }


def test_copies_take_graph_and_own_code_of_their_own(quantized: nn.Module) -> None:
    ids, mask = tokens()
    graph, own = quantized(ids, mask).last, quantized(ids, mask, hidden=True).last
    for name, found in forms(quantized).items():
        assert torch.equal(found(ids, mask).last, graph), name
        assert torch.equal(found(ids, mask, hidden=True).last, own), name
        with torch.no_grad():
            found.up.layer.bias.add_(1)
            found.state_dict()["torchq_graph.up.bias"].add_(1)
            found.load_state_dict(found.state_dict())
        assert not torch.equal(found(ids, mask).last, graph), name
        assert torch.equal(quantized(ids, mask).last, graph), name
        assert torch.equal(quantized(ids, mask, hidden=True).last, own), name


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_reaches_graph_and_leaves(converted: nn.Module, assign: bool) -> None:
    other = Encoder().eval()
    other = torchq.quantize(other, [tokens() for _ in range(2)])
    ids, mask = tokens()
    assert not torch.equal(other(ids, mask).last, converted(ids, mask).last)
    state = copy.deepcopy(converted.state_dict())
    assert str(other.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    for kwargs in ({}, {"hidden": True}):
        assert torch.equal(other(ids, mask, **kwargs).last, converted(ids, mask, **kwargs).last)


def test_a_state_that_does_not_fit_is_refused(encoder: nn.Module, converted: nn.Module) -> None:
    state = converted.state_dict()
    name = "torchq_graph.up.weight_scale"
    fewer = {key: value for key, value in state.items() if key != name}
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{name}"'):
        converted.load_state_dict(fewer)
    with pytest.raises(RuntimeError, match=r'Unexpected key.* "torchq_graph.nonsense"'):
        converted.load_state_dict({**state, "torchq_graph.nonsense": torch.zeros(1)})
    assert converted.load_state_dict(fewer, strict=False).missing_keys == [name]
    with pytest.raises(RuntimeError, match="of the float model"):
        converted.load_state_dict(encoder.state_dict())


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


# Graphs without the model's own code


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

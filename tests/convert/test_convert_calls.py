# SPDX-License-Identifier: Apache-2.0
"""Calls of a converted model as the float model takes them: arguments, results, copies."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from flows import MISSES, calls, near, sqnr, tensors, values, wired
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, register_pytree_node

import torchq


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


class Options(nn.Module):
    """Takes options in a dict and by any name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, options: dict[str, Any], **more: Any) -> Tensor:
        return self.fc(x) * options.get("scale", 1.0) * more.get("factor", 1.0)


@pytest.mark.parametrize(
    ("options", "more", "why"),
    [
        ({"scale": 3.0}, {}, "'scale' of its argument 'options' is 3.0, not 2.0"),
        ({}, {}, "'scale' of its argument 'options' is missing"),
        ({"scale": 2.0}, {"factor": 2.0}, "its argument 'factor' is 2.0, which the example left"),
    ],
)
def test_the_warning_names_the_entry_of_a_dict(options: Any, more: Any, why: str) -> None:
    model, x = Options().eval(), values(4, 8)
    converted = torchq.quantize(model, [(x, {"scale": 2.0})])
    with pytest.warns(UserWarning, match=why):
        near(model, converted, x, options, **more)


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


class Cache:
    """Keeps tensors, as the caches of language models do; torch.export does not know it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_a_result_that_torch_export_does_not_know_is_seen_without_a_capture() -> None:
    model = wired(lambda m, x: (m.b(m.a(x)), Cache(x)))
    with mock.patch("torch.export.export", side_effect=AssertionError):
        converted = torchq.quantize(model, [values(90, 8)])
    assert "it returns a Cache, which is no tensor" in torchq.explain(converted).note
    y, cache = converted(x := values(2, 8))
    assert sqnr(model(x)[0], y) > 25 and torch.equal(cache.x, x)


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

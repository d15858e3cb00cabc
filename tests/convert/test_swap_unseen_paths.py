# SPDX-License-Identifier: Apache-2.0
"""Swapped models that go ways which calibration never saw: float-correct results or an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import flows
import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq import eager

pytestmark = pytest.mark.usefixtures("one_thread")

Call = tuple[Any, ...]
lin = partial(nn.Linear, 8, 8)
torch.manual_seed(1)
X, IMAGE, FACTOR = torch.randn(4, 8), torch.randn(2, 8, 6, 6), torch.rand(4, 8)
X[0, 0] = 1.0
BITS = (X > 0).to(torch.uint8)
TWO: dict[str, Any] = {"a": lin, "b": lin}


def chain() -> nn.Sequential:
    return nn.Sequential(lin(), nn.ReLU(), lin(), nn.Tanh(), lin())


def conv_chain() -> nn.Sequential:
    layers = [models.conv(), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), models.conv()]
    return nn.Sequential(*layers)


def tied() -> nn.Module:
    modules = nn.ModuleDict({"emb": nn.Embedding(16, 8), "out": nn.Linear(8, 16, bias=False)})
    modules["out"].weight = modules["emb"].weight
    return modules


def alias(model: Any) -> None:
    model.alias = model.s[2]


def second(m: Any, x: Tensor, factor: Tensor | None = None) -> Tensor:
    y = m.a(x)
    if factor is not None:
        y = y * factor
    return m.b(y)


def skips(m: Any, x: Tensor, norm: bool = True, act: bool = True) -> Tensor:
    y = m.c(x)
    y = m.bn(y) if norm else y
    return m.d(m.relu(y)) if act else y


def residual(m: Any, x: Tensor, add: bool = True) -> Tensor:
    y = m.a(x)
    return m.b(m.add(y, x) if add else y * 2)


def early(m: Any, x: Tensor, depth: int = 5) -> Tensor:
    if depth == 5:
        return m.s(x)
    for layer in list(m.s)[:depth]:
        x = layer(x)
    return x


def repeated(m: Any, x: Tensor, times: int = 1) -> Tensor:
    for _ in range(times):
        x = m.b(torch.tanh(m.s(x)))
    return x


def mask(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.b(m.a(x) * mask) + m.keep.to(x.dtype)


def tokens(m: Any, ids: Tensor, how: int = 0) -> Tensor:
    y = m.t["emb"](ids.long())
    return F.linear(y, m.t["out"].weight) if how else m.t["out"](y)


def in_place(m: Any, x: Tensor, more: bool = False) -> Tensor:
    y = m.a(x)
    y += x
    if more:
        y.relu_().mul_(3)
    return m.b(y)


def first_writes(m: Any, x: Tensor, again: bool = False) -> Tensor:
    x = x * 1.0
    y = m.s(x)
    return y + x if again else y


def forks(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(y) if x[0, 0] > 0 else m.b(torch.cat([y, y])[: len(x)] / 2)


def looks(m: Any, x: Tensor, way: str = "") -> Any:
    y = m.s(x)
    match way:
        case "dtype":
            return m.b(y) * torch.ones(8, dtype=y.dtype)
        case "bits":
            return m.b((y.view(torch.int32) & -65536).view(torch.float32))
        case "numpy":
            return m.b(torch.from_numpy(y.numpy() * 2))
        case "numbers":
            return m.b(y * max(map(abs, y.flatten().tolist())))
        case "views":
            return m.b(y.view(2, -1, 8).transpose(0, 1)[0].narrow(0, 0, 1) - y.mean())
        case "argmax":
            return m.b(F.one_hot(y.argmax(1), 8).float() * y.std())
    return m.b(y)


def weights(m: Any, x: Tensor, way: str = "") -> Tensor:
    layer = m.a
    match way:
        case "sum":
            return layer(x) * layer.weight.sum()
        case "dtype":
            return layer(x.to(layer.weight.dtype))
        case "shape":
            return layer(x).view(-1, layer.out_features)
        case "bias":
            return layer(x) - layer.bias
        case "linear":
            return F.linear(x, layer.weight)
        case "described":
            assert layer.weight.size() == layer.weight.shape and layer.weight.size(0) == 8
            assert layer.weight.dim() == layer.weight.ndim == 2 and layer.bias.numel() == 8
            assert layer.bias is not None and layer.weight.device == x.device
    return layer(x)


def parts(m: Any, x: Tensor, way: str = "") -> Tensor:
    match way:
        case "index":
            return m.s[0](x) * 2
        case "slice":
            return m.s[:2](x) * 2
        case "alias":
            return m.alias(x.relu()) * 2
        case "length":
            return m.s(x) * len(m.s)
        case "keyword":
            return m.s(input=x)
        case "forward":
            return m.s.forward(x)
    return m.s(x)


class Ways:
    """A model, the call it is calibrated with, and calls that go other ways.

    A call of ``wrong`` must raise, as it does for the float model.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        modules: dict[str, Callable[[], nn.Module]],
        seen: Call,
        right: list[Call],
        wrong: list[Call] = [],  # noqa: B006
        change: Callable[[Any], None] = lambda m: None,
    ) -> None:
        self.forward, self.modules, self.seen = forward, modules, seen
        self.right, self.wrong, self.change = right, wrong, change

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        made = {name: make() for name, make in self.modules.items()}
        model = models.Wired(self.forward, **made)
        model.register_buffer("keep", torch.arange(8, dtype=torch.uint8) % 2)
        self.change(model)
        return models.randomize(model)


S = {"s": chain, "b": lin}
CONVS = {"s": conv_chain}
IDS = torch.randint(0, 16, (4, 5))
U8 = torch.arange(8, dtype=torch.uint8).expand(4, 8) * 30
WAYS = {
    "factor": Ways(second, TWO, (X,), [(X, FACTOR), (X, BITS), (X, torch.tensor(1))]),
    "no factor": Ways(second, TWO, (X, 2 * FACTOR), [(X,)]),
    "norm and relu": Ways(
        skips, {"c": models.conv, "d": models.conv, "bn": lambda: nn.BatchNorm2d(8),
                "relu": nn.ReLU}, (IMAGE,),
        [(IMAGE, False), (IMAGE, True, False), (IMAGE, False, False)]),
    "residual": Ways(residual, {**TWO, "add": torchq.nn.Add}, (X,), [(X, False)]),
    "early": Ways(early, {"s": chain}, (X,), [(X[:1],), (X, 1), (X, 2), (X, 3)]),
    "iterated": Ways(early, {"s": chain}, (X, 4), [(X,), (X, 1), (X, 2), (X, 3)]),
    "repeated": Ways(repeated, S, (X,), [(X, 2), (X, 3), (X, 0)]),
    "repeated less": Ways(repeated, S, (X, 3), [(X, 1)]),
    "mask": Ways(mask, TWO, (X, X > 0), [(X, BITS), (X, FACTOR)], [(U8, X)]),
    "tokens": Ways(tokens, {"t": tied}, (IDS,), [(IDS.byte(),), (IDS[:1, :2],), (IDS, 1)]),
    "tied": Ways(tokens, {"t": tied}, (IDS, 1), [(IDS, 1), (IDS,)]),
    "in place": Ways(in_place, TWO, (X,), [(X, True)]),
    "first writes": Ways(
        first_writes, {"s": lambda: nn.Sequential(nn.ReLU(True), lin())}, (X,), [(X, True)]),
    "forks": Ways(forks, TWO, (X,), [(-X,), (-X[:2],)]),
    "looks": Ways(looks, S, (X,), [(X, w) for w in (
        "dtype", "bits", "numpy", "numbers", "views", "argmax")]),
    "weights": Ways(weights, {"a": lin}, (X,), [(X, w) for w in (
        "shape", "dtype", "described", "sum", "bias", "linear")]),
    "dtypes are read": Ways(weights, {"a": lin}, (X, "described"), [(X, "dtype"), (X, "sum")]),
    "sizes are read": Ways(weights, {"a": lin}, (X, "shape"), [(X,)]),
    "weights are read": Ways(weights, {"a": lin}, (X, "sum"), [(X,), (X, "dtype"), (X, "bias")]),
    "parts": Ways(parts, S, (X,), [
        (X, w) for w in ("keyword", "forward", "index", "slice", "length")]),
    "length": Ways(parts, S, (X, "length"), [(X, "index"), (X, "slice")]),
    "alias": Ways(parts, S, (X,), [(X, w) for w in ("alias", "index", "slice")], change=alias),
    "sizes": Ways(parts, CONVS, (IMAGE,), [
        (torch.randn(5, 8, 9, 4),), (IMAGE.to(memory_format=torch.channels_last),),
        (IMAGE[:, :, ::2, ::2],), (torch.randn(1, 8, 2, 2),)], [
            (IMAGE.byte(),), (IMAGE.double(),)]),
    "ranks": Ways(second, TWO, (X,), [(X[0],), (X[None, None],), (X[:0],)], [
        (U8,), (X.double(),), (X.long(),), (X[:, :5],)]),
    "ranks of sequences": Ways(looks, S, (X,), [(X[0],), (X[None],), (X[:0],)], [
        (U8,), (X.double(),), (X.int(),), (X[:, :5],)]),
}  # fmt: skip


def holds(want: Any, got: Tensor, bound: float = 18.0) -> None:
    assert want.dtype == got.dtype and want.shape == got.shape
    if want.numel():
        assert flows.sqnr(want, got) > bound


@pytest.mark.parametrize("name", WAYS)
def test_ways_that_calibration_did_not_see(name: str) -> None:
    ways = WAYS[name]
    model = ways.model()
    data = [tuple(a * f if a is X or a is IMAGE else a for a in ways.seen) for f in (1, 1.5, 3)]
    with torch.no_grad():
        converted = eager.quantize(model, [*data, ways.seen], ways.seen)
        for one in (converted, copy.deepcopy(converted)):
            for args in (ways.seen, *ways.right):
                holds(model(*args), one(*args))
            for args in ways.wrong:
                with pytest.raises((TypeError, RuntimeError, AttributeError, ValueError)):
                    one(*args)


def test_models_convert_in_int8() -> None:
    """Or the ways would be right for a reason of no interest."""
    for name, ways in WAYS.items():
        converted = eager.quantize(ways.model(), [ways.seen], ways.seen)
        some = any(isinstance(m, torchq.nn.module.QModule) for m in converted.modules())
        assert some == (name != "tied")


def test_dynamic_layers() -> None:
    """Their weights can be read, too."""
    ways = WAYS["weights"]
    model = ways.model()
    with torch.no_grad():
        converted = eager.quantize(model, [(X,)], (X, "shape"), torchq.QConfig(dynamic=True))
        assert isinstance(converted.a.layer, torchq.nn.DynamicQLinear)
        for args in ((X,), (50 * X,), *ways.right):
            holds(model(*args), converted(*args))
        with pytest.raises(TypeError):
            converted(U8)


def test_autocast_hooks_and_replaced_modules() -> None:
    ways = WAYS["factor"]
    model = ways.model()
    converted = eager.quantize(model, [(X,), (2 * X,)], (X,))
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            y = converted.a(X)
            assert converted.b(y @ torch.eye(8)).dtype == y.dtype == torch.bfloat16
        seen: list[Tensor] = []
        handle = converted.a.register_forward_hook(lambda m, args, y: seen.extend((*args, y)))
        holds(model(X), converted(X))
        handle.remove()
        holds(X, seen[0])
        holds(model.a(X), seen[1])
        expected = converted(X)
        converted.train()
        assert torch.equal(converted(X), expected)
        converted.eval().b = model.b
        holds(model(X), converted(X))
        converted.b = torch.compile(nn.Sequential(model.b, nn.ReLU()), backend="eager")
        holds(model(X).relu(), converted(X))


class Optionally(nn.Module):
    """A model with branches that TorchScript takes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.s = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, factor: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        y = self.a(x)
        if factor is not None:
            y = y * factor
        return self.b(self.s(y))


def test_every_way_to_run_goes_every_way(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, factor = Optionally().eval(), torch.randn(4, 8)
    with torch.no_grad():
        converted = eager.quantize(model, [X, 3 * X], X)
        assert converted.get_submodule("s.0.layer").src_dtype == torch.uint8
        calls = [(X,), (X, factor)]
        expected = [converted(*args) for args in calls]
        for args, got in zip(calls, expected, strict=True):
            holds(model(*args), got)
        torchq.save(converted, tmp_path / "model")
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(converted), buffer)
        buffer.seek(0)
        compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
        everywhere: list[Any] = [
            copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)),
            torchq.load(tmp_path / "model", Optionally()), torch.jit.load(buffer), compiled,
        ]  # fmt: skip
        for one in everywhere:
            for args, want in zip(calls, expected, strict=True):
                assert torch.equal(one(*args), want)
        for args, want in zip(calls, expected, strict=True):
            traced = torch.jit.freeze(torch.jit.trace(converted, args))
            assert torch.equal(traced(*args), want)
            exported = torch.export.export(converted, args)
            assert torch.equal(exported.module()(*args), want)
        for one in (converted, *everywhere[:4]):
            with pytest.raises(
                (TypeError, torch.jit.Error), match=r"takes torch\.float32|must be torch\.float32"
            ):
                one(U8)


def test_a_forward_that_enters_inference_mode_is_swapped() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = m.b(m.a(x))
        return y * 2

    model, x = (
        models.Wired(forward, a=nn.Linear(8, 8), b=nn.Sequential(nn.Linear(8, 8))),
        torch.randn(4, 8),
    )
    converted = torchq.quantize(model.eval(), [x], x)
    assert flows.sqnr(model(x), converted(x)) > 25

# SPDX-License-Identifier: Apache-2.0
"""Modules with a forward of their own that become graphs where the model cannot be traced."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from flows import sqnr
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq.nn.swapped import PartError, Whole, by_float_name

pytestmark = pytest.mark.usefixtures("one_thread")

torch.manual_seed(2)
X = torch.randn(2, 8, 10, 10)


class Residual(nn.Module):
    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = models.conv(stride=stride, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = models.conv(bias=False), nn.BatchNorm2d(8)
        self.relu, self.stride = nn.ReLU(inplace=True), stride
        self.down = nn.Sequential(models.conv(k=1, stride=stride)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)

    def helper(self, x: Tensor) -> Tensor:
        return self.conv1(x)


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = models.conv(16), nn.ReLU()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.act(self.conv(torch.cat([x, skip], 1)))


class Squeeze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = models.conv(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        n, c, _, _ = y.shape
        return y * self.fc(y.mean((2, 3))).view(n, c, 1, 1).sigmoid()


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.add = models.conv(), models.conv(), models.conv(), tnn.Add()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.c(self.add(self.b(y), y))


class Net(nn.Module):
    """Acts on values; ``code(m, x, way)`` is what it does with its parts."""

    def __init__(self, code: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.code = code
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, way: str = "") -> Tensor:
        y = self.code(self, x, way)
        return y * 2 if float(y.sum()) > 1e9 else y


def built(code: Callable[..., Tensor], **parts: Any) -> Any:
    torch.manual_seed(0)
    model = Net(code, **parts)
    for module in model.modules():  # in the order of modules: seeds hold
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.reset_parameters()
    return models.randomize(model)


def converted(model: nn.Module, *args: Any, **more: Any) -> Any:
    args = args or (X,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = torchq.quantize(model, [args, (1.5 * args[0], *args[1:])], args, **more)
    with torch.no_grad():
        assert sqnr(model(*args), result(*args)) > 25
    return result


def wholes(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if issubclass(type(module), Whole)}


# What becomes of them


def test_a_stage_is_one_graph() -> None:
    model = built(lambda m, x, way: m.head(m.s(m.stem(x))), stem=models.conv(), head=models.conv(),
                  s=nn.Sequential(Residual(), Residual(2)))  # fmt: skip
    result = converted(model, strict=True)
    assert wholes(result) == {"s"}
    rows = {row.name: row for row in torchq.explain(result).rows}
    assert all(rows[n].quantized for n in rows)
    assert rows["s.0.bn2"].reason == rows["s.0.add"].reason == "fused into s.0.conv2"
    assert rows["s.0.relu"].reason == "fused into s.0.conv1, s.0.conv2"
    layers = dict(by_float_name(result))
    assert layers["s.0.conv2"].dst_dtype == layers["s.1.conv1"].dst_dtype == torch.uint8
    assert "-> u8" in str(torchq.explain(result))
    sites = [layer.name for layer in torchq.profile(model, result, X, rounds=1).layers]
    assert {"s.0.conv1", "s.1.down.0", "stem"} <= set(sites)
    prepared = torchq.calibrate(torchq.prepare(model, X), [X])
    found = torchq.compare(prepared, torchq.convert(prepared), [X])
    assert {"s.0.conv1", "stem"} <= {layer.name for layer in found.layers}


def test_an_addition_in_a_block_is_int8() -> None:
    result = converted(built(lambda m, x, way: m.s(x), s=Added()))
    layers = dict(by_float_name(result))
    assert layers["a"] if "a" in layers else layers["s.b"].dst_dtype == torch.uint8
    assert "sum" in layers["s.b"].post_ops or type(layers["s.add"]) is tnn.QAdd


def test_a_part_that_cannot_be_traced_leaves_the_others() -> None:
    class Acts(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if float(x.sum()) < 1e9 else -x)

    model = built(lambda m, x, way: m.s(x), s=nn.Sequential(Residual(), Acts(), Residual()))
    assert wholes(converted(model)) == {"s.0", "s.2"}


def test_overrides() -> None:
    model = built(lambda m, x, way: m.t(m.s(x)), s=Residual(), t=Residual())
    result = converted(model, overrides={"s": None, "t.conv1": None}, strict=True)
    assert wholes(result) == {"t"} and type(result.s) is Residual
    result = converted(model, overrides={"s.add": None, "t.conv?.dst": None})
    rows = {row.name: row for row in torchq.explain(result).rows}
    assert rows["s.add"].reason == "kept float by an override"
    with pytest.raises(ValueError, match=r"\['s.sub'\] match none"):
        converted(model, overrides={"s.sub": None})


# Ways that calibration did not see


def ways(m: Any, x: Tensor, way: str) -> Tensor:
    s = m.s
    match way:
        case "keyword":
            return s(x=x)
        case "forward":
            return s.forward(x)
        case "constant":
            return s(x) * s.stride
        case "no such":
            return s(x) * (2 if hasattr(s, "gain") else 1) * getattr(s, "factor", 1)
        case "twice":
            y = s(x)
            y += s(y)
            return y
        case "part":
            return s.conv1(x)
        case "parts":
            for part in (s.conv1, s.bn1, s.relu):
                x = part(x)
            return x
        case "weight":
            return s(x) * s.conv1.weight.sum()
        case "statistics":
            return s(x) + s.bn1.running_mean.sum()
        case "has":
            return s(x) * (1 if hasattr(s, "down") else 2)
        case "default":
            return s(x) * (2 if getattr(s, "conv2", None) is None else 1)
        case "children":
            for part in list(s.children())[:1]:
                x = part(x) * 0.5
            return x
        case "modules":
            return [part for part in s.modules() if hasattr(part, "stride")][1](x)
        case "helper":
            return s.helper(x)
        case "more":
            return s(x, x)
        case "state":
            return s(x) * s.state_dict()["conv1.weight"].sum()
        case "submodule":
            return s.get_submodule("conv1")(x)
        case "set constant":
            s.stride = 3
        case "set part":
            s.conv1 = nn.Identity()
        case "hook":
            s.conv1.register_forward_hook(lambda module, args, result: result * 2)
        case "length":
            return s(x) * len(s)
    return s(x)


RIGHT = ["keyword", "forward", "constant", "no such", "twice"]
WRONG = [
    *("part", "parts", "weight", "statistics", "has", "default", "children", "modules", "helper"),
    *("more", "state", "submodule", "set constant", "set part", "hook", "length"),
]


def test_ways_that_were_not_calibrated() -> None:
    model = built(ways, s=Residual(2))
    result = converted(model)
    assert wholes(result) == {"s"}
    with torch.no_grad():
        for one in (result, copy.deepcopy(result), result.train()):
            for way in RIGHT:
                if way != "twice":
                    assert sqnr(model(X, way), one(X, way)) > 25
            for x in (X[:1], X[:0], X.repeat(2, 1, 2, 1), X.to(memory_format=torch.channels_last)):
                want, got = model(x), one(x)
                assert want.shape == got.shape and (not len(x) or sqnr(want, got) > 25)
            for way in WRONG:
                with pytest.raises((RuntimeError, TypeError, AttributeError, LookupError)):
                    one(X, way)
            for x in (X.double(), X.half(), (X > 0).to(torch.uint8)):
                with pytest.raises((TypeError, RuntimeError)):
                    one(x)
    with pytest.raises(PartError, match=r"'conv1' of 's' must not.*overrides=\{'s': None\}"):
        result(X, "part")
    model = built(ways, s=Residual())
    result = converted(model)
    with torch.no_grad():
        assert sqnr(model(X, "twice"), result(X, "twice")) > 22


@pytest.mark.parametrize("way", WRONG)
def test_ways_that_the_example_takes(way: str) -> None:
    """The same, seen: then the module is no graph, and does what it did."""
    model, tried = built(ways, s=Residual(2)), built(ways, s=Residual(2))
    try:
        tried(X, way)
        model(X, "")
    except Exception:
        return
    if way == "hook":
        return  # changes what the layer does from now on
    try:
        result = converted(model, X, way)
    except AttributeError as error:  # of a layer, which may not be changed either
        assert "must be what it was" in str(error)
        return
    assert wholes(result) == set() or way in ("set constant", "set part")
    with torch.no_grad():
        assert sqnr(model(X), result(X)) > 25


def test_a_graph_that_code_looks_into_leaves_the_others() -> None:
    model = built(lambda m, x, way: m.t(m.s(x)) * (1 if hasattr(m.s, "conv1") else 2),
                  s=Residual(), t=Residual(), u=Residual())  # fmt: skip
    assert wholes(converted(model)) == {"t"}


def test_several_inputs() -> None:
    def code(m: Any, x: Tensor, way: str) -> Tensor:
        match way:
            case "none":
                return m.s(x, None)
            case "bool":
                return m.s(x, x > 0)
            case "double":
                return m.s(x, x.double())
            case "keywords":
                return m.s(skip=x, x=x * 2)
        return m.s(x, x.relu())

    model = built(code, s=Join())
    result = converted(model)
    assert wholes(result) == {"s"}
    with torch.no_grad():
        for way in ("", "keywords"):
            for x in (X, X[:1, :, :5]):
                assert sqnr(model(x, way), result(x, way)) > 22
        for way in ("none", "bool", "double"):
            with pytest.raises((TypeError, AttributeError)):
                result(X, way)


def test_numbers_of_dims() -> None:
    """What code asks of them may hold for one only."""

    class Flexible(Squeeze):
        def forward(self, x: Tensor) -> Tensor:
            if x.dim() == 3:
                return super().forward(x[None])[0] * 2
            return super().forward(x)

    for block, expected in ((Squeeze, {"s"}), (Flexible, set())):
        model = built(lambda m, x, way: m.s(x), s=block())
        result = converted(model)
        assert wholes(result) == expected
        with torch.no_grad():
            assert sqnr(model(X[:1, :, 2:]), result(X[:1, :, 2:])) > 22


# Modules that do not become graphs, and ways through them that calibration did not see


class Shared:
    gain = 1.0


class Optional(Residual):
    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gain


class Masked(Residual):
    def forward(self, x: Tensor, mask: Any) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        return y if mask is None else y * mask * 2


class Sized(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[-1] > 10 else y


class Counts(Residual):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return super().forward(x)


class Configured(Residual):
    config: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.gain


class Indexed(Residual):
    def __getitem__(self, index: int) -> nn.Module:
        return [self.conv1, self.conv2][index]


class Pairs(Residual):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y + 1


def _optional(m: Any, x: Tensor, way: str) -> Tensor:
    return m.s(x, 3.0) if way else m.s(x)


def _masked(m: Any, x: Tensor, way: str) -> Tensor:
    return m.s(x, x > 0) if way else m.s(x, None)


def _configured(m: Any, x: Tensor, way: str) -> Tensor:
    m.config.gain = 3.0 if way else 1.0
    return m.s(x)


def _counted(m: Any, x: Tensor, way: str) -> Tensor:
    y = m.s(x)
    return y * (m.s.n > 0) if way else y


def _alias(m: Any, x: Tensor, way: str) -> Tensor:
    return m.alias(x) * 2 if way else m.s(x)


def _part(m: Any, x: Tensor, way: str) -> Tensor:
    return m.s(x) if way else m.s(x) + m.s.conv1(x)


def _read(m: Any, x: Tensor, way: str) -> Tensor:
    return m.s(x) if way else m.s(x) * m.s.conv1.weight.std()


def _tied(m: Any, x: Tensor, way: str) -> Tensor:
    return F.conv2d(x, m.w) if way else m.s(x)


def _plain(m: Any, x: Tensor, way: str) -> Tensor:
    return m.s(x)


def _indexed(m: Any, x: Tensor, way: str) -> Tensor:
    return m.s[0](x) if way else m.s(x)


def _is_residual(module: nn.Module) -> bool:
    return isinstance(module, Residual)


def _asks(m: Any, x: Tensor, way: str) -> Tensor:
    return (m.s(x) if _is_residual(m.s) else m.s(x) * 2) if way else m.s(x)


def _pairs(m: Any, x: Tensor, way: str) -> Tensor:
    return m.s(x)[1 if way else 0]


def _aliased() -> dict[str, Any]:
    block = Residual()
    return {"s": block, "alias": block.conv1}


def _with_config() -> dict[str, Any]:
    block, config = Configured(), Shared()
    block.config = config
    return {"s": block, "config": config}


def _with_weight() -> dict[str, Any]:
    block = Residual()
    return {"s": block, "w": block.conv1.weight}


def _hooked() -> dict[str, Any]:
    block = Residual()
    block.bn2.register_forward_hook(lambda module, args, result: result * 2)
    return {"s": block}


LEFT: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, Any]], Tensor]] = {
    "optional": (_optional, lambda: {"s": Optional()}, X),
    "masked": (_masked, lambda: {"s": Masked()}, X),
    "sized": (_plain, lambda: {"s": Sized()}, torch.cat([X, X], -1)),
    "configured": (_configured, _with_config, X),
    "counts": (_counted, lambda: {"s": Counts()}, X),
    "alias": (_alias, _aliased, X),
    "part": (_part, lambda: {"s": Residual()}, X),
    "read": (_read, lambda: {"s": Residual()}, X),
    "tied": (_tied, _with_weight, X),
    "indexed": (_indexed, lambda: {"s": Indexed()}, X),
    "asks": (_asks, lambda: {"s": Residual()}, X),
    "pairs": (_pairs, lambda: {"s": Pairs()}, X),
    "hooked": (_plain, _hooked, X),
}


@pytest.mark.parametrize("name", LEFT)
def test_modules_that_are_no_graphs(name: str) -> None:
    code, parts, x = LEFT[name]
    model = built(code, **parts())
    result = converted(model)
    assert wholes(result) == set()
    assert any(row.quantized for row in torchq.explain(result).rows)
    with torch.no_grad():
        for way in ("", "other"):
            assert sqnr(model(x, way), result(x, way)) > 22


# Every way to run


class Outer(nn.Module):
    """What TorchScript takes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.s, self.b = models.conv(), Residual(), models.conv()

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        y = self.s(self.a(x))
        if double:
            y = y * 2
        return self.b(y)


def test_every_way_to_run(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = models.randomize(Outer())
    with torch.no_grad():
        result = torchq.eager.quantize(model, [X, 3 * X], X)
        assert wholes(result) == {"s"}
        expected = result(X)
        assert sqnr(model(X), expected) > 25
        torchq.save(result, tmp_path / "model")
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(result), buffer)
        buffer.seek(0)
        loaded = torchq.load(tmp_path / "model", Outer())
        pickled = pickle.loads(pickle.dumps(result))
        for one in (
            *(copy.deepcopy(result), pickled, loaded, torch.jit.load(buffer)),
            torch.compile(result, fullgraph=True, backend="aot_eager"),
            torch.jit.freeze(torch.jit.trace(result, X)),
            torch.export.export(result, (X,)).module(),
        ):
            assert torch.equal(one(X), expected)
        for one in (copy.deepcopy(result), pickled, loaded):
            assert one.s.stride == 1
            with pytest.raises(PartError):
                one.s.conv1(X)
        prepared = torchq.eager.prepare(model, X)
        for one in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
            again = torchq.convert(torchq.calibrate(one, [X, 3 * X]))
            assert torch.equal(again(X), expected) and wholes(again) == {"s"}
            with pytest.raises(PartError):
                _ = one.s.conv1

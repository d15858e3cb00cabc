# SPDX-License-Identifier: Apache-2.0
"""Code that walks over swapped layers where the example did not: the float answer, or an error."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq


class Transposed(nn.Module):
    """Becomes a linear layer; its weight is of the other shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Net(nn.Module):
    """Cannot be traced; ``ask`` is called on ways that the example does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.t, self.rnn = nn.Linear(8, 8), Transposed(), nn.LSTM(16, 8, 2)
        self.s = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, ask: str = "") -> Tensor:
        y: Tensor = self.s(self.rnn(self.t(self.a(x)))[0])
        y = y * 2 if float(y.sum()) > 1e9 else y
        return y * 0 + float(ASKS[ask](self)) if ask else y


def total(found: Any) -> int:
    return sum(1 for _ in found)


ONE = torch.ones(1, 8)
RIGHT: dict[str, Callable[[Net], Any]] = {
    "linears": lambda m: total(k for k in m.modules() if isinstance(k, nn.Linear)),
    "relus": lambda m: total(k for k in m.modules() if isinstance(k, nn.ReLU)),
    "sequence": lambda m: isinstance(m.s, nn.Sequential),
    "lstm": lambda m: isinstance(m.rnn, nn.LSTM) and m.rnn.num_layers == 2,
    "own class": lambda m: isinstance(m.t, Transposed) and m.t.__class__ is Transposed,
    "children": lambda m: total(m.children()) + 10 * total(m.s.children()),
    "names": lambda m: len("".join(name for name, _ in m.named_modules())),
    "parameters": lambda m: sum(p.numel() for p in m.parameters()),
    "parameter names": lambda m: len("".join(name for name, _ in m.named_parameters())),
    "buffers": lambda m: len("".join(name for name, _ in m.named_buffers())),
    "dtype": lambda m: next(m.parameters()).dtype == torch.float32,
    "floats": lambda m: all(p.is_floating_point() for p in m.parameters()),
    "shape": lambda m: m.t.weight.shape[1],
    "has a weight": lambda m: hasattr(m.rnn, "weight_ih_l0") and hasattr(m.a, "weight"),
    "same weight": lambda m: m.a.weight is m.a.weight and m.a.weight is next(m.a.parameters()),
    "copies": lambda m: m.to("cpu") is m and isinstance(copy.deepcopy(m.a), nn.Linear),
    "modes": lambda m: m.eval() is m and not m.a.training,
}
RAISE: dict[str, Callable[[Net], Any]] = {
    "norms": lambda m: sum(p.norm() for p in m.parameters()),
    "norms by torch": lambda m: sum(torch.linalg.norm(p) for p in m.parameters()),
    "values": lambda m: m.a.weight.data.sum(),
    "products": lambda m: F.linear(ONE, m.a.weight).sum(),
    "cat": lambda m: torch.cat([p.reshape(-1) for p in m.a.parameters()]).sum(),
    "lists": lambda m: torch.stack(list(m.a.parameters())[:1]).sum(),
    "comparing": lambda m: (m.a.weight == 0).sum(),
    "truth": lambda m: bool(m.a.bias),
    "is a tensor": lambda m: isinstance(m.a.weight, Tensor),
    "is a tensor to torch": lambda m: torch.is_tensor(m.a.weight),
    "is a parameter": lambda m: isinstance(next(m.parameters()), nn.Parameter),
    "state": lambda m: len(m.state_dict()),
    "method": lambda m: hasattr(m.a, "reset_parameters"),
    "part": lambda m: next(m.s.children())(ONE).sum(),
    "part by name": lambda m: m.s.get_submodule("0")(ONE).sum(),
    "part by attribute": lambda m: getattr(m.s, "0")(ONE).sum(),
    "part of modules": lambda m: m.s._modules["0"](ONE).sum(),
}
WRITES: dict[str, Callable[[Net], Any]] = {
    "register": lambda m: m.a.register_parameter("weight", nn.Parameter(torch.ones(8, 8))),
    "parameters": lambda m: m.a._parameters.update(bias=None),
    "recurrent": lambda m: setattr(m.rnn, "weight_ih_l0", nn.Parameter(torch.ones(32, 16))),
    "constant": lambda m: setattr(m.rnn, "bidirectional", True),
    "load": lambda m: m.load_state_dict({"a.weight": torch.ones(8, 8)}, strict=False),
    "assign": lambda m: m.s.load_state_dict({"0.weight": ONE}, strict=False, assign=True),
    "modules": lambda m: m.s._modules.pop("1"),
    "add": lambda m: m.s.add_module("4", nn.ReLU()),
    "replace": lambda m: setattr(m.s, "2", nn.Tanh()),
    "delete": lambda m: delattr(m.s, "2"),
    "part": lambda m: setattr(next(m.s.children()), "bias", None),
    "part's constant": lambda m: setattr(list(m.s.children())[1], "eps", 1.0),
    "part's buffer": lambda m: list(m.s.children())[1].register_buffer("running_mean", ONE),
    "part's hook": lambda m: list(m.s.children())[2].register_forward_hook(print),
    "part's forward": lambda m: setattr(next(m.s.children()), "forward", abs),
    "mode": lambda m: m.s.train(),
    "part's mode": lambda m: list(m.s.children())[1].train(),
}
ASKS = RIGHT | RAISE | {f"write {name}": ask for name, ask in WRITES.items()}
SOURCE = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def float_model() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def swapped(float_model: Net, tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = torchq.prepare(float_model, SOURCE)
    again = pickle.loads(pickle.dumps(torchq.calibrate(prepared, [SOURCE, 2 * SOURCE])))
    model = torchq.convert(again)
    path = tmp_path_factory.mktemp("standing") / "model"
    torchq.save(model, path)
    return {
        "converted": model,
        "copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
        "loaded": torchq.load(path, Net().eval()),
    }


@pytest.mark.parametrize("how", ["converted", "copied", "pickled", "loaded"])
def test_answers_are_those_of_the_float_model(float_model, swapped, how) -> None:
    model = swapped[how]
    assert total(m for m in model.modules() if isinstance(m, torchq.nn.QModule)) > 4
    for ask in RIGHT:
        assert torch.equal(float_model(SOURCE, ask), model(SOURCE, ask)), ask
    for ask in RAISE:
        with pytest.raises((RuntimeError, TypeError), match=r"name it in overrides with None"):
            model(SOURCE, ask)


@pytest.mark.parametrize("how", ["converted", "loaded"])
@pytest.mark.parametrize("ask", WRITES)
def test_writes_raise(swapped, how, ask) -> None:
    """They would have no effect on the numbers."""
    model = swapped[how]
    expected = model(SOURCE)
    with pytest.raises((RuntimeError, AttributeError), match=r"name it in overrides with None"):
        model(SOURCE, f"write {ask}")
    assert torch.equal(model(SOURCE), expected)


def test_outside_of_calls_is_what_is_there(swapped) -> None:
    model = swapped["converted"]
    state = model.state_dict()
    assert "a.layer.weight" in state and state["a.layer.weight"].dtype == torch.int8
    assert not list(model.parameters()) and state.keys() <= dict(model.named_buffers()).keys()
    assert isinstance(model.a, torchq.nn.Swapped) and not isinstance(model.a, nn.Linear)
    assert list(dict(model.a.named_modules())) == ["", "layer"]
    assert type(model.s).__mro__[1].__name__ == "QuantizedGraph"
    assert model.s.get_submodule("0").dst_dtype == torch.uint8


def test_the_example_may_ask_for_classes(float_model: Net) -> None:
    """Then all becomes int8; ``type(layer)`` cannot be answered, and keeps the model float."""

    class Asks(Net):
        exact = False

        def forward(self, x: Tensor, ask: str = "") -> Tensor:
            y = super().forward(x)
            right = type(self.a) is nn.Linear if self.exact else isinstance(self.a, nn.Linear)
            return y if right and isinstance(self.t, Transposed) else y * 2

    torch.manual_seed(0)
    model = Asks().eval()
    for exact, expected in ((False, 5), (True, 0)):
        model.exact = exact
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = torchq.quantize(model, [SOURCE, 2 * SOURCE])
        rows = [row for row in torchq.explain(result).rows if row.is_matmul]
        assert sum(row.quantized for row in rows) == expected

# SPDX-License-Identifier: Apache-2.0
"""Weight and bias of a quantized leaf: what a model's own code asks of them, and does with them."""

from __future__ import annotations

import copy
import io
import pickle
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq import QConfig, eager
from torchq.nn.float_weight import FloatWeight

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 6), (4, 8)),
    "conv": (lambda: nn.Conv2d(8, 6, 3, groups=2, dilation=2), (2, 8, 9, 9)),
    "depthwise": (lambda: nn.Conv1d(8, 8, 3, groups=8), (2, 8, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 3, 2, groups=2), (2, 8, 5, 5)),
    "no bias": (lambda: nn.Linear(8, 6, bias=False), (4, 8)),
}
DYNAMIC = QConfig(dynamic=True)


def converted(model: nn.Module, x: Tensor, config: QConfig | None = None) -> Any:
    return eager.quantize(model.eval(), [x], x, config, strict=True)


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("name", LAYERS)
def test_values_are_those_that_the_layer_computes_with(name: str, granularity: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    leaf = converted(nn.Sequential(layer), x, QConfig(weight_granularity=granularity))[0]
    same = copy.deepcopy(layer).requires_grad_(False)
    same.weight.copy_(leaf.weight)
    real = (leaf.layer._quantized_src(x) - leaf.layer.src_zero_point) * leaf.layer.src_scale
    torch.testing.assert_close(leaf(x), same(real), rtol=1e-5, atol=1e-5)
    assert (layer.bias is None) == (leaf.bias is None)
    if layer.bias is not None:
        assert torch.equal(leaf.bias + 0, layer.bias.detach())


class Reads(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer.weight.sum()


@pytest.mark.parametrize("name", LAYERS)
def test_scripted_code_reads_weights(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    x = torch.randn(shape)
    model = converted(Reads(make()), x)
    assert torch.equal(torch.jit.script(model)(x), model(x))


@pytest.fixture
def leaf() -> Any:
    torch.manual_seed(0)
    return converted(nn.Sequential(nn.Linear(8, 6)), torch.randn(4, 8))[0]


def test_questions_do_not_dequantize(leaf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf, "_weight_values", None)
    w = leaf.weight
    assert isinstance(w, Tensor) and isinstance(w, nn.Parameter) and torch.is_tensor(w)
    assert w is leaf.weight and w is w.data and not w.requires_grad
    assert w.dtype is torch.float32 and w.is_floating_point() and w.device.type == "cpu"
    assert w.shape == w.size() == (6, 8) and w.dim() == w.ndim == 2 and w.numel() == 48
    assert w.size(0) == 6 and len(w) == 6 and not list(leaf.parameters())


def test_questions_cost_little(leaf: Any) -> None:
    """Less than those of a float layer: the first is T5's."""
    question = "isinstance(m.weight, Tensor) and x.dtype != m.weight.dtype"
    layer, x = nn.Linear(8, 6), torch.randn(4, 8)

    def cost(m: nn.Module) -> float:
        return min(timeit.repeat(question, globals={**globals(), "m": m, "x": x}, number=1000))

    assert min(cost(leaf) / cost(layer) for _ in range(5)) < 1.3


USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda w, x: w + 0,
    "linear": lambda w, x: F.linear(x, w),
    "transposed": lambda w, x: F.linear(x[:, :6], w.t()),
    "matmul": lambda w, x: x @ w.T,
    "detach": lambda w, x: w.detach().mul(2),
    "data": lambda w, x: w.data.clone(),
    "to": lambda w, x: w.to(torch.float64),
    "norm": lambda w, x: torch.linalg.norm(w),
    "cat": lambda w, x: torch.cat([w, w]),
    "index": lambda w, x: w[1:, 0],
    "numpy": lambda w, x: torch.from_numpy(w.numpy()),
    "list": lambda w, x: torch.tensor(w.tolist()),
    "copy": lambda w, x: copy.deepcopy(w) * 1,
    "pickle": lambda w, x: pickle.loads(pickle.dumps(w)) * 1,
    "bool": lambda w, x: (w > 0).float(),
}


@pytest.mark.parametrize("name", USES)
def test_what_computes_with_it_gets_the_values(leaf: Any, name: str) -> None:
    use, x = USES[name], torch.randn(4, 8)
    values = leaf._weight_values()
    got = use(leaf.weight, x)
    assert type(got) is Tensor and torch.equal(got, use(values, x))


def test_gradients_flow_through_it(leaf: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    F.linear(x, leaf.weight).sum().backward()
    torch.testing.assert_close(x.grad, leaf._weight_values().sum(0).expand(4, 8))


def test_copies_and_text(leaf: Any) -> None:
    for copied in (copy.deepcopy(leaf.weight), pickle.loads(pickle.dumps(leaf.weight))):
        assert type(copied) is nn.Parameter and not copied.requires_grad
    assert str(leaf.weight).startswith("Parameter containing:\ntensor([[")
    text = io.BytesIO()
    torch.save(leaf.weight, text)
    text.seek(0)
    assert torch.equal(torch.load(text, weights_only=True), leaf._weight_values())
    other = copy.deepcopy(leaf)
    assert other.weight is not leaf.weight and torch.equal(other.weight, leaf.weight)


def _item(w: Tensor) -> None:
    w[0] = 1.0


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda w: w.add_(1),
    "data": lambda w: w.data.mul_(2),
    "detach": lambda w: w.detach().zero_(),
    "item": _item,
    "init": nn.init.zeros_,
    "out": lambda w: torch.add(w, 1, out=w),
    "set data": lambda w: setattr(w, "data", torch.zeros(6, 8)),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_raise(leaf: Any, name: str) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"weight of a .*overrides with None"):
        WRITES[name](leaf.weight)


@pytest.mark.parametrize(
    ("name", "value"),
    [("weight", nn.Parameter(torch.ones(6, 8))), ("bias", None), ("in_features", 9)],
)
def test_attributes_cannot_be_set(leaf: Any, name: str, value: Any) -> None:
    assert (leaf.in_features, leaf.out_features) == (8, 6)
    with pytest.raises(AttributeError, match=rf"{name} of a layer must be.*overrides with None"):
        setattr(leaf, name, value)


class Asks(nn.Module):
    """As T5's feed-forward block; and it computes with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.wi(x))
        if isinstance(self.wo.weight, Tensor) and x.dtype != self.wo.weight.dtype:
            x = x.to(self.wo.weight.dtype)
        return F.linear(self.wo(x), self.wi.weight) + self.wo.weight.size(0)


@pytest.mark.parametrize("config", [None, DYNAMIC], ids=["static", "dynamic"])
def test_every_way_to_run(config: QConfig | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = converted(Asks(), x, config)
    with torch.no_grad():
        want = model(x)
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(model), buffer)
        buffer.seek(0)
        runs = [torch.jit.load(buffer), torch.jit.trace(model, x)]
        runs += [torch.export.export(model, (x,), strict=s).module() for s in (False, True)]
        runs += [torch.compile(model, fullgraph=True, backend="aot_eager"), copy.deepcopy(model)]
        for run in runs:
            assert torch.equal(run(x), want)
    assert type(model.wo.weight) is FloatWeight


def test_observed_leaves_answer_likewise() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 8), Asks().eval()
    prepared: Any = eager.prepare(model, x)
    assert type(prepared.wo.weight) is FloatWeight
    assert torch.equal(prepared.wo.weight + 0, model.wo.weight)
    assert torch.equal(pickle.loads(pickle.dumps(prepared))(x), model(x))
    assert "wo.layer.weight" in converted(model, x).state_dict()


def test_sharing_memory_between_processes(leaf: Any) -> None:
    assert leaf.weight.shape == (6, 8)
    assert torchq.sqnr(leaf.share_memory()(torch.ones(1, 8)), leaf(torch.ones(1, 8))) > 100


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 6, 2, bidirectional=True, proj_size=4),
    "gru": lambda: nn.GRU(8, 6),
    "cell": lambda: nn.LSTMCell(8, 6),
}


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("name", RECURRENT)
def test_parameters_of_recurrent_modules(name: str, granularity: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(RECURRENT[name]())
    q = converted(module, torch.randn(4, 8), QConfig(weight_granularity=granularity))[0]
    for own, value in module[0].named_parameters():
        got = getattr(q, own)
        assert type(got) is FloatWeight and got.shape == value.shape
        torch.testing.assert_close(got + 0, value.detach(), rtol=0, atol=0.01)
        with pytest.raises(RuntimeError, match=f"{own} of a quantized layer"):
            got.zero_()
    assert not hasattr(q, "weight_ih_l7") and not hasattr(q, "weight_hh_l0_reversed")
    assert hasattr(q, "weight_hr_l0") == (name == "lstm")

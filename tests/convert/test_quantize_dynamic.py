# SPDX-License-Identifier: Apache-2.0
"""torchq.quantize_dynamic: what it replaces for every kind of spec, and what it leaves alone."""

from __future__ import annotations

import copy
import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import assert_same
from torch import Tensor, nn

import torchq
from torchq.nn import QModule


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(20, 32, 3, padding=1)
        self.rnn = nn.LSTM(32, 24, 2, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, src: Tensor) -> Tensor:
        steps = torch.relu(self.conv(src)).transpose(1, 2)
        return self.head(self.norm(self.rnn(steps)[0]))


SRC = torch.randn(2, 20, 9, generator=torch.Generator().manual_seed(0))
LINEARS = {"head.0", "head.2"}


@pytest.fixture
def model() -> Speech:
    torch.manual_seed(1)
    return Speech().eval()


def replaced(before: nn.Module, after: nn.Module) -> set[str]:
    """Names of the float modules whose class is another now."""
    new = dict(after.named_modules())
    return {name for name, m in before.named_modules() if type(new.get(name)) is not type(m)}


SPECS: dict[str, tuple[Any, set[str]]] = {
    "default": (None, {"rnn", *LINEARS}),
    "types": ({nn.Linear, nn.LSTM}, {"rnn", *LINEARS}),
    "a type that the model lacks": ({nn.Linear, nn.GRU}, LINEARS),
    "a list": ([nn.LSTM], {"rnn"}),
    "one type": (nn.LSTM, {"rnn"}),
    "a name": ({"rnn"}, {"rnn"}),
    "a name of modules": ({"head"}, LINEARS),
    "a type of modules": ({nn.Sequential}, LINEARS),
    "the model": ({""}, {"rnn", *LINEARS}),
    "the model's type": ({Speech}, {"rnn", *LINEARS}),
    "convolutions": ({nn.Conv1d}, {"conv"}),
    "a convolution by name": ({"conv"}, {"conv"}),
    "a name before its type": (
        {nn.Linear: torchq.QConfig(), "head.2": None},
        {"head.0"},
    ),
    "a name inside of another": ({"head": None, "head.2": torchq.QConfig()}, {"head.2"}),
    "all but": ({"": torchq.QConfig(), nn.LSTM: None}, LINEARS),
}


@pytest.mark.parametrize("name", SPECS)
def test_specs(model: Speech, name: str):
    spec, expected = SPECS[name]
    quantized = torchq.quantize_dynamic(model, spec)
    assert type(quantized) is Speech and replaced(model, quantized) == expected
    assert torchq.sqnr(model(SRC), quantized(SRC)) > 30
    rows = {row.name: row for row in torchq.explain(quantized).rows}
    assert {name for name, row in rows.items() if row.quantized} == expected
    assert all(row.quantized or row.reason for row in rows.values())


def test_signature_of_torch_ao(model: Speech):
    ao = inspect.signature(torch.ao.quantization.quantize_dynamic).parameters
    own = inspect.signature(torchq.quantize_dynamic).parameters
    assert list(own) == list(ao)
    assert [p.default for p in own.values()] == [p.default for p in ao.values()]
    copied = copy.deepcopy(model)
    assert torchq.quantize_dynamic(copied, {nn.Linear}, torch.qint8, None, True) is copied
    assert replaced(model, copied) == LINEARS


@pytest.mark.parametrize("spec", (None, {nn.Linear}, {"head": None, nn.LSTM: torchq.QConfig()}))
def test_replaces_what_torch_ao_replaces(model: Speech, spec: Any):
    ao = torch.ao.quantization
    theirs = spec
    if isinstance(spec, dict):
        theirs = {k: v and ao.default_dynamic_qconfig for k, v in spec.items()}
    with pytest.warns(DeprecationWarning):
        expected = ao.quantize_dynamic(model, theirs)
    assert replaced(model, torchq.quantize_dynamic(model, spec)) == replaced(model, expected)


@pytest.mark.parametrize("kind", ("GRU", "RNN", "LSTM"))
def test_recurrent(kind: str):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"net": getattr(nn, kind)(8, 12), "cell": getattr(nn, f"{kind}Cell")(8, 12)}
    )
    quantized = torchq.quantize_dynamic(model)
    src = torch.randn(5, 3, 8)
    with torch.no_grad():
        assert torchq.sqnr(model["net"](src)[0], quantized["net"](src)[0]) > 30
        results = [m["cell"](src[0]) for m in (model, quantized)]
    if kind == "LSTM":
        results = [result[0] for result in results]
    assert torchq.sqnr(*results) > 30


def test_attention_where_asked():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).eval()
    src = torch.randn(2, 5, 32)
    plain = torchq.quantize_dynamic(model)
    assert replaced(model, plain) == {"layers.0.linear1", "layers.0.linear2"}
    asked = torchq.quantize_dynamic(model, {nn.MultiheadAttention})
    inner = asked.layers[0].self_attn
    assert isinstance(inner, nn.MultiheadAttention)
    names = {f"{key}_proj" for key in ("q", "k", "v", "out")}
    assert {name for name, m in inner.named_children() if isinstance(m, QModule)} == names
    for quantized in (plain, asked):
        assert torchq.sqnr(model(src), quantized(src)) > 30


def test_convolutions_that_are_slower() -> None:
    """Depthwise ones are asked for by name; memory formats decide about 1x1 of few channels."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 4, 3))
    rows = torchq.explain(torchq.quantize_dynamic(model, {nn.Conv2d})).rows
    assert [row.quantized for row in rows] == [False, True, True]
    assert "would be slower" in rows[0].reason and not rows[0].requested
    assert "channels-last" in rows[1].reason and not rows[2].reason
    named = torchq.explain(torchq.quantize_dynamic(model, {"0", nn.Conv2d})).rows
    assert all(row.quantized for row in named)


def test_weights_of_a_qconfig(model: Speech):
    ao = torch.ao.quantization
    for qconfig, scales in ((ao.default_dynamic_qconfig, 1), (ao.per_channel_dynamic_qconfig, 16)):
        quantized = torchq.quantize_dynamic(model, {"head.0": qconfig})
        assert quantized.head[0].layer.weight_scale.unique().numel() == scales
    quantized = torchq.quantize_dynamic(model, {nn.Conv1d: torchq.QConfig(weight_bits=7)})
    assert int(quantized.conv.layer.packed().unpack().abs().max()) == 63


def test_inplace_is_the_same(model: Speech):
    expected, copied = torchq.quantize_dynamic(model), copy.deepcopy(model)
    assert torchq.quantize_dynamic(copied, inplace=True) is copied
    assert_same(copied(SRC), expected(SRC))


def test_the_model_stays_and_shares_nothing(model: Speech):
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quantized = torchq.quantize_dynamic(model, {"head"})
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert not quantized.training and not any(p.requires_grad for p in quantized.parameters())
    for value in quantized.state_dict().values():
        if value.is_floating_point():
            value.fill_(3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_modules_of_two_names_hooks_and_computed_weights():
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.utils.weight_norm(nn.Linear(6, 6)), shared)
    model.append(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)))
    calls = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    src = torch.randn(3, 6)
    for inplace in (False, True):
        expected = model(src)
        quantized = torchq.quantize_dynamic(model, {nn.Linear}, inplace=inplace)
        assert quantized[0] is quantized[2]
        assert all(isinstance(layer, QModule) for layer in quantized)
        calls.clear()
        assert torchq.sqnr(expected, quantized(src)) > 30 and len(calls) == 2


class Turned(nn.Module):
    """A linear layer with its weight as GPT-2 has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, src: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, src.view(-1, src.size(-1)), self.weight)
        return rows.view(src.size()[:-1] + (self.weight.shape[1],))  # noqa: RUF005 - traced


def test_classes_that_compute_a_linear_layer():
    model, src = nn.Sequential(Turned(6, 8), nn.Linear(8, 4)), torch.randn(3, 6)
    assert replaced(model, torchq.quantize_dynamic(model)) == {"1"}
    quantized = torchq.quantize_dynamic(model, {Turned})
    assert replaced(model, quantized) == {"0"} and torchq.sqnr(model(src), quantized(src)) > 30


def test_a_layer_alone():
    layer = nn.Linear(6, 4)
    assert torchq.quantize_dynamic(layer)(torch.randn(2, 6)).shape == (2, 4)
    with pytest.raises(ValueError, match="inplace=False"):
        torchq.quantize_dynamic(layer, inplace=True)


def test_gradients_stop_at_the_quantized_model():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4))
    assert not torchq.quantize_dynamic(model)(torch.tensor([1, 3])).requires_grad


def test_saved_and_loaded(model: Speech, tmp_path: Path):
    quantized = torchq.quantize_dynamic(model, {nn.Conv1d, nn.LSTM, nn.Linear})
    torchq.save(quantized, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", Speech())
    assert_same(loaded(SRC), quantized(SRC))
    assert torchq.explain(loaded).rows == torchq.explain(quantized).rows


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"qconfig_spec": {nn.BatchNorm2d}}, "got BatchNorm2d.*Linear"),
    "type without layers": ({"qconfig_spec": {nn.LayerNorm}}, "got LayerNorm"),
    "name": ({"qconfig_spec": {"haed"}}, "got a module 'haed': the model has .*'head'"),
    "name without layers": ({"qconfig_spec": {"norm"}}, "got 'norm', a LayerNorm"),
    "key": ({"qconfig_spec": {3}}, "got 3"),
    "config": ({"qconfig_spec": {nn.Linear: "int8"}}, r"\[Linear\] must be .* got str"),
    "float16 config": (
        {"qconfig_spec": {nn.Linear: torch.ao.quantization.float16_dynamic_qconfig}},
        "float16",
    ),
    "float16": ({"dtype": torch.float16}, "dtype must be torch.qint8.*got torch.float16.*int8"),
    "qint32": ({"dtype": torch.qint32}, "got torch.qint32"),
    "mapping": ({"mapping": {}}, "mapping must be None"),
}


@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("name", ERRORS)
def test_errors_change_nothing(model: Speech, name: str, inplace: bool):
    arguments, message = ERRORS[name]
    model.train()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        torchq.quantize_dynamic(model, inplace=inplace, **arguments)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.training and all(p.requires_grad for p in model.parameters())


def test_not_half_converted_where_a_weight_is_broken(model: Speech):
    model.head[2].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"head\.2"):
        torchq.quantize_dynamic(model, inplace=True)
    assert type(model.head[0]) is nn.Linear and type(model.rnn) is nn.LSTM


def test_what_is_no_float_model(model: Speech):
    with pytest.raises(TypeError, match=r"nn\.Module"):
        torchq.quantize_dynamic(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float model"):
        torchq.quantize_dynamic(torchq.quantize_dynamic(model))
    with pytest.raises(TypeError, match="float32"):
        torchq.quantize_dynamic(model.double())


@pytest.mark.parametrize("name", ("quantize_dynamic", "from_torch_ao", "from_torchao", "from_pt2e"))
def test_the_example_of_a_docstring(name: str):
    if name in ("from_torchao", "from_pt2e"):
        pytest.importorskip("torchao")
    function = getattr(torchq, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0

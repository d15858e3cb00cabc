# SPDX-License-Identifier: Apache-2.0
"""Tensors between two layers with one scale per channel, which the second layer's weight has."""

from __future__ import annotations

import io
import pathlib
import pickle

import pytest
import torch
import torch.nn.functional as F
from flows import graph_of, sqnr
from models import Wired
from onnx_runtime import session
from torch import nn

import torchq

X = (8, 4, 9, 9)


def convs(**others: nn.Module) -> dict[str, nn.Module]:
    """Return layers whose first one has channels of 1/30 to 30, which the second one undoes."""
    torch.manual_seed(0)
    a, b = nn.Conv2d(4, 16, 3), others.pop("b", None) or nn.Conv2d(16, 8, 3)
    factors = 30 ** torch.linspace(-1, 1, 16)
    with torch.no_grad():
        a.weight.mul_(factors.view(-1, 1, 1, 1))
        a.bias.mul_(factors)
        if isinstance(b, nn.Linear):
            b.weight.div_(factors.repeat_interleave(b.in_features // 16))
        else:
            shape = (-1, 1, 1, 1) if b.groups > 1 else (1, -1, 1, 1)
            b.weight.div_(factors.view(shape))
    return {"a": a, "b": b, **others}


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(X, generator=generator) for _ in range(3)]


def quantized(model: nn.Module, **options: object) -> nn.Module:
    return torchq.quantize(model.eval(), data(), **options)


def scales(qmodel: nn.Module) -> int:
    return int(graph_of(qmodel).a.dst_scale.numel())


FORMS = {
    "conv": (lambda m, x: m.b(F.relu(m.a(x))), {}),
    "relu6": (lambda m, x: m.b(F.relu6(m.a(x))), {}),
    "no activation": (lambda m, x: m.b(m.a(x)), {}),
    "pad": (lambda m, x: m.b(F.pad(F.relu(m.a(x)), (1, 1, 1, 1))), {}),
    "depthwise": (lambda m, x: m.b(F.relu(m.a(x))), {"b": nn.Conv2d(16, 16, 3, groups=16)}),
    "flatten": (lambda m, x: m.b(F.relu(m.a(x)).flatten(1)), {"b": nn.Linear(16 * 49, 5)}),
    "norm": (
        lambda m, x: m.b(F.relu(m.n(m.a(x)))),
        {"n": nn.BatchNorm2d(16)},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_rescaled_channels_keep_their_accuracy(name: str) -> None:
    forward, others = FORMS[name]
    model = Wired(forward, **convs(**others))
    qmodel = quantized(model)
    assert scales(qmodel) == 16
    x = data()[0]
    assert sqnr(model(x), qmodel(x)) > 34


KEEP_ONE = {
    "second reader": (lambda m, x: m.b(y := F.relu(m.a(x))).sum() + y.sum(), {}),
    "two layers": (lambda m, x: m.b(y := F.relu(m.a(x))) + m.c(y), {"c": nn.Conv2d(16, 8, 3)}),
    "transposed": (lambda m, x: m.b(F.relu(m.a(x)).transpose(2, 3)), {}),
    "table": (lambda m, x: m.b(F.hardswish(m.a(x))), {}),
    "returned": (lambda m, x: (m.b(y := F.relu(m.a(x))), y), {}),
}


@pytest.mark.parametrize("name", KEEP_ONE)
def test_a_tensor_that_something_else_reads_keeps_one_scale(name: str) -> None:
    forward, others = KEEP_ONE[name]
    assert scales(quantized(Wired(forward, **convs(**others)))) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"config": torchq.QConfig(activation_bits=7)},
        {"overrides": {"b": None}},
        {"overrides": {"a.dst": None}},
    ],
    ids=["7 bits", "float reader", "float result"],
)
def test_settings_that_keep_one_scale(options: dict[str, object]) -> None:
    qmodel = quantized(Wired(FORMS["conv"][0], **convs()), **options)
    assert scales(qmodel) == 1


def test_layers_with_channels_that_are_alike_keep_one_scale() -> None:
    torch.manual_seed(0)
    model = Wired(FORMS["conv"][0], a=nn.Conv2d(4, 16, 3), b=nn.Conv2d(16, 8, 3))
    assert scales(quantized(model)) == 1


def test_the_same_bits_come_out_of_a_pickled_preparation_and_a_saved_model() -> None:
    layers = convs()
    model = nn.Sequential(layers["a"], nn.ReLU(), layers["b"]).eval().requires_grad_(False)
    prepared = torchq.calibrate(torchq.prepare(model, data()[0]), data())
    x, expected = data()[0], torchq.convert(prepared)(data()[0])
    again = pickle.loads(pickle.dumps(prepared))
    assert torch.equal(torchq.convert(again)(x), expected)
    qmodel = torchq.convert(prepared)
    stored = io.BytesIO()
    torch.save(qmodel, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=False)(x), expected)
    assert torch.equal(torch.jit.trace(qmodel, x)(x), expected)


def test_a_layer_called_by_itself_has_its_own_result() -> None:
    """The source of the second one has a scale per channel there, too: it reads the same weight."""
    model = Wired(FORMS["conv"][0], **convs()).eval()
    prepared = torchq.calibrate(torchq.prepare(model, data()[0]), data())
    qmodel, x = torchq.convert(prepared), data()[0]
    assert sqnr(model.a(x), qmodel.a(x)) > 30
    y = F.relu(model.a(x)).detach()
    assert bool((255 * qmodel.b.quantize.src_scale > 0.8 * y.amax((0, 2, 3))).all())
    assert sqnr(model.b(y).detach(), qmodel.b(y)) > 20


def test_compare_shows_real_values() -> None:
    model = Wired(FORMS["conv"][0], **convs()).eval()
    prepared = torchq.calibrate(torchq.prepare(model, data()[0]), data())
    found = torchq.compare(prepared, torchq.convert(prepared), data())
    assert [layer.name for layer in found.layers] == ["a", "b"]
    assert min(layer.sqnr for layer in found.layers) > 34


@pytest.mark.parametrize("name", ["conv", "pad", "flatten"])
def test_onnx_runtime_computes_the_same_from_a_file(name: str, tmp_path: pathlib.Path) -> None:
    forward, others = FORMS[name]
    qmodel, x = quantized(Wired(forward, **convs(**others))), data()[0]
    torchq.to_onnx(qmodel, tmp_path / "model.onnx", x)
    runtime = session(tmp_path / "model.onnx")
    found = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})[0]
    assert sqnr(qmodel(x), torch.from_numpy(found)) > 50


@pytest.mark.parametrize("rescaled_first", [True, False])
def test_a_state_of_a_model_with_other_scales_is_refused(rescaled_first: bool) -> None:
    """Weights of the second layer belong to the scales of the first one."""
    plain = Wired(FORMS["conv"][0], a=nn.Conv2d(4, 16, 3), b=nn.Conv2d(16, 8, 3))
    models = [quantized(Wired(FORMS["conv"][0], **convs())), quantized(plain)]
    one, other = models if rescaled_first else models[::-1]
    assert scales(one) != scales(other)
    with pytest.raises(RuntimeError, match=r"load with torchq\.load"):
        other.load_state_dict(one.state_dict())


def test_a_state_loads_into_the_model_calibrated_on_other_data() -> None:
    """Its factors come along, in the weights."""
    model = Wired(FORMS["conv"][0], **convs()).eval()
    one, other = quantized(model), torchq.quantize(model, [3 * x for x in data()])
    x = data()[0]
    assert not torch.equal(one(x), other(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))

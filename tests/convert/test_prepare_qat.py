# SPDX-License-Identifier: Apache-2.0
"""torchq.prepare_qat: models train with rounding, and convert to what was trained."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import graph_of
from models import Wired
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchq
import torchq.nn as tnn
from torchq import QConfig
from torchq.models.attached import graphs_of
from torchq.qat.quantizer import ActivationQuantizer

DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.images, dtype=torch.float32).unsqueeze(1) / 16
LABELS = torch.tensor(DIGITS.target)


class Block(nn.Module):
    """Depthwise and pointwise, with a residual; one ReLU is called twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.pointwise, self.relu = nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.depthwise(x)))
        y = self.norm2(self.pointwise(y))
        y += x
        return self.relu(y)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.act, self.blocks = nn.ReLU(), nn.Sequential(Block(16), Block(16))
        self.down, self.head = nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.Linear(24 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.act(self.norm(self.stem(x))))
        return self.head(F.relu(self.down(x)).flatten(1))


class Transformer(nn.Module):
    """Rows of pixels as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(torch.randn(8, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.squeeze(1)) + self.place).mean(1))


def fit(model: nn.Module, steps: int, rate: float = 3e-3, **options: Any) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    model.train()
    losses = []
    for index in torch.randint(1200, (steps, 64)):
        with torch.autocast("cpu", **({"enabled": False} | options)):
            loss = F.cross_entropy(model(IMAGES[index]).float(), LABELS[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IMAGES[1200:])


def accuracy(model: nn.Module) -> float:
    return float((logits(model).argmax(1) == LABELS[1200:]).float().mean())


@cache
def fitted(learn: bool) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = Cnn()
    fit(model, 8)
    qat = torchq.prepare_qat(model, IMAGES[:64], learn_scales=learn)
    return qat, fit(qat, 35)


@pytest.fixture(params=[False, True], ids=["ranges", "learned"])
def trained(request: pytest.FixtureRequest) -> tuple[nn.Module, list[float]]:
    """A CNN, trained in float first, then with rounding."""
    qat, losses = fitted(request.param)
    return copy.deepcopy(qat), losses


def test_a_cnn_trains_and_converts(trained: tuple[nn.Module, list[float]]) -> None:
    qat, losses = trained
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    converted = torchq.convert(qat, strict=True)
    assert type(converted) is type(qat) is Cnn
    assert abs(accuracy(converted) - accuracy(qat)) <= 0.005 and accuracy(converted) > 0.8
    rows = {row.name: row for row in torchq.explain(converted).rows}
    float_rows = torchq.explain(torchq.prepare(Cnn().eval(), IMAGES[:64])).rows
    assert rows.keys() == {row.name for row in float_rows}
    assert all(row.quantized for row in rows.values())
    assert rows["act"].kind == "ReLU" and rows["stem"].kind == "Conv2d"
    assert rows["blocks.0.add"].reason == "fused into blocks.0.pointwise"
    assert not any(isinstance(m, ActivationQuantizer) for m in converted.modules())
    assert isinstance(converted.blocks[0].depthwise, tnn.QuantizedLeaf)


def test_layers_give_the_integers_of_training(trained: tuple[nn.Module, list[float]]) -> None:
    """Each layer gives the levels that training rounded to, of the same sources.

    Sums are exact here and of float32 in training: a value next to a tie may be one level away.
    """
    qat, _ = trained
    converted, rounded, wrong = torchq.convert(qat), dict[float, Tensor](), []
    assert torchq.sqnr(logits(qat), logits(converted)) > 60
    for module in {m for m in qat.modules() if isinstance(m, ActivationQuantizer)}:
        scale = float(module.affine(torch.empty(0))[0].detach())
        module.register_forward_hook(
            lambda _, __, result, scale=scale: rounded.update({scale: result})
        )

    def compare(module: Any, _: Any, result: Tensor) -> Tensor:
        if result.dtype != torch.uint8:
            return result
        side = "dst" if hasattr(module, "dst_scale") else "src"
        scale, zero = (getattr(module, f"{side}_{name}") for name in ("scale", "zero_point"))
        levels = (rounded[float(scale)] / scale).round() + zero
        levels = levels.reshape(result.shape)
        steps = (levels - result).abs()
        assert float(steps.max()) <= 1
        wrong.append(float((steps > 0).float().mean()))
        return levels.to(torch.uint8)  # what the next layer reads

    logits(qat)
    for module in graph_of(converted).modules():
        if isinstance(module, (tnn.Quantize, tnn.QConv2d, tnn.QLinear)):
            module.register_forward_hook(compare)
    logits(converted)
    assert len(wrong) == 7 and wrong[0] == 0 and max(wrong) <= 1e-4


def test_weights_are_the_integers_of_training(trained: tuple[nn.Module, list[float]]) -> None:
    qat, _ = trained
    converted = torchq.convert(qat)
    for name in ("stem", "blocks.1.depthwise", "blocks.1.pointwise", "down", "head"):
        leaf, layer = converted.get_submodule(name), qat.get_submodule(name)
        assert torch.equal(leaf.weight.as_subclass(Tensor) * 1.0, layer.weight.detach())
        fused = graph_of(converted).get_submodule(name).packed().unpack()
        assert torch.equal(fused.abs(), leaf.layer.packed().unpack().abs())  # of a negative factor


@pytest.mark.slow
def test_a_transformer_trains_and_converts() -> None:
    """Its attention rounds probabilities as well, which training does not."""
    torch.manual_seed(0)
    model = Transformer()
    fit(model, 60)
    before = copy.deepcopy(model)
    qat = torchq.prepare_qat(model, IMAGES[:64])
    losses = fit(qat, 60, 1e-3)
    assert sum(losses[-10:]) < sum(losses[:10])
    converted = torchq.convert(qat, strict=True)
    assert abs(accuracy(converted) - accuracy(qat)) <= 0.01 and accuracy(qat) > 0.7
    assert torchq.sqnr(logits(qat), logits(converted)) > 35
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )
    kinds = {r.kind for r in torchq.explain(converted).rows if r.quantized}
    assert {"Linear", "scaled_dot_product_attention"} <= kinds


@pytest.mark.parametrize("learn", [False, True])
def test_copies_and_loaded_states_go_on_alike(learn: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    qat = torchq.prepare_qat(Cnn(), IMAGES[:32], learn_scales=learn)
    fit(qat, 3)
    torch.save(qat.state_dict(), tmp_path / "state.pt")
    fresh = torchq.prepare_qat(Cnn(), IMAGES[32:48], learn_scales=learn)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    results = []
    for one in (qat, copy.deepcopy(qat), fresh.eval()):
        torch.manual_seed(1)
        before = logits(one)
        fit(one, 2)
        results.append([before, logits(one)])
    results[1].append(logits(torchq.convert(qat)))
    results[2].append(logits(torchq.convert(fresh)))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=False))
    assert all(torch.equal(a, b) for a, b in zip(results[1], results[2], strict=True))


def test_freeze_after() -> None:
    torch.manual_seed(0)
    qat = torchq.prepare_qat(Cnn(), IMAGES[:32], freeze_after=2)
    fit(qat, 3)
    names = ("running_", "_value", "num_batches")
    frozen = {k: v.clone() for k, v in qat.state_dict().items() if any(n in k for n in names)}
    weight = qat.stem.parametrizations.weight.original.clone()
    fit(qat, 2)
    assert all(torch.equal(v, qat.state_dict()[k]) for k, v in frozen.items())
    assert int(qat.norm.num_batches_tracked) == 2 and qat.head.src_quantizer.steps == 5
    assert not torch.equal(weight, qat.stem.parametrizations.weight.original)
    converted = torchq.convert(qat)
    assert not any("freeze" in key for key in converted.state_dict())


def test_autocast() -> None:
    torch.manual_seed(0)
    model = Cnn()
    fit(model, 5)
    qat = torchq.prepare_qat(model, IMAGES[:64])
    losses = fit(qat, 20, 1e-3, enabled=True, dtype=torch.bfloat16)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert {p.grad.dtype for p in qat.parameters() if p.grad is not None} == {torch.float32}
    assert torchq.sqnr(logits(qat), logits(torchq.convert(qat))) > 60


class Branching(nn.Module):
    """Its code acts on values, so that there is no graph of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(32, 10)
        self.up = nn.ConvTranspose2d(1, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).mean((2, 3)).repeat(1, 16) + x.flatten(1)
        y = self.a(x)
        return self.b(y.relu() if y.sum() > 0 else -y.relu())


@pytest.mark.parametrize("model", [Branching(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))])
@pytest.mark.parametrize("learn", [False, True])
def test_models_without_a_graph(model: nn.Module, learn: bool) -> None:
    qat = torchq.prepare_qat(model, IMAGES[:64], learn_scales=learn)
    fit(qat, 5)
    converted = torchq.convert(qat, strict=False)
    assert torchq.sqnr(logits(qat), logits(converted)) > 60
    assert all(r.quantized for r in torchq.explain(converted).rows if r.is_matmul)


def test_parts_of_a_model_have_graphs() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.first(m.stem(x))
        return m.head(m.second(x if x.sum() > 0 else -x).flatten(1))

    model = Wired(forward, stem=nn.Conv2d(1, 4, 1, bias=False), first=Block(4), second=Block(4),
                  head=nn.Linear(256, 4, bias=False))  # fmt: skip
    qat = torchq.prepare_qat(model, IMAGES[:32])
    qat(IMAGES[:32]).square().mean().backward()
    converted = torchq.convert(qat.eval(), strict=True)
    rows = {r.name: r for r in torchq.explain(converted).rows if r.is_matmul}
    assert len(rows) == 6 and all(
        r.quantized and r.kind in ("Conv2d", "Linear") for r in rows.values()
    )
    assert rows["first.pointwise"].site == "first.pointwise"
    assert [name for name, _ in graphs_of(converted)] == ["first", "second"]
    assert torchq.sqnr(logits(qat), logits(converted)) > 60


def test_one_layer() -> None:
    layer, x = nn.Linear(8, 4), torch.randn(32, 8)
    qat = torchq.prepare_qat(layer, x)
    assert isinstance(qat, nn.Linear)
    qat(x).sum().backward()
    converted = torchq.convert(qat.eval(), strict=True)
    assert isinstance(converted, tnn.QuantizedLeaf)
    assert [(r.kind, r.quantized) for r in torchq.explain(converted).rows] == [("Linear", True)]
    torch.testing.assert_close(converted(x), qat(x).detach(), atol=1e-5, rtol=1e-5)


def test_recurrent_layers_are_trained_in_float() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.lstm(m.embed(x))[0][:, -1])

    model = Wired(forward, embed=nn.Linear(8, 16), lstm=nn.LSTM(16, 16, batch_first=True),
                  head=nn.Linear(16, 4))  # fmt: skip
    x = torch.randn(8, 5, 8)
    qat = torchq.prepare_qat(model, x).eval()
    assert type(qat.lstm) is nn.LSTM and not list(qat.lstm.children())
    rows = {row.name: row for row in torchq.explain(torchq.convert(qat)).rows}
    assert not rows["lstm"].quantized and "QConfig(dynamic=True)" in rows["lstm"].reason
    with pytest.raises(RuntimeError, match="lstm: quantization-aware training did not round"):
        torchq.convert(qat, strict=True)
    qat = torchq.prepare_qat(model, x, overrides={"lstm": QConfig(dynamic=True)}).eval()
    converted = torchq.convert(qat, strict=True)
    assert torchq.sqnr(qat(x).detach(), converted(x)) > 30


def test_overrides_and_configs_hold() -> None:
    config = QConfig(activation_dtype=torch.int8, weight_granularity="per_tensor", weight_bits=7)
    qat = torchq.prepare_qat(Cnn(), IMAGES[:32], config, {"down": None, "head": QConfig()})
    assert not hasattr(qat.down, "parametrizations") and qat.stem.src_quantizer.integers[0] == -128
    assert qat.stem.parametrizations.weight[0].integers == (-63, 63)
    fit(qat, 2)
    converted = torchq.convert(qat)
    assert torchq.sqnr(logits(qat), logits(converted)) > 60
    rows = {row.name: row for row in torchq.explain(converted).rows}
    assert rows["down"].requested and rows["down"].reason == "kept float by an override"


@pytest.mark.parametrize("recipe", ["accurate", "best"])
def test_convolutions_beside_4_bit_layers_have_8_bits(recipe: Any) -> None:
    x, config = IMAGES[:8], QConfig(weight_bits=4, recipe=recipe)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    qat = torchq.prepare_qat(model, x, config)
    assert qat[0].parametrizations.weight[0].integers == (-127, 127)
    fit(qat, 1)
    assert torchq.sqnr(qat(x).detach(), torchq.convert(qat, strict=True)(x)) > 60


def test_linear_layers_of_other_recipes_are_refused_with_a_remedy() -> None:
    x, config = IMAGES[:8], QConfig(weight_bits=4, recipe="accurate")
    with pytest.raises(ValueError, match=r"recipe must be 'fast'.*for 'head'.*overrides=") as told:
        torchq.prepare_qat(Cnn(), x, config)
    assert "QConfig(weight_bits=4, dynamic=True)" in str(told.value)
    remedy = {"head": QConfig(weight_bits=4, dynamic=True)}
    qat = torchq.prepare_qat(Cnn(), x, overrides=remedy)
    fit(qat, 1)
    assert torch.isfinite(torchq.convert(qat, strict=True)(x)).all()


def test_errors() -> None:
    x = IMAGES[:8]
    qat = torchq.prepare_qat(Cnn().eval(), x)
    assert all(module.training for module in qat.modules())
    with pytest.raises(ValueError, match=r"torchq\.convert: model must be in eval mode"):
        torchq.convert(qat)
    qat.eval().head.src_quantizer.min_value.fill_(torch.inf)
    message = r"torchq\.convert: 'head\.src_quantizer' must know its range, got inf to"
    with pytest.raises(RuntimeError, match=message):
        torchq.convert(qat)
    with pytest.raises(ValueError, match=r"got ActivationQuantizer in 'stem.src_quantizer'"):
        torchq.prepare_qat(qat, x)
    with pytest.raises(ValueError, match=r"or give this one to torchq\.convert"):
        torchq.prepare(qat, x)
    with pytest.raises(
        ValueError, match="freeze_after must be None or an int of at least 0, got -1"
    ):
        torchq.prepare_qat(Cnn(), x, freeze_after=-1)
    with pytest.raises(
        ValueError, match="must call a convolution or linear layer that becomes int8"
    ):
        torchq.prepare_qat(nn.Sequential(nn.ReLU(), nn.Flatten()), x)
    with pytest.raises(ValueError, match=r"got 'head' \(dynamic\), 'stem' \(only linear"):
        torchq.prepare_qat(Cnn(), x, torchq.QConfig(weight_bits=4, dynamic=True))
    with pytest.raises(ValueError, match=r"overrides={'head': .*weight_bits=4, dynamic=True"):
        torchq.prepare_qat(Cnn(), x, torchq.QConfig(weight_bits=4, recipe="accurate"))
    with pytest.raises(ValueError, match="overrides must match names of modules"):
        torchq.prepare_qat(Cnn(), x, overrides={"nothing": None})
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got function"):
        torchq.prepare_qat(lambda x: x, x)


def test_linear_layers_of_four_bits_beside_convolutions() -> None:
    """They are not rounded in training; convolutions take eight bits."""
    four = torchq.QConfig(weight_bits=4, dynamic=True)
    qat = torchq.prepare_qat(Cnn().eval(), IMAGES[:8], overrides={"head": four}).eval()
    converted = torchq.convert(qat)
    rows = {row.name: row for row in torchq.explain(converted).rows if row.is_matmul}
    assert all(row.quantized for row in rows.values()) and rows["head"].kind == "Linear"
    assert isinstance(converted.head.layer, torchq.nn.DynamicQLinearInt4)
    assert torchq.sqnr(qat(IMAGES[:8]), converted(IMAGES[:8])) > 15

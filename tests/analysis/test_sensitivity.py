# SPDX-License-Identifier: Apache-2.0
"""torchq.sensitivity: each layer and function alone in int8, and alone in float."""

from __future__ import annotations

from glob import escape

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.analysis import sensitivities


class Residual(nn.Module):
    """A fused addition, a product, a concatenation and a table between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.c2, self.b2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.c3, self.fc = nn.Conv2d(16, 16, 1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b1(self.c1(x)))
        y = torch.relu(self.b2(self.c2(x)) + x)
        y = torch.cat([y * torch.sigmoid(self.c3(y)), y], 1)
        return self.fc(nn.functional.gelu(y).mean((2, 3)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(tokens))[0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.linear = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.gelu(x + self.attention(x, x, x)[0]))


class Untraceable(nn.Module):
    """Branches on values, so that only its layers are quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y if float(y.sum()) > 0 else -y)


def images() -> list[Tensor]:
    return [torch.randn(4, 3, 12, 12) for _ in range(3)]


@pytest.mark.parametrize(
    ("make", "data", "config"),
    [
        pytest.param(Residual, images, torchq.QConfig(), marks=pytest.mark.slow),
        (Tagger, lambda: [torch.randint(50, (2, 9)) for _ in range(3)], torchq.QConfig()),
        pytest.param(
            Block,
            lambda: [torch.randn(2, 9, 16) for _ in range(3)],
            torchq.QConfig(recipe="best"),
            marks=pytest.mark.slow,
        ),
        (Untraceable, lambda: [torch.randn(4, 8) for _ in range(3)], torchq.QConfig()),
    ],
    ids=["functions", "recurrent", "recipe", "untraceable"],
)
def test_every_entry_is_what_a_quantization_gives(make, data, config) -> None:
    torch.manual_seed(0)
    model, batches = make().eval(), data()
    found = torchq.sensitivity(model, batches, batches[0], config, progress=False)
    matmuls = {r.name for r in torchq.explain(torchq.quantize(model, batches, config=config)).rows
               if r.is_matmul and r.quantized}  # fmt: skip
    assert matmuls <= {entry.name for entry in found}

    def measured(overrides: torchq.quantization.config.Overrides) -> float:
        qmodel = torchq.quantize(model, batches, None, config, overrides)
        with torch.no_grad():
            return torchq.sqnr([model(x) for x in batches], [qmodel(x) for x in batches])

    for entry in found:
        assert entry.all_quantized == measured({})
        assert entry.kept == measured({escape(entry.name): None}), entry.name
        if entry.name in matmuls:
            assert entry.alone == measured({"*": None, escape(entry.name): config}), entry.name


def test_a_function_whose_sources_cancel_is_the_most_harmful() -> None:
    torch.manual_seed(0)

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
            with torch.no_grad():
                self.b.weight.copy_(-self.a.weight * (1 + 0.01 * torch.rand_like(self.a.weight)))
                self.b.bias.copy_(-self.a.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x) + self.b(x))

    model, data, config = Difference().eval(), images(), torchq.QConfig(activation_bits=7)
    found = torchq.sensitivity(model, data, data[0], config, progress=False)
    assert found[0].name == "add" and found[0].alone < min(entry.alone for entry in found[1:])
    assert found[0].kept > found[0].all_quantized + 6


def test_the_model_is_captured_and_calibrated_once(monkeypatch) -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Linear(16, 16), nn.ReLU())]
    model, data = nn.Sequential(*layers).eval(), [torch.randn(8, 16) for _ in range(20)]
    counts: dict[str, int] = {}
    for name in ("calibrate", "prepared_model"):
        own = getattr(sensitivities, name)

        def counted(*args, own=own, name=name, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return own(*args, **kwargs)

        monkeypatch.setattr(sensitivities, name, counted)
    runs = []
    monkeypatch.setattr(
        "torchq.analysis.sensitivities.call",
        lambda model, batch: runs.append(0) or model(batch),
    )
    assert len(torchq.sensitivity(model, data, data[0], progress=False)) == 12
    assert counts == {"calibrate": 1, "prepared_model": 1}
    # once in float, once in int8 to choose batches, then all trials
    assert len(runs) <= 8 * len(data) + 6


def test_an_outlier_in_any_batch_is_measured() -> None:
    """A batch which the int8 model clips is among those that trials are measured on."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(16, 16), nn.ReLU())]
    model, data = nn.Sequential(*layers).eval(), [torch.randn(32, 16) for _ in range(40)]
    data[17] = 30 * data[17][:1]
    own = torchq.sensitivity(model, data, data[0], progress=False)
    qmodel = torchq.quantize(model, data)
    with torch.no_grad():
        worst = torchq.sqnr(model(data[17]), qmodel(data[17]))
        others = torchq.sqnr(model(data[0]), qmodel(data[0]))
    assert worst < others and own[0].all_quantized < others


def test_layers_of_the_row_rule_are_measured_as_they_run() -> None:
    """Dynamic by the row rule in the whole model means dynamic alone, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).eval()
    loud = torch.exp(3 * torch.randn(256, 1))
    data = [torch.randn(256, 16) * loud for _ in range(3)]
    whole = torchq.quantize(model, data)
    rows = {row.name: row.reason for row in torchq.explain(whole).rows}
    assert rows["0"].startswith("dynamic")
    found = {e.name: e for e in torchq.sensitivity(model, data, data[0], progress=False)}
    dynamic = torchq.QConfig(dynamic=True)
    qmodel = torchq.quantize(model, data, None, None, {"*": None, "0": dynamic})
    with torch.no_grad():
        expected = torchq.sqnr([model(x) for x in data], [qmodel(x) for x in data])
    assert found["0"].alone == pytest.approx(expected, abs=1e-3)


def test_embeddings_are_ranked_with_the_layers() -> None:
    torch.manual_seed(0)
    model, data = Tagger().eval(), [torch.randint(50, (8, 9)) for _ in range(3)]
    config = torchq.QConfig(embedding_bits=4)
    found = torchq.sensitivity(model, data, data[0], config, progress=False)
    entries = {entry.name: entry for entry in found}
    assert entries.keys() == {"embed", "lstm", "out"} and found[0].name == "embed"

    def measured(overrides: torchq.quantization.config.Overrides) -> float:
        qmodel = torchq.quantize(model, data, config=config, overrides=overrides)
        with torch.no_grad():
            return torchq.sqnr([model(x) for x in data], [qmodel(x) for x in data])

    table = entries["embed"]
    assert table.alone == pytest.approx(measured({"*": None, "embed": config}))
    assert table.kept == pytest.approx(measured({"embed": None}), abs=2)
    for entry in found:
        assert entry.all_quantized == pytest.approx(measured({}), abs=0.5)
    assert entries["lstm"].kept == pytest.approx(measured({"lstm": None}), abs=0.5)
    only = torchq.sensitivity(model, data, data[0], config, {"lstm": None, "out": None}, False)
    assert [entry.name for entry in only] == ["embed"]

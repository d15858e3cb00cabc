# SPDX-License-Identifier: Apache-2.0
"""Saturation of recurrent layers: the emulation without it is the kernel, the proof holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchq
from torchq import Attr, QConfig, saturation
from torchq.nn import (
    QGRU,
    QLSTM,
    DynamicQLinear,
    QGRUCell,
    QLSTMCell,
    QRecurrentLayer,
    QRNNCell,
    RecurrentWeight,
)
from torchq.onednn.saturation import Tally, emulate_recurrent
from torchq.quantization.qparams import QParams

U8, S8 = torch.uint8, torch.int8
UNIT, SIGNED = QParams.per_tensor(1 / 127, 128), QParams.per_tensor(1 / 127, 0, S8)
X = torch.randn(6, 3, 20, generator=torch.Generator().manual_seed(3)) * 0.4


def weight(gates: int, units: int, inputs: int, directions: int) -> RecurrentWeight:
    return RecurrentWeight.quantize(torch.randn(directions, gates, units, inputs) * 0.3)


CELLS = {"lstm": 4, "gru": 3, "gru_vanilla": 3, "rnn_tanh": 1, "rnn_relu": 1}


def layer(cell: str, directions: int = 1, **options: Any) -> QRecurrentLayer:
    gates, units = CELLS[cell], 12
    biases = torch.randn(2, directions, gates, units)
    if options.pop("projects", False):
        options["projection"] = weight(1, 5, units, directions)
    state = 5 if "projection" in options else units
    weights = weight(gates, units, 20, directions), weight(gates, units, state, directions)
    return QRecurrentLayer(cell, *weights, *biases, **options)


LAYERS: dict[str, Any] = {
    **{f"{cell}-static": (cell, {"src": UNIT}) for cell in CELLS},
    **{f"{cell}-dynamic": (cell, {}) for cell in CELLS},
    "both": ("lstm", {"src": UNIT, "directions": 2, "dst_dtype": U8, "h_n_dtype": U8}),
    "projection": ("lstm", {"src": UNIT, "projects": True, "directions": 2}),
    "projection-dynamic": ("lstm", {"projects": True}),
    "signed": ("gru", {"src": SIGNED, "state": SIGNED, "dst_dtype": S8}),
    "signed-vanilla": ("gru_vanilla", {"src": SIGNED, "state": SIGNED}),
    "peephole": ("lstm", {"src": UNIT, "peephole": torch.full((1, 3, 12), 0.3)}),
}


def close(got: Tensor, want: Tensor, static: bool) -> None:
    """A step of the state where a float32 cell is near a tie, which later steps carry on."""
    assert got.dtype == want.dtype and got.shape == want.shape
    off = (got.double() - want.double()).abs()
    step = 1.0 if not want.is_floating_point() else 1 / 127 if static else 1e-4
    assert off.numel() == 0 or float(off.max()) <= 2 * step
    assert off.numel() == 0 or float((off > step / 50).double().mean()) < 0.05


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("packed", [False, True])
def test_exact_sums_give_what_the_kernel_gives(name: str, packed: bool) -> None:
    torch.manual_seed(5)
    cell, options = LAYERS[name]
    q = layer(cell, **options)
    units = q.projection_size or q.hidden_size
    h_0 = torch.rand(q.directions, 3, units) - 0.5
    c_0 = torch.randn(q.directions, 3, 12) if cell == "lstm" else None
    x, sizes = X, None
    if packed:
        sequence = pack_padded_sequence(X, [6, 4, 1])
        x, sizes = sequence.data, sequence.batch_sizes
    for given in ((x, sizes, h_0, c_0), (x, sizes, None, None)):
        for got, want in zip(emulate_recurrent(q, *given, saturates=False), q(*given), strict=True):
            close(got, want, not q.dynamic)


def test_pairs_saturate_as_they_do_in_a_linear_layer() -> None:
    """One step from zero: u8 255 times pairs of 127."""
    ones = torch.full((1, 1, 2, 4), 127, dtype=S8)
    q = QRecurrentLayer(
        "rnn_relu",
        RecurrentWeight(ones, torch.ones(1)),
        RecurrentWeight(ones[..., :2], torch.ones(1)),
        src=QParams.per_tensor(1.0, 0),
        state=QParams.per_tensor(1000.0, 0),
    )
    src, tally = torch.full((1, 1, 4), 255, dtype=U8), Tally()
    assert q(src)[0].tolist() == [[[4 * 255 * 127] * 2]]
    assert emulate_recurrent(q, src, tally=tally).dst.tolist() == [[[2 * 32767] * 2]]
    assert (tally.pairs, tally.saturating) == (2 * 2 + 2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0])


@pytest.mark.parametrize("flow", [torchq, torchq.eager], ids=["fx", "eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_models_report_their_recurrent_layers(flow: Any, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    data = [torch.randn(10, 1, 64) * 2 for _ in range(2)]
    qmodel = flow.quantize(model, data, data[0], QConfig(dynamic=dynamic))
    before = [qmodel(x) for x in data]
    told = saturation.seven_bits(qmodel)
    assert list(told) == ["rnn", "fc"]
    assert "could saturate" in told["rnn"] and "of 512 channels" in told["rnn"]
    assert ("activation_bits" in told["rnn"]) != dynamic
    report = saturation.emulate(qmodel, data)
    row = report.layers[0]
    assert row.name == "rnn" and row.pairs == 2 * 10 * 256 * 64 and row.src == "u8"
    assert 0 < row.saturating < row.pairs and 0 < row.changed <= row.outputs == 2 * 10 * 64
    assert 0 < row.sqnr < 60 and report.sqnr < 60
    assert "rnn" not in str(report.not_emulated)
    assert all(torch.equal(qmodel(x), y) for x, y in zip(data, before, strict=True))
    seven = flow.quantize(model, data, data[0], QConfig(dynamic=dynamic, weight_bits=7))
    assert saturation.seven_bits(seven) == {}
    row = saturation.emulate(seven, data).layers[0]
    assert row.saturating == row.changed == 0 and row.proof.safe.all()


@pytest.mark.parametrize("packed", [False, True])
def test_names_and_packed_sequences(packed: bool) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two, self.cell = nn.LSTM(20, 8, 2, bidirectional=True), nn.GRUCell(16, 8)

        def forward(self, x: Any) -> Tensor:
            dst = self.two(x)[0]
            return self.cell(dst[0] if isinstance(dst, Tensor) else dst.data)

    x = pack_padded_sequence(X, [6, 4, 1]) if packed else X
    qmodel = torchq.eager.quantize(Several().eval(), [x], x)
    report = saturation.emulate(qmodel, [x])
    assert [row.name for row in report.layers] == ["two.layers.0", "two.layers.1", "cell"]
    assert set(saturation.seven_bits(qmodel)) <= {row.name for row in report.layers}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [20, 60, 120])
def test_what_is_not_listed_never_saturates(seed: int, factor: int) -> None:
    """Layers that the proof does not list, of every kind, on sources at the ends of their range."""
    torch.manual_seed(seed)
    attr = Attr().set_rnn_data_qparams(127, 128)
    attr.set_rnn_weights_qparams(0, factor * 8**0.5)
    modules = [
        QLSTM.from_float(nn.LSTM(8, 8), attr=attr),
        QGRU.from_onednn(*(torch.rand(1, 1, 8, 3, 8) - 0.5 for _ in range(2)), None, attr),
        *(
            cls.from_float(float_cls(8, 8), attr=attr)
            for cls, float_cls in ((QLSTMCell, nn.LSTMCell), (QGRUCell, nn.GRUCell))
        ),
        QRNNCell.from_float(nn.RNNCell(8, 8), attr=attr),
    ]
    for module in modules:
        model = nn.Sequential(module)
        x = torch.randint(0, 2, (20, 8)).float() * 2 - 1
        report = saturation.emulate(model, [x[None] if hasattr(module, "layers") else x])
        if "0" not in saturation.seven_bits(model):
            assert report.layers[0].saturating == 0


def test_dynamic_linear_layers_are_listed() -> None:
    layers = [DynamicQLinear.from_float(nn.Linear(64, 8), bits=bits) for bits in (8, 7)]
    assert list(saturation.seven_bits(nn.Sequential(*layers))) == ["0"]


def test_networks_are_emulated_layer_by_layer() -> None:
    q = QLSTM.from_float(nn.LSTM(20, 8), UNIT)
    with pytest.raises(TypeError, match=r"layer must be of type QRecurrentLayer, got QLSTM"):
        emulate_recurrent(q, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a recurrent one: emulate_recurrent"):
        saturation.emulate_module(q, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"float64"):
        emulate_recurrent(q.layers[0], X.double())

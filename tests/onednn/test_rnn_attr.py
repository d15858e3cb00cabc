# SPDX-License-Identifier: Apache-2.0
"""oneDNN's attributes and weights of recurrent networks: ``attr`` and ``from_onednn``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import Attr
from torchq.nn import (
    QGRU,
    QLSTM,
    QRNN,
    QGRUCell,
    QLSTMCell,
    QRecurrentLayer,
    QRNNCell,
    RecurrentWeight,
)
from torchq.quantization.qparams import QParams

S8 = torch.int8
UNIT = QParams.per_tensor(1 / 127, 128)
X = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1)) * 0.4


def data(attr: Attr | None = None) -> Attr:
    return (attr or Attr()).set_rnn_data_qparams(127, 128)


def factors(gates: int, units: int = 16) -> Tensor:
    return torch.linspace(60, 240, gates * units)


def assert_equal(got: Any, expected: Any) -> None:
    if isinstance(got, Tensor):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
        return
    for one, other in zip(got, expected, strict=True):
        assert_equal(one, other)


PAIRS = [
    (nn.LSTM, QLSTM, 4),
    (nn.GRU, QGRU, 3),
    (nn.RNN, QRNN, 1),
    (nn.LSTMCell, QLSTMCell, 4),
    (nn.GRUCell, QGRUCell, 3),
    (nn.RNNCell, QRNNCell, 1),
]


@pytest.mark.parametrize(("float_cls", "cls", "gates"), PAIRS, ids=lambda x: str(x)[-12:])
def test_data_qparams_are_those_of_source_and_states(float_cls: Any, cls: Any, gates: int) -> None:
    module, x = float_cls(8, 16).eval(), X[0] if "Cell" in float_cls.__name__ else X
    assert_equal(cls.from_float(module, attr=data())(x), cls.from_float(module, UNIT, UNIT)(x))


@pytest.mark.parametrize(("float_cls", "cls", "gates"), PAIRS, ids=lambda x: str(x)[-12:])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_weights_are_multiplied(float_cls: Any, cls: Any, gates: int, static: bool) -> None:
    """Gates come in oneDNN's order: u r o of a GRU, where torch has r z n."""
    module = float_cls(8, 16).eval()
    attr = Attr().set_rnn_weights_qparams(24, factors(gates))
    q = cls.from_float(module, attr=data(attr) if static else attr)
    layer: QRecurrentLayer = q.layer if "Cell" in cls.__name__ else q.layers[0]
    weight = module.weight_ih if "Cell" in cls.__name__ else module.weight_ih_l0
    order = [1, 0, 2] if gates == 3 else list(range(gates))
    factor = factors(gates).reshape(gates, 16)[order]
    expected = torch.round(weight.detach().reshape(gates, 16, 8) * factor[..., None])
    assert torch.equal(layer.unpacked("src")[0], expected.clamp(-128, 127).to(S8))
    assert torch.equal(layer.scale_src[0], 1 / factor) and layer.dynamic != static
    torch.testing.assert_close(q.attr.values("weights", "rnn_weights"), factors(gates))
    assert str(q.attr) in str(q) and str(q.attr) == str(attr)


@pytest.mark.parametrize("mask", [0, 24])
def test_a_projection_has_scales_of_its_own(mask: int) -> None:
    module = nn.LSTM(8, 16, num_layers=2, proj_size=6, bidirectional=True).eval()
    attr = data().set_rnn_weights_qparams(mask, factors(4) if mask else 90.0)
    attr.set_rnn_weights_projection_qparams(8, torch.arange(1.0, 7.0) * 50)
    q = QLSTM.from_float(module, attr=attr)
    weight = module.weight_hr_l1_reverse.detach()
    expected = torch.round(weight * (torch.arange(1.0, 7.0) * 50)[:, None]).clamp(-128, 127)
    assert torch.equal(q.layers[1].unpacked("projection")[1, 0], expected.to(S8))
    assert f"rnn_weights:{mask} rnn_weights_projection:8" in repr(q.layers[0])
    with torch.no_grad():
        assert (q(X)[0] - module(X)[0]).abs().max() < 0.03


@pytest.mark.parametrize("mask", [0, 8])
@pytest.mark.parametrize("units", [1, 2])
def test_a_projection_of_few_units(units: int, mask: int) -> None:
    module = nn.LSTM(8, 4, proj_size=units).eval()
    attr = data().set_rnn_weights_qparams(0, 90.0)
    attr.set_rnn_weights_projection_qparams(mask, [50.0] * (units if mask else 1))
    q = QLSTM.from_float(module, attr=attr)
    expected = torch.round(module.weight_hr_l0.detach() * 50).clamp(-128, 127)
    assert torch.equal(q.layers[0].unpacked("projection")[0, 0], expected.to(S8))
    ldigo = torch.randn(1, 1, 8, 4, 4), torch.randn(1, 1, units, 4, 4)
    ldio = torch.randn(1, 1, 4, units)
    made = QLSTM.from_onednn(*ldigo, None, attr, weights_projection=ldio)
    expected = torch.round(ldio[0, 0].t() * 50).clamp(-128, 127)
    assert torch.equal(made.layers[0].unpacked("projection")[0, 0], expected.to(S8))


def test_a_float_destination_is_the_state_before_it_is_rounded() -> None:
    """oneDNN gives the rounded state, dequantized; this is nearer, by up to half a step."""
    attr = data().set_rnn_weights_qparams(0, 60.0)
    src = torch.randint(0, 256, (5, 3, 8), dtype=torch.uint8)
    weights = torch.randn(1, 1, 8, 4, 6) * 0.4, torch.randn(1, 1, 6, 4, 6) * 0.4
    rounded, real = (
        QLSTM.from_onednn(*weights, None, attr, dst_dtype=dtype)(src)[0]
        for dtype in (torch.uint8, torch.float32)
    )
    steps = (real * 127 - (rounded.float() - 128)).abs()
    assert 0.01 < steps.max() < 0.5001


@pytest.mark.parametrize("scale", [60.0, 3.7, 127.0, 0.001, 31.25])
def test_the_printed_factor_is_the_given_one(scale: float) -> None:
    """Kept is its inverse in float32, of which 1 / 60 has the inverse 59.999996."""
    attr = Attr().set_rnn_data_qparams(scale, 128.0)
    assert f" {attr} " in repr(QLSTM.from_float(nn.LSTM(4, 4), attr=attr))


def test_a_second_network_of_the_printed_attr_is_the_same() -> None:
    attr = data().set_rnn_weights_qparams(24, factors(4))
    module = nn.LSTM(8, 16, 2)
    q = QLSTM.from_float(module, attr=attr)
    assert str(q.attr) == str(attr)
    again = QLSTM.from_float(module, attr=Attr.parse(str(q.attr), rnn_weights=factors(4)))
    assert_equal(again(X), q(X))


def test_signed_data() -> None:
    attr, module = Attr().set_rnn_data_qparams(127, 0), nn.LSTM(8, 16)
    q = QLSTM.from_float(module, attr=attr, data_dtype=S8, dst_dtype=S8, h_n_dtype=S8)
    unit = QParams.per_tensor(1 / 127, 0, S8)
    dst, (h_n, _) = q(X)
    assert dst.dtype == h_n.dtype == S8
    expected = QLSTM.from_float(module, unit, unit, dst_dtype=S8, h_n_dtype=S8)(X)
    assert_equal((dst, h_n), (expected[0], expected[1][0]))


def ldigo(module: nn.Module, name: str, gates: int, order: list[int]) -> Tensor:
    """Returns the weights of a float network with one direction, in oneDNN's layout."""
    layers = [getattr(module, f"{name}_l{i}").detach() for i in range(module.num_layers)]
    stacked = torch.stack([w.reshape(gates, -1, *w.shape[1:])[order] for w in layers])[:, None]
    return stacked.permute(0, 1, 4, 2, 3) if stacked.dim() == 5 else stacked


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize(
    ("float_cls", "cls", "gates", "cell"), [(nn.LSTM, QLSTM, 4, None), (nn.GRU, QGRU, 3, "gru")]
)
def test_ldigo(
    float_cls: Any, cls: Any, gates: int, cell: Any, static: bool, layers: int, int8: bool
) -> None:
    module, order = float_cls(8, 8, layers).eval(), [1, 0, 2] if gates == 3 else [0, 1, 2, 3]
    attr = Attr().set_rnn_weights_qparams(24, factors(gates, 8))
    attr = data(attr) if static else attr
    weights = [ldigo(module, name, gates, order) for name in ("weight_ih", "weight_hh")]
    if int8:
        values = factors(gates, 8).reshape(gates, 8)
        weights = [torch.round(w * values).clamp(-128, 127).to(S8) for w in weights]
    both = [ldigo(module, name, gates, order) for name in ("bias_ih", "bias_hh")]
    bias = both[0] + both[1]
    if cell == "gru":  # the new gate's two are apart
        bias[:, :, 2] = both[0][:, :, 2]
        bias = torch.cat([bias, both[1][:, :, 2:]], 2)
    q = cls.from_onednn(*weights, bias, attr, cell=cell)
    expected = cls.from_float(module, attr=attr)
    torch.testing.assert_close(q(X), expected(X), rtol=0, atol=1e-5 if not static else 2 / 127)
    for one, other in zip(q.layers, expected.layers, strict=True):
        assert torch.equal(one.unpacked("state"), other.unpacked("state"))


def test_vanilla_gru_projection_and_directions_from_ldigo() -> None:
    weights = torch.randn(1, 2, 8, 3, 16) * 0.3, torch.randn(1, 2, 16, 3, 16) * 0.3
    bias = torch.randn(1, 2, 3, 16)
    q = QGRU.from_onednn(*weights, bias, data(), dst_dtype=torch.uint8)
    order = [1, 0, 2]
    parts = [RecurrentWeight.quantize(w[0].permute(0, 2, 3, 1)[:, order]) for w in weights]
    options: dict[str, Any] = {"src": UNIT, "state": UNIT, "dst_dtype": torch.uint8}
    layer = QRecurrentLayer("gru_vanilla", *parts, bias[0][:, order], **options)
    assert_equal(q(X)[0], layer(layer._quantized_src(X))[0])

    lstm = torch.randn(1, 1, 8, 4, 16) * 0.3, torch.randn(1, 1, 6, 4, 16) * 0.3
    projection = torch.randn(1, 1, 16, 6) * 0.3
    attr = data().set_rnn_weights_projection_qparams(0, 60.0)
    q = QLSTM.from_onednn(*lstm, None, attr, weights_projection=projection)
    assert q(X)[0].shape == (5, 3, 6)
    expected = torch.round(projection[0, 0].t() * 60).to(S8)
    assert torch.equal(q.layers[0].unpacked("projection")[0, 0], expected)


def test_repr_of_calibrated_and_dynamic_networks() -> None:
    module = nn.Sequential(nn.LSTM(8, 16, 2, proj_size=4)).eval()
    q = torchq.quantize(module, [X, X * 2])
    line = (
        r"lstm, 8, 16, num_layers=2, proj_size=4, u8 -> f32, states u8, scales:src:0+src1:0+src2:0 "
        r"zero_points:src:0+src1:0+src2:0 rnn_weights:24 rnn_weights_projection:8"
    )
    assert line in repr(q) and line in str(torchq.explain(q))
    assert "src2" not in repr(QLSTM.from_float(nn.LSTM(8, 16), UNIT))
    dynamic = QLSTM.from_float(nn.LSTM(8, 16), granularity="per_tensor")
    assert "dynamic -> f32, rnn_weights:0" in repr(dynamic)


def test_state_of_one_fits_the_other(tmp_path: Path) -> None:
    modules = [nn.LSTM(8, 16), nn.LSTM(8, 16)]
    attr = Attr().set_rnn_weights_qparams(24, factors(4)).set_rnn_data_qparams(100, 120)
    q, other = QLSTM.from_float(modules[0], attr=attr), QLSTM.from_float(modules[1], UNIT)
    other.load_state_dict(q.state_dict())
    assert_equal(other(X), q(X))
    assert other.attr == q.attr and other.attr.rnn_data_qparams == (100, 120)
    torchq.save(nn.Sequential(q), tmp_path / "q")
    assert_equal(torchq.load(tmp_path / "q", nn.Sequential(modules[0]))(X), q(X))
    assert_equal(torch.jit.script(q)(X), q(X))


LSTM, WEIGHTS = nn.LSTM(8, 16), (torch.ones(1, 1, 8, 4, 16), torch.ones(1, 1, 16, 4, 16))
ERRORS = {
    r"QLSTM: attr must be of type Attr, got dict": lambda: QLSTM.from_float(LSTM, attr={}),
    r"QLSTM: attr must set only rnn_data.* got scales:src:0 post_ops:eltwise_relu\.": lambda: (
        QLSTM.from_float(
            LSTM,
            attr=Attr()
            .set_scales("src", 0, 1.0)
            .set_post_ops(torchq.PostOps.parse("eltwise_relu:0")),
        )
    ),
    r"from attr's rnn_data or from arguments, got both": lambda: QLSTM.from_float(
        LSTM, UNIT, attr=data()
    ),
    r"QLSTMCell: source and states must": lambda: QLSTMCell.from_float(
        nn.LSTMCell(8, 16), None, UNIT, attr=data()
    ),
    r"mask of rnn_weights must be 0 .* or 24 .*, got 8": lambda: QLSTM.from_float(
        LSTM, attr=Attr().set_rnn_weights_qparams(8, torch.ones(4))
    ),
    r"rnn_weights of weights must be 64 values": lambda: QLSTM.from_float(
        LSTM, attr=Attr().set_rnn_weights_qparams(24, torch.ones(16))
    ),
    r"rnn_weights of weights must be supplied": lambda: QLSTM.from_float(
        LSTM, attr=Attr().set_rnn_weights_qparams(24)
    ),
    r"only for an LSTM with a projection": lambda: QLSTM.from_float(
        LSTM, attr=Attr().set_rnn_weights_projection_qparams(0, 1.0)
    ),
    r"shift of rnn_data must be an integer in \[0, 255\].*got 127.5": lambda: QLSTM.from_float(
        LSTM, attr=Attr().set_rnn_data_qparams(127, 127.5)
    ),
    r"shift .* \[-128, 127\].*got 128": lambda: QLSTM.from_float(LSTM, attr=data(), data_dtype=S8),
    r"weights_layer must be ldigo .* 4 gates.* got \[8, 64\]": lambda: QLSTM.from_onednn(
        torch.ones(8, 64), WEIGHTS[1]
    ),
    r"weights_iter must have the layers": lambda: QLSTM.from_onednn(
        WEIGHTS[0], torch.ones(2, 1, 16, 4, 16)
    ),
    r"bias must be ldgo \[1, 1, 4, 16\] for lstm, got \[64\]": lambda: QLSTM.from_onednn(
        *WEIGHTS, torch.ones(64)
    ),
    r"weights_projection must be ldio \[1, 1, 16, 16\]": lambda: QLSTM.from_onednn(
        *WEIGHTS, weights_projection=torch.ones(16, 6)
    ),
    r"attr must have the scales of int8 weights": lambda: QLSTM.from_onednn(
        *(w.to(S8) for w in WEIGHTS), attr=data()
    ),
    r"one layer or one direction": lambda: QLSTM.from_onednn(
        *(torch.ones(2, 2, 16, 4, 16) for _ in range(2))
    ),
    r"cell must be": lambda: QGRU.from_onednn(*WEIGHTS, cell="lstm"),
    r"got 1 NaN or inf values of 512": lambda: QLSTM.from_onednn(
        WEIGHTS[0]
        .clone()
        .index_fill_(2, torch.tensor([0]), 1.0)
        .masked_fill_(torch.arange(512).reshape(1, 1, 8, 4, 16) == 3, torch.nan),
        WEIGHTS[1],
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"torchq.*{message}"):
        ERRORS[message]()

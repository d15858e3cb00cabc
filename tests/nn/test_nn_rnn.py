# SPDX-License-Identifier: Apache-2.0
"""QLSTM, QGRU, QRNN and cells beside torch's: arguments, shapes, accuracy, and every deployment."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import sqnr
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import torchq
from torchq import QConfig
from torchq.nn import (
    QLSTM,
    QRNN,
    ObservedRNN,
    QGRUCell,
    QLSTMCell,
    QRecurrentLayer,
    QRNNCell,
    RecurrentWeight,
)
from torchq.quantization.qparams import QParams

SRC = QParams.per_tensor(8 / 255, 128)


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, PackedSequence):
        return [result.data]
    return [result] if isinstance(result, Tensor) else [t for each in result for t in flat(each)]


def quantized(module: nn.Module, dynamic: bool, x: Tensor | PackedSequence) -> nn.Module:
    """As the observers say."""
    observed = ObservedRNN(module, QConfig(activation_observer="minmax", dynamic=dynamic))
    with torch.no_grad():
        observed(x)
    return observed.convert()


FLOATS = [
    lambda: nn.LSTM(20, 48),
    lambda: nn.LSTM(20, 48, num_layers=2, bidirectional=True, dropout=0.5),
    lambda: nn.LSTM(20, 48, num_layers=2, batch_first=True, bias=False),
    lambda: nn.LSTM(20, 48, num_layers=2, proj_size=24, bidirectional=True),
    lambda: nn.GRU(20, 48, num_layers=2, bidirectional=True, batch_first=True),
    lambda: nn.GRU(20, 48, bias=False),
    lambda: nn.RNN(20, 48, num_layers=2),
    lambda: nn.RNN(20, 48, bidirectional=True),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("index", range(len(FLOATS)))
def test_is_torchs_network_to_30_db(index: int, dynamic: bool) -> None:
    module = FLOATS[index]().eval()
    batch = (9, 5, 20)
    x = torch.randn(batch)
    q = quantized(module, dynamic, x)
    with torch.no_grad():
        for given in (x, x[0]):  # batched and not
            expected = module(given)
            for got, want in zip(flat(q(given)), flat(expected), strict=True):
                assert got.shape == want.shape and got.dtype == want.dtype
                assert sqnr(want, got) > 30
            hx = expected[1]
            for got, want in zip(flat(q(given, hx)), flat(module(given, hx)), strict=True):
                assert sqnr(want, got) > 30


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_data_that_calibration_did_not_see(cls: Any, dynamic: bool) -> None:
    """With the configuration that is the default, a usual width, and gates that saturate."""
    module = cls(64, 256, num_layers=2).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
        observed = ObservedRNN(module, QConfig(dynamic=dynamic))
        for _ in range(4):
            observed(torch.randn(32, 8, 64))
        x = torch.randn(32, 8, 64)
        pairs = zip(flat(observed.convert()(x)), flat(module(x)), strict=True)
        assert all(sqnr(want, got) > 30 for got, want in pairs)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_relu(dynamic: bool) -> None:
    module = nn.RNN(20, 48, nonlinearity="relu").eval()
    x = torch.randn(9, 5, 20)
    with torch.no_grad():
        expected, h_n = module(x)
        if dynamic:
            q = QRNN.from_float(module)
        else:
            with pytest.raises(ValueError, match="QRNN: states must be given for relu"):
                QRNN.from_float(module, SRC)
            with pytest.raises(ValueError, match="QRNNCell: state must be given for relu"):
                QRNNCell.from_float(nn.RNNCell(20, 48, nonlinearity="relu"), SRC)
            states = QParams.per_tensor(float(expected.max()) / 255, 0)
            q = QRNN.from_float(module, SRC, states)
        dst, h = q(x)
    assert sqnr(expected, dst) > 30 and sqnr(h_n, h) > 30


@pytest.mark.parametrize("kind", ["tensor", "unbatched", "packed", "unsorted"])
def test_a_projection_is_observed_on_both_sides(kind: str) -> None:
    """Its states leave [-1, 1]; what it reads stays far inside."""
    module = nn.LSTM(20, 48, num_layers=2, proj_size=24, bidirectional=True).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "weight_hr" in name:
                parameter.mul_(5)
    x, hx = torch.randn(9, 5, 20), (torch.randn(4, 5, 24), torch.randn(4, 5, 48))
    given: Any = x
    if kind == "unbatched":
        given, hx = x[:, 0], (hx[0][:, 0], hx[1][:, 0])
    elif kind != "tensor":
        lengths = torch.tensor([9, 7, 7, 4, 1] if kind == "packed" else [4, 9, 1, 7, 7])
        given = pack_padded_sequence(x, lengths, enforce_sorted=kind == "packed")
    observed = ObservedRNN(module, QConfig(activation_observer="minmax"))
    seen: list[Tensor] = []
    observed.hidden_observer.register_forward_hook(lambda m, args, dst: seen.append(dst))
    with torch.no_grad():
        expected = module(given, hx)
        for got, want in zip(flat(observed(given, hx)), flat(expected), strict=True):
            assert torch.equal(got, want)
        q = observed.convert()
        assert max(float(t.abs().max()) for t in flat(expected)) > 1.2
        assert all(sqnr(a, b) > 30 for a, b in zip(flat(expected), flat(q(given, hx)), strict=True))
    # What was seen before the last projection makes the last layer's states.
    weight = module.weight_hr_l1_reverse
    rebuilt = torch.cat([row @ weight.T for row in seen[len(seen) // 2 :]])
    last = flat(expected)[0][..., 24:].reshape(-1, 24)
    assert all(float((rebuilt - row).abs().amax(1).min()) < 1e-4 for row in last)
    with pytest.raises(ValueError, match="QLSTM: states must be given for a projection"):
        QLSTM.from_float(module, SRC)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", [FLOATS[1], FLOATS[4]], ids=["lstm", "gru"])
def test_packed_sequences(make: Any, dynamic: bool) -> None:
    module = make().eval()
    lengths = torch.tensor([3, 7, 1, 7, 5])
    x = torch.randn(5, 7, 20)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    q = quantized(module, dynamic, packed)
    with torch.no_grad():
        expected, hx = module(packed)
        dst, h_n = q(packed)
        assert torch.equal(dst.batch_sizes, expected.batch_sizes)
        assert torch.equal(dst.unsorted_indices, expected.unsorted_indices)
        for got, want in zip(flat((dst.data, h_n)), flat((expected.data, hx)), strict=True):
            assert sqnr(want, got) > 30
        again = flat(q(packed, h_n)[1])
        for got, want in zip(again, flat(module(packed, hx)[1]), strict=True):
            assert sqnr(want, got) > 30
        one = pack_sequence([x[0, :3], x[2, :1]])
        assert q(one)[0].data.shape == module(one)[0].data.shape


@pytest.mark.parametrize("src", [SRC, None], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("make", "cls"),
    [(nn.LSTMCell, QLSTMCell), (nn.GRUCell, QGRUCell), (nn.RNNCell, QRNNCell)],
    ids=["lstm", "gru", "rnn"],
)
def test_cells(make: Any, cls: Any, src: QParams | None) -> None:
    module = make(20, 48).eval()
    x = torch.randn(5, 20)
    q = cls.from_float(module, src)
    with torch.no_grad():
        for given in (x, x[0]):
            hx, mine = module(given), q(given)
            for got, want in zip(flat(mine), flat(hx), strict=True):
                assert sqnr(want, got) > 30
            for got, want in zip(flat(q(given, hx)), flat(module(given, hx)), strict=True):
                assert sqnr(want, got) > 30
    twin = type(q).from_spec(q.read_spec())
    twin.load_state_dict(q.state_dict())
    assert torch.equal(flat(twin(x))[0], flat(q(x))[0])


def test_a_sum_of_directions_cannot_clip() -> None:
    """Two states near 1 make 2, which no state's integers hold."""
    weight = RecurrentWeight(torch.zeros(2, 4, 16, 8, dtype=torch.int8), torch.ones(1))
    state = RecurrentWeight(torch.zeros(2, 4, 16, 16, dtype=torch.int8), torch.ones(1))
    layer = QRecurrentLayer("lstm", weight, state, torch.full((2, 4, 16), 9.0), src=SRC)
    x = torch.randn(6, 2, 8)
    both, _ = QLSTM([layer], merge="concat")(x)
    total, _ = QLSTM([layer], merge="sum")(x)
    assert torch.equal(total, both[..., :16] + both[..., 16:])
    assert float(total.max()) > 1.5


def test_quantized_results_have_the_last_states_parameters() -> None:
    module = FLOATS[1]().eval()
    x = torch.randn(9, 5, 20)
    states = QParams.per_tensor(0.5 / 127, 128)
    real, _ = QLSTM.from_float(module, SRC, states)(x)
    q, _ = QLSTM.from_float(module, SRC, states, dst_dtype=torch.uint8)(x)
    assert q.dtype == torch.uint8
    assert ((q.float() - 128) * states.scale - real).abs().max() <= states.scale * 0.501


MODELS = {
    "lstm": (FLOATS[1], False),
    "lstm-dynamic": (FLOATS[2], True),
    "gru": (FLOATS[4], False),
    "rnn-dynamic": (FLOATS[7], True),
}


@pytest.mark.parametrize("name", MODELS)
def test_deployment(name: str, tmp_path: Path) -> None:
    """Script, trace, export, compile, copy, pickle and torchq.save: the same bits each."""
    make, dynamic = MODELS[name]
    module = make().eval()
    x = torch.randn(9, 5, 20)
    q = quantized(module, dynamic, x)
    with torch.no_grad():
        expected, hx = flat(q(x)), q(x)[1]
        scripted = torch.jit.script(q)
        buffer = io.BytesIO()
        torch.jit.save(scripted, buffer)
        buffer.seek(0)
        copied, pickled = copy.deepcopy(q), io.BytesIO()
        torch.save(q, pickled)
        pickled.seek(0)
        twin = type(q).from_spec(q.read_spec())
        twin.load_state_dict(q.state_dict())
        holder = nn.Sequential(q)
        torchq.save(holder, tmp_path / "model")
        loaded = torchq.load(tmp_path / "model", nn.Sequential(module))[0]
        time = torch.export.Dim("time", min=2, max=64)
        dims = ({1 if q.batch_first else 0: time},)
        runs = {
            "script": torch.jit.load(buffer),
            "trace": torch.jit.trace(q, (x,)),
            "copy": copied,
            "pickle": torch.load(pickled, weights_only=False),
            "state": twin,
            "saved": loaded,
            "export": torch.export.export(q, (x,), dynamic_shapes=dims).module(),
            "compile": torch.compile(q, backend="aot_eager", fullgraph=True),
        }
        for label, run in runs.items():
            for got, want in zip(flat(run(x)), expected, strict=True):
                assert torch.equal(got, want), label
        for label in ("script", "compile"):
            for got, want in zip(flat(runs[label](x, hx)), flat(q(x, hx)), strict=True):
                assert torch.equal(got, want), label


ERRORS: dict[str, Any] = {
    "src must have 2 dimensions": lambda q: q(torch.zeros(20)),
    "src must have 20 features": lambda q: q(torch.zeros(4, 2, 19)),
    "QLSTM: h_0 must have shape": lambda q: q(torch.zeros(4, 2, 20), (torch.zeros(2, 2, 48),) * 2),
    r"h_0 must have shape \[1, 48\] .* unbatched source\), got \[1, 1, 48\]": (
        lambda q: q(torch.zeros(4, 20), (torch.zeros(1, 1, 48),) * 2)
    ),
    r"c_0 must have shape \[1, 2, 48\]": (
        lambda q: q(torch.zeros(4, 2, 20), (torch.zeros(1, 2, 48), torch.zeros(1, 2, 47)))
    ),
    r"h_0 must have shape \[1, 2, 48\] .*got \[1, 3, 48\]": (
        lambda q: q(pack_sequence([torch.zeros(4, 20)] * 2), (torch.zeros(1, 3, 48),) * 2)
    ),
    "src must be float32": lambda q: q(torch.zeros(4, 2, 20, dtype=torch.float64)),
    "module must be a torch.nn.LSTM": lambda q: QLSTM.from_float(nn.GRU(3, 4)),
    "states must have one entry": lambda q: QLSTM.from_float(nn.LSTM(3, 4), SRC, [SRC, SRC]),
    "weight must be finite": lambda q: QLSTM.from_float(broken()),
    "merge must be": lambda q: QLSTM(list(q.layers), merge="mean"),
    "layers must have the same": lambda q: QLSTM([q.layers[0], q.layers[0]]),
}


def broken() -> nn.LSTM:
    module = nn.LSTM(3, 4)
    with torch.no_grad():
        module.weight_hh_l0[0, 0] = torch.nan
    return module


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    q = QLSTM.from_float(nn.LSTM(20, 48), SRC)
    with pytest.raises((TypeError, ValueError), match=f"torchq.*{message}"):
        ERRORS[message](q)


@pytest.mark.parametrize("scripted", [False, True])
def test_errors_of_cells(scripted: bool) -> None:
    cell: Any = QLSTMCell.from_float(nn.LSTMCell(8, 6))
    cell = torch.jit.script(cell) if scripted else cell
    h, errors = torch.zeros(3, 6), (ValueError, torch.jit.Error)
    for src, h_0, message in (
        (torch.zeros(3, 7), h, r"src must have shape \[batch, 8\] or \[8\], got \[3, 7\]"),
        (torch.zeros(2, 3, 8), h, r"src must have .* got \[2, 3, 8\]"),
        (torch.zeros(()), h, r"src must have .* got \[\]"),
        (torch.zeros(3, 8), torch.zeros(4, 6), r"h must have shape \[3, 6\].* got \[4, 6\]"),
        (torch.zeros(8), torch.zeros(1, 6), r"h must have shape \[6\].* got \[1, 6\]"),
    ):
        with pytest.raises(errors, match=rf"torchq\.nn\.QLSTMCell: {message}"):
            cell(src, (h_0, h))

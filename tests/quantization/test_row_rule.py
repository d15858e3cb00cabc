# SPDX-License-Identifier: Apache-2.0
"""Layers that read rows far smaller than their tensor's scale suits are not static by default."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import torchq
from torchq import eager
from torchq.models.attached import computing_modules
from torchq.quantization.qparams import choose_qparams
from torchq.quantization.recipes.rows import LEAST, RowPowers

FLOWS = {"graph": torchq, "eager": eager}


def sizes(count: int, spread: bool) -> Tensor:
    """Return factors for rows: of four decades, or all 1."""
    return torch.logspace(-3, 1, count) if spread else torch.ones(count)


class Net(nn.Module):
    """A convolution, a function behind it, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(4, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).mean(-1))


def net() -> Net:
    torch.manual_seed(0)
    model = Net().eval().requires_grad_(False)
    model.conv.bias.zero_()
    return model


def batches(spread: bool, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(32, 4, 24, generator=generator) * sizes(32, spread).view(-1, 1, 1)
    return list(rows[torch.randperm(32, generator=generator)].split(8))


def in_int8(qmodel: nn.Module) -> dict[str, bool]:
    return {row.name: row.quantized for row in torchq.explain(qmodel).rows if row.is_matmul}


def median_sqnr(rows: Tensor, low: float, high: float) -> float:
    """Return the median over rows of the SQNR that rounding them leaves."""
    q = choose_qparams(low, high)
    near = ((rows / q.scale + q.zero_point).round().clamp(0, 255) - q.zero_point) * q.scale
    errors = (near - rows).square().sum(1)
    return float((10 * torch.log10(rows.square().sum(1) / errors)).median())


@pytest.mark.parametrize("spread", [1e-3, 1e-1, 1.0])
def test_the_figure_is_near_the_measured_one(spread):
    torch.manual_seed(0)
    rows = torch.randn(999, 64) * torch.logspace(math.log10(spread), 0, 999).view(-1, 1)
    rows *= torch.rand(999, 64) > 0.3  # zeros are exact
    powers = RowPowers()
    powers(rows)
    src = choose_qparams(float(rows.min()), float(rows.max()))
    assert powers.decibels(src) == pytest.approx(
        median_sqnr(rows, float(rows.min()), float(rows.max())), abs=1.0
    )


def test_rows_of_a_convolution_are_patches_of_each_group():
    torch.manual_seed(0)
    src = torch.randn(2, 6, 9, 10)
    src[:, :3] *= 2.0**-20
    powers = RowPowers.of(nn.Conv2d(6, 4, (3, 5), groups=2))
    powers(src)
    assert int(powers.counts.sum()) == 2 * 2 * 3 * 2
    below = powers.counts[: 4 * (128 - 20)].sum()  # 2^-40 is the power of the small group
    assert int(below) == 2 * 3 * 2


def test_windows_larger_than_the_source_and_sources_without_batch():
    powers = RowPowers.of(nn.Conv1d(1, 4, 256))
    powers(torch.ones(1, 100))
    powers(torch.zeros(3, 1, 300))  # nothing to round
    assert int(powers.counts.sum()) == 1 and powers.decibels(choose_qparams(0.0, 255.0)) is not None


@pytest.mark.parametrize("flow", FLOWS)
def test_a_convolution_with_spread_rows_stays_float(flow):
    model, data = net(), batches(True)
    qmodel = FLOWS[flow].quantize(model, data, data[0])
    assert in_int8(qmodel)["conv"] is False
    row = next(r for r in torchq.explain(qmodel).rows if r.name == "conv")
    assert "dB" in row.reason and row.reason in str(torchq.explain(qmodel))
    forced = FLOWS[flow].quantize(model, data, data[0], overrides={"conv": torchq.QConfig()})
    assert in_int8(forced)["conv"] is True
    small = batches(True, seed=9)
    gains = [torchq.sqnr(model(x), qmodel(x)) - torchq.sqnr(model(x), forced(x)) for x in small]
    assert min(gains) > 0


def test_layers_that_stay_float_are_copies(tmp_path):
    model, data = net(), batches(True)
    calls = []
    model.conv.register_forward_hook(lambda *_: calls.append(1))
    prepared = torchq.calibrate(torchq.prepare(model, data[0]), data)
    qmodel = torchq.convert(prepared)
    pointers = {model.conv.weight.data_ptr(), prepared.conv.module.weight.data_ptr()}
    assert qmodel.conv.weight.data_ptr() not in pointers
    changed = {name: torch.zeros_like(value) for name, value in qmodel.state_dict().items()}
    qmodel.load_state_dict({**qmodel.state_dict(), "conv.weight": changed["conv.weight"]})
    assert model.conv.weight.any()
    expected = model.head(torch.zeros(8, 8))
    assert torchq.sqnr(expected, qmodel(data[0])) > 30  # graph and leaf have one weight
    calls.clear()
    prepared.conv(data[0])
    assert len(calls) == 1


def test_files_of_all_layers_serve_a_model_with_an_override(tmp_path):
    model, data = net(), batches(True)
    whole = torchq.calibrate(torchq.prepare(model, data[0]), data)
    torchq.save_calibration(whole, tmp_path / "all")
    forced = torchq.prepare(model, data[0], overrides={"conv": torchq.QConfig()})
    torchq.load_calibration(forced, tmp_path / "all")
    assert all(in_int8(torchq.convert(forced)).values())


@pytest.mark.parametrize("flow", FLOWS)
def test_ordinary_rows_change_nothing(flow):
    model, data = net(), batches(False)
    qmodel = FLOWS[flow].quantize(model, data, data[0])
    assert all(in_int8(qmodel).values())
    forced = FLOWS[flow].quantize(model, data, data[0], overrides={"*": torchq.QConfig()})
    assert torch.equal(qmodel(data[0]), forced(data[0]))


@pytest.mark.parametrize("flow", FLOWS)
def test_a_linear_layer_becomes_dynamic(flow):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    rows = torch.randn(64, 16) * sizes(64, True).view(-1, 1)
    data = rows[torch.randperm(64)].split(16)
    qmodel = FLOWS[flow].quantize(model, data, data[0])
    first = next(r for r in torchq.explain(qmodel).rows if r.name == "0")
    assert first.quantized and "dB" in first.reason
    assert isinstance(computing_modules(qmodel)["0"], torchq.nn.DynamicQLinear)


class Tagger(nn.Module):
    """A recurrent network over sequences."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)[0]


def sequences(spread: bool) -> list[Tensor]:
    steps = torch.rand(4, 2, 32, 6, generator=torch.Generator().manual_seed(3))
    return list(steps * sizes(32, spread).view(-1, 1))


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"proj_size": 5}])
def test_the_first_layer_of_an_lstm_stays_float(options, tmp_path):
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(6, 16, 2, batch_first=True, **options)).eval()
    data = sequences(True)
    qmodel = torchq.quantize(model, data)
    first, others = (r for r in torchq.explain(qmodel).rows if r.is_matmul)
    assert not first.quantized and "dB" in first.reason
    assert others.quantized and others.reason.startswith("dynamic: ")
    assert first.weights and not {*first.weights} & {*others.weights}
    assert "int8: 100 %" not in str(torchq.explain(qmodel))
    static = torchq.quantize(model, data, overrides={"network": torchq.QConfig()})
    src = torch.cat(data)
    assert torchq.sqnr(model(src), qmodel(src)) > torchq.sqnr(model(src), static(src)) + 3
    torchq.save(qmodel, tmp_path / "model")
    generator = torch.get_rng_state()
    loaded = torchq.load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), generator)  # nothing is drawn to be overwritten
    for other in (loaded, torch.jit.script(qmodel)):
        assert torch.equal(other(src), qmodel(src))
    network = qmodel.network
    assert torch.equal(network.weight_ih_l0 + 0, model.network.weight_ih_l0)
    assert torchq.sqnr(model.network.weight_hh_l1, network.weight_hh_l1 + 0) > 40
    assert (network.input_size, network.num_layers) == (6, 2)


def test_such_an_lstm_of_bfloat16_and_its_spec():
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(6, 16, 2, batch_first=True)).eval().bfloat16()
    data = [x.bfloat16() for x in sequences(True)]
    qmodel = torchq.quantize(model, data)
    assert qmodel(data[0]).dtype == torch.bfloat16
    assert torchq.sqnr(model(data[0]).float(), qmodel(data[0]).float()) > 25
    assert list(qmodel.network.read_spec())[-1] == "first"  # not in the order of a set


def test_states_and_packed_sequences_of_such_an_lstm():
    torch.manual_seed(0)
    lstm, data = nn.LSTM(6, 16, 3).eval().requires_grad_(False), sequences(True)
    observed = torchq.nn.ObservedRNN(lstm)
    for batch in data:
        observed(batch.transpose(0, 1))
    qlstm = observed.convert()
    src, states = data[0].transpose(0, 1), (torch.rand(3, 2, 16), torch.rand(3, 2, 16))
    packed = pack_padded_sequence(src, torch.tensor([17, 32]), enforce_sorted=False)
    for args in ((src,), (src, states), (packed, states), (src[:, 0],)):
        expected, got = lstm(*args), qlstm(*args)
        assert torchq.sqnr(expected[1], got[1]) > 35
        outputs = [x.data if isinstance(x, PackedSequence) else x for x in (expected[0], got[0])]
        assert torchq.sqnr(*outputs) > 35


@pytest.mark.parametrize("make", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize("spread", [True, False])
def test_other_networks_become_dynamic(make, spread):
    torch.manual_seed(0)
    model = Tagger(make(6, 16, batch_first=True)).eval()
    qmodel = torchq.quantize(model, sequences(spread))
    row = next(r for r in torchq.explain(qmodel).rows if r.is_matmul)
    assert row.quantized and row.reason.startswith("dynamic: ") == spread
    assert ("dynamic" in str(qmodel.network)) == spread


def test_strict_names_the_layer_and_its_figure():
    with pytest.raises(RuntimeError, match=r"conv: .* dB"):
        torchq.quantize(net(), batches(True), strict=True)


def test_sensitivity_lists_layers_in_int8_only():
    data = batches(True)
    found = torchq.sensitivity(net(), data, data[0], progress=False)
    assert [layer.name for layer in found] == ["head"]


def test_counts_merge_and_go_through_files(tmp_path: Path):
    model, data = net(), batches(True)
    prepared = torchq.prepare(model, data[0])
    whole = torchq.calibrate(copy.deepcopy(prepared), data)
    first = torchq.calibrate(copy.deepcopy(prepared), data[2:])
    torchq.save_calibration(first, tmp_path / "first")
    rest = torchq.calibrate(copy.deepcopy(prepared), data[:2])
    torchq.load_calibration(rest, tmp_path / "first", merge=True)
    again = pickle.loads(pickle.dumps(rest))
    for other in (rest, again):
        mine, theirs = torchq.convert(whole), torchq.convert(other)
        assert torch.equal(mine(data[0]), theirs(data[0]))
        assert torchq.explain(mine).rows == torchq.explain(theirs).rows


def test_the_model_is_saved_and_loaded_as_it_is(tmp_path: Path):
    model, data = net(), batches(True)
    qmodel = torchq.quantize(model, data)
    torchq.save(qmodel, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model")
    assert torch.equal(loaded(data[0]), qmodel(data[0]))
    assert in_int8(loaded) == in_int8(qmodel)
    again = torchq.quantize(model, data[::-1])
    again.load_state_dict(qmodel.state_dict())
    assert torch.equal(again(data[0]), qmodel(data[0]))


def test_the_limit_is_one_of_the_data_not_of_the_bits():
    powers = RowPowers()
    powers(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
    eight, seven = (choose_qparams(-4.0, 4.0, bits=bits) for bits in (8, 7))
    assert powers.decibels(eight) == pytest.approx(powers.decibels(seven), abs=0.1)
    assert powers.decibels(eight) > LEAST and not powers.why_coarse(eight)

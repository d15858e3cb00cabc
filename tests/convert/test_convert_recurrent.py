# SPDX-License-Identifier: Apache-2.0
"""Recurrent modules in both flows, static and dynamic: what becomes int8, and what says why not."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchq
from torchq import QConfig, eager
from torchq.report.rows import Row

FLOWS = {"graph": torchq, "eager": eager}


class Tagger(nn.Module):
    """Every result of the LSTM is unpacked; one state is used, and one is not."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True, **options)
        self.head = nn.Linear(options.get("proj_size", 32), 6)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, _c) = self.lstm(self.embed(x))
        return self.head(out) + self.head(h[-1]).unsqueeze(1)


class Lengths(nn.Module):
    """Packs by itself, in both ways of writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(12, 24, num_layers=2, bidirectional=True)
        self.head = nn.Linear(48, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, _ = self.gru(packed)
        padded, _ = pad_packed_sequence(out)
        return self.head(padded)


class Given(nn.Module):
    """Initial states from outside, by keyword; the result is the states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 24, num_layers=2)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return self.lstm(input=x, hx=(h, c))[1]


class Decoder(nn.Module):
    """Cells in a loop, and a network that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(12, 24, nonlinearity="relu")
        self.lstm_cell = nn.LSTMCell(24, 16)
        self.cells = nn.ModuleList([nn.GRUCell(16, 8), nn.RNNCell(8, 8)])

    def forward(self, x: Tensor) -> Any:
        first, last = self.rnn(x)
        second, _ = self.rnn(x.flip(0), last)
        state, other, third = None, None, None
        for i in range(3):
            state = self.lstm_cell(first[i] + second[i], state)
            other = self.cells[0](state[0], other)
            third = self.cells[1](other, third)
        return third


def packed_input(count: int = 5) -> Any:
    lengths = torch.randint(2, 9, (count,)).sort(descending=True).values
    return pack_padded_sequence(torch.randn(8, count, 12), lengths)


class PackedIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 24, proj_size=10, bidirectional=True)

    def forward(self, packed: Any) -> Tensor:
        out, _ = self.lstm(packed)
        return pad_packed_sequence(out)[0]


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], set[str]]
CASES: dict[str, Case] = {
    "tagger": (Tagger, lambda: (torch.randn(5, 9, 12),), {"embed", "lstm", "head"}),
    "projection": (
        lambda: Tagger(num_layers=2, proj_size=20),
        lambda: (torch.randn(5, 9, 12),),
        {"embed", "lstm", "head"},
    ),
    "lengths": (
        Lengths,
        lambda: (torch.randn(9, 4, 12), torch.tensor([5, 9, 2, 7])),
        {"gru", "head"},
    ),
    "given": (
        Given,
        lambda: (torch.randn(9, 4, 12), *(0.3 * torch.randn(2, 2, 4, 24))),
        {"lstm"},
    ),
    "decoder": (
        Decoder,
        lambda: (torch.randn(3, 4, 12),),
        {"rnn", "lstm_cell", "cells.0", "cells.1"},
    ),
    "packed": (PackedIn, lambda: (packed_input(),), {"lstm"}),
}


def network(name: str) -> tuple[nn.Module, list[tuple[Any, ...]]]:
    torch.manual_seed(len(name))
    make, inputs, _ = CASES[name]
    return make().eval(), [inputs() for _ in range(4)]


def row_of(model: nn.Module, name: str) -> Row:
    return next(row for row in torchq.explain(model).rows if row.name == name)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("name", "flow"),
    [*((name, "graph") for name in CASES), ("tagger", "eager"), ("given", "eager")],
)
def test_a_network_with_recurrent_modules(
    name: str, flow: str, dynamic: bool, tmp_path: Path
) -> None:
    model, data = network(name)
    before = copy.deepcopy(model.state_dict())
    # Everything is seen in calibration, so nothing may be clipped away here.
    config = QConfig(activation_observer="minmax", dynamic=dynamic)
    prepared = FLOWS[flow].prepare(model, data[0], config)
    with torch.no_grad():
        for batch in data:
            torch.testing.assert_close(prepared(*batch), model(*batch), rtol=1e-5, atol=1e-6)
        q = FLOWS[flow].convert(eager.calibrate(prepared, data), strict=True)
        assert {row.name for row in torchq.explain(q).rows if row.is_matmul} == CASES[name][2]
        assert all(row.quantized for row in torchq.explain(q).rows if row.is_matmul)
        assert "recurrent modules run in int8" in str(torchq.explain(q))
        floats = [m for m in q.modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase | nn.Linear)]
        assert not floats
        assert all(torchq.sqnr(model(*batch), q(*batch)) > 30 for batch in data)
        expected = q(*data[1])
        torchq.save(q, tmp_path / "file")
        loaded = torchq.load(tmp_path / "file", model)
        buffer = io.BytesIO()
        torch.save(q, buffer)
        buffer.seek(0)
        for again in (loaded, copy.deepcopy(q), torch.load(buffer, weights_only=False)):
            assert torchq.sqnr(expected, again(*data[1])) == float("inf")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["tagger", "given"])
def test_deployment_of_a_graph(name: str, dynamic: bool) -> None:
    model, data = network(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        q = torchq.quantize(model, data, config=QConfig(dynamic=dynamic))
        runs = [
            torch.jit.script(q),
            torch.export.export(q, data[0]).module(),
            torch.compile(q, backend="aot_eager", fullgraph=True),
        ]
    with torch.no_grad():
        expected = q(*data[1])
        assert all(torchq.sqnr(expected, run(*data[1])) == float("inf") for run in runs)


def test_packing_in_the_model() -> None:
    """Its own code runs on quantized layers; nothing warns of that."""
    model, data = network("lengths")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = torchq.quantize(model, data)
    assert type(q) is Lengths and type(q.gru).__name__ == "QGRU"
    longer = torch.randn(11, 3, 12), torch.tensor([11, 1, 6])
    with torch.no_grad():
        assert torchq.sqnr(model(*longer), q(*longer)) > 30


@pytest.mark.parametrize("flow", FLOWS)
def test_an_override_keeps_it_float(flow: str) -> None:
    model, data = network("tagger")
    prepared = FLOWS[flow].prepare(model, data[0], overrides={"ls*": None})
    q = FLOWS[flow].convert(eager.calibrate(prepared, data), strict=True)
    row = row_of(q, "lstm")
    assert not row.quantized and row.is_matmul and "kept float by an override" in row.reason
    assert row_of(q, "head").quantized
    with torch.no_grad():
        assert torchq.sqnr(model(*data[0]), q(*data[0])) > 30


class Renamed(nn.LSTM):
    pass


class Foreign(nn.LSTM):
    def forward(self, input: Tensor, hx: Any = None) -> Any:
        out, states = super().forward(input, hx)
        return 2 * out, states


def hooked(model: Any) -> None:
    """Its result changes, so it must neither be lost nor be applied twice."""
    model.lstm.register_forward_hook(lambda module, args, result: (2 * result[0], result[1]))


def subclassed(cls: type[nn.LSTM]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        mine = cls(16, 32, batch_first=True)
        mine.load_state_dict(model.lstm.state_dict())
        model.lstm = mine

    return change


def normed(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.lstm, "weight_hh_l0")


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    ("change", "int8"),
    [(hooked, True), (normed, True), (subclassed(Renamed), True), (subclassed(Foreign), False)],
    ids=["hook", "parametrization", "other name", "other code"],
)
def test_changed_modules(change: Callable[[Any], None], int8: bool, flow: str) -> None:
    """Hooks, computed weights and other names do not keep a layer float; code of its own does."""
    model, data = network("tagger")
    change(model)
    model.eval()
    q = FLOWS[flow].quantize(model, data, data[0])
    row = row_of(q, "lstm")
    assert row.quantized is int8 and row.is_matmul
    assert int8 or "code of its own" in row.reason
    with torch.no_grad():
        assert torchq.sqnr(model(*data[0]), q(*data[0])) > 30


@pytest.mark.parametrize("flow", FLOWS)
def test_parameters_that_are_read_outside(flow: str) -> None:
    class Reader(Tagger):
        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.lstm(self.embed(x))
            return self.head(out @ self.lstm.weight_hh_l0[:32])

    model, x = Reader().eval(), torch.randn(5, 9, 12)
    q = FLOWS[flow].convert(eager.calibrate(FLOWS[flow].prepare(model, x), [x]))
    row = row_of(q, "lstm")
    assert row.quantized or row.reason
    with torch.no_grad():
        assert torchq.sqnr(model(x), q(x)) > 30


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRUCell, nn.Linear])
def test_a_model_of_one_module(make: Any, dynamic: bool) -> None:
    model, x = make(12, 16).eval(), torch.randn(7, 12)
    q = torchq.quantize(model, [x], config=QConfig(dynamic=dynamic), strict=True)
    assert [row.quantized for row in torchq.explain(q).rows if row.is_matmul] == [True]
    with torch.no_grad():
        assert 30 < torchq.sqnr(model(x), q(x)) < 80


def test_quantized_without_data() -> None:
    """Only what is dynamic; a static layer names itself."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x, config = torch.randn(3, 6), QConfig(dynamic=True)
    result = torchq.quantize(model, example_inputs=x, config=config, strict=True)
    assert torch.equal(result(x), torchq.quantize(model, [x], config=config)(x))
    with pytest.raises(TypeError, match="data must be batches to calibrate with, got None"):
        torchq.quantize(model, example_inputs=x)


@pytest.mark.parametrize("flow", [torchq, eager])
def test_flattened_parameters(flow: Any) -> None:
    """A call that much code makes for CUDA; it is no other use of the weights."""

    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.lstm.flatten_parameters()
            y = self.lstm(x)[0]
            return y if y.sum() > -1e9 else -y

    torch.manual_seed(0)
    model, data = Flattens().eval(), [torch.randn(5, 2, 8) for _ in range(3)]
    result = flow.quantize(model, data, data[0], strict=True)
    assert type(result.lstm).__name__ == "QLSTM"
    assert torchq.sqnr(model(data[0]), result(data[0])) > 30


def test_too_many_inputs() -> None:
    model, x = nn.Sequential(nn.RNN(65794, 1)), torch.zeros(2, 1, 65794)
    for flow in FLOWS.values():
        assert "65793 products" in row_of(flow.prepare(model.eval(), x), "0").reason


@pytest.mark.parametrize("flow", FLOWS)
def test_one_configuration_each(flow: str) -> None:
    """Dynamic by default, a static convolution, and weights of seven bits."""
    model = nn.Sequential(
        nn.Conv1d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 1), nn.Linear(12, 16),
        nn.LSTM(16, 8),
    ).eval()  # fmt: skip
    x = torch.randn(5, 6, 12)
    overrides = {"0": QConfig(), "4": QConfig(dynamic=True, weight_bits=7)}
    prepared = FLOWS[flow].prepare(model, x, QConfig(dynamic=True), overrides)
    q = FLOWS[flow].convert(eager.calibrate(prepared, [x]))
    rows = {row.name: row for row in torchq.explain(q).rows}
    assert [rows[i].quantized for i in "0234"] == [True, False, True, True]
    assert "attention have a dynamic form" in rows["2"].reason
    assert any(type(m).__name__ == "DynamicQLinear" for m in q.modules())
    assert int(q.get_submodule("4").layers[0].unpacked("state").abs().max()) == 63
    with torch.no_grad():
        expected, got = model(x)[0], q(x)[0]
    assert torchq.sqnr(expected, got) > 20
    with pytest.raises(RuntimeError, match=r"2: only linear layers, recurrent"):
        FLOWS[flow].convert(prepared, strict=True)


@pytest.mark.parametrize("flow", FLOWS)
def test_errors_name_the_module(flow: str) -> None:
    model, data = network("tagger")
    prepared = FLOWS[flow].prepare(model, data[0], overrides={"embed": None, "head": None})
    with pytest.raises(RuntimeError, match="prepared must be calibrated"):
        FLOWS[flow].convert(prepared)
    with pytest.raises(ValueError, match=r"'lstm': src must be finite.*\{'lstm': None\}"):
        eager.calibrate(prepared, [(torch.full((1, 2, 12), torch.nan),)])
    with pytest.raises(ValueError, match=r"'lsm' matches none. Did you mean 'lstm'"):
        FLOWS[flow].prepare(model, data[0], overrides={"lsm": None})
    with torch.no_grad():
        model.lstm.weight_hh_l0[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"'lstm.weight_hh_l0' of the model must be finite"):
        FLOWS[flow].prepare(model, data[0], QConfig(dynamic=True))
    with pytest.raises(
        TypeError, match=r"must be float32, bfloat16 or float16, got torch.float64 in 'lstm'"
    ):
        model.lstm.double()
        FLOWS[flow].prepare(model, data[0])


def test_accuracy_by_layer_and_saved_calibration(tmp_path: Path) -> None:
    """Each call of a module that runs twice is compared with its own float result."""
    for name, module in (("tagger", "lstm"), ("decoder", "rnn")):
        model, data = network(name)
        for flow in FLOWS.values():
            prepared = eager.calibrate(flow.prepare(model, data[0]), data)
            q = flow.convert(prepared)
            layers = {layer.name: layer for layer in torchq.compare(prepared, q, data).layers}
            assert layers[module].sqnr > 30
            torchq.save_calibration(prepared, tmp_path / "ranges")
            other = torchq.load_calibration(flow.prepare(model, data[0]), tmp_path / "ranges")
            again = flow.convert(other)
            with torch.no_grad():
                assert torchq.sqnr(q(*data[0]), again(*data[0])) == float("inf")


class Reading(Tagger):
    """The model's own code reads a parameter of its LSTM, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.lstm.weight_hh_l0.square().mean().sqrt()


@pytest.mark.parametrize("flow", FLOWS)
def test_code_may_read_the_parameters(flow: str) -> None:
    model, data = Reading().eval(), [(torch.randn(3, 7, 12),) for _ in range(4)]
    qmodel = FLOWS[flow].convert(eager.calibrate(FLOWS[flow].prepare(model, data[0]), data))
    rows = {row.name: row for row in torchq.explain(qmodel).rows}
    assert rows["lstm"].quantized
    with torch.no_grad():
        assert torchq.sqnr(model(*data[0]), qmodel(*data[0])) > 25

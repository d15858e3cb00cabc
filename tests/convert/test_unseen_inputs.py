# SPDX-License-Identifier: Apache-2.0
"""Tests what conversion says of calibration data, what calls count, and what they refuse."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import eager

LITTLE = "calibration has seen too little"
BEYOND = "of the sampled values of"
CHECKS = torchq.QConfig(check_inputs=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    return nn.Sequential(*layers).eval()


class Branch(nn.Module):
    """Has no graph of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.low, self.high = network(), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.high(x) if x.mean() > 0 else self.low(x)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, images: Tensor) -> Tensor:
        return self.net((images - 0.5) / 0.2)


def images(rows: int = 8) -> Tensor:
    return torch.rand(rows, 3, 8, 8)


def told(run: Callable[[], object]) -> list[str]:
    """Return the warnings of torchq."""
    with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
        warnings.simplefilter("always")
        run()
    mine = [w for w in caught if str(w.message).startswith("torchq")]
    assert all(w.category is UserWarning and w.filename == __file__ for w in mine)
    return [str(w.message) for w in mine]


def quantized(model: nn.Module, config: torchq.QConfig | None = None) -> nn.Module:
    return torchq.quantize(model, [images() for _ in range(4)], config=config)


# Conversion


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (torch.zeros(8, 3, 8, 8), "input 'input' was 0 everywhere, in 8 rows."),
        (torch.full((1, 3, 8, 8), 0.5), "input 'input' was 0.5 everywhere, in 1 row."),
        (images(1), "input 'input' had 1 row."),
        (images(3), "input 'input' had 3 rows."),
    ],
    ids=["zeros", "constant", "one", "three"],
)
def test_conversion_says_what_calibration_cannot_tell(data: Tensor, expected: str) -> None:
    (text,) = told(lambda: torchq.quantize(network(), [data]))
    assert text.startswith(f"torchq.quantize: {LITTLE}") and expected in text
    prepared = torchq.calibrate(torchq.prepare(network(), data), [data])
    (text,) = told(lambda: torchq.convert(pickle.loads(pickle.dumps(prepared))))
    assert text.startswith("torchq.convert") and expected in text
    (text,) = told(lambda: eager.quantize(network(), [data], data))
    assert "the source of '0'" in text


@pytest.mark.parametrize("data", [[images(1)] * 4, [images(4)]], ids=["batches", "batch"])
def test_a_handful_of_rows_is_enough(data: list[Tensor]) -> None:
    assert told(lambda: torchq.quantize(network(), data)) == []
    assert told(lambda: torchq.quantize(Normalized().eval(), data)) == []


def test_what_weights_make_constant_is_no_fault_of_the_data() -> None:
    model = network()
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    assert told(lambda: torchq.quantize(model, [images()])) == []


def test_one_warning_names_the_inputs_of_all_parts() -> None:
    (text,) = told(lambda: torchq.quantize(Branch().eval(), [images(1)] * 2))
    assert "input 'input' of 'encoder' had 2 rows; the source of " in text


def test_recurrent_networks_have_inputs_too() -> None:
    (text,) = told(lambda: torchq.quantize(nn.LSTM(8, 8).eval(), [torch.zeros(5, 2, 8)]))
    assert "the input of the model was 0 everywhere" in text


def test_what_files_hold_does_not_tell_rows(tmp_path: Path) -> None:
    prepared = torchq.calibrate(torchq.prepare(network(), images()), [images(1)])
    torchq.save_calibration(prepared, tmp_path / "ranges")
    other = torchq.prepare(network(), images())
    torchq.load_calibration(other, tmp_path / "ranges")
    assert told(lambda: torchq.convert(other)) == []


# Calls


@pytest.mark.parametrize("make", [network, Normalized, Branch])
@pytest.mark.parametrize("loaded", [False, True])
def test_raw_calls_warn_once(make: Callable[[], nn.Module], loaded: bool, tmp_path: Path) -> None:
    """With 0 to 1 in calibration and 0 to 255 in calls, results were noise, silently."""
    qmodel = quantized(make().eval())
    if loaded:
        torchq.save(qmodel, tmp_path / "q")
        qmodel = torchq.load(tmp_path / "q", make().eval())
    name = {"network": "input 'input' ", "Normalized": "the source of 'net.0'", "Branch": "encoder"}
    (text,) = told(lambda: [qmodel(255 * images()) for _ in range(9)])
    assert BEYOND in text and name[make.__name__] in text and "Calibrate with data" in text
    first = torchq.explain(qmodel).inputs[0]
    assert first.clipped > 0.9 * first.sampled and first.seen[1] > 200 * first.range[1] / 3
    assert f"of {first.sampled} sampled values {first.clipped} clipped; range" in str(
        torchq.explain(qmodel)
    )
    assert len(told(lambda: copy.deepcopy(qmodel)(255 * images()))) == 1  # counts anew


def test_a_range_three_times_as_large_warns() -> None:
    data = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    qmodel = torchq.quantize(network(), data)
    assert told(lambda: [qmodel(torch.randn(8, 3, 8, 8)) for _ in range(300)]) == []
    qmodel = copy.deepcopy(qmodel)
    assert len(told(lambda: [qmodel(3 * torch.randn(8, 3, 8, 8)) for _ in range(9)])) == 1


@pytest.mark.parametrize("percentile", [99.9, 95.0])
def test_calibration_data_do_not_warn(percentile: float, tmp_path: Path) -> None:
    """Observers clip on purpose: 95 % five times as much as the warning allows of others."""
    observer = partial(torchq.observers.PercentileObserver, percentile)
    data = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    config = torchq.QConfig(activation_observer=observer)
    qmodel = torchq.quantize(network(), data, config=config)
    torchq.save(qmodel, tmp_path / "q")
    for model in (qmodel, torchq.load(tmp_path / "q", network())):
        assert told(lambda model=model: [model(x) for x in data * 50]) == []
    assert torchq.explain(qmodel).inputs[0].clipped > 0 or percentile > 99


def test_values_that_only_a_flat_function_reads_do_not_warn() -> None:
    class Squashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.sigmoid(x))

    data = [100 * torch.randn(64, 16)]
    qmodel = torchq.quantize(Squashed().eval(), data)
    assert told(lambda: [qmodel(data[0]) for _ in range(9)]) == []


def test_ranges_that_users_chose_do_not_warn() -> None:
    module = torchq.nn.Quantize(torchq.QParams.per_tensor(0.1, 0))
    assert told(lambda: module(torch.full((8, 8), 99.0))) == []


def test_nan_is_counted_and_said() -> None:
    qmodel, x = quantized(network()), images(1)[:, :, :4, :4]
    x = torch.cat([x, x], 2).repeat(1, 1, 1, 2)
    x[0, 0, 0, 0] = float("nan")
    told(lambda: qmodel(x))
    (row,) = torchq.explain(qmodel).inputs
    assert (row.sampled, row.clipped, row.nans) == (192, 0, 1)
    assert "sampled values 0 clipped, 1 NaN" in str(torchq.explain(qmodel))


def test_good_calls_add_no_line() -> None:
    qmodel = quantized(network())
    before = str(torchq.explain(qmodel))
    qmodel(0.5 * images())
    assert str(torchq.explain(qmodel)) == before.replace("model: 0 calls", "model: 1 calls")


def test_few_calls_are_sampled() -> None:
    """The others add 1 and compare: 0.4 us."""
    qmodel, x = quantized(network()), images(8)
    with torch.inference_mode():
        for _ in range(100):
            qmodel(x)
    assert torchq.explain(qmodel).inputs[0].sampled == 6 * 256  # calls 1, 3, 6, 13, 26 and 53


def test_both_sources_of_an_addition_are_sampled() -> None:
    one = torchq.QParams.per_tensor(0.1, 0)
    module = torchq.nn.QAdd([one, one], None)
    for _ in range(8):
        module(torch.zeros(4), torch.full((4,), 99.0))
    assert 0 < module._clips.clipped < module._clips.sampled


def test_counters_leave_models_as_they_are(tmp_path: Path) -> None:
    qmodel, x = quantized(network()), images()
    keys = list(qmodel.state_dict())
    torchq.save(qmodel, tmp_path / "before")
    torch.jit.trace(qmodel, x)
    exported = torch.export.export(qmodel, (x,)).graph
    qmodel(x)
    assert not any("take" in str(node.target) for node in exported.nodes)
    torchq.save(qmodel, tmp_path / "after")
    assert list(qmodel.state_dict()) == keys
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()
    assert not torchq.explain(copy.deepcopy(qmodel)).inputs
    scripted = torch.jit.script(qmodel)
    assert "isfinite" not in str(scripted.inlined_graph)


def test_threads_may_call_at_once() -> None:
    qmodel, x, failed = quantized(network()), images(), []

    def run() -> None:
        try:
            for _ in range(50):
                qmodel(x)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and torchq.explain(qmodel).inputs[0].sampled > 0


# NaN and inf


def spoiled() -> Tensor:
    x = images(2)
    x[1, 2, 3, 4], x[1, 2, 3, 5] = float("nan"), -float("inf")
    return x


FINITE = r"must be finite with check_inputs=True, got 1 NaN and 1 inf in shape \[2, 3, 8, 8\], the "


@pytest.mark.parametrize("make", [network, Normalized, Branch])
def test_check_inputs(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make().eval()
    x = spoiled()
    assert quantized(model)(x).isfinite().all()  # the default: NaN is the zero point
    qmodel = quantized(model, CHECKS)
    assert qmodel(images()).isfinite().all()
    torchq.save(qmodel, tmp_path / "q")
    copies = copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))
    for one in (qmodel, *copies, torchq.load(tmp_path / "q", model)):
        with pytest.raises(ValueError, match=FINITE + r"first at \[1, 2, 3, 4\]"):
            one(x)


def test_check_inputs_in_own_code_and_scripts() -> None:
    qmodel, x = quantized(network(), CHECKS), spoiled()
    handle = qmodel[0].register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=FINITE):
        qmodel(x)
    handle.remove()
    scripted = torch.jit.script(qmodel)
    with pytest.raises(torch.jit.Error, match=FINITE):
        scripted(x)
    y = images()
    assert torch.equal(scripted(y), qmodel(y))
    traced = torch.jit.trace(qmodel, y)
    exported = torch.export.export(qmodel, (y,)).module()
    assert torch.equal(traced(x[:1].repeat(8, 1, 1, 1)), exported(x[:1].repeat(8, 1, 1, 1)))


def test_check_inputs_of_recurrent_networks() -> None:
    data = [torch.rand(5, 4, 8)]
    for model in (nn.LSTM(8, 8).eval(), nn.GRU(8, 8).eval()):
        qmodel = torchq.quantize(model, data, config=CHECKS)
        with pytest.raises(ValueError, match="the input of the model must be finite"):
            qmodel(data[0] / 0)


def test_check_inputs_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="check_inputs must be a bool, got int"):
        torchq.QConfig(check_inputs=1)  # type: ignore[arg-type]

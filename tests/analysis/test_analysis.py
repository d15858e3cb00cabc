# SPDX-License-Identifier: Apache-2.0
"""Accuracy by layer, sensitivity, profile, calibration files and the HTML report."""

from __future__ import annotations

import math
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.analysis import speed, timing
from torchq.quantization.observers import MovingAverageObserver


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 5),
    ).eval()


@pytest.fixture(scope="module")
def flow() -> tuple[nn.Module, nn.Module, nn.Module, list[Tensor]]:
    model = network()
    data = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    prepared = torchq.calibrate(torchq.prepare(model, data[0]), data)
    return model, prepared, torchq.convert(prepared), data


def test_sqnr_is_the_ratio_of_energies() -> None:
    x, noise = torch.tensor([3.0, -4.0]), torch.tensor([0.3, 0.4])
    assert torchq.sqnr(x, x + noise) == pytest.approx(20.0)
    assert torchq.sqnr(x, x) == math.inf
    nested = {"a": x, "b": [x, (x,)], "id": torch.tensor(3)}
    moved = {"a": x + noise, "b": [x, (x,)], "id": torch.tensor(4)}
    assert torchq.sqnr(nested, moved) == pytest.approx(10 * math.log10(75 / 0.25))
    with pytest.raises(ValueError, match=r"torchq.sqnr: got must have the float tensors"):
        torchq.sqnr(x, torch.zeros(3))


def test_compare_measures_the_output_and_every_layer(flow) -> None:
    model, prepared, qmodel, data = flow
    accuracy = torchq.compare(prepared, qmodel, data)
    with torch.no_grad():
        expected, got = torch.cat([model(x) for x in data]), torch.cat([qmodel(x) for x in data])
    assert accuracy.output == pytest.approx(torchq.sqnr(expected, got), abs=1e-2)
    assert [layer.name for layer in accuracy.layers] == ["0", "3", "4", "6"]
    last = accuracy.layers[-1]
    assert last.sqnr == pytest.approx(accuracy.output, abs=1e-6)
    assert last.worst == pytest.approx(float((expected - got).abs().max()), rel=1e-4)
    assert all(layer.sqnr > 20 for layer in accuracy.layers)
    assert all(0 <= layer.clipped < 0.02 for layer in accuracy.layers)
    assert str(accuracy).splitlines()[0].startswith("output ")


def test_compare_sees_clipping(flow) -> None:
    _, prepared, qmodel, data = flow
    accuracy = torchq.compare(prepared, qmodel, [8 * data[0]])
    assert accuracy.layers[0].clipped > 0.1


def test_compare_leaves_observers_alone(flow) -> None:
    _, prepared, qmodel, data = flow
    before = {k: v.clone() for k, v in prepared.state_dict().items()}
    torchq.compare(prepared, qmodel, [100 * data[0]])
    assert all(torch.equal(v, before[k]) for k, v in prepared.state_dict().items())
    with pytest.raises(ValueError, match=r"torchq.compare: qmodel must be what torchq.convert"):
        torchq.compare(prepared, nn.Linear(3, 3), data)
    with pytest.raises(ValueError, match=r"torchq.compare: data must have at least one batch"):
        torchq.compare(prepared, qmodel, [])


def test_sensitivity_finds_the_layer_that_hurts() -> None:
    model = network()
    # Weights of a channel that is always zero take the steps from the others.
    with torch.no_grad():
        model[1].bias[0] = -1000
        model[3].weight[:, 0] *= 1000
    data = [torch.randn(4, 3, 8, 8)]
    config = torchq.QConfig(weight_granularity="per_tensor")
    found = torchq.sensitivity(model, data, data[0], config, progress=False)
    worst = found[0]
    assert worst.name == "3" and {layer.name for layer in found} == {"0", "3", "6"}
    assert worst.alone < min(layer.alone for layer in found[1:])
    assert worst.kept > worst.all_quantized
    kept = torchq.quantize(model, data, data[0], config, {"3": None})
    with torch.no_grad():
        assert worst.kept == pytest.approx(torchq.sqnr(model(data[0]), kept(data[0])))


def test_sensitivity_prints_a_table() -> None:
    data = [torch.randn(4, 3, 8, 8)]
    found = torchq.sensitivity(network(), data, progress=False)
    head, *lines = str(found).splitlines()
    assert head == f"output with all of these in int8 {found[0].all_quantized:.1f} dB"
    assert [line.split()[-1] for line in lines] == [entry.name for entry in found]
    assert f"{found[0].alone:.1f} dB alone in int8" in lines[0]
    assert str(type(found)()) == "no layers"


def test_sensitivity_leaves_out_what_stays_float() -> None:
    data = [torch.randn(4, 3, 8, 8)]
    found = torchq.sensitivity(network(), data, data[0], overrides={"0": None}, progress=False)
    assert {layer.name for layer in found} == {"3", "6"}
    with pytest.raises(ValueError, match=r"must have a convolution or linear that runs in int8"):
        torchq.sensitivity(network(), data, data[0], overrides={"*": None}, progress=False)


def test_profile_times_fused_layers_together(flow) -> None:
    model, _, qmodel, data = flow
    times = torchq.profile(model, qmodel, data[0], rounds=3)
    modules = {layer.name: set(layer.modules) for layer in times.layers}
    assert modules["0"] == {"0", "1", "2"}
    assert all(layer.float_ms > 0 and layer.int8_ms > 0 for layer in times.layers)
    assert all(0 < layer.share <= 1 for layer in times.layers)
    assert times.float_ms > 0 and "ms int8" in str(times)
    assert not model[0]._forward_hooks and not qmodel.get_submodule("0")._forward_hooks
    with pytest.raises(ValueError, match=r"rounds must be positive, got 0"):
        torchq.profile(model, qmodel, data[0], rounds=0)
    with pytest.raises(ValueError, match=r"rounds and calls must be positive, got 1 and 0"):
        torchq.milliseconds({"float": model}, data[0], 1, 0)
    with pytest.raises(TypeError, match=r"must be a dict of models, got Sequential\. Name each"):
        torchq.milliseconds(model, data[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", ["attribute", "object", "buffer"])
def test_what_a_model_kept_in_grad_mode(keep: str) -> None:
    class Keeps(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            if keep == "object":
                self.seen = SimpleNamespace(last=[y])
            else:
                self.last = y
            return super().forward(x)

    model = Keeps(*network())
    if keep == "buffer":
        model.register_buffer("last", torch.zeros(()))
    x = torch.randn(4, 3, 8, 8)
    qmodel = torchq.quantize(model.eval(), [x])
    model(x)
    assert torchq.quantize(model, [x])(x).shape == (4, 5)
    assert torchq.profile(model, qmodel, x, rounds=1).float_ms > 0
    assert len(torchq.sensitivity(model, [x], x)) == 3


def calibrated(data: list[Tensor], config: torchq.QConfig | None = None) -> nn.Module:
    return torchq.calibrate(torchq.prepare(network(), data[0], config), data)


def test_calibration_resumes_from_a_file(flow, tmp_path: Path) -> None:
    *_, data = flow
    expected = torchq.convert(calibrated(data))(data[0])
    torchq.save_calibration(calibrated(data[:1]), tmp_path / "one.pt")
    resumed = torchq.load_calibration(torchq.prepare(network(), data[0]), tmp_path / "one.pt")
    torchq.calibrate(resumed, data[1:])
    assert torch.equal(torchq.convert(resumed)(data[0]), expected)


def test_calibration_merges(flow, tmp_path: Path) -> None:
    *_, data = flow
    config = torchq.QConfig(activation_observer="minmax")
    expected = torchq.convert(calibrated(data, config))(data[0])
    torchq.save_calibration(calibrated(data[1:], config), tmp_path / "rest.pt")
    merged = torchq.load_calibration(calibrated(data[:1], config), tmp_path / "rest.pt", merge=True)
    assert torch.equal(torchq.convert(merged)(data[0]), expected)
    average = torchq.QConfig(activation_observer=MovingAverageObserver)
    torchq.save_calibration(calibrated(data[1:], average), tmp_path / "average.pt")
    with pytest.raises(RuntimeError):
        torchq.load_calibration(calibrated(data[:1], average), tmp_path / "average.pt", merge=True)


def test_calibration_files_are_checked(flow, tmp_path: Path) -> None:
    *_, data = flow
    prepared = torchq.prepare(network(), data[0])
    with pytest.raises(FileNotFoundError, match=r"torchq.load_calibration: path must be a file"):
        torchq.load_calibration(prepared, tmp_path / "none.pt")
    torch.save({"weight": torch.ones(3)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"which is not one"):
        torchq.load_calibration(prepared, tmp_path / "other.pt")
    config = torchq.QConfig(activation_observer="minmax")
    torchq.save_calibration(calibrated(data, config), tmp_path / "minmax.pt")
    with pytest.raises(ValueError, match=r"prepared must have the observers that '.*' holds"):
        torchq.load_calibration(prepared, tmp_path / "minmax.pt")
    with pytest.raises(ValueError, match=r"without observers"):
        torchq.save_calibration(network(), tmp_path / "float.pt")


def test_report_names_every_layer_and_needs_nothing_else(
    flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prepared, qmodel, data = flow
    monkeypatch.setattr(timing, "clock", count().__next__)
    monkeypatch.setattr(speed, "crowded", str)
    path = tmp_path / "report.html"
    torchq.write_report(path, model, prepared, qmodel, data, title="a <b> & c")
    text = path.read_text()
    assert "a &lt;b&gt; &amp; c in int8" in text
    body = text[text.rindex("<tbody>") : text.rindex("</tbody>")]
    assert body.count("<tr") == len(torchq.explain(qmodel).rows) == 7
    assert "3 of 3" in text and "fused into 0" in text
    for heading in ("Least accurate", "Most of the time", "What stays float, and why"):
        assert f"<h2>{heading}</h2>" in text
    assert re.search(r"[\d.]+ times (faster|slower) and [\d.]+ times smaller than float", text)
    assert text.count("<svg") == 5
    assert not re.search(r"https?://|src=|@import|\$[a-z]", text)
    accuracy = torchq.compare(prepared, qmodel, data)
    assert f"{accuracy.output:.1f} dB" in text


def test_functions_of_the_float_model_have_no_time() -> None:
    """There is no module to time: int8 is not said to be slower."""
    import models

    model = models.Wired(
        lambda m, x: m.nanc(m.a(x) + m.b(x) * m.b(x)),
        a=models.conv(),
        b=models.conv(),
        nanc=models.conv(),
    ).eval()
    x = torch.randn(models.IMAGE)
    times = torchq.profile(model, torchq.quantize(model, [x], x), x, rounds=3)
    unknown = [layer.name for layer in times.layers if math.isnan(layer.float_ms)]
    assert unknown and not {layer.name for layer in times.losing} & set(unknown)
    assert "        - ms float" in str(times) and "nan ms" not in str(times)
    assert "x  nanc" in str(times) and repr(times) == str(times)


class Recurrent(nn.Module):
    """Graph and model share the recurrent module: hooks of one are in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(3, 8, 3), nn.Linear(8, 4)
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(self.conv(x).transpose(1, 2))[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", ["compare", "profile", "emulate"])
def test_measurements_take_the_graph(what: str) -> None:
    """Also where calls that cannot are errors; calls behind them do, too."""
    torch.manual_seed(0)
    model, x = Recurrent().eval(), torch.randn(4, 3, 9)
    prepared = torchq.calibrate(torchq.prepare(model, x), [x])
    qmodel = torchq.convert(prepared, strict=True)
    results = {
        "compare": lambda: torchq.compare(prepared, qmodel, [x]),
        "profile": lambda: torchq.profile(model, qmodel, x, rounds=2),
        "emulate": lambda: torchq.saturation.emulate(qmodel, [x]),
    }
    assert {layer.name for layer in results[what]().layers} == {"conv", "rnn", "fc"}
    assert torchq.sqnr(model(x), qmodel(x)) > 20
    handle = qmodel.rnn.register_forward_hook(lambda *args: None)
    with pytest.raises(RuntimeError, match="hook that is newer than the graph"):
        qmodel(x)
    handle.remove()


def test_compare_measures_dynamic_layers() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(9, 8)
    prepared = torchq.prepare(model, x, torchq.QConfig(dynamic=True))
    accuracy = torchq.compare(prepared, torchq.convert(prepared), [x])
    assert [layer.name for layer in accuracy.layers] == ["0", "2"]
    assert accuracy.layers[-1].sqnr == accuracy.output > 20


@pytest.mark.parametrize("what", ["explain", "compare", "profile", "sensitivity", "emulate"])
def test_results_show_themselves(flow, what: str) -> None:
    """As text where Python prints them, as a table in a notebook."""
    model, prepared, qmodel, data = flow
    results = {
        "explain": lambda: torchq.explain(qmodel),
        "compare": lambda: torchq.compare(prepared, qmodel, data[:1]),
        "profile": lambda: torchq.profile(model, qmodel, data[0], rounds=1),
        "sensitivity": lambda: torchq.sensitivity(model, data[:1], data[0], progress=False),
        "emulate": lambda: torchq.saturation.emulate(qmodel, data[:1]),
    }
    result = results[what]()
    assert repr(result) == str(result) and "(rows=" not in repr(result)
    html = result._repr_html_()
    rows = {"explain": 7, "sensitivity": 3, "emulate": 3}.get(what, 4)
    assert html.startswith("<details open>" if what == "explain" else "<table>")
    assert html.count("<tr>") == 1 + rows
    assert html.count("<td") % rows == 0 and "<p>" in html


def test_tables_escape_names() -> None:
    layer = torchq.analysis.LayerAccuracy("<b>&", 1.0, 1.0, 0.0)
    assert "&lt;b&gt;&amp;" in torchq.analysis.Accuracy(1.0, (layer,))._repr_html_()

# SPDX-License-Identifier: Apache-2.0
"""The networks of the zoo: the full ones are what they say, narrow ones convert and are timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from benchmarks.inference import markdown, measure, quality
from benchmarks.inference.runtimes import Runtime
from benchmarks.models import NETWORKS
from tests.support.slow import rest_slow

pytestmark = pytest.mark.usefixtures("one_thread")

# Multiply-adds of convolutions, linears and LSTMs that must run in int8, where it is not all.
INT8_SHARE = {"unet": 0.95, "vit_b_16": 0.41}
INT8_SHARE["bert_base"] = 0.99  # its pooler has no part in the result, so the graph drops it
# Where narrow variants differ from ordinary: few channels average less noise away.
SQNR_DB = {"mobilenet_v3": 16, "inception_v3": 18, "detector": 15, "efficientnet_b0": 15}


# Which convert in `make test`: plain, with branches that join, and with functions between layers.
QUICK = ("resnet18", "shufflenet_v2", "mobilenet_v3")


@pytest.fixture(params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if not NETWORKS[chosen].available:
        pytest.skip(f"{chosen} needs {NETWORKS[chosen].requires}")
    return chosen


def test_full_networks_have_the_published_size(name: str) -> None:
    network = NETWORKS[name]
    with torch.device("meta"):
        model = network.make().eval()
    if network.parameters is not None:
        assert sum(p.numel() for p in model.parameters()) == network.parameters
    counts = quality.macs(model, network.inputs(1))
    if network.macs is not None:
        assert sum(counts.values()) / 1e9 == pytest.approx(network.macs, rel=0.005)


@pytest.mark.parametrize(
    "name",
    rest_slow(NETWORKS, *QUICK),
    indirect=True,
)
def test_narrow_networks_convert(name: str) -> None:
    network = NETWORKS[name]
    model, batches = network.build(small=True), network.calibration(small=True)
    inputs = network.inputs(8, small=True)
    batch = network.batch
    expected, counts = quality.run(model, inputs, batch), quality.macs(model, inputs[:1])
    assert all(bool(result.isfinite().all()) for result in expected)

    converted = torchq.quantize(model, batches, batches[0][:batch])

    left = quality.float_layers(converted, counts)
    assert all(reason for *_, reason in left)
    share = 1 - sum(layer[2] for layer in left) / sum(counts.values())
    assert share >= INT8_SHARE.get(name, 1.0), left
    outputs = quality.run(converted, inputs, batch)
    assert torchq.sqnr(expected, outputs) > SQNR_DB.get(name, 20)
    scripted = measure.frozen(converted, inputs[:batch])
    assert all(map(torch.equal, quality.run(scripted, inputs, batch), outputs))


def test_weights_and_inputs_are_the_same_in_every_run() -> None:
    network = NETWORKS["mobilenet_v2"]
    first, inputs = network.build(small=True).state_dict(), network.inputs(4)
    torch.manual_seed(1234)
    torch.set_num_threads(2)
    second = network.build(small=True).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(inputs, network.inputs(4))
    assert not torch.equal(inputs, network.calibration()[0])


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (1, 4, 5, 7), 6 * 5 * 7 * 2 * 9),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (1, 4, 5, 7), 4 * 5 * 7 * 6 * 4),
        (nn.Linear(8, 3), (2, 5, 8), 2 * 5 * 8 * 3),
        (nn.LSTM(8, 3, batch_first=True, bidirectional=True), (2, 5, 8), 2 * 5 * 2 * 12 * 11),
    ],
    ids=["grouped", "transposed", "linear", "lstm"],
)
def test_multiply_adds(module: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    assert quality.macs(nn.Sequential(module), torch.zeros(shape)) == {"0": expected}


@pytest.mark.slow
def test_the_command_writes_times_and_tables(benchmarks: Any, tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.md"
    peers = [peer for peer in measure.PEERS if measure.installed(peer)]
    options = ("--quick", "--small", "--json", str(rows), "--markdown", str(page))
    result = benchmarks("models", "--model", "shufflenet_v2", "--threads", "1", *options)
    assert result.returncode == 0, result.stderr
    assert "shufflenet_v2: 0.000 GMAC, 100.0% in int8" in result.stdout
    row = json.loads(rows.read_text())
    assert (row["model"], row["threads"], row["failures"]) == ("shufflenet_v2", 1, {})
    assert list(row["peers"]) == peers
    times = [row["torchq_ms"], row["torchq_script_ms"], row["float_ms"], *row["peers"].values()]
    assert all(0 < ms < 1e4 for ms in times)
    # names and specs are most of so small a file
    assert 0 < row["torchq_bytes"] < 1.6 * row["float_bytes"]
    text = page.read_text()
    assert "Time on 1 thread, ms" in text and "| shufflenet_v2 | " in text


def test_unknown_peers_are_named(benchmarks: Any) -> None:
    result = benchmarks("models", "--model", "unet", "--peers", "tensorrt")
    assert result.returncode == 1
    assert "--peers must be of torch_ao, torch_ao_jit, onnxruntime, openvino, got tensorrt" in (
        result.stderr
    )


def test_a_runtime_that_cannot_start_says_why(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(RuntimeError, match="NoSuchFile"):
        Runtime("onnxruntime", tmp_path / "absent.onnx", torch.zeros(1, 3), 1)


@pytest.mark.slow
def test_a_contender_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(measure.torch_ao, "quantized", fail)
    plan = measure.Plan(block_seconds=1e-4, rounds=1, blocks=1, pause_seconds=0)
    found = measure.measure("squeezenet", ["torch_ao", "torch_ao_jit"], [1], plan, small=True)
    assert found.failures["torch_ao"] == "RuntimeError: first line"
    assert set(found.times[1]) == {"torchq", "torchq_script", "float"}
    assert found.rows()[0]["peers"] == {}


def test_a_trace_with_other_bits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(model: nn.Module, src: Tensor) -> measure.Model:
        return lambda x: model(x) + 1

    monkeypatch.setattr(measure, "frozen", other)
    plan = measure.Plan(block_seconds=1e-4, rounds=1, blocks=1, pause_seconds=0)
    with pytest.raises(RuntimeError, match="torchq_script has other bits"):
        measure.measure("squeezenet", [], [1], plan, small=True)


@pytest.mark.slow
def test_other_ways_to_run_it() -> None:
    plan = measure.Plan(block_seconds=1e-4, rounds=1, blocks=1, pause_seconds=0)
    found = measure.measure("squeezenet", [], [1], plan, small=True, ways=measure.WAYS)
    assert found.failures == {}
    assert set(found.rows()[0]["ways"]) == {"torchq_export", "torchq_compile"}
    rows = [{**row, "share_of_peak": 1, "torch": "", "isa": "", "cpu": ""} for row in found.rows()]
    assert "| model | eager | frozen TorchScript | torch.export | torch.compile |" in (
        markdown.page(rows)
    )


def test_the_best_of_a_row_is_bold() -> None:
    assert markdown._figures([2.0, None, 1.0], 1, min) == ["2.0", "-", "**1.0**"]

# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run and write what they promise. Their times are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchq
from benchmarks import ops, report, timing
from benchmarks.competitors import Competitor
from benchmarks.peak import BusyMachineError, Peak
from benchmarks.primitives import ELEMENTWISE
from benchmarks.suites import SUITES, Conv, total_macs

ROOT = Path(__file__).parent.parent
FIELDS = [
    *("suite", "layer", "count", "src_dtype", "threads", "isa", "ops"),
    *("kernel_us", "call_us", "peers", "peak_gops"),
]


def benchmarks(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("network,gmacs", [("resnet50", 4.09), ("mobilenet_v2", 0.30)])
def test_counts_make_up_the_network(network: str, gmacs: float) -> None:
    assert round(total_macs(SUITES[network]) / 1e9, 2) == gmacs


@pytest.mark.parametrize("suite", SUITES)
def test_names_are_unique_and_macs_are_torchs(suite: str) -> None:
    layers = list(SUITES[suite])
    assert len({layer.name for layer in layers}) == len(layers)
    for layer in layers:
        weight = torch.empty(layer.weight_shape, device="meta")
        src = torch.empty(layer.src_shape, device="meta")
        if isinstance(layer, Conv):
            window = (layer.stride, layer.padding, 1, layer.groups)
            dst = torch.nn.functional.conv2d(src, weight, None, *window)
        else:
            dst = torch.nn.functional.linear(src, weight)
        assert dst.shape == layer.dst_shape
        assert layer.macs == dst.numel() * weight[0].numel()


def test_resnet50_names_its_fused_sums() -> None:
    sums = {layer.name: count for layer, count in SUITES["resnet50"].items() if layer.residual}
    assert sums == {
        "1x1 64->256 + sum, 56": 3,
        "1x1 128->512 + sum, 28": 4,
        "1x1 256->1024 + sum, 14": 6,
        "1x1 512->2048 + sum, 7": 3,
    }


@pytest.mark.parametrize("src", ["u8", "s8"])
def test_ops_writes_rows_and_a_chart(src: str, tmp_path: Path) -> None:
    table, chart = tmp_path / "rows.json", tmp_path / "ratios.png"
    outputs = ("--json", str(table), "--plot", str(chart))
    result = benchmarks("ops", "--suite", "small", "--quick", "--src", src, *outputs)
    assert result.returncode == 0, result.stderr
    rows = json.loads(table.read_text())
    assert [row["layer"] for row in rows] == [layer.name for layer in SUITES["small"]]
    for row, (layer, count) in zip(rows, SUITES["small"].items(), strict=True):
        assert list(row) == FIELDS
        assert (row["suite"], row["src_dtype"], row["threads"]) == ("small", src, 1)
        assert (row["ops"], row["count"]) == (2 * layer.macs, count)
        assert row["isa"] == torchq.isa()
        assert set(row["peers"]) <= {"onednn", "torch"}
        assert min(row["kernel_us"], row["call_us"], row["peak_gops"]) > 0
        assert all(us > 0 for us in row["peers"].values())
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "geometric mean" in result.stdout


def test_elementwise_writes_rows(tmp_path: Path) -> None:
    table = tmp_path / "rows.json"
    result = benchmarks("ops", "--suite", "elementwise", "--quick", "--json", str(table))
    assert result.returncode == 0, result.stderr
    rows = json.loads(table.read_text())
    assert [row["layer"] for row in rows] == [layer.name for layer in ELEMENTWISE]
    assert len({row["layer"] for row in rows}) == len(rows)
    assert all(list(row) == FIELDS and row["kernel_us"] > 0 for row in rows)


def test_peak_runs() -> None:
    result = benchmarks("peak", "--quick", "--threads", "1")
    assert result.returncode == 0, result.stderr
    assert "clock, GHz" in result.stdout and "linear 4x64->64, module" in result.stdout


def test_an_unknown_peer_is_named() -> None:
    result = benchmarks("ops", "--suite", "small", "--peers", "fbgemm")
    assert result.returncode == 1
    assert result.stderr == "benchmarks: --peers must be of onednn, torch, got fbgemm.\n"


def test_a_busy_machine_is_refused() -> None:
    def peak(measured: float | None) -> Peak:
        return Peak(1, 3.7, None if measured is None else 473.6, measured, 473.6)

    peak(None).check_quiet()
    peak(0.981 * 473.6).check_quiet()
    with pytest.raises(BusyMachineError, match=r"is busy.* 97.5% of the 474 .*Stop what else runs"):
        peak(0.975 * 473.6).check_quiet()


@pytest.mark.parametrize("wrong", ["bits", "peer"])
def test_a_wrong_result_is_not_timed(wrong: str) -> None:
    layer = next(iter(SUITES["small"]))
    right = torch.full(layer.dst_shape, 7, dtype=torch.uint8)
    peer = Competitor(right + (2 if wrong == "peer" else 1), lambda *_: [1.0])
    expected = right + (1 if wrong == "bits" else 0)
    with pytest.raises(RuntimeError, match="Nothing was timed"):
        ops.verify(layer, right, expected, {"onednn": peer})


def test_competitors_take_turns() -> None:
    turns: list[str] = []

    def competitor(name: str) -> timing.Blocks:
        def blocks(iterations: int, count: int) -> list[float]:
            turns.append(name)
            return [1e-3] * count

        return blocks

    plan = timing.Plan(block_seconds=1e-3, rounds=3, blocks=2, pause_seconds=0)
    samples = timing.interleave({"a": competitor("a"), "b": competitor("b")}, plan)
    assert turns[2:] == ["a", "b"] * 3
    assert len(samples["a"].values) == 6
    assert samples["b"].median == pytest.approx(1000)


def test_ratios_compare_like_with_like() -> None:
    """Native oneDNN with the time inside C++, torch's op with the time of the call."""
    us = {name: timing.Samples([value]) for name, value in (("onednn", 6), ("torch", 20))}
    times = report.Times("gemm", timing.Samples([4]), timing.Samples([10]), us)
    row = report.Row("small", "4x64->64", 1, "u8", 1, "avx2", 32768, 100, times)
    assert (row.ratio("onednn"), row.ratio("torch")) == (1.5, 2)
    assert row.gops == pytest.approx(32768 / 4e3)


def test_rnn_command(tmp_path: Path) -> None:
    path = tmp_path / "rnn.json"
    run = benchmarks("rnn", "--quick", "--json", str(path))
    if "cannot download" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    rows = json.loads(path.read_text())
    assert [row["layer"] for row in rows] == ["lstm H=64 N=2", "gru H=64 N=2"]
    for row in rows:
        assert row["kernel_us"] > 0 and set(row["peers"]) == {"onednn", "torch.ao", "float"}

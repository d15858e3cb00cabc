# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run and write what they promise. Their times are not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchq
from benchmarks import ops, report, rnn, timing
from benchmarks import peak as peak_module
from benchmarks.competitors import Competitor
from benchmarks.lines import read_lines
from benchmarks.ops import LAYERS
from benchmarks.peak import BusyMachineError, Peak
from benchmarks.suites import SUITES, Conv, total_macs

ROOT = Path(__file__).parents[2]
FIELDS = [
    *("suite", "layer", "count", "src_dtype", "threads", "isa", "ops"),
    *("kernel_us", "call_us", "peers", "peak_gops"),
]


Command = Callable[..., subprocess.CompletedProcess[str]]


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
def test_ops_writes_rows_and_a_chart(benchmarks: Command, src: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("suite", ["elementwise", "dynamic"])
def test_a_suite_of_other_ops_writes_rows(benchmarks: Command, suite: str, tmp_path: Path) -> None:
    table = tmp_path / "rows.json"
    options = ("--peers", "onednn,torch", "--quick", "--json", str(table))
    result = benchmarks("ops", "--suite", suite, *options)
    assert result.returncode == 0, result.stderr
    rows = json.loads(table.read_text())
    assert [row["layer"] for row in rows] == [layer.name for layer in LAYERS[suite]]
    assert len({row["layer"] for row in rows}) == len(rows)
    assert all(list(row) == FIELDS and row["kernel_us"] > 0 for row in rows)


def test_peak_runs() -> None:
    command = [sys.executable, "-m", "benchmarks", "peak", "--quick", "--threads", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "clock, GHz" in result.stdout and "linear 4x64->64, module" in result.stdout


def test_an_unknown_peer_is_named(benchmarks: Command) -> None:
    result = benchmarks("ops", "--suite", "small", "--peers", "fbgemm")
    assert result.returncode == 1
    assert result.stderr == "benchmarks: --peers must be of onednn, torch, torchao, got fbgemm.\n"


def test_a_busy_machine_is_refused() -> None:
    def peak(measured: float | None) -> Peak:
        return Peak(1, 3.7, None if measured is None else 473.6, measured, 473.6)

    peak(None).check_quiet()
    peak(0.981 * 473.6).check_quiet()
    with pytest.raises(BusyMachineError, match=r"is busy.* 97.5% of the 474 .*Stop what else runs"):
        peak(0.975 * 473.6).check_quiet()


def test_a_peak_is_measured_until_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Peak(2, 3.7, 100.0, measured, 100.0) for measured in (90.0, 97.9, 98.0, 99.0)]
    left = iter(found)
    monkeypatch.setattr(peak_module, "_measure", lambda *_: next(left))
    assert peak_module.measure(2, "avx2", 2) is found[1]
    assert peak_module.measure(2, "avx2", 2) is found[2]


@pytest.mark.parametrize(
    ("fractions", "kept", "worse"),
    [
        ([0.99, 0.98], 0, 0.98),
        ([0.99, 0.5, 0.99, 0.99], 1, 0.99),  # busy after the first
        ([0.5, 0.9, 0.8, 0.7, 0.6, 0.9], 1, 0.7),  # never quiet: the best of three
    ],
)
def test_rnn_times_are_those_of_a_quiet_machine(
    fractions: list[float], kept: int, worse: float
) -> None:
    rates = iter(fractions)
    plan = timing.Plan(block_seconds=1e-9, rounds=1, blocks=1, pause_seconds=0)
    tries = 0

    def peak() -> Peak:
        nonlocal tries
        tries += 1
        return Peak(1, 3.7, 100.0, 100 * next(rates), 100.0)

    def blocks(iterations: int, count: int) -> list[float]:
        return [1e-6 * (1 + (tries - 1) // 2)] * count

    cells = {"lstm": {"kernel": blocks}, "gru": {"kernel": blocks}}
    found = rnn.measured(cells, plan, peak, 3)
    assert next(rates, None) is None
    assert found.peak.fraction == pytest.approx(worse)
    for cell in cells:
        assert found.times[cell]["kernel"].median == pytest.approx(kept + 1)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("wrong", ["bits", "peer"])
def test_a_wrong_result_is_not_timed(wrong: str, saturate: bool) -> None:
    """But a peer's, where that is how it computes."""
    layer = next(iter(SUITES["small"]))
    right = torch.full(layer.dst_shape, 7, dtype=torch.uint8)
    near, far = (Competitor(right + steps, lambda *_: [1.0]) for steps in (1, 2))
    peers = {"near": near, "far": far if wrong == "peer" else near}
    expected = right + (1 if wrong == "bits" else 0)
    if saturate and wrong == "peer":
        assert ops.verify(layer.name, right, expected, peers, saturate=True) == {"far"}
        return
    with pytest.raises(RuntimeError, match="Nothing was timed"):
        ops.verify(layer.name, right, expected, peers, saturate=saturate)


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


@pytest.mark.parametrize("block_seconds", [1e-3, 3e-3, 9e-3], ids="{}".format)
def test_cold_caches_are_not_counted(block_seconds: float) -> None:
    """The first executions of each turn wait for memory that other turns have displaced."""

    def blocks(iterations: int, count: int) -> list[float]:
        executions = [4e-3, 3e-3, 2e-3] + [1e-3] * (iterations * count)
        starts = range(0, iterations * count, iterations)
        return [sum(executions[at : at + iterations]) / iterations for at in starts]

    plan = timing.Plan(block_seconds=block_seconds, rounds=2, blocks=2, pause_seconds=0)
    samples = timing.interleave({"a": blocks}, plan)
    assert samples["a"].values == pytest.approx([1000] * 4)


def test_ratios_compare_like_with_like(capsys: pytest.CaptureFixture[str]) -> None:
    """Native oneDNN with the time inside C++, torch's op with the time of the call."""
    us = {name: timing.Samples([value] * 2) for name, value in (("onednn", 6), ("torch", 20))}
    times = report.Times("gemm", timing.Samples([4] * 2), timing.Samples([10] * 2), us, {"torch"})
    row = report.Row("small", "4x64->64", 1, "u8", 1, "avx2", 32768, 100, times)
    assert (row.ratio("onednn"), row.ratio("torch")) == (1.5, 2)
    assert row.gops == pytest.approx(32768 / 4e3)
    report.print_row(row, ["onednn", "torch"])
    report.print_summary([row])
    table, _, summary = capsys.readouterr().out.partition("\n")
    assert " 1.50 " in table and " 2.00*" in table
    assert "* a wrong result" in summary


def test_rnn_command(benchmarks: Command, tmp_path: Path) -> None:
    path = tmp_path / "rnn.json"
    run = benchmarks("rnn", "--quick", "--json", str(path))
    if "cannot download" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    rows = json.loads(path.read_text())
    assert [row["layer"] for row in rows] == ["lstm H=64 N=2", "gru H=64 N=2"]
    for row in rows:
        assert row["kernel_us"] > 0 and set(row["peers"]) == {"onednn", "torch.ao", "float"}


LOGGED = """
import torch, torchq, torchq.functional as TF
from torchq import Attr, PostOps
# -128: no kernel for weights whose pairs fit 16 bits, which the random ones of a repetition do not
# where there are many
u8, s8 = (lambda *shape: torch.zeros(shape, dtype=torch.uint8)), (
    lambda *shape: torch.full(shape, -128, dtype=torch.int8))
def attr(text="", values=(), dst=0.5, zero=None):
    a = Attr().set_scales("src", 0, 0.01).set_scales("weights", 0, 0.01)
    a = a.set_scales("dst", 0, dst) if dst else a
    a = a if zero is None else a.set_zero_points("src", 0, zero)
    return a.set_post_ops(PostOps.parse(text).with_values(values))
def conv(src, weight, a, dtype=torch.uint8, **window):
    getattr(TF, f"conv{src.dim() - 2}d")(src, weight, attr=a, dst_dtype=dtype, **window)
for _ in range(2):
    TF.linear(u8(5, 40), s8(9, 40), None, attr("eltwise_relu", zero=7), torch.uint8)
TF.linear(s8(2, 3, 40), s8(9, 40), torch.ones(9), attr(dst=None))
conv(u8(1, 8, 9, 7), s8(12, 8, 3, 3), attr("sum:0.5+eltwise_clip:0:6"), torch.int8, stride=2,
     padding=1, post_op_srcs=[s8(1, 12, 5, 4)])
conv(s8(2, 8, 9), s8(8, 1, 3), attr(zero=-3), groups=8, dilation=2)
conv(u8(1, 4, 5, 5, 5), s8(6, 4, 2, 2, 2), Attr(), torch.int32)
conv(u8(1, 8, 6, 6), s8(32, 4, 1, 1),
     attr("eltwise_tanh+binary_mul:2+prelu:0", [torch.ones(32), [0.5]]), groups=2)
conv(u8(1, 8, 6, 6), u8(32, 8, 1, 1), attr().set_zero_points("weights", 0, 100))
TF.max_pool(u8(1, 8, 6, 6), 2)
"""


def test_lines_are_repeated(benchmarks: Command, tmp_path: Path) -> None:
    """A line of TORCHQ_VERBOSE can be repeated, and the repetition prints the same line."""
    environment = {**os.environ, "TORCHQ_VERBOSE": "1"}
    command = [sys.executable, "-c", LOGGED]
    log = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = log.stdout.splitlines()
    (tmp_path / "log").write_text("what else the program prints\n" + log.stdout)
    rows = tmp_path / "rows.json"
    result = benchmarks("ops", "--line", str(tmp_path / "log"), "--quick", "--json", str(rows))
    assert result.returncode == 0, result.stderr
    assert "not repeated: 1 x max_pool" in result.stderr
    table = json.loads(rows.read_text())
    assert [row["count"] for row in table] == [2, 1, 1, 1, 1, 1, 1]
    assert table[0]["layer"] == "linear u8[5,40]->u8[5,9]" and table[0]["ops"] == 2 * 5 * 40 * 9
    if "no onednn" not in result.stderr:
        compared = {row["layer"] for row in table if row["peers"]}  # it refuses some zero points
        assert len(compared) >= 4 and "conv 3x3 u8[1,8,9,7]->s8[1,12,5,4]" in compared
    repeat = """
import sys
from benchmarks.lines import LoggedCall, LoggedLayer
for line in sys.stdin:
    op, args = LoggedCall(LoggedLayer.parse(line)).torchq
    op(*args)
"""
    again = subprocess.run(
        [sys.executable, "-c", repeat],
        cwd=ROOT,
        input="\n".join(lines[:-1]),
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    ).stdout.splitlines()
    described = [line.rsplit(",", 1)[0] for line in lines[:-1]]
    assert [line.rsplit(",", 1)[0] for line in again] == described


def test_line_from_the_command_line(benchmarks: Command) -> None:
    line = (
        "torchq,exec,linear,uint8[4, 64] -> uint8[4, 64] scales:src:0+weights:1+dst:0 "
        "post_ops:eltwise_relu,gemm:avx2,0.01"
    )
    result = benchmarks("ops", "--line", line, "--quick", "--peers", "")
    assert result.returncode == 0, result.stderr
    assert "linear u8[4,64]->u8[4,64]" in result.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("conv 3x3", "--line must be a line that TORCHQ_VERBOSE=1 prints"),
        (
            "torchq,exec,add,uint8[1] uint8[1] -> uint8[1],add:avx2,0.1",
            "can repeat linear and conv",
        ),
        ("torchq,exec,conv,uint8[1, 1, 1] -> uint8[1, 1, 1],gemm:avx2,0.1", "do not fit"),
        (
            "torchq,exec,linear,uint8[2, 3] -> uint8[2, 4] post_ops:relu,gemm:avx2,0.1",
            "got 'relu': post-op must be",
        ),
    ],
)
def test_lines_that_cannot_be_repeated(line: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        read_lines(line)

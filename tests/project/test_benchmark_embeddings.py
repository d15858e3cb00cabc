# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks embeddings``: its rows, its turns, and its page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.encoders.command import turns
from benchmarks.encoders.markdown import page, peaks

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_rows_and_page(benchmarks: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    data, text, again = (tmp_path / name for name in ("rows.json", "page.md", "again.md"))
    result = benchmarks(
        *("embeddings", "--quick", "--network", "tiny", "--contender", "PyTorch", "torchq"),
        *("--json", str(data), "--markdown", str(text)),
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(data.read_text())
    assert not results["failures"]["tiny"]
    assert {row["contender"] for row in results["rows"]} == {
        "PyTorch, float32", "PyTorch, bfloat16", "torchq, static", "torchq, dynamic",
    }  # fmt: skip
    for row in results["rows"]:
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"] and row["rounds"] >= 3
    for name, decibels in results["sqnr_db"]["tiny"].items():
        assert decibels > 20, name
    assert text.read_text() == page(results) and "## tiny" in text.read_text()
    done = benchmarks("embeddings", "--render", str(data), "--markdown", str(again))
    assert done.returncode == 0 and again.read_text() == text.read_text()


class Slow(nn.Module):
    """Takes the time that its sources say, on a clock of its own."""

    def __init__(self, clock: list[float], first: float, later: float) -> None:
        super().__init__()
        self.clock, self.first, self.later, self.calls = clock, first, later, 0

    def forward(self, src: Tensor) -> Tensor:
        self.clock[0] += self.first if self.calls == 0 else self.later
        self.calls += 1
        return src


@pytest.mark.parametrize("seconds,rounds", [(0.0, 3), (36.0, 11), (1000.0, 21)])
def test_turns_share_the_time(seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.encoders.command.time.perf_counter", lambda: clock[0])
    models = {"a": Slow(clock, 3.0, 1.0), "b": Slow(clock, 2.0, 2.0)}
    times = turns(models, torch.zeros(1), seconds)
    assert {len(t.rounds) for t in times.values()} == {rounds}
    assert times["a"].median == 1000.0 and times["a"].rounds[0] == 3000.0  # its first call counts
    assert clock[0] <= max(seconds, 11.0)
    short = {"c": Slow(clock, 5e-3, 1e-3)}
    assert turns(short, torch.zeros(1), 0.0)["c"].rounds == pytest.approx((1.0, 1.0, 1.0))


def test_peaks_and_what_is_missing() -> None:
    row = {"network": "bge-base", "length": 16, "low_ms": 1.0, "high_ms": 9.0, "rounds": 3}
    rows = [
        {**row, "contender": "PyTorch, float32", "batch": 1, "ms": 2.0},
        {**row, "contender": "PyTorch, float32", "batch": 8, "ms": 10.0},
        {**row, "contender": "torchq, static", "batch": 1, "ms": 1.0},
        {**row, "contender": "torchq, static", "batch": 8, "ms": 2.0},
    ]
    assert peaks(rows) == {("PyTorch, float32", 16): 800.0, ("torchq, static", 16): 4000.0}
    text = page(
        {
            "rows": rows, "sqnr_db": {"bge-base": {"torchq, static": 30.0}}, "cpu": "C",
            "failures": {"bge-base": {"OpenVINO, int8": "ImportError: no"}}, "isa": "avx2",
            "threads": 1, "versions": {"torch": "2"}, "share_of_peak": 0.5,
        }
    )  # fmt: skip
    assert "| torchq, static | **4000** (5.00x) | 30.0 |" in text
    assert "torchq is 5.0x to 5.0x as fast as float32" in text
    assert "| torchq, static | 1.00 (1.00 to 9.00) |" in text
    assert "The machine was busy." in text and "- bge-base, OpenVINO, int8: ImportError: no" in text

# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks migrate``: its rows, its page, and the lines that it counts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from benchmarks.migrate import contenders
from benchmarks.migrate.markdown import page

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_rows_and_page(benchmarks: Command, tmp_path: Path) -> None:
    data, text = tmp_path / "rows.json", tmp_path / "page.md"
    result = benchmarks(
        *("migrate", "--quick", "--small", "--model", "LSTM tagger", "recommender"),
        *("--contender", "torch.ao", "torchq dynamic", "torchq static"),
        *("--json", str(data), "--markdown", str(text)),
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(data.read_text())
    rows = {(row["model"], row["contender"]): row for row in results["rows"]}
    assert rows["LSTM tagger", "torch.ao"]["lines"] == 2
    for name in ("torch.ao", "torchq dynamic", "torchq static"):
        row = rows["LSTM tagger", name]
        assert not row["failure"] and row["ms"] > 0 and row["sqnr_db"] > 25
        assert 0 < row["bytes"] < rows["LSTM tagger", "float"]["bytes"] * 1.5
    assert ("recommender", "torchq static") not in rows
    table = rows["recommender", "torchq dynamic"]
    assert bool(table["failure"]) != hasattr(torchq.nn, "QEmbeddingBag")
    assert text.read_text() == page(results)
    assert "## recommender" in text.read_text() and results["cpu"] in text.read_text()

    again = tmp_path / "again.md"
    assert benchmarks("migrate", "--render", str(data), "--markdown", str(again)).returncode == 0
    assert again.read_text() == text.read_text()


def test_a_failure_is_told_and_not_timed() -> None:
    row = {"model": "m", "lines": None, "ms": None, "bytes": None, "sqnr_db": None}
    good = {**row, "contender": "a", "lines": 2, "ms": 1.5, "bytes": 2e6, "sqnr_db": 30.0}
    text = page(
        {
            "rows": [
                {**good, "contender": "float", "ms": 1.0, "sqnr_db": None, "failure": ""},
                {**good, "failure": ""},
                {**row, "contender": "b", "failure": "it has no form"},
            ],
            **{"cpu": "C", "isa": "avx2", "threads": 1, "versions": {"torch": "2"}},
        }
    )
    assert "| a | 2 | **1.5** | **2.00** | **30.0** |" in text
    assert "| float | 2 | 1 | 2.00 |  |" in text
    assert "- b: it has no form" in text


def test_lines_are_those_of_the_code() -> None:
    assert contenders.lines_of(contenders.torchq_dynamic) == 2  # with `import torchq`
    assert contenders.lines_of(contenders.ao_static) == 8
    code = contenders.code_of(contenders.ao_dynamic)
    assert "def " not in code and code.endswith("quantize_dynamic(model, {nn.Linear, nn.LSTM})")


@pytest.mark.parametrize("make", [contenders.ao_static, contenders.torchq_static])
def test_static_contenders(make: contenders.Make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    assert torchq.sqnr(model(batches[0]), make(model, batches)(batches[0])) > 25


def test_torchao_takes_part() -> None:
    pytest.importorskip("torchao")
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(),
        torch.randn(4, 64),
    )
    made = contenders.torchao_eager(model, [x])
    with torch.no_grad():
        assert 25 < torchq.sqnr(model(x), made(x)) < 80

# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks generate``: its rows, its page, and what it says of a peer that fails."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.generation.markdown import page
from benchmarks.generation.shapes import SHAPES, interleaved, prompt, words
from benchmarks.generation.worker import FailedError, Worker

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_rows_and_page(benchmarks: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    data, text, again = (tmp_path / name for name in ("rows.json", "page.md", "again.md"))
    options = "--shape", "tiny", "--prompts", "8", "40", "--count", "6", "--rounds", "2"
    result = benchmarks(
        *("generate", *options, "--folder", str(tmp_path), "--contender", "torchq"),
        *("--json", str(data), "--markdown", str(text)),
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(data.read_text())
    assert results["failures"] == {"tiny": {}}
    found = [(row["prompt"], row["contender"]) for row in results["rows"]]
    names = "PyTorch, float32", "torchq, int8", "torchq, int4"
    assert found == [(length, name) for length in (8, 40) for name in names]
    for row in results["rows"]:
        assert 0 < row["token_low_ms"] <= row["token_ms"] <= row["token_high_ms"]
        assert row["prompt_ms"] > 0
    assert all(row["load_s"] > 0 and row["peak_mb"] > 0 for row in results["memory"])
    sizes = [(tmp_path / "tiny" / f"torchq{bits}.safetensors").stat().st_size for bits in (8, 4)]
    assert sizes[1] < sizes[0]
    assert text.read_text() == page(results) and "## tiny" in text.read_text()
    done = benchmarks("generate", "--render", str(data), "--markdown", str(again))
    assert done.returncode == 0 and again.read_text() == text.read_text()


@pytest.mark.slow
def test_a_contender_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"(Error|Exception): .*(CTranslate2|ctranslate2)"):
        Worker("CTranslate2, int8", "tiny", tmp_path, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_has_its_words_and_prompts(name: str) -> None:
    shape = SHAPES[name]
    names = words(shape.vocabulary)
    assert len({*names}) == shape.vocabulary
    known = {*names}
    assert all(one[:-1] in known and one[-1] in known for one in names[256:])  # so merges make them
    ids = prompt(shape, 100)
    assert ids == prompt(shape, 100) and all(256 <= i < shape.vocabulary for i in ids)


def test_rates_beside_float() -> None:
    row = {"shape": "tiny", "prompt": 8, "rounds": 2, "token_low_ms": 4.0, "token_high_ms": 10.0}
    names = "PyTorch, float32", "torchq, int8"
    text = page(
        {
            "rows": [
                {**row, "contender": names[0], "prompt_ms": 30.0, "token_ms": 8.0},
                {**row, "contender": names[1], "prompt_ms": 10.0, "token_ms": 5.0},
            ],
            "memory": [
                {"shape": "tiny", "contender": name, "load_s": 1.0, "peak_mb": 9} for name in names
            ],
            "failures": {"tiny": {"llama.cpp, Q8_0": "ImportError: no"}},
            "cpu": "C", "isa": "avx2", "threads": 2, "count": 6, "versions": {"torch": "2"},
        }
    )  # fmt: skip
    assert "| torchq, int8 | 10 (3.00x) | 200.0 (100.0 to 250.0) | 9 | 1.0 |" in text
    assert "on 2 threads of one C" in text and "- tiny, llama.cpp, Q8_0: ImportError: no" in text


def test_pairs_that_rotate_adjoin() -> None:
    """llama.cpp rotates rows 2i and 2i + 1 of a head, transformers i and i + half."""
    weight = torch.arange(2 * 6.0).reshape(12, 1)  # two heads of six rows
    expected = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert interleaved(weight, 2).flatten().tolist() == expected

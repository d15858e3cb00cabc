# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks generate``: its rows, its page, and what it says of a peer that fails."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.generation.contenders import contenders
from benchmarks.generation.markdown import page
from benchmarks.generation.shapes import (
    SHAPES,
    Speech,
    interleaved,
    prompt,
    words,
    write_folder,
)
from benchmarks.generation.worker import FailedError, Worker

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_rows_and_page(benchmarks: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    data, text, again = (tmp_path / name for name in ("rows.json", "page.md", "again.md"))
    options = "--shape", "tiny", "tiny-whisper", "--prompts", "8", "40", "--rounds", "2"
    result = benchmarks(
        *("generate", *options, "--count", "6", "--threads", "1", "2"),
        *("--folder", str(tmp_path), "--contender", "torchq"),
        *("--json", str(data), "--markdown", str(text)),
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(data.read_text())
    assert results["failures"] == {"tiny": {}, "tiny-whisper": {}}
    names = "PyTorch, float32", "torchq, int8", "torchq, int4"
    keys = "shape", "threads", "prompt", "contender"
    assert [tuple(row[key] for key in keys) for row in results["rows"]] == [
        *(("tiny", n, length, name) for n in (1, 2) for length in (8, 40) for name in names),
        *(("tiny-whisper", n, 4, name) for n in (1, 2) for name in names[:2]),
    ]
    for row in results["rows"]:
        assert row["count"] == 6
        assert 0 < row["token_low_ms"] <= row["token_ms"] <= row["token_high_ms"]
        assert row["prompt_ms"] > 0
    assert len(results["memory"]) == 2 * (3 + 2)
    assert all(row["load_s"] > 0 and row["peak_mb"] > 0 for row in results["memory"])
    sizes = [(tmp_path / "tiny" / f"torchq{bits}.safetensors").stat().st_size for bits in (8, 4)]
    assert sizes[1] < sizes[0]
    assert text.read_text() == page(results) and "## tiny" in text.read_text()
    done = benchmarks("generate", "--render", str(data), "--markdown", str(again))
    assert done.returncode == 0 and again.read_text() == text.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-whisper"])
def test_a_contender_that_fails_says_why(shape: str, tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"(Error|Exception): .*(CTranslate2|ctranslate2)"):
        Worker("CTranslate2, int8", shape, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 9])
def test_speech_in_ctranslate2_has_as_many_tokens_as_asked_for(count: int, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("transformers")
    shape = SHAPES["tiny-whisper"]
    write_folder(shape, tmp_path)
    made = contenders(shape)["CTranslate2, int8"](shape, tmp_path, 1)
    made.needs()
    made.write()
    made.load()
    stamps = made.generate(prompt(shape, 4), count)
    assert len(stamps) == count


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_has_its_words_and_prompts(name: str) -> None:
    shape = SHAPES[name]
    names = words(shape.words)
    assert len({*names}) == shape.words == shape.vocabulary - len(shape.special)
    known = {*names}
    assert all(one[:-1] in known and one[-1] in known for one in names[256:])  # so merges make them
    src = prompt(shape, 100)
    assert src.ids == prompt(shape, 100).ids
    if isinstance(shape, Speech):
        assert src.ids == [*range(shape.vocabulary - 4, shape.vocabulary)]
        assert src.features is not None and src.features.shape == (1, 80, 3000)
    else:
        assert all(256 <= i < shape.vocabulary for i in src.ids) and src.features is None


def results(shape: str, *threads: int) -> dict[str, Any]:
    """Return what the command writes; with another number of threads the times are others, too."""
    rows: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    for n in threads:
        common = {"shape": shape, "threads": n}
        row = {**common, "prompt": 8, "count": 6, "token_low_ms": 4.0, "token_high_ms": 10.0}
        names = "PyTorch, float32", "torchq, int8"
        rows += [
            {**row, "contender": names[0], "prompt_ms": 30.0 / n, "token_ms": 8.0},
            {**row, "contender": names[1], "prompt_ms": 10.0 / n, "token_ms": 5.0},
        ]
        memory += [{**common, "contender": name, "load_s": 1.0, "peak_mb": 9} for name in names]
    return {
        "options": " ".join([" --threads", *map(str, threads)]), "rows": rows, "memory": memory,
        "failures": {shape: {"llama.cpp, Q8_0": "ImportError: no"}},
        "cpu": "C", "isa": "avx2", "versions": {"torch": "2"},
    }  # fmt: skip


def test_rates_beside_float() -> None:
    text = page(results("tiny", 2))
    assert "| torchq, int8 | 5 (3.00x) | 200.0 (100.0 to 250.0) | 9 | 1.0 |" in text
    assert "on two threads of one C" in text and "- tiny, llama.cpp, Q8_0: ImportError: no" in text
    assert "generate --threads 2 --json docs/data/generate_avx2.json" in text
    assert "generates 6 tokens" in text and "minute" not in text and "On two" not in text


def test_a_table_for_each_number_of_threads() -> None:
    text = page(results("tiny", 1, 2))
    assert "on one and two threads of one C" in text and "--threads 1 2 --json" in text
    tables = re.split(r"On (one thread|two threads):\n\n", text)
    for part, ms in zip(tables[2::2], ("10", "5"), strict=True):
        assert f"| torchq, int8 | {ms} (3.00x) |" in part


def test_a_section_for_each_machine() -> None:
    found = [results("tiny", 1), {**results("tiny", 2), "isa": "amx"}]
    text = page(*found)
    assert "--render docs/data/generate_avx2.json docs/data/generate_amx.json --mark" in text
    parts = re.split(r"^## C, (?:avx2|amx)$", text, flags=re.MULTILINE)
    for part, threads in zip(parts[1:], ("one thread", "two threads"), strict=True):
        assert f"on {threads} of one C" in part and part.count("### tiny") == 1


def test_a_minute_of_audio_is_two_windows() -> None:
    found = results("tiny-whisper", 1)
    for row in found["rows"]:
        row["prompt_ms"] *= 100  # 3000 and 1000, then five more tokens, twice
    text = page(found)
    assert "| 30 s of audio, ms | then tokens/s | a minute of audio, s |" in text
    assert "| torchq, int8 | 1000 (3.00x) | 200.0 (100.0 to 250.0) | 2.0 (2.97x) |" in text


def test_pairs_that_rotate_adjoin() -> None:
    """llama.cpp rotates rows 2i and 2i + 1 of a head, transformers i and i + half."""
    weight = torch.arange(2 * 6.0).reshape(12, 1)  # two heads of six rows
    expected = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert interleaved(weight, 2).flatten().tolist() == expected

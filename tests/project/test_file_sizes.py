# SPDX-License-Identifier: Apache-2.0
"""No source file is longer than a reader takes in at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 400
SUFFIXES = {".c", ".cpp", ".h", ".py", ".sh"}


def lengths(folder: Path) -> dict[str, int]:
    """Lines of each source file in a folder."""
    files = {path.relative_to(folder): path for path in folder.rglob("*")}
    return {
        str(name): len(path.read_text().splitlines())
        for name, path in files.items()
        if path.suffix in SUFFIXES and "build" not in name.parts
    }


@pytest.mark.parametrize("folder", ["benchmarks", "csrc", "examples", "tests", "torchq"])
def test_files_have_at_most_400_lines(folder: str) -> None:
    found = lengths(ROOT / folder)
    long = {path: lines for path, lines in found.items() if lines > LIMIT}
    assert found and not long, f"split {long}, which have more than {LIMIT} lines, by subject"


def test_a_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("#\n" * (LIMIT + 1))
    assert lengths(tmp_path) == {"a.py": LIMIT + 1}

# SPDX-License-Identifier: Apache-2.0
"""Docstrings say what a thing is or does; none opens as a question would."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUESTION = re.compile(r"\s*(What|Whether|Of|Which|Where)\b")


def docstrings(path: Path) -> list[tuple[str, str]]:
    """(name, docstring) of a file's module, classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    found = [(getattr(node, "name", "module"), ast.get_docstring(node)) for node in nodes]
    return [(f"{path.name}: {name}", text) for name, text in found if text]


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests", "torchq"])
def test_docstrings_open_with_a_statement(folder: str) -> None:
    docs = [doc for path in (ROOT / folder).rglob("*.py") for doc in docstrings(path)]
    assert len(docs) > 10
    odd = [f"{name}: {text.splitlines()[0]}" for name, text in docs if QUESTION.match(text)]
    assert not odd, "\n".join(odd)


def test_a_question_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text('def f():\n    """Whether it is."""\n')
    assert [bool(QUESTION.match(text)) for _, text in docstrings(tmp_path / "module.py")] == [True]

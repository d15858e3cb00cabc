# SPDX-License-Identifier: Apache-2.0
"""No function of the package is longer than a reader takes in at a time."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 50  # lines, without the docstring


def long_functions(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
                if lines > LIMIT:
                    found.append(f"{path.relative_to(folder)}: {node.name} has {lines} lines")
    return found


def test_functions_fit_a_screen() -> None:
    assert not long_functions(ROOT / "torchq")


def test_a_long_function_is_found(tmp_path: Path) -> None:
    body = "    x = 1\n" * (LIMIT - 1)
    (tmp_path / "a.py").write_text(f'def short():\n    """Say\n\n    it."""\n{body}')
    (tmp_path / "b.py").write_text(f"def long():\n{body}    x = 2\n")
    assert long_functions(tmp_path) == [f"b.py: long has {LIMIT + 1} lines"]

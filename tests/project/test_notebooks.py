# SPDX-License-Identifier: Apache-2.0
"""The tutorials as notebooks: the same code and words, and a kernel runs them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_extensions"))
from blocks import blocks
from ipynb import notebook as notebook_of

ROOT = Path(__file__).parents[2]
SITE = "https://torchq.example/docs"
PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if "_build" not in path.parts and "```{notebook}\n" in path.read_text(encoding="utf-8")
]


def sources(notebook: dict[str, Any], kind: str) -> list[str]:
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


def test_the_four_tutorials_are_notebooks() -> None:
    names = [page.stem for page in PAGES]
    assert names == ["bert", "cnn", "lstm", "qat"]
    assert all(page.parent.name == "tutorials" for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_its_page(page: Path) -> None:
    notebook = notebook_of(page, SITE)
    pytest.importorskip("nbformat").validate(json.loads(json.dumps(notebook)))
    text = page.read_text(encoding="utf-8")
    code = [b.text.strip() for b in blocks(text) if b.language == "python" and b.runs]
    assert sources(notebook, "code") == code
    prose = "\n".join(sources(notebook, "markdown"))
    heads = re.findall(r"^#+ .*", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    assert (
        re.findall(r"^#+ .*", re.sub(r"```.*?```", "", prose, flags=re.DOTALL), re.MULTILINE)
        == heads
    )
    targets = re.findall(r"\]\((.*?)\)", prose)
    assert targets and all(
        target.startswith("https://") and ".." not in target for target in targets
    )
    assert not re.search(r"\{notebook\}|<!--|:::", prose)
    outputs = [o["text"] for c in notebook["cells"] for o in c.get("outputs", [])]
    assert len(outputs) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_kernel_runs_a_notebook(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell prints the words that its page says; test_docs compares them by the same rule."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    from test_docs import words

    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = notebook_of(page, SITE)
    notebook = nbformat.reads(json.dumps(before), as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    compared = 0
    for cell, expected in zip(notebook.cells, before["cells"], strict=True):
        said = "".join("".join(o["text"]) for o in expected.get("outputs", []))
        told = "".join(
            o.get("text", "") for o in cell.get("outputs", []) if o.get("name") == "stdout"
        )
        if said and " ms " not in said and "equal bits" not in said:
            assert words(told) == words(said)
            compared += 1
    assert compared >= 3

# SPDX-License-Identifier: Apache-2.0
"""Runs the code of README.md and of every page of the site, page by page.

A block that opens with ``python`` is executed. One that opens with ``pycon`` is a session, whose
output is compared. The blocks of a page share one namespace, in an empty folder. A comment in front
of a block, ``<!-- not run: reason -->``, leaves it out.

A block of text right behind a block of Python is what that prints: its words are compared, but not
its numbers. Lines may come in another order, since some are sorted by what was measured. What
differs from machine to machine is marked ``<!-- varies: reason -->``.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import sys
import types
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import torchq

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_extensions"))
import bars
from blocks import Block, blocks, printed

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts),
]
_LANGUAGES = ("python", "pycon")


def run_page(
    path: Path,
    code: list[Block],
    monkeypatch: pytest.MonkeyPatch,
    outputs: Mapping[Block, Block] | None = None,
) -> None:
    """Executes the blocks of a page one after the other, as a script in the current folder."""
    outputs = outputs or {}
    script = Path.cwd() / "page.py"
    script.write_text(_script(code))
    module = types.ModuleType("__main__")  # pickle and processes look classes up there
    module.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", module)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for block in code:
        if block.language == "python":
            told = io.StringIO()
            with contextlib.redirect_stdout(told):
                exec(compile(_script([block]), str(script), "exec"), vars(module))
            if block in outputs:
                _compare(path, outputs[block], told.getvalue())
            continue
        name, line = path.stem, block.line - 1
        session = doctest.DocTestParser().get_doctest(block.text, {}, name, str(path), line)
        assert session.examples, f"{path}:{block.line}: a session without >>>"
        session.globs = vars(module)
        failures: list[str] = []
        runner.run(session, out=failures.append, clear_globs=False)
        assert not failures, "".join(failures)


_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?")


def words(text: str) -> list[str]:
    """Returns the lines of an output without numbers and widths, sorted."""
    return sorted(" ".join(_NUMBER.sub("0", line).split()) for line in text.strip().splitlines())


def _compare(path: Path, output: Block, told: str) -> None:
    if output.mark != "varies":
        place = f"{path.name}:{output.line}: prints other words:\n{told}"
        assert words(told) == words(output.text), place


def _script(code: list[Block]) -> str:
    """Returns the Python blocks with the line numbers that they have in their page."""
    text = ""
    for block in code:
        if block.language == "python":
            text += "\n" * (block.line - 1 - text.count("\n")) + block.text
    return text


LONG = ["docs/howto/accuracy.md", *(f"docs/tutorials/{name}.md" for name in ("bert", "cnn", "qat"))]


def page(path: Path) -> Any:
    name = str(path.relative_to(ROOT))
    return pytest.param(path, id=name, marks=[pytest.mark.slow] if name in LONG else [])


@pytest.mark.parametrize("path", map(page, PAGES))
def test_the_code_of_a_page_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(blocks(path.read_text(encoding="utf-8")))
    strange = [b.line for b in found if "python" in b.language and b.language not in _LANGUAGES]
    strange += [b.line for b in found if b.language == "{code-block} python" and b.runs]
    assert not strange, f"{path}: lines {strange}: write ```python or ```pycon, or mark as not run"
    code = [block for block in found if block.runs and block.language in _LANGUAGES]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])
    run_page(path, code, monkeypatch, dict(printed(found)))


def test_links_of_llms_txt_lead_to_pages() -> None:
    text = (ROOT / "docs/llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([\w/.]+)\.html\)", text)
    pages = {str(page.relative_to(ROOT / "docs"))[:-3] for page in PAGES[1:]}
    generated = {link for link in links if link.startswith("reference/api/")}
    assert links and set(links) - generated <= pages
    for link in generated:
        importlib.import_module(link.removeprefix("reference/api/"))


def test_examples_stand_under_public_names() -> None:
    names = [
        name
        for path in (ROOT / "docs/reference/examples").glob("*.md")
        for name in re.findall(r"^## (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(names) == len(set(names)) > 100
    for name in names:
        assert name.startswith("torchq.") and attrgetter(name[7:])(torchq), name


def test_blocks_are_found_with_their_lines_and_marks() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- not run: slow -->\n\n```pycon\n>>> y\n```\n"
    text += "````text\n```\n````"
    assert list(blocks(text)) == [
        Block("python", "x = 1\n", 3, "", False, (1, 3)),
        Block("pycon", ">>> y\n", 8, "not run", True, (4, 8)),
        Block("text", "```\n", 11, "", True, (9, 11)),
    ]


def test_a_wrong_output_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    with pytest.raises(AssertionError, match="Expected"):
        run_page(page, [Block("pycon", ">>> 1 + 1\n3\n", 1)], monkeypatch)
    code = [Block("python", "n = 1\n", 1), Block("pycon", ">>> n + 1\n2\n", 3)]
    run_page(page, code, monkeypatch)


def test_other_words_in_a_text_block_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "```python\nprint('1 dB')\nprint(' b  -2.5')\n```\n\n{}```text\nb 3\n{} dB\n```\n"
    for mark, number in (("", "7"), ("<!-- varies: it does -->\n", "seven")):
        found = list(blocks(text.format(mark, number)))
        run_page(tmp_path / "page.md", found[:1], monkeypatch, dict(printed(found)))
    found = list(blocks(text.format("", "seven")))
    with pytest.raises(AssertionError, match=r"page.md:7: prints other words"):
        run_page(tmp_path / "page.md", found[:1], monkeypatch, dict(printed(found)))


def test_code_of_a_page_can_be_pickled_and_scripted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
import pickle, torch

class Twice(torch.nn.Module):
    def forward(self, x):
        return 2 * x

assert pickle.loads(pickle.dumps(Twice()))(3) == 6
assert torch.jit.script(Twice())(torch.ones(1)) == 2
"""
    run_page(tmp_path / "page.md", [Block("python", text, 7)], monkeypatch)


REMEDY = "run python docs/_extensions/bars.py"


def test_the_table_of_the_readme_is_that_of_the_data() -> None:
    tables = bars.TABLE.findall(bars.README.read_text(encoding="utf-8"))
    assert tables == [bars.table()], REMEDY


def test_the_readme_says_by_how_much_torchq_wins() -> None:
    """As frozen TorchScript and in eager PyTorch, against the best of the others."""
    rows = bars.rows().values()
    peers = [min(t for t in row["peers"].values() if isinstance(t, float)) for row in rows]
    script, eager = (
        [time / row[key] for time, row in zip(peers, rows, strict=True)]
        for key in ("torchq_script_ms", "torchq_ms")
    )
    losses = [ratio for ratio in eager if ratio < 1]
    precise = [max(row["sqnr_db"], key=row["sqnr_db"].get) for row in rows]
    text = (
        f"torchq is the fastest in all {len(script)} networks of [docs/models.md](docs/models.md), "
        f"by {min(script):.2f} to {max(script):.1f} times. TorchScript is deprecated in PyTorch; "
        f"as eager modules torchq is the fastest in {len(eager) - len(losses)}, and "
        f"{1 - min(losses):.0%} behind".replace("%", " %")
    )
    readme = " ".join(bars.README.read_text(encoding="utf-8").split())
    assert min(script) > 1
    assert text in readme
    assert f"is ahead in SQNR in {precise.count('openvino')} of them" in readme


def test_docs_models_is_the_page_of_the_data() -> None:
    assert bars.PAGE.read_text(encoding="utf-8") == bars.page(), REMEDY


def test_the_picture_of_the_readme_is_that_of_the_data() -> None:
    assert bars.PICTURE.read_text(encoding="utf-8") == bars.draw(), REMEDY

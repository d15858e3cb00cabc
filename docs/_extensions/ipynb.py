# SPDX-License-Identifier: Apache-2.0
"""Makes a Jupyter notebook of a page.

Blocks of Python become cells, with what the page says that they print. What is not run stays text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from blocks import Block, blocks, printed

_DOCS = Path(__file__).parents[1]
_DIRECTIVE = re.compile(r"^```\{notebook\}\n```\n", re.MULTILINE)
_MARK = re.compile(r"^<!-- .* -->$\n?", re.MULTILINE)


def notebook(page: Path, site: str) -> dict[str, Any]:
    """Return a page as a notebook; links lead to the site at that address."""
    text = _DIRECTIVE.sub("", page.read_text(encoding="utf-8"))
    lines, found = text.splitlines(), list(blocks(text))
    outputs = dict(printed(found))
    address = f"{site}/{page.relative_to(_DOCS).with_suffix('.html').as_posix()}"
    cells: list[dict[str, Any]] = []
    begin = 0
    for block in found:
        if block in outputs.values():
            begin = block.lines[1] + 1
        elif block.language == "python" and block.runs:
            cells += _prose(lines[begin : block.lines[0]], address)
            cells.append(_code(block, outputs.get(block)))
            begin = block.lines[1] + 1
    cells += _prose(lines[begin:], address)
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}


def _prose(lines: list[str], address: str) -> list[dict[str, Any]]:
    """Return a cell of text, where there is any."""

    def target(match: re.Match[str]) -> str:
        path, section = match[1], match[2] or ""
        page = _joined(address, f"../{path.removesuffix('.md')}.html") if path else address
        return f"]({page}{section})"

    images = _joined(address, "../../_images")

    text = _MARK.sub("", "\n".join(lines)).strip()
    text = re.sub(r"\]\(((?:[\w./-]+\.md)?)(#[\w-]+)?\)", target, text)
    text = re.sub(r"!\[(.*?)\]\([\w./-]*?([\w-]+\.svg)\)", rf"![\1]({images}/\2)", text)
    return [_cell("markdown", text)] if text else []


def _joined(address: str, path: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(rest, path))}"


def _code(block: Block, output: Block | None) -> dict[str, Any]:
    told = [] if output is None else [_stream(output.text)]
    return _cell("code", block.text.strip()) | {"execution_count": None, "outputs": told}


def _stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def _cell(kind: str, text: str) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}

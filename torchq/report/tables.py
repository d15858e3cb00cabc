# SPDX-License-Identifier: Apache-2.0
"""Writes tables as text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def text_table(lines: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Return lines of cells in columns, heads first, and the notes below them."""
    cells = list(lines)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = (
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in (*padded, *notes))


_OPEN = 20  # rows of a table that is unfolded at first


def folding_table(
    heads: Sequence[str], lines: Iterable[Sequence[object]], notes: Sequence[str]
) -> str:
    """Return a table that folds under its last note, and the other notes below it."""
    rows = list(lines)
    state = " open" if len(rows) <= _OPEN else ""
    table = html_table(heads, rows, notes[:-1])
    return f"<details{state}><summary>{escape(notes[-1])}</summary>{table}</details>"


def html_table(
    heads: Sequence[str], lines: Iterable[Sequence[object]], notes: Iterable[str] = ()
) -> str:
    """Return a table and the notes below it; every text is escaped."""
    body = "".join(_row("td", line) for line in lines)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><thead>{_row('th', heads)}</thead><tbody>{body}</tbody></table>{below}"


def _row(kind: str, cells: Sequence[object]) -> str:
    texts = (f'<{kind} style="text-align: left">{escape(str(cell))}</{kind}>' for cell in cells)
    return f"<tr>{''.join(texts)}</tr>"

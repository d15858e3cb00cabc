# SPDX-License-Identifier: Apache-2.0
"""Tables as notebooks show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


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

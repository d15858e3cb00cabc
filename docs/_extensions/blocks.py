# SPDX-License-Identifier: Apache-2.0
"""The fenced blocks of a page: its code, and what that prints."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
_MARK = re.compile(r"<!-- (not run|varies): \S.* -->")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: what its fence says.
        text: its lines, without the fences.
        line: number of the first of them.
        mark: "not run" or "varies", as a comment in front of it says, or "".
        follows: whether only blank lines, and a mark, are between it and the block before.
        lines: first and last line of the page that are the block's, from 0 on, marks included.
    """

    language: str
    text: str
    line: int
    mark: str = ""
    follows: bool = False
    lines: tuple[int, int] = (0, 0)

    @property
    def runs(self) -> bool:
        """Return whether nothing says that it is not run."""
        return self.mark != "not run"


def blocks(text: str) -> Iterator[Block]:
    """Yield the outermost fenced blocks."""
    lines = text.splitlines()
    i, behind = 0, None
    while i < len(lines):
        start = _FENCE.match(lines[i])
        if start is None:
            i += 1
            continue
        indent, fence, info = len(start[1]), start[2], start[3].strip()
        end = next(
            (j for j in range(i + 1, len(lines)) if re.match(rf" *{fence}[`~]*\s*$", lines[j])),
            len(lines),
        )
        first = next((j for j in range(i - 1, -1, -1) if lines[j].strip()), 0)
        mark = _MARK.fullmatch(lines[first].strip()) if i else None
        first = first if mark else i
        follows = behind is not None and not any(map(str.strip, lines[behind + 1 : first]))
        body = "\n".join(line[indent:] for line in lines[i + 1 : end]) + "\n"
        yield Block(info, body, i + 2, mark[1] if mark else "", follows, (first, end))
        behind = end
        i = end + 1


def printed(found: list[Block]) -> Iterator[tuple[Block, Block]]:
    """Yield blocks of Python that run, and the text right behind each: what it prints."""
    for code, output in itertools.pairwise(found):
        is_output = output.language == "text" and output.follows
        if is_output and code.language == "python" and code.runs:
            yield code, output

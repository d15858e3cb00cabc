# SPDX-License-Identifier: Apache-2.0
"""Conditions on one size, solved: ``(1 + (s - 1) // 2) != 1`` says that s is at least 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from torchq.capture.terms import Call, Size, Term, parts, text_of

_COMPARED = {
    "==": "equals", "!=": "differs from", "<": "is less than", "<=": "is at most",
    ">": "is more than", ">=": "is at least",
}  # fmt: skip
_TURNED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}

_Range: TypeAlias = "tuple[float, float]"
"""The first and the last integer, which may be infinite."""


@dataclass(frozen=True)
class Ranges:
    """Values that a size may have, in increasing order. A size is at least 1 here."""

    ranges: tuple[_Range, ...]

    @property
    def others(self) -> list[_Range]:
        """The ranges of all other values."""
        ends = [-math.inf, *(end for a, b in self.ranges for end in (a - 1, b + 1)), math.inf]
        found = zip(ends[::2], ends[1::2], strict=True)
        return [(a, b) for a, b in found if a <= b and a < math.inf and b > -math.inf]

    def __str__(self) -> str:
        """Return ``at least 3``, ``4 to 8 or 12``, ``not 1``."""
        gaps = [(a[1] + 1, b[0] - 1) for a, b in zip(self.ranges, self.ranges[1:], strict=False)]
        if gaps and self.ranges[0][0] == 1 and self.ranges[-1][1] == math.inf:
            return f"not {' or '.join(map(_range, gaps))}"
        return " or ".join(map(_range, self.ranges)) or "no size"


POSITIVE = Ranges(((1, math.inf),))
_LARGEST = 1 << 63
"""Sizes are smaller. Larger numbers in conditions may be beyond floats, and so beyond infinity."""


def _range(values: _Range) -> str:
    first, last = values
    if last == math.inf:
        return "any" if first <= 1 else f"at least {first}"
    if first == last:
        return f"{first}"
    return f"at most {last}" if first <= 1 else f"{first} to {last}"


def solved(term: Term) -> tuple[Size, Ranges] | None:
    """Return the one size that a condition reads, and its values; None where that is no range."""
    if not isinstance(term, Call):
        return None
    if term.name in ("and", "or"):
        return _joined(term.name, list(map(solved, term.operands)))
    if term.name not in _COMPARED:
        return None
    (left, right), name = term.operands, term.name
    if isinstance(left, int):
        left, right, name = right, left, _TURNED[name]
    if not isinstance(right, int) or sum(isinstance(part, Size) for part in parts(left)) != 1:
        return None
    if any(isinstance(part, int) and abs(part) >= _LARGEST for part in (right, *parts(left))):
        return None
    below, above = (-math.inf, right - 1), (right + 1, math.inf)
    wanted: list[_Range] = [below] if name in ("<", "<=", "!=") else []
    wanted += [(right, right)] if name in ("==", "<=", ">=") else []
    wanted += [above] if name in (">", ">=", "!=") else []
    while not isinstance(left, Size):
        step = _inverse(left)
        if step is None:
            return None
        left, back = step
        wanted = [r for r in map(back, wanted) if r[0] <= r[1]]
    return left, common([_merged(wanted), POSITIVE])


def _joined(name: str, found: list[tuple[Size, Ranges] | None]) -> tuple[Size, Ranges] | None:
    """Return what several conditions on one size say together."""
    known = [one for one in found if one is not None]
    if len(known) < len(found) or len({size for size, _ in known}) > 1:
        return None
    ranges = [ranges for _, ranges in known]
    if name == "and":
        return known[0][0], common(ranges)
    return known[0][0], _merged([r for one in ranges for r in one.ranges])


def common(found: Iterable[Ranges]) -> Ranges:
    """Return the values that are in all of these. Pair by pair, many would take long."""
    return Ranges(tuple(_merged([r for one in found for r in one.others]).others))


def _inverse(term: Term) -> tuple[Term, Callable[[_Range], _Range]] | None:
    """Return what an operation is applied to, and from its results to the values that give them."""
    if not isinstance(term, Call):
        return None
    name, operands = term.name, term.operands
    if name == "-x":
        return operands[0], lambda r: (-r[1], -r[0])
    inner = [operand for operand in operands if isinstance(operand, Size | Call)]
    numbers = [operand for operand in operands if isinstance(operand, int)]
    if len(inner) != 1 or len(numbers) != len(operands) - 1:
        return None
    if name == "+":
        total = sum(numbers)
        return inner[0], lambda r: (r[0] - total, r[1] - total)
    if name == "-":
        number = numbers[0]
        if operands[0] is inner[0]:
            return inner[0], lambda r: (r[0] + number, r[1] + number)
        return inner[0], lambda r: (number - r[1], number - r[0])
    factor = math.prod(numbers)
    if not 0 < factor < _LARGEST:
        return None
    if name == "*":
        return inner[0], lambda r: (_up(r[0], factor), _down(r[1], factor))
    if name == "//" and operands[0] is inner[0]:
        return inner[0], lambda r: (r[0] * factor, r[1] * factor + factor - 1)
    return None


def _up(value: float, factor: int) -> float:
    return value if math.isinf(value) else -(-value // factor)


def _down(value: float, factor: int) -> float:
    return value if math.isinf(value) else value // factor


def _merged(ranges: list[_Range]) -> Ranges:
    """Return the same values in as few ranges as there are gaps."""
    found: list[_Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return Ranges(tuple(found))


def words(term: Term, label: Callable[[Size], str]) -> str:
    """Return a condition for a reader, with these names of sizes."""
    if (found := solved(term)) is not None:
        return f"{label(found[0])} is {found[1]}"
    if not isinstance(term, Call):
        return text_of(term, label)
    if term.name in ("and", "or"):
        return f" {term.name} ".join(words(operand, label) for operand in term.operands)
    if term.name not in _COMPARED:
        return text_of(term, label)
    left, right = term.operands
    if isinstance(left, Call) and left.name == "%" and isinstance(right, int):
        return _remainder(left, term.name, right, label) or text_of(term, label)
    return f"{text_of(left, label)} {_COMPARED[term.name]} {text_of(right, label)}"


def _remainder(left: Call, name: str, right: int, label: Callable[[Size], str]) -> str:
    """Return ``x.shape[1] is a multiple of 4``, or "" for other remainders."""
    value, factor = (text_of(operand, label) for operand in left.operands)
    if name not in ("==", "!=") or (right and name == "!="):
        return ""
    more = f"{right} more than " if right else ""
    return f"{value} is {'no' if name == '!=' else f'{more}a'} multiple of {factor}"

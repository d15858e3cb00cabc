# SPDX-License-Identifier: Apache-2.0
"""A condition on the sizes of a call's tensors: a guard of a graph, or a limit of its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchq.capture import size_ranges
from torchq.capture.terms import FUNCTIONS, Call, Size, Term, computed, parse, parts, text_of

_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def _identifier(name: str) -> str:
    return f"_{name.replace('.', '_')}"


NAMES: dict[str, object] = {_identifier(name): function for name, function in FUNCTIONS.items()}
NAMES |= {"_math_inf": float("inf"), "_math_nan": float("nan")}
"""Functions and constants of :meth:`Condition.source`, by their names there."""


@dataclass(frozen=True)
class Condition:
    """A condition on sizes. The limits of its grammar bound the time to evaluate it."""

    term: Term

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition of a text such as ``s0[1] % 4 == 0``.

        Raises:
            ValueError: the text is no condition on sizes, or exceeds a limit.
        """
        return cls(parse(text))

    @classmethod
    def on(cls, size: Size, comparison: str, number: int) -> Condition:
        """Return ``size comparison number``, such as ``s0[1] != 1``."""
        return cls(Call(comparison, (size, number)))

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        return text_of(self.term)

    def holds(self, shapes: Mapping[int, Sequence[int]]) -> bool:
        """Return whether it holds for these shapes of the graph's tensors, by their numbers.

        False where it cannot be computed: a division by zero, say, or a tensor without a shape.
        """
        try:
            return bool(computed(self.term, shapes))
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return False

    def source(self, name: Callable[[Size], str]) -> str:
        """Return it as Python code, with these names of sizes and :data:`NAMES` for functions."""
        return text_of(self.term, name, _identifier)

    def words(self, label: Callable[[Size], str]) -> str:
        """Return it for a reader: ``images.shape[2] is at least 3``."""
        return size_ranges.words(self.term, label)

    def recorded(self, size: Callable[[Size], object], call: Callable[..., object]) -> object:
        """Return what ``size`` and ``call`` make of its parts, from the inside out."""

        def of(term: Term) -> object:
            if isinstance(term, Call):
                return call(term.name, [of(operand) for operand in term.operands])
            return size(term) if isinstance(term, Size) else term

        return of(self.term)

    @property
    def sizes(self) -> list[Size]:
        """The sizes that it reads, in the order of the graph's tensors."""
        found = {part for part in parts(self.term) if isinstance(part, Size)}
        return sorted(found)

    @property
    def only_excludes(self) -> bool:
        """True for ``a != b``, which excludes single sizes."""
        return isinstance(self.term, Call) and self.term.name == "!="

    @property
    def equal_sizes(self) -> tuple[Size, Size] | None:
        """The two sizes that it says to be equal; None where it says anything else."""
        if not isinstance(self.term, Call) or self.term.name != "==":
            return None
        a, b = self.term.operands
        return (a, b) if isinstance(a, Size) and isinstance(b, Size) else None

    def opposite(self) -> Condition:
        """Return the condition that holds where this one does not."""
        if isinstance(self.term, Call) and self.term.name in _OPPOSITE:
            return Condition(Call(_OPPOSITE[self.term.name], self.term.operands))
        return Condition(Call("not", (self.term,)))

    def or_equal(self) -> Condition:
        """Return ``a >= b`` for ``a > b``, and ``a <= b`` for ``a < b``; itself for others."""
        if isinstance(self.term, Call) and self.term.name in ("<", ">"):
            return Condition(Call(f"{self.term.name}=", self.term.operands))
        return self

    def either(self, other: Condition) -> Condition:
        """Return the condition that holds where this one or the other does."""
        return Condition(Call("or", (self.term, other.term)))


def by_size(
    conditions: Iterable[Condition],
) -> tuple[dict[Size, size_ranges.Ranges], list[Condition]]:
    """Return the values that conditions leave to each size, and the conditions on several sizes."""
    ranges: dict[Size, list[size_ranges.Ranges]] = {}
    others: list[Condition] = []
    for condition in conditions:
        if (found := size_ranges.solved(condition.term)) is None:
            others.append(condition)
        else:
            ranges.setdefault(found[0], []).append(found[1])
    return {size: size_ranges.common(each) for size, each in ranges.items()}, others

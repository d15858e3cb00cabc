# SPDX-License-Identifier: Apache-2.0
"""An einsum of two operands as the matrix product that it is."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import torch
from torch import fx

_ATEN = torch.ops.aten
Emit = Callable[..., fx.Node]
Known = tuple[tuple[int, ...], bool]


def as_product(
    emit: Emit, equation: str, operands: Sequence[fx.Node], known: Sequence[Known]
) -> fx.Node | None:
    """Write an einsum as permutations around one ``matmul``.

    Args:
        emit: writes an ATen call with these arguments.
        equation: as ``torch.einsum`` takes it.
        operands: its tensors.
        known: for each operand, the example's shape, and whether it varies from call to call. A
            constant, such as a weight, comes second in the product.

    Returns:
        None where it is no matrix product: with another number of operands, an index that occurs
        twice in one of them, is summed in one only or has two sizes there, no index that is summed
        in both, or without ``->``.
    """
    if len(operands) != 2 or equation.count(",") != 1:
        return None
    if not known[0][1]:
        sources, arrow, result = equation.partition("->")
        first, _, second = sources.partition(",")
        equation = f"{second},{first}{arrow}{result}"
        operands, known = operands[::-1], known[::-1]
    return _Product(emit, known).run(equation, operands)


class _Product:
    def __init__(self, emit: Emit, known: Sequence[Known]) -> None:
        self.emit, self.known = emit, known

    def run(self, equation: str, operands: Sequence[fx.Node]) -> fx.Node | None:
        shapes = [shape for shape, _ in self.known]
        labels = _labels(equation, [len(shape) for shape in shapes])
        if labels is None:
            return None
        (a, b), (of_a, of_b, result) = operands, labels
        batch = [c for c in of_a if c in of_b and c in result]
        summed = [c for c in of_a if c in of_b and c not in result]
        rows = [c for c in of_a if c not in of_b]
        columns = [c for c in of_b if c not in of_a]
        if not summed or any(c not in result for c in (*rows, *columns)):
            return None
        if any(shapes[0][of_a.index(c)] != shapes[1][of_b.index(c)] for c in summed):
            return None  # one of them is broadcast
        many_rows = [self._size(0, a, of_a.index(c)) for c in rows]
        many_columns = [self._size(1, b, of_b.index(c)) for c in columns]
        a = self._permuted(a, of_a, batch + rows + summed)
        b = self._permuted(b, of_b, batch + summed + columns)
        n = len(batch)
        kept = rows if n == 0 and rows else []  # a matmul takes any number of rows without a batch
        a = self._one(a, n + len(rows), len(summed))
        a = a if kept else self._one(a, n, len(rows))
        b = self._one(self._one(b, n + len(summed), len(columns)), n, len(summed))
        whole = self.emit(_ATEN.matmul.default, a, b)
        whole = self._split(whole, len(kept) or n + 1, many_columns)
        whole = whole if kept else self._split(whole, n, many_rows)
        return self._permuted(whole, batch + rows + columns, list(result))

    def _size(self, i: int, node: fx.Node, dim: int) -> object:
        shape, varying = self.known[i]
        return self.emit(_ATEN.sym_size.int, node, dim) if varying else shape[dim]

    def _permuted(self, x: fx.Node, labels: Sequence[str], order: list[str]) -> fx.Node:
        dims = [labels.index(c) for c in order]
        return x if dims == sorted(dims) else self.emit(_ATEN.permute.default, x, dims)

    def _one(self, x: fx.Node, start: int, count: int) -> fx.Node:
        """``count`` dims from ``start`` on as one."""
        if count == 0:
            return self.emit(_ATEN.unsqueeze.default, x, start)
        if count == 1:
            return x
        return self.emit(_ATEN.flatten.using_ints, x, start, start + count - 1)

    def _split(self, x: fx.Node, dim: int, sizes: Sequence[object]) -> fx.Node:
        """Undo :meth:`_one`."""
        if not sizes:
            return self.emit(_ATEN.squeeze.dim, x, dim)
        return x if len(sizes) == 1 else self.emit(_ATEN.unflatten.int, x, dim, sizes)


def _labels(equation: str, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """Letters of two operands and of the result, with letters in the place of ``...``."""
    if equation.count("->") != 1:
        return None
    sources, result = equation.replace(" ", "").split("->")
    named = [text.replace("...", "") for text in sources.split(",")]
    if any(len(set(text)) != len(text) for text in (*named, result.replace("...", ""))):
        return None
    more = [rank - len(text) for text, rank in zip(named, ranks, strict=True)]
    elided = [m for m, text in zip(more, sources.split(","), strict=True) if "..." in text]
    if (elided and "..." not in result) or len(set(elided)) > 1:
        return None
    free = [c for c in string.ascii_letters if c not in equation][: elided[0] if elided else 0]
    a, b = (text.replace("...", "".join(free)) for text in sources.split(","))
    return a, b, result.replace("...", "".join(free))

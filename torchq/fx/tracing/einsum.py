# SPDX-License-Identifier: Apache-2.0
"""torch.einsum of two operands as the matrix product it is."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["einsum"]


def einsum(args: Sequence[Any], known: Callable[[Any], tuple[Tensor, bool]]) -> Any:
    """``torch.einsum(*args)`` as permutations around one ``torch.matmul``, to be traced.

    Args:
        args: the equation and two operands, nodes among them.
        known: value of an operand, and whether it varies from call to call. What does not, a
            weight, comes second in the matmul.

    Returns:
        None where it is no matrix product: with another number of operands, an index that occurs
        twice in one of them, is summed in one only or has two sizes there, no index that is summed
        in both, or without ``->``.
    """
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if len(operands) != 2 or not isinstance(equation, str) or equation.count(",") != 1:
        return None
    values = [known(operand) for operand in operands]
    if not values[0][1]:
        sources, arrow, result = equation.partition("->")
        first, _, second = sources.partition(",")
        equation = f"{second},{first}{arrow}{result}"
        operands, values = operands[::-1], values[::-1]
    return _matmul(equation, operands, [value.shape for value, _ in values])


def _matmul(equation: str, operands: Sequence[Any], shapes: Sequence[torch.Size]) -> Any:
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
    many_rows = [a.size(of_a.index(c)) for c in rows]
    many_columns = [b.size(of_b.index(c)) for c in columns]
    a, b = _permuted(a, of_a, batch + rows + summed), _permuted(b, of_b, batch + summed + columns)
    n = len(batch)
    kept = rows if n == 0 and rows else []  # a matmul takes any number of rows without a batch
    a = _one(a, n + len(rows), len(summed))
    a = a if kept else _one(a, n, len(rows))
    b = _one(_one(b, n + len(summed), len(columns)), n, len(summed))
    whole = torch.matmul(a, b)
    dim = len(kept) or n + 1
    whole = _split(whole, dim, many_columns)
    whole = whole if kept else _split(whole, n, many_rows)
    return _permuted(whole, batch + rows + columns, list(result))


def _labels(equation: str, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """The letters of two operands and of the result, with letters in the place of ``...``."""
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
    if any(m != 0 and "..." not in text for m, text in zip(more, sources.split(","), strict=True)):
        return None  # torch says what is wrong
    free = [c for c in string.ascii_letters if c not in equation][: elided[0] if elided else 0]
    a, b = (text.replace("...", "".join(free)) for text in sources.split(","))
    return a, b, result.replace("...", "".join(free))


def _permuted(x: Any, labels: Sequence[str], order: list[str]) -> Any:
    dims = [labels.index(c) for c in order]
    return x if dims == sorted(dims) else x.permute(dims)


def _one(x: Any, start: int, count: int) -> Any:
    """``count`` dims from ``start`` on as one."""
    if count == 0:
        return x.unsqueeze(start)
    return x if count == 1 else x.flatten(start, start + count - 1)


def _split(x: Any, dim: int, sizes: list[Any]) -> Any:
    """The inverse of :func:`_one`."""
    if not sizes:
        return x.squeeze(dim)
    return x if len(sizes) == 1 else x.unflatten(dim, sizes)

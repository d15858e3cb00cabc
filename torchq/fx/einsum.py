# SPDX-License-Identifier: Apache-2.0
"""torch.einsum of two operands as the matrix product it is."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["einsum"]


def einsum(args: Sequence[Any], ranks: Sequence[int]) -> Any:
    """``torch.einsum(*args)`` as permutations around one ``torch.matmul``, to be traced.

    Args:
        args: the equation and two operands, nodes among them.
        ranks: of the operands.

    Returns:
        None where it is no matrix product: with another number of operands, an index that occurs
        twice in one of them or is summed in one only, no index that is summed in both, or
        without ``->``.
    """
    a, b = args[1], args[2]
    labels = _labels(args[0], ranks)
    if labels is None:
        return None
    of_a, of_b, result = labels
    batch = [c for c in of_a if c in of_b and c in result]
    summed = [c for c in of_a if c in of_b and c not in result]
    rows = [c for c in of_a if c not in of_b]
    columns = [c for c in of_b if c not in of_a]
    if not summed or any(c not in result for c in (*rows, *columns)):
        return None
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


def _labels(equation: Any, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """The letters of two operands and of the result, with letters in the place of ``...``."""
    if not isinstance(equation, str) or equation.count("->") != 1 or equation.count(",") != 1:
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

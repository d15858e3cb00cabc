# SPDX-License-Identifier: Apache-2.0
"""Histograms that merge exactly.

Bin widths are powers of two and bin edges are multiples of the width, so doubling the width adds
adjacent bins and loses nothing. The exponent is the smallest one whose bins cover the data and
zero, hence a function of the data alone: the same values give the same bits in any order, in any
split into batches, and through any tree of merges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# No float32 value is finer than 2**-149, so narrower bins cannot separate anything.
SMALLEST_EXPONENT = -149


@dataclass(frozen=True)
class Histogram:
    """Counts of finite float32 values.

    Attributes:
        counts: int64 ``[bins]``; bin i counts ``first + i <= x / width < first + i + 1``.
        zeros: how many of them are exactly zero; any range represents those without error.
        first: integer position of bin 0, in widths.
        exponent: ``width = 2**exponent``.
        min_value: smallest value counted.
        max_value: largest value counted.
    """

    counts: Ints
    zeros: int
    first: int
    exponent: int
    min_value: float
    max_value: float

    @property
    def width(self) -> float:
        """Width of a bin in real units."""
        return math.ldexp(1.0, self.exponent)

    @property
    def nonzero_counts(self) -> Ints:
        """Counts without the exact zeros."""
        counts = self.counts.copy()
        counts[-self.first] -= self.zeros
        return counts

    @property
    def edges(self) -> Floats:
        """Bin edges ``[bins + 1]`` in widths, integers."""
        return self.first + np.arange(len(self.counts) + 1, dtype=np.float64)


def bin_exponent(low: float, high: float, bins: int) -> int:
    """Smallest exponent such that ``bins`` aligned bins cover ``low``, ``high`` and zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        return SMALLEST_EXPONENT
    # 2**exponent must exceed (high - low) / bins; start at or below that and walk up.
    exponent = math.frexp(high - low)[1] - 1 - bins.bit_length()
    exponent = max(exponent, SMALLEST_EXPONENT)
    while first_bin(high, exponent) - first_bin(low, exponent) >= bins:
        exponent += 1
    return exponent


def first_bin(value: float, exponent: int) -> int:
    """Position, in widths, of the bin that holds ``value``; exact for float32 values."""
    return math.floor(math.ldexp(value, -exponent))


def rebin(counts: Ints, first: int, exponent: int, new_first: int, new_exponent: int) -> Ints:
    """Move counts to coarser (or equally wide) aligned bins; exact.

    Every occupied bin must have a place in the new ones, as it does when ``bin_exponent`` of a
    range that contains the old one chose them.
    """
    occupied = np.flatnonzero(counts)
    # Shifting right by 63 already maps every position to 0 or -1; numpy forbids more.
    shift = min(new_exponent - exponent, 63)
    moved = np.zeros_like(counts)
    np.add.at(moved, ((first + occupied) >> shift) - new_first, counts[occupied])
    return moved

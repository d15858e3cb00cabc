# SPDX-License-Identifier: Apache-2.0
"""Observers that keep a histogram and search it for a range."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from torchq.quantization.observers.base import Observer
from torchq.quantization.observers.clipping import best_range, percentile_range
from torchq.quantization.observers.histogram import (
    SMALLEST_EXPONENT,
    Histogram,
    bin_exponent,
    first_bin,
    rebin,
)
from torchq.quantization.qparams import QParams, choose_qparams
from torchq.quantization.ranges import activation_range

# Values are binned in pieces that stay in the L2 cache.
_PIECE = 1 << 16
_MOST = 1 << 62
"""Values that all bins together may count."""


class _BinnedObserver(Observer):
    """Base of the observers that keep a histogram; see ``torchq.quantization.observers.histogram``.

    Buffers:
        counts: int64 ``[bins]``.
        zeros: int64 ``[]``, how many values are exactly zero (they are counted in counts too).
        exponent: int64 ``[]``, bins are ``2**exponent`` wide.
    """

    counts: Tensor
    zeros: Tensor
    exponent: Tensor

    def __init__(self, bins: int = 2048) -> None:
        super().__init__()
        if bins < 512:
            raise ValueError(
                f"torchq.{type(self).__name__}: bins must be >= 512, two per quantized value, "
                f"got {bins}. 2048 is usual."
            )
        self._add_buffer("counts", [0] * bins, dtype=torch.int64)
        self._add_buffer("zeros", 0, dtype=torch.int64)
        self._add_buffer("exponent", SMALLEST_EXPONENT, dtype=torch.int64)

    @property
    def bins(self) -> int:
        """Number of bins."""
        return self.counts.numel()

    def histogram(self) -> Histogram:
        """Return a copy of what was recorded, for searches, reports and plots."""
        low, high = (
            (self.min_value.item(), self.max_value.item()) if self.calibrated else (0.0, 0.0)
        )
        exponent = int(self.exponent)
        first = first_bin(min(low, 0.0), exponent)
        counts = self.counts.numpy(force=True).copy()
        return Histogram(counts, int(self.zeros), first, exponent, low, high)

    def check_state(self) -> None:
        """See the base class: the exponent follows from the range, and no bin beyond it counts."""
        super().check_state()
        low, high = float(self.min_value), float(self.max_value)
        low, high = (low, high) if self.calibrated else (0.0, 0.0)
        self._check_loaded(int(self.exponent) == bin_exponent(low, high, self.bins), "exponent")
        positive = (self.counts >= 0).all() & (self.counts.double().sum() < _MOST)
        self._check_loaded(positive, "counts")
        h = self.histogram()
        last = first_bin(max(high, 0.0), h.exponent) - h.first
        self._check_loaded(not h.counts[last + 1 :].any(), "counts")
        self._check_loaded(0 <= h.zeros <= h.counts[-h.first], "zeros")

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"bins={self.bins}"

    def _grow(self, low: Tensor, high: Tensor) -> int:
        """Make room for ``[low, high]`` and return the position of the first bin."""
        old = self.histogram()
        self._widen(low, high)
        low_value, high_value = self.min_value.item(), self.max_value.item()
        exponent = bin_exponent(low_value, high_value, self.bins)
        first = first_bin(min(low_value, 0.0), exponent)
        if (first, exponent) != (old.first, old.exponent):
            moved = rebin(old.counts, old.first, old.exponent, first, exponent)
            self.counts.copy_(torch.from_numpy(moved))
            self.exponent.fill_(exponent)
        return first

    def _record(self, values: Tensor) -> None:
        first = self._grow(*self._min_max(values))
        exponent = int(self.exponent)
        # Scaling by a power of two is exact in float32 unless it underflows; double never does.
        exact_in_float = -126 <= exponent <= 0
        for piece in torch.split(values.reshape(-1), _PIECE):
            wide = piece if exact_in_float else piece.to(torch.float64)
            index = (wide * 2.0**-exponent).floor_().to(torch.int32).sub_(first)
            self.counts.add_(torch.bincount(index, minlength=self.bins))
            self.zeros.add_(piece.numel() - torch.count_nonzero(piece))

    def _merge(self, other: Self) -> None:
        theirs = other.histogram()
        first = self._grow(other.min_value, other.max_value)
        exponent = int(self.exponent)
        moved = rebin(theirs.counts, theirs.first, theirs.exponent, first, exponent)
        self.counts.add_(torch.from_numpy(moved))
        self.zeros.add_(theirs.zeros)


class PercentileObserver(_BinnedObserver):
    """Clips outliers: keeps the given percentage of the values, within one bin. Merges exactly.

    Affine ranges cut ``(100 - percentile) / 2`` percent of the values at each end; symmetric ones
    keep ``percentile`` percent of ``|x|``.

    Args:
        percentile: percentage of values to keep, in (50, 100].
        bins: number of histogram bins.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, percentile: float = 99.99, bins: int = 2048) -> None:
        """Start without data."""
        super().__init__(bins)
        if not 50 < percentile <= 100:
            raise ValueError(
                f"torchq.PercentileObserver: percentile must be in (50, 100], got {percentile}. "
                "It is a percentage; 99.99 is usual."
            )
        self.percentile = percentile

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"percentile={self.percentile}, bins={self.bins}"

    def _range(self, integers: tuple[int, int], symmetric: bool) -> tuple[float, float]:
        return percentile_range(self.histogram(), self.percentile, symmetric)


class HistogramObserver(_BinnedObserver):
    """The range with the least expected squared quantization error. Merges exactly.

    The error includes rounding within the range, and clipping beyond. On the histogram it is never
    larger than that of the range from minimum to maximum.

    Args:
        bins: number of histogram bins.

    Raises:
        ValueError: ``bins`` is too small.
    """

    def within(self, low: float, high: float) -> Self:
        """Return an observer of the values in bins that ``[low, high]`` reaches."""
        old, other = self.histogram(), copy.deepcopy(self)
        low, high = max(low, old.min_value), min(high, old.max_value)
        first, last = (first_bin(end, old.exponent) for end in (min(low, 0.0), max(high, 0.0)))
        counts = np.zeros_like(old.counts)
        counts[: last - first + 1] = old.counts[first - old.first :][: last - first + 1]
        other.counts.copy_(torch.from_numpy(counts))
        other.min_value.fill_(low)
        other.max_value.fill_(high)
        return other

    def qparams_before(
        self,
        function: Callable[[Tensor], Tensor],
        dtype: torch.dtype = torch.uint8,
        bits: int = 8,
        symmetric: bool = False,
    ) -> QParams:
        """As :meth:`qparams`, for values that only ``function`` reads, which maps each element.

        The range is the one with the least error of the function's results: see
        :func:`torchq.quantization.observers.clipping.error_behind`.
        """
        own = type(self)._range, type(self).qparams
        if not self.calibrated or own != (HistogramObserver._range, Observer.qparams):
            return self.qparams(dtype, bits, symmetric)  # raises, or a subclass chooses
        integers = activation_range(dtype, bits)
        low, high = best_range(self.histogram(), "mse", integers, symmetric, function)
        return choose_qparams(low, high, dtype, bits, symmetric)

    def _range(self, integers: tuple[int, int], symmetric: bool) -> tuple[float, float]:
        return best_range(self.histogram(), "mse", integers, symmetric)


class EntropyObserver(_BinnedObserver):
    """The range with the least loss of information (KL divergence). Merges exactly.

    The divergence is that between the values and their quantized levels, on the histogram.

    Args:
        bins: number of histogram bins.

    Raises:
        ValueError: ``bins`` is too small.
    """

    def _range(self, integers: tuple[int, int], symmetric: bool) -> tuple[float, float]:
        return best_range(self.histogram(), "kl", integers, symmetric)

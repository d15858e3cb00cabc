# SPDX-License-Identifier: Apache-2.0
"""Searches for a good clipping range on a histogram."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchq.quantization.observers.histogram import Floats, Histogram, Ints
from torchq.quantization.ranges import solve_qparams

Cost = Callable[[Histogram, Floats, Floats, tuple[int, int], bool], Floats]

# A range narrower by less than this in cost is not worth leaving min-max for: the histogram cannot
# tell values within a bin apart, min-max is exact for data that already lies on a grid.
_LEAST_GAIN = 0.01

_PARTS = 8  # of a bin, where a function is evaluated


def percentile_range(h: Histogram, percentile: float, symmetric: bool) -> tuple[float, float]:
    """Return the range that keeps ``percentile`` percent of the values, within one bin.

    Affine ranges lose ``(100 - percentile) / 2`` percent at each end, symmetric ones keep
    ``percentile`` percent of ``|x|``. Bounds are the outer edges of the bins that hold the order
    statistics, limited to the observed minimum and maximum.
    """
    if symmetric:
        folded = _fold(h)
        largest = max(-h.min_value, h.max_value)
        bound = min(_upper_edge(folded, percentile / 100) * h.width, largest)
        return max(h.min_value, -bound), min(h.max_value, bound)
    keep = (100 + percentile) / 200
    high = (h.first + _upper_edge(h.counts, keep)) * h.width
    low = (h.first + len(h.counts) - _upper_edge(h.counts[::-1], keep)) * h.width
    return max(low, h.min_value), min(high, h.max_value)


def _fold(h: Histogram) -> Ints:
    """Return counts of ``|x|``: positions k and -1 - k share a magnitude up to their edges."""
    positions = h.first + np.arange(len(h.counts))
    folded = np.zeros(2 * len(h.counts), dtype=np.int64)
    np.add.at(folded, np.where(positions < 0, -1 - positions, positions), h.counts)
    return folded


def _upper_edge(counts: Ints, keep: float) -> int:
    """Return the number of leading bins that hold at least the fraction ``keep`` of the counts."""
    cumulative = np.cumsum(counts)
    # Percentages are rarely exact in binary: without the slack, 99.9% of 1000 may be 1000 values.
    rank = math.ceil(keep * int(cumulative[-1]) * (1 - 1e-12))
    return int(np.searchsorted(cumulative, max(rank, 1))) + 1


def best_range(
    h: Histogram,
    criterion: Literal["mse", "kl"],
    integers: tuple[int, int],
    symmetric: bool,
    function: Callable[[Tensor], Tensor] | None = None,
) -> tuple[float, float]:
    """Return the clipping range inside ``[min_value, max_value]`` that minimises a criterion.

    A grid over both ends is refined around its best point until its spacing is below a bin; the
    end that is zero, and in symmetric mode the smaller one, needs no search. A gain below 1% is
    not worth clipping for. See :func:`squared_error` and :func:`divergence` for the criteria. With
    a function, the mean square counts the error of its results: see :func:`error_behind`.
    """
    if np.count_nonzero(h.nonzero_counts) <= 1:
        return h.min_value, h.max_value
    cost: Cost = squared_error if criterion == "mse" else divergence
    if function is not None:
        cost = error_behind(function, h) or cost
    low, high = min(h.min_value, 0.0) / h.width, max(h.max_value, 0.0) / h.width
    if symmetric:
        low, high = -max(-low, high), max(-low, high)
    low_fraction, high_fraction = _search(h, cost, low, high, integers, symmetric)
    if low_fraction == high_fraction == 1.0:
        return h.min_value, h.max_value
    low, high = low_fraction * low, high_fraction * high
    if criterion == "kl":
        low, high = (float(bound) for bound in _whole_bins(low, high))
    return max(low * h.width, h.min_value), min(high * h.width, h.max_value)


def _search(
    h: Histogram, cost: Cost, low: float, high: float, integers: tuple[int, int], symmetric: bool
) -> tuple[float, float]:
    """Fractions of ``low`` and ``high`` (in widths) with the least cost, coarse to fine."""
    two_sided = low < 0 < high and not symmetric
    points = 17 if two_sided else 257
    full = float(cost(h, np.array([low]), np.array([high]), integers, symmetric)[0])
    best, least = (1.0, 1.0), full * (1 - _LEAST_GAIN)
    center, step, reach = (0.5, 0.5), 1.0 / (points - 1), 0.5
    while True:
        offsets = np.linspace(-reach, reach, points)
        high_fractions = np.clip(center[1] + offsets, 0, 1)
        low_fractions = np.clip(center[0] + offsets, 0, 1)
        if two_sided:
            low_fractions, high_fractions = (
                grid.ravel() for grid in np.meshgrid(low_fractions, high_fractions)
            )
        costs = cost(h, low_fractions * low, high_fractions * high, integers, symmetric)
        index = int(np.argmin(costs))
        center = float(low_fractions[index]), float(high_fractions[index])
        if costs[index] < least:
            best, least = center, float(costs[index])
        if step * max(-low, high) < 0.5:
            return best
        reach, step = step, 2 * step / (points - 1)


def squared_error(
    h: Histogram, low: Floats, high: Floats, integers: tuple[int, int], symmetric: bool
) -> Floats:
    """Return the expected squared error of quantizing the histogram, per value, in squared widths.

    With p the density that is constant within each bin, exact zeros left out because they have no
    error, and ``v_q = (q - zero_point) * scale`` for the parameters of ``[low, high]``::

        E = 1/n * sum over q of  integral of  p(x) (x - v_q)^2 dx  over the x that quantize to q

    The integrals are exact: every level needs the moments of p of order 0 to 2 between its bounds.

    Args:
        h: the histogram.
        low: float64 ``[candidates]``, in widths.
        high: float64 ``[candidates]``, in widths.
        integers: smallest and largest quantized value.
        symmetric: see ``choose_qparams``.

    Returns:
        float64 ``[candidates]``; inf for an empty range.
    """
    values, bounds = _levels(low, high, integers, symmetric)
    counts = h.nonzero_counts.astype(np.float64)
    edges = h.edges
    ends = np.tile(edges[[0, -1]], (len(low), 1))
    bounds = np.hstack([ends[:, :1], bounds.clip(edges[0], edges[-1]), ends[:, 1:]])
    bins = np.minimum((bounds - edges[0]).astype(np.int64), len(counts) - 1)
    density, left = counts[bins], edges[bins]
    error = np.zeros(len(low))
    # (x - v)^2 = x^2 - 2 v x + v^2: the factors of the moments of order 2, 1 and 0.
    for power, factor in ((3, np.ones(1)), (2, -2 * values), (1, values**2)):
        whole = counts * np.diff(_power(edges, power)) / power
        before = np.concatenate([[0.0], np.cumsum(whole)])
        until = before[bins] + density * (_power(bounds, power) - _power(left, power)) / power
        error += (np.diff(until) * factor).sum(1)
    # The moments cancel almost entirely, so rounding may leave less than nothing.
    error = np.maximum(error, 0.0) / max(float(counts.sum()), 1.0)
    return np.where((low < 0) | (high > 0), error, np.inf)


def error_behind(function: Callable[[Tensor], Tensor], h: Histogram) -> Cost | None:
    """Return the cost of a range by how quantization changes an elementwise function's values.

    As :func:`squared_error`, for values x in the middle of each eighth of a bin::

        E = 1/n * sum over q of  sum of  p(x) (f(x) - f(v_q))^2  over the x that quantize to q

    What the function makes equal or nearly so, such as all below -3 for a hardswish, needs no
    levels. None where its values are not finite.
    """
    counts = np.repeat(h.nonzero_counts / _PARTS, _PARTS)
    points = h.edges[0] + (np.arange(len(counts)) + 0.5) / _PARTS

    def values(x: Floats) -> Floats:
        real = torch.from_numpy(x * h.width).to(torch.float32)
        with torch.no_grad():
            result: Floats = function(real).to(torch.float64).numpy()
        return result

    wanted = np.where(counts > 0, values(points), 0.0)
    if not np.isfinite(wanted).all():
        return None
    until = [np.concatenate([[0.0], np.cumsum(counts * _power(wanted, k))]) for k in (1, 2)]
    until.insert(0, np.concatenate([[0.0], np.cumsum(counts)]))

    def cost(
        h: Histogram, low: Floats, high: Floats, integers: tuple[int, int], symmetric: bool
    ) -> Floats:
        levels, bounds = _levels(low, high, integers, symmetric)
        splits = np.ceil((bounds - h.edges[0]) * _PARTS - 0.5).clip(0, len(points))
        splits = np.pad(splits.astype(np.int64), ((0, 0), (1, 1)))
        splits[:, -1] = len(points)
        count, first, second = (np.diff(sums[splits]) for sums in until)
        found = np.where(count > 0, values(levels), 0.0)
        with np.errstate(invalid="ignore"):  # inf - inf, which is refused below
            error = (second - 2 * found * first + found * found * count).sum(1)
        error = np.maximum(error, 0.0) / max(float(counts.sum()), 1.0)
        return np.where(((low < 0) | (high > 0)) & np.isfinite(error), error, np.inf)

    return cost


def divergence(
    h: Histogram, low: Floats, high: Floats, integers: tuple[int, int], symmetric: bool
) -> Floats:
    """KL divergence between the clipped histogram and what its levels can tell of it, in nats.

    This is the calibration known from TensorRT, for ranges that need not be symmetric. Exact zeros
    are left out. With c the counts, n their total, and the bins (by their centers) assigned to the
    levels of the parameters of ``[low, high]``::

        KL(P || Q) = sum over bins i of  P_i * log(P_i / Q_i)
        P_i = c_i / n inside the range; the outermost occupied bins also take what lies outside
        Q_i = S(q) / K(q) / m  for occupied i;  S(q): sum of c over the bins of level q that are
              inside the range, K(q): how many of them are occupied, m: sum of all S(q)

    So P keeps the outliers and Q does not, which is what makes clipping cost something. Ranges
    with fewer bins than levels, or fewer occupied bins than half the levels, are considered only
    if nothing lies outside: their Q equals P by construction, whatever they clip.

    Args:
        h: the histogram.
        low: float64 ``[candidates]``, in widths; its bin is inside as a whole.
        high: float64 ``[candidates]``, in widths; its bin is inside as a whole.
        integers: smallest and largest quantized value.
        symmetric: see ``choose_qparams``.

    Returns:
        float64 ``[candidates]``; inf for ranges that are not considered.
    """
    low, high = _whole_bins(low, high)
    counts = h.nonzero_counts
    _, bounds = _levels(low, high, integers, symmetric)
    begin = (low - h.first).astype(np.int64).clip(0, len(counts) - 1)
    end = (high - h.first).astype(np.int64).clip(begin + 1, len(counts))
    splits = np.ceil(bounds - h.first - 0.5).clip(begin[:, None], end[:, None])
    splits = np.hstack([begin[:, None], splits.astype(np.int64), end[:, None]])

    total, used, c_log_c = (
        np.concatenate([[0], np.cumsum(term)]) for term in (counts, counts > 0, _xlogx(counts))
    )
    level_sum = np.diff(total[splits]).astype(np.float64)
    level_bins = np.diff(used[splits])
    # [2, candidates]: the bins that take the outliers, how many those are, and their levels.
    outermost = np.stack([used[begin] + 1, used[end]])
    edge = np.searchsorted(used[1:], outermost).clip(begin, end - 1)
    outliers = np.stack([total[begin], total[-1] - total[end]])
    level = (splits[:, 1:] <= edge[..., None]).sum(-1)

    moved = (_xlogx(counts[edge] + outliers) - _xlogx(counts[edge])).sum(0)
    log_mean = np.log(np.where(level_sum > 0, level_sum / np.maximum(level_bins, 1), 1.0))
    p_log_p = c_log_c[end] - c_log_c[begin] + moved
    edge_log_mean = log_mean[np.arange(len(low)), level]
    p_log_q = (level_sum * log_mean).sum(1) + (outliers * edge_log_mean).sum(0)
    n, inside = int(total[-1]), total[end] - total[begin]
    kl = (p_log_p - p_log_q) / n - math.log(n) + np.log(np.maximum(inside, 1))

    levels = integers[1] - integers[0] + 1
    coarse = (high - low < levels) | (2 * (used[end] - used[begin]) < levels)
    # No divergence is negative: rounding must not make a range look better than exact.
    return np.where((coarse & (inside < n)) | (inside == 0), np.inf, np.maximum(kl, 0.0))


def _whole_bins(low: Floats | float, high: Floats | float) -> tuple[Floats, Floats]:
    """Bin edges around a range; a bin owns its left edge, but none is needed above zero."""
    return np.floor(low), np.where(np.asarray(high) > 0, np.floor(high) + 1, 0.0)


def _power(base: Floats, exponent: int) -> Floats:
    # numpy's ** takes over 100 times as long as products where the base is negative.
    return base if exponent == 1 else base * _power(base, exponent - 1)


def _levels(
    low: Floats, high: Floats, integers: tuple[int, int], symmetric: bool
) -> tuple[Floats, Floats]:
    """Values ``[candidates, levels]`` of the integers, and the bounds between neighbors."""
    scale, zero_point = solve_qparams(low, high, integers, symmetric)
    steps = np.arange(integers[0], integers[1] + 1) - zero_point[:, None]
    step_size = scale.astype(np.float64)[:, None]
    return steps * step_size, (steps[:, :-1] + 0.5) * step_size


def _xlogx(counts: Ints) -> Floats:
    positive = np.maximum(counts, 1).astype(np.float64)
    return positive * np.log(positive)

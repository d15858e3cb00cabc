# SPDX-License-Identifier: Apache-2.0
"""Bins, percentiles and the searches against brute force."""

import math
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from torchq.quantization.observers import HistogramObserver
from torchq.quantization.observers.clipping import (
    best_range,
    divergence,
    percentile_range,
    squared_error,
)
from torchq.quantization.observers.histogram import Histogram, bin_exponent, first_bin, rebin
from torchq.quantization.qparams import activation_range
from torchq.quantization.ranges import solve_qparams

AFFINE = ((0, 255), False)
SYMMETRIC = ((-128, 127), True)
float32s = st.floats(allow_nan=False, allow_infinity=False, width=32)


def histogram_of(values, bins=2048):
    observer = HistogramObserver(bins)
    observer(torch.as_tensor(values, dtype=torch.float32))
    return observer.histogram()


def heavy_tailed(n=50_000, seed=0):
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


def actual_error(values, low, high, integers, symmetric):
    scale, zero_point = solve_qparams(low, high, integers, symmetric)
    q = np.clip(np.rint(values.astype(np.float64) / scale) + zero_point, *integers)
    return float(np.mean(((q - zero_point) * np.float64(scale) - values) ** 2))


@given(low=float32s, high=float32s)
def test_bin_exponent_is_the_smallest_that_fits(low, high):
    low, high = min(low, high, 0.0), max(low, high, 0.0)
    exponent = bin_exponent(low, high, 2048)
    assert first_bin(high, exponent) - first_bin(low, exponent) < 2048
    assert exponent >= -149
    if exponent > -149:
        assert first_bin(high, exponent - 1) - first_bin(low, exponent - 1) >= 2048


@given(st.lists(float32s, min_size=1, max_size=50))
def test_bins_hold_their_values(values):
    """Every value, from denormal to 3e38, lies in the bin that the definition names."""
    h = histogram_of(values)
    expected = np.zeros(2048, dtype=np.int64)
    for value in values:
        expected[first_bin(float(np.float32(value)), h.exponent) - h.first] += 1
    assert np.array_equal(h.counts, expected)
    assert h.zeros == sum(value == 0 for value in values)
    assert (h.nonzero_counts >= 0).all()
    assert h.nonzero_counts.sum() == len(values) - h.zeros


def test_rebin_adds_adjacent_bins():
    counts = np.array([1, 2, 3, 4, 5, 0, 0, 0])  # positions -3 .. 4
    assert rebin(counts, -3, 0, -2, 1).tolist() == [1, 5, 9, 0, 0, 0, 0, 0]
    assert rebin(counts, -3, 0, -4, 0).tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert rebin(counts, -3, 0, -1, 200).tolist() == [6, 9, 0, 0, 0, 0, 0, 0]


def test_counts_beyond_double_precision_stay_exact():
    counts = np.array([2**60 + 1, 2**60 + 2, 0, 0])
    assert rebin(counts, 0, 0, 0, 1)[0] == 2**61 + 3


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99, 100.0])
@pytest.mark.parametrize("make", [np.abs, np.negative, lambda x: -np.abs(x), lambda x: x + 20])
def test_percentile_matches_numpy(make, percentile):
    values = make(heavy_tailed())
    h = histogram_of(values)
    low, high = percentile_range(h, percentile, symmetric=False)
    keep = 100 - (100 - percentile) / 2
    # The slack keeps a product such as 0.9995 * 50000 from being rounded up to the next rank.
    upper = np.percentile(values, keep * (1 - 1e-12), method="inverted_cdf")
    lower = -np.percentile(-values, keep * (1 - 1e-12), method="inverted_cdf")
    assert abs(low - lower) <= h.width
    assert abs(high - upper) <= h.width
    low, high = percentile_range(h, percentile, symmetric=True)
    expected = np.percentile(np.abs(values), percentile * (1 - 1e-12), method="inverted_cdf")
    assert abs(max(-low, high) - expected) <= h.width
    if percentile == 100:
        assert (low, high) == (values.min(), values.max())


@pytest.mark.parametrize(("integers", "symmetric"), [AFFINE, SYMMETRIC, ((0, 127), False)])
def test_squared_error_is_the_integral(integers, symmetric):
    """Against values spread evenly within each bin, which is what the formula integrates."""
    h = histogram_of(heavy_tailed(4000))
    spread = (np.arange(256) + 0.5) / 256
    positions = (h.edges[:-1, None] + spread).ravel()
    weights = np.repeat(h.nonzero_counts / 256, 256)
    for low, high in [(-900.0, 700.0), (-200.5, 300.25), (-20.0, 30.0), (0.0, 300.0), (-50.0, 0.0)]:
        scale, zero_point = solve_qparams(low, high, integers, symmetric)
        q = np.clip(np.rint(positions / scale) + zero_point, *integers)
        expected = np.average(((q - zero_point) * scale - positions) ** 2, weights=weights)
        got = squared_error(h, np.array([low]), np.array([high]), integers, symmetric)[0]
        assert got == pytest.approx(expected, rel=1e-3)


def direct_divergence(h, low, high, integers, symmetric):
    """The definition in divergence's docstring, in loops."""
    c = h.nonzero_counts.astype(float)
    begin, end = max(int(low) - h.first, 0), min(int(high) - h.first, len(c))
    inside = c[begin:end]
    p = inside.copy()
    occupied = np.flatnonzero(inside)
    p[occupied[0]] += c[:begin].sum()
    p[occupied[-1]] += c[end:].sum()
    scale, zero_point = solve_qparams(low, high, integers, symmetric)
    centers = h.first + np.arange(begin, end) + 0.5
    level = np.clip(np.floor(centers / scale.astype(float) + 0.5) + zero_point, *integers)
    q = np.zeros_like(p)
    for value in np.unique(level):
        members = (level == value) & (p > 0)
        if members.any():
            q[members] = inside[level == value].sum() / members.sum()
    keep = p > 0
    p, q = p[keep] / p.sum(), q[keep] / q.sum()
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize(("integers", "symmetric"), [AFFINE, SYMMETRIC, ((0, 127), False)])
@pytest.mark.parametrize("n", [300, 30_000])
def test_divergence_matches_its_definition(integers, symmetric, n):
    h = histogram_of(heavy_tailed(n))
    lowest, highest = h.min_value / h.width, h.max_value / h.width
    fractions = np.random.default_rng(1).uniform(0.2, 1.0, (40, 2))
    low, high = np.floor(fractions[:, 0] * lowest), np.ceil(fractions[:, 1] * highest)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    got = divergence(h, low, high - 0.5, integers, symmetric)  # whole bins are used
    assert np.isfinite(got).sum() > (30 if n > 300 else 0)
    for index in np.flatnonzero(np.isfinite(got)):
        expected = direct_divergence(h, low[index], high[index], integers, symmetric)
        assert got[index] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("integers", "symmetric"), [AFFINE, SYMMETRIC, ((-64, 63), False)])
@pytest.mark.parametrize("make", [lambda x: x, np.abs, lambda x: -np.abs(x), lambda x: x + 5])
def test_mse_beats_min_max_and_equals_an_exhaustive_search(make, integers, symmetric):
    values = make(heavy_tailed())
    h = histogram_of(values)
    low, high = best_range(h, "mse", integers, symmetric)
    error = actual_error(values, low, high, integers, symmetric)
    assert error < actual_error(values, values.min(), values.max(), integers, symmetric)
    fractions = np.linspace(0.02, 1, 50)
    grid = [
        actual_error(
            values, f * min(values.min(), 0), g * max(values.max(), 0), integers, symmetric
        )
        for f in (fractions if not symmetric and values.min() < 0 < values.max() else [1.0])
        for g in fractions
        if not symmetric
    ]
    if symmetric:
        largest = np.abs(values).max()
        grid = [actual_error(values, -f * largest, f * largest, *SYMMETRIC) for f in fractions]
    assert error <= min(grid) * 1.02


FUNCTIONS = {
    "hardswish": (F.hardswish, 2.0),
    "gelu": (F.gelu, 2.0),
    "sigmoid": (torch.sigmoid, 3.0),
    "relu6": (F.relu6, 3.0),
    "neg": (torch.neg, 0.0),  # what it gains at least, in decibels
}


@pytest.mark.parametrize("integers, symmetric", [AFFINE, SYMMETRIC])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_range_by_the_results_of_a_function(name, integers, symmetric):
    """No worse on the data than an exhaustive search, and better than the range of the source."""
    function, gain = FUNCTIONS[name]
    values = np.random.default_rng(0).normal(0, 4, 40_000).astype(np.float32)
    wanted = function(torch.from_numpy(values)).double().numpy()

    def error(low, high):
        scale, zero_point = solve_qparams(low, high, integers, symmetric)
        q = np.clip(np.rint(values.astype(np.float64) / scale) + zero_point, *integers)
        levels = ((q - zero_point) * np.float64(scale)).astype(np.float32)
        return np.mean((function(torch.from_numpy(levels)).double().numpy() - wanted) ** 2)

    h = histogram_of(values)
    found = error(*best_range(h, "mse", integers, symmetric, function))
    grid = np.linspace(0, 1, 21)
    lows = grid[-1:] if symmetric else grid
    least = min(error(a * values.min(), b * values.max()) for a in lows for b in grid[1:])
    assert found < 1.02 * least
    if not symmetric:
        plain = error(*best_range(h, "mse", integers, symmetric))
        assert found <= 1.01 * plain / 10 ** (gain / 10)


def test_functions_that_are_not_finite_are_ignored():
    h = histogram_of(heavy_tailed())
    assert best_range(h, "mse", *AFFINE, torch.rsqrt) == best_range(h, "mse", *AFFINE)


def test_mse_keeps_min_max_where_it_is_exact():
    image = np.arange(256, dtype=np.float32).repeat(9) / 255
    h = histogram_of(image)
    assert best_range(h, "mse", *AFFINE) == (0.0, 1.0)


def test_mse_finds_the_bulk_below_a_far_outlier():
    """0.5 ppm of outliers at 100 sigma cost less clipped than they cost everyone else in range."""
    values = np.random.default_rng(0).normal(size=2_000_000).astype(np.float32)
    values[0] = 100.0
    low, high = best_range(histogram_of(values), "mse", *AFFINE)
    assert -6 < low < -3
    assert high < 90


@pytest.mark.parametrize(("integers", "symmetric"), [AFFINE, SYMMETRIC])
def test_kl_on_known_distributions(integers, symmetric):
    rng = np.random.default_rng(0)
    uniform = rng.uniform(-1, 1, 500_000)
    low, high = best_range(histogram_of(uniform), "kl", integers, symmetric)
    assert low < -0.97
    assert high > 0.97
    # A Gaussian with a few far outliers: the range covers the bulk and drops the outliers.
    values = rng.normal(size=500_000)
    values[:20] = rng.uniform(-15, 15, 20)
    low, high = best_range(histogram_of(values), "kl", integers, symmetric)
    assert -8 < low < -3
    assert 3 < high < 8


@pytest.mark.parametrize(("integers", "symmetric"), [AFFINE, SYMMETRIC, ((0, 127), False)])
@pytest.mark.parametrize("count", [2, 17, 100, 256])
def test_kl_keeps_the_range_of_data_on_a_grid(count, integers, symmetric):
    """A range around one occupied bin has no divergence either, but it is useless."""
    values = np.arange(count).repeat(50) / (count - 1)
    low, high = best_range(histogram_of(values), "kl", integers, symmetric)
    assert low == 0.0
    assert high > 0.95


def test_kl_ignores_exact_zeros():
    values = np.abs(np.random.default_rng(0).normal(size=100_000))
    with_zeros = np.concatenate([values, np.zeros(300_000)])
    expected = best_range(histogram_of(values), "kl", *AFFINE)
    assert best_range(histogram_of(with_zeros), "kl", *AFFINE) == (0.0, expected[1])


@pytest.mark.parametrize("criterion", ["mse", "kl"])
@pytest.mark.parametrize("exponent", [-120, -60, 0, 60, 100])
def test_searches_do_not_depend_on_the_unit(criterion, exponent):
    values = heavy_tailed(20_000)
    unit = 2.0**exponent
    low, high = best_range(histogram_of(values), criterion, *AFFINE)
    scaled = best_range(histogram_of(values * np.float32(unit)), criterion, *AFFINE)
    assert scaled == (low * unit, high * unit)


@pytest.mark.parametrize("criterion", ["mse", "kl"])
@pytest.mark.parametrize(("integers", "symmetric"), [AFFINE, SYMMETRIC])
def test_searches_are_fast(criterion, integers, symmetric):
    h = histogram_of(heavy_tailed())
    best = math.inf
    for _ in range(5):
        start = time.thread_time()
        best_range(h, criterion, integers, symmetric)
        best = min(best, time.thread_time() - start)
    assert best < 0.05


@given(
    values=st.lists(float32s, min_size=1, max_size=8),
    criterion=st.sampled_from(["mse", "kl"]),
    dtype=st.sampled_from([torch.uint8, torch.int8]),
    symmetric=st.booleans(),
)
def test_ranges_lie_within_the_data(values, criterion, dtype, symmetric):
    h = histogram_of(values)
    low, high = best_range(h, criterion, activation_range(dtype), symmetric)
    assert h.min_value <= low <= max(h.max_value, 0.0)
    assert min(h.min_value, 0.0) <= high <= h.max_value
    assert low <= high


def test_histogram_describes_itself():
    h = Histogram(np.array([1, 2, 3]), 1, -1, -2, -0.25, 0.4)
    assert h.width == 0.25
    assert h.edges.tolist() == [-1, 0, 1, 2]
    assert h.nonzero_counts.tolist() == [1, 1, 3]

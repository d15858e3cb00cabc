# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant: large channels of a linear layer's source become smaller, their weights larger.

With one positive factor ``s`` per input channel, ``x @ W.T == (x / s) @ (W * s).T``. One scale for
a row suits ``x / s`` better where

    s[k] = max|x[:, k]| ** alpha / max|W[:, k]| ** (1 - alpha)

(Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", ICML 2023). ``alpha`` moves difficulty from the source to the weight.

Channels that even this leaves too large may be quantized apart: :func:`large_channels`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""What each layer chooses from, beside no smoothing."""

_MOST = 16  # channels apart: the kernels pad fewer to as many
_SMALLEST = 2.0**-20  # of a channel, beside the largest one


def smoothing_factors(largest: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """Return ``s``, one float32 factor per input channel, whose geometric mean is about 1.

    Their reciprocals are bfloat16 numbers: a source of that dtype is multiplied by them. Channels
    without values or weights count as very small ones.

    Args:
        largest: magnitude of each channel of the source, ``[in_features]``.
        weight: ``[out_features, in_features]``.
        alpha: between 0 and 1.
    """
    source, column = _positive(largest), _positive(weight.abs().amax(0))
    exponent = alpha * source.log2() - (1 - alpha) * column.log2()
    return 1 / torch.exp2(exponent.mean() - exponent).bfloat16().float()


def static_smoothing(low: Tensor, high: Tensor, weight: Tensor) -> tuple[float, Tensor, float]:
    """Return the alpha with the least expected error, its factors, and that error.

    For a source with one scale and zero point. Roundings of source and weight are taken as
    independent, each of the variance ``step ** 2 / 12``, and the source's values as a third of the
    largest of their channel.

    Args:
        low: smallest value of each channel of the source, ``[in_features]``.
        high: largest value of each channel.
        weight: ``[out_features, in_features]``.

    Returns:
        alpha; factors of :func:`smoothing_factors`; the squared error beside that without
        smoothing, 1 for as much.
    """
    largest, magnitudes = torch.maximum(-low, high), weight.abs()
    squares = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float64).square()

    def error(factors: Tensor) -> float:
        step = ((high / factors).amax().clamp(min=0) - (low / factors).amin().clamp(max=0)) / 255
        rounded_source = step.double() ** 2 * (squares * factors.double().square()).sum()
        steps = (magnitudes * factors).amax(1) / 127
        power = (largest / factors / 3).double().square().sum()
        return float(rounded_source + steps.double().square().sum() * power)

    plain = error(torch.ones_like(largest))
    tried = [(alpha, smoothing_factors(largest, weight, alpha)) for alpha in ALPHAS]
    least, (alpha, factors) = min(
        ((error(factors), (alpha, factors)) for alpha, factors in tried), key=lambda one: one[0]
    )
    return alpha, factors, least / plain if plain > 0 else 1.0


def large_channels(low: Tensor, high: Tensor, squares: Tensor) -> tuple[Tensor, float]:
    """Return the channels to quantize apart, and the expected squared error beside that of none.

    Args:
        low: smallest value of each channel.
        high: largest value of each channel.
        squares: what the square of an error in each channel counts.
    """
    order = torch.sort(torch.maximum(-low, high), descending=True, stable=True).indices
    low, high = low.double(), high.double()

    def error(channels: Tensor) -> float:
        step = high[channels].max().clamp(min=0) - low[channels].min().clamp(max=0)
        return float(step.square() * squares[channels].double().sum())

    counts = range(1, min(_MOST, len(order) - 1) + 1)
    found = [(error(order[:n]) + error(order[n:]), n) for n in counts]
    least, count = min(found, default=(0.0, 0))
    plain = error(order)
    return order[:count].sort().values, least / plain if plain > 0 and count else 1.0


def _positive(values: Tensor) -> Tensor:
    values = values.double()
    return values.clamp(min=max(float(values.max()) * _SMALLEST, torch.finfo(torch.float32).tiny))

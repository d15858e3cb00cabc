# SPDX-License-Identifier: Apache-2.0
"""Cross-layer equalization: small channels between two layers take more of the 8 bits.

One scale for a tensor suits its largest channel. With one positive factor ``s`` per channel, the
first layer emits ``x / s`` and the second one, whose weight is multiplied by ``s``, computes the
same from it (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
Correction", ICCV 2019). That paper balances the ranges of two weights, ``s = sqrt(r1 / r2)``.
Scales of weights are per channel here, so what counts is the range of the channel itself, which
calibration knows:

    s[c] = max|x[c]| ** alpha / max|W[:, c]| ** (1 - alpha)
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchq.quantization.recipes.smoothing import smoothing_factors

_ALPHAS = (0.5, 0.75)  # below 1: small channels keep room for values beyond their range
_GAIN = 2.0
"""The estimated noise must shrink by this factor: what is estimated is not what is measured."""
_MEAN_SQUARE = 1 / 16  # of a channel, beside the square of its largest value


def equalizing_factors(
    largest: Tensor, weight: Tensor, step: float, step_with: Callable[[Tensor], float]
) -> Tensor | None:
    """Return ``s`` of the second layer's source, or None where it gains little.

    Args:
        largest: magnitude of each channel, ``[C]``.
        weight: of the second layer, ``[G, rows, C / G, taps]`` for its G groups.
        step: of the source as it is, real units.
        step_with: from ``s`` to the step of ``x / s``.
    """
    magnitudes = weight.abs().amax(3)
    rows = magnitudes.amax(2, keepdim=True)
    rows = torch.where(rows > 0, rows, 1)
    magnitudes /= rows
    scaled = weight / rows.unsqueeze(3)
    squares = torch.linalg.vector_norm(scaled, dim=(1, 3), dtype=torch.float64).square()
    del scaled
    columns = magnitudes.amax(1).reshape(1, -1)

    def noise(factors: Tensor, step: float) -> float:
        """Return the estimated noise of the second layer's results, each beside its own weights."""
        by_group = factors.reshape(len(weight), 1, -1)
        of_source = step**2 * (squares * by_group.squeeze(1).double().square()).sum()
        power = (largest / factors).double().square().reshape(len(weight), -1) * _MEAN_SQUARE
        steps = (magnitudes * by_group).amax(2).double() / 127
        of_weight = steps.square() * power.sum(1, keepdim=True) * weight.shape[3]
        return float(of_source + of_weight.sum())

    best = noise(torch.ones_like(largest), step) / _GAIN
    found = None
    for alpha in _ALPHAS:
        factors = smoothing_factors(largest, columns, alpha)
        if (expected := noise(factors, step_with(factors))) < best:
            best, found = expected, factors
    return found


def by_channels(module: nn.Module, count: int) -> Tensor:
    """Return a layer's weight as ``[G, rows, C / G, taps]``.

    Args:
        module: convolution or linear layer.
        count: channels C of its source. A linear layer may read several values of each, flattened.
    """
    weight, groups = module.weight, getattr(module, "groups", 1)
    assert isinstance(weight, Tensor)
    return weight.detach().reshape(groups, len(weight) // groups, count // groups, -1)


def with_source_factors(module: nn.Module, factors: Tensor) -> nn.Module:
    """Return a copy of a layer that computes the same from a source divided by these factors."""
    scaled, weight = copy.deepcopy(module), by_channels(module, len(factors))
    weight = weight * factors.reshape(weight.shape[0], 1, weight.shape[2], 1)
    scaled.weight = nn.Parameter(weight.reshape(module.weight.shape), False)  # type: ignore[arg-type]
    return scaled

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchq.quantization.qparams import QParams, choose_qparams
from torchq.quantization.recipes.smoothing import smoothing_factors

_ALPHAS = (0.5, 0.75, 1.0)
_GAIN = 2.0
"""The estimated noise must shrink by this factor: what is estimated is not what is measured."""
_ROWS = 32
_MEAN_SQUARE = 1 / 16  # of a channel, beside the square of its largest value


@dataclass(frozen=True)
class Between:
    """The tensor between two layers.

    Attributes:
        dst: what the first layer quantizes by, one scale per channel.
        src: what the second layer reads, one scale.
        factors: float32 ``[C]``, ``dst.scale / src.scale``, in the second layer's weight.
    """

    dst: QParams
    src: QParams
    factors: Tensor


def equalized_between(
    largest: Tensor, weight: Tensor, lowest: float, given: QParams, symmetric: bool, axis: int
) -> Between | None:
    """Return how to quantize what is between two layers, or None to leave one scale.

    Args:
        largest: magnitude of each channel, ``[C]``.
        weight: of the second layer, as of :func:`by_channels`.
        lowest: of all values.
        given: parameters with one scale.
        symmetric: whether the zero point is in the middle.
        axis: of the channels.
    """

    def choose(factors: Tensor) -> QParams:
        most = float((largest / factors).max())
        low = -most if lowest < 0 else 0.0
        return choose_qparams(low, most, given.dtype, given.bits, symmetric)

    step = float(given.scale)
    factors = equalizing_factors(largest, weight, step, lambda f: float(choose(f).scale))
    if factors is None:
        return None
    src = choose(factors)
    zero_point = src.zero_point.expand(len(factors)).contiguous()
    return Between(QParams(src.scale * factors, zero_point, src.dtype, axis), src, factors)


def expected_largest(seen: Tensor, rows: Tensor) -> Tensor:
    """Return the magnitude of each channel, at least what its weights give where others have most.

    Calibration may hardly reach a channel behind a ReLU, which is no reason to clip it later.
    Bias alone makes some channels large, which says nothing of the others.

    Args:
        seen: in calibration, ``[C]``.
        rows: norm of the weights that make each channel, ``[C]``.
    """
    both = (seen > 0) & (rows > 0)
    ratios = (seen[both] / rows[both]).sort().values
    return torch.maximum(seen, rows * ratios[int(0.9 * len(ratios))]) if len(ratios) else seen


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
    columns = torch.stack([part.abs().amax((1, 3)) for part in _parts(weight)]).amax(0)
    columns = columns.reshape(1, -1)
    best = _noise(weight, largest, torch.ones_like(largest), step) / _GAIN
    found = None
    for alpha in _ALPHAS:
        factors = smoothing_factors(largest, columns, alpha)
        noise = _noise(weight, largest, factors, step_with(factors))
        if noise < best:
            best, found = noise, factors
    return found


def _noise(weight: Tensor, largest: Tensor, factors: Tensor, step: float) -> float:
    """Return the estimated noise of the second layer's results, each beside its own weights."""
    groups, _, channels, taps = weight.shape
    power = (largest / factors).double().square().reshape(groups, 1, channels) * _MEAN_SQUARE
    noise = 0.0
    for part in _parts(weight):
        scaled = part * factors.reshape(groups, 1, channels, 1)
        steps = scaled.abs().amax((2, 3)) / 127
        noise += float(step**2 * scaled.square().sum())
        noise += float((steps.square() * power.sum(2)).sum()) * taps
    return noise


def _parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield some rows at a time, so that little memory is taken, each beside its largest value."""
    for part in torch.split(weight, _ROWS, 1):
        largest = part.abs().amax((2, 3), keepdim=True)
        yield (part / torch.where(largest > 0, largest, 1)).double()


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
    own = module.weight
    assert isinstance(own, Tensor)
    weight = weight * factors.reshape(weight.shape[0], 1, weight.shape[2], 1)
    scaled.weight = nn.Parameter(weight.reshape(own.shape), False)
    return scaled

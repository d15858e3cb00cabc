# SPDX-License-Identifier: Apache-2.0
"""Chooses what is done to a linear layer whose source is quantized row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.attributes.options import Granularity
from torchq.quantization.int4 import int4_scales
from torchq.quantization.qparams import weight_qparams
from torchq.quantization.ranges import weight_range
from torchq.quantization.recipes.rounding import rounded
from torchq.quantization.recipes.sample import SourceSample
from torchq.quantization.recipes.smoothing import ALPHAS, smoothing_factors
from torchq.report import reasons


@dataclass(frozen=True)
class Recipe:
    """A linear layer that computes the same from another source, weight and bias.

    Attributes:
        weight: float32 ``[out_features, in_features]``; of GPTQ, multiples of ``weight_scale``.
        bias: float32 ``[out_features]``, or None.
        weight_scale: of the weight, one or one per output channel; ``[out_features, groups]`` of a
            4-bit one with several groups.
        src_factor: float32 ``[in_features]`` that the source is multiplied by; None for none.
        note: for the report.
    """

    weight: Tensor
    bias: Tensor | None
    weight_scale: Tensor
    src_factor: Tensor | None
    note: str


def linear_recipe(
    weight: Tensor,
    bias: Tensor | None,
    sample: SourceSample,
    granularity: Granularity,
    bits: int,
    gptq: bool,
    group_size: int | None = None,
) -> Recipe:
    """Return the recipe whose result is nearest to the float one on a sample of the source.

    Smoothing is tried with each of :data:`ALPHAS` and without; the mean error of each output that
    is left goes into the bias.

    Args:
        weight: float32 ``[out_features, in_features]``.
        bias: of the layer, float32.
        sample: of its source, with at least one row.
        granularity: of the weight scale.
        bits: of an int8 weight.
        gptq: round the weight with :func:`~torchq.quantization.recipes.rounding.rounded`.
        group_size: of a 4-bit weight; None for an int8 one.
    """
    trial = _Trial(weight, sample, granularity, bits, group_size)
    tried = [trial.run(alpha, gptq=False) for alpha in (0.0, *ALPHAS)]
    best = min(tried, key=lambda one: one.noise)
    if gptq:  # not for each alpha: what fits the sample best suits other rows less
        best = trial.run(best.alpha, gptq)
    before, after = trial.decibels(tried[0].noise), trial.decibels(best.noise)
    more = ", GPTQ" if gptq else ""
    note = reasons.ROUNDED.format(alpha=best.alpha, more=more, before=before, after=after)
    factor = None if best.factors is None else 1 / best.factors
    bias = -best.shift if bias is None else bias - best.shift
    return Recipe(best.weight, bias, best.scale.squeeze(1), factor, note)


@dataclass(frozen=True)
class _Tried:
    """An attempt: the weight, what it was divided by, and the error of its results."""

    alpha: float
    factors: Tensor | None
    weight: Tensor
    scale: Tensor
    noise: float
    shift: Tensor


class _Trial:
    """Computes a layer on a sample of its source, in float and as int8 would."""

    def __init__(
        self,
        weight: Tensor,
        sample: SourceSample,
        granularity: Granularity,
        bits: int,
        group_size: int | None,
    ) -> None:
        self._weight, self._sample = weight, sample
        self._granularity, self._bits, self._group_size = granularity, bits, group_size
        self._expected = sample.kept @ weight.t()

    def run(self, alpha: float, gptq: bool) -> _Tried:
        """Return what smoothing with ``alpha`` comes to; 0 stands for none."""
        factors, src, weight = None, self._sample.kept, self._weight
        if alpha:
            factors = smoothing_factors(self._sample.largest, weight, alpha)
            src, weight = src / factors, weight * factors
        group_size = self._group_size
        if group_size is not None:
            scale, integers = int4_scales(weight, group_size), (-8, 7)
            steps = scale.repeat_interleave(group_size, 1)[:, : weight.shape[1]]
        else:
            scale = weight_qparams(weight, self._granularity, self._bits).scale.reshape(-1, 1)
            steps, integers = scale, weight_range(self._bits)
        near = (weight / steps).round().clamp(*integers) * steps
        if gptq:
            weight = near = rounded(weight, steps, src, integers)
        error = quantized_rows(src, symmetric=group_size is not None) @ near.t() - self._expected
        error = error.double()
        noise, shift = float(error.square().sum()), error.mean(0).float()
        return _Tried(alpha, factors, weight, scale, noise, shift)

    def decibels(self, noise: float) -> str:
        """Return the SQNR of the layer's result as text."""
        power = float(self._expected.double().square().sum())
        ratio = power / noise if noise else math.inf
        return f"{10 * math.log10(ratio):.1f} dB" if ratio > 0 else "-inf dB"


def quantized_rows(rows: Tensor, symmetric: bool = False) -> Tensor:
    """Return what uint8 with a scale and zero point for each row, or int8, makes of the rows."""
    if symmetric:
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        return (rows / scale).round() * scale
    low, high = (end.unsqueeze(1) for end in torch.aminmax(rows, dim=1))
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = torch.where(high > low, (high - low) / 255, 1.0)
    zero_point = (-low / scale).round()
    return ((rows / scale + zero_point).round().clamp(0, 255) - zero_point) * scale

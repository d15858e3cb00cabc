# SPDX-License-Identifier: Apache-2.0
"""Weights of recurrent layers: quantized, and in the order in which the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.attributes.options import WEIGHT_GRANULARITIES, Granularity
from torchq.quantization.ranges import check_bits, check_choice


@dataclass(frozen=True, eq=False)
class RecurrentWeight:
    """An int8 weight of a layer and its scales.

    Attributes:
        weight: int8 ``[directions, gates, units, inputs]``; a projection has one gate.
        scale: float32 ``[directions, gates, units]``, or ``[1]``: real units per step.
    """

    weight: Tensor
    scale: Tensor

    @classmethod
    def quantize(
        cls, weight: Tensor, granularity: Granularity = "per_channel", bits: int = 8
    ) -> RecurrentWeight:
        """Symmetric: ``scale = max|weight| / 127`` (63 at 7 bits), per gate and unit or for all.

        Raises:
            ValueError: an argument is out of its domain, or ``weight`` has NaN or inf.
        """
        check_bits("RecurrentWeight", "bits", bits)
        check_choice("RecurrentWeight", "granularity", granularity, WEIGHT_GRANULARITIES)
        values = _finite(weight).to(torch.float64)
        limit = 2 ** (bits - 1) - 1
        flat = values.flatten(3) if granularity == "per_channel" else values.reshape(1, 1, 1, -1)
        if flat.shape[-1] == 0:
            flat = flat.new_zeros([*flat.shape[:-1], 1])
        largest = flat.abs().amax(-1).clamp_min(limit * 2.0**-126)
        scale = (largest / limit).to(torch.float32)
        quantized = torch.round(values / scale.to(torch.float64)[..., None])
        q = quantized.clamp(-limit, limit).to(torch.int8)
        return cls(q, scale if granularity == "per_channel" else scale.reshape(1))

    @classmethod
    def choose(
        cls, weight: Tensor, factors: Tensor | None, granularity: Granularity, bits: int
    ) -> RecurrentWeight:
        """Quantize with oneDNN's factors, or where there are none with scales that are chosen."""
        if factors is None:
            return cls.quantize(weight, granularity, bits)
        return cls.of_factors(weight, factors)

    @classmethod
    def of_factors(cls, weight: Tensor, factors: Tensor) -> RecurrentWeight:
        """With oneDNN's scales, which multiply: ``q = clamp(rne(weight * factor))``.

        Args:
            weight: floating point ``[directions, gates, units, inputs]``, or int8 as it is.
            factors: float32 ``[gates, units]``, or ``[1]``.

        Raises:
            ValueError: ``weight`` has NaN or inf.
        """
        scale = 1 / factors
        if factors.numel() > 1:
            scale = scale.expand(weight.shape[:3]).contiguous()
        if weight.dtype == torch.int8:
            return cls(weight, scale)
        product = _finite(weight).to(torch.float32) * factors[..., None]
        return cls(torch.round(product).clamp(-128, 127).to(torch.int8), scale)


def _finite(weight: Tensor) -> Tensor:
    """Return the weight; ValueError for NaN and inf."""
    weight = weight.detach()
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise ValueError(
            f"torchq.RecurrentWeight: weight must be finite, got {bad} NaN or inf values of "
            f"{weight.numel()}. Repair the checkpoint or keep this module float."
        )
    return weight


def grouped(values: Tensor) -> Tensor:
    """``[D, G, H, ...]`` to ``[D, H/16, G, 16, ...]``, units padded with zeros to whole groups."""
    directions, gates, units = values.shape[:3]
    groups = -(-units // 16)
    padded = values.new_zeros([directions, gates, groups * 16, *values.shape[3:]])
    padded[:, :, :units] = values
    split = padded.reshape([directions, gates, groups, 16, *values.shape[3:]])
    return split.transpose(1, 2).contiguous()


def ungrouped(values: Tensor, units: int) -> Tensor:
    """Undo :func:`grouped`."""
    return values.transpose(1, 2).flatten(2, 3)[:, :, :units].contiguous()

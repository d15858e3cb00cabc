# SPDX-License-Identifier: Apache-2.0
"""Quantized leaves, with the weights of the graphs and sources that suit all calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchq.convert.swap.observed import ObservedLeaf
from torchq.nn.packed_weights import PackedWeights
from torchq.quantization.config import QConfig
from torchq.quantization.qparams import QParams, choose_qparams


class Source(NamedTuple):
    """How a layer of a graph reads its first source.

    Attributes:
        qparams: parameters of what is divided by the factors.
        whole: of the source as it is.
        fixed: the model itself says them.
        factors: of its channels; None for none.
    """

    qparams: QParams
    whole: QParams
    fixed: bool
    factors: Tensor | None


def converted_leaf(
    module: ObservedLeaf,
    calls: list[Source],
    must_convert: bool,
    weights: PackedWeights,
    coarse: bool,
) -> nn.Module:
    """Return the quantized leaf, or the float layer where neither graph nor leaf was calibrated.

    What graphs have seen of the source in their ``calls`` counts as well: most calls take a graph.
    """
    if coarse:
        return module.coarse(weights)
    own = module.calibrated
    if not calls or module.observer is None:
        return module.convert(weights) if own or must_convert else module.module
    first, *others = calls
    factors = first.factors if all(_have_one_form(first, call) for call in others) else None
    src = first.whole if factors is None else first.qparams
    more = [one.whole if factors is None else one.qparams for one in others]
    if own:
        seen = module.qparams()
        more.append(seen if factors is None else _divided(seen, first, module.config))
    for other in () if any(call.fixed for call in calls) else more:
        src = _wider(src, other, module.config)
    return module.convert(weights, src, factors)


def _have_one_form(a: Source, b: Source) -> bool:
    """Return whether two sources are divided by the same factors."""
    if a.factors is None or b.factors is None:
        return a.factors is b.factors
    return torch.equal(a.factors, b.factors)


def _divided(own: QParams, call: Source, config: QConfig) -> QParams:
    """Return parameters of a source once it is divided by the factors of a call."""
    ratio = float(call.qparams.scale) / float(call.whole.scale)
    low, high = own.range
    return choose_qparams(low * ratio, high * ratio, own.dtype, own.bits, config.symmetric)


def _wider(a: QParams, b: QParams, config: QConfig) -> QParams:
    """Return parameters for the values of both."""
    if (a.dtype, a.bits) != (b.dtype, b.bits):
        return b
    if config.symmetric:
        return a if float(a.scale) > float(b.scale) else b
    lows, highs = zip(a.range, b.range, strict=True)
    return choose_qparams(min(lows), max(highs), a.dtype, a.bits)

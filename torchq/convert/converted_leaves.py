# SPDX-License-Identifier: Apache-2.0
"""Quantized leaves, with the weights of the graphs and sources that suit all calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torchq.convert.settled import Settled, Source
from torchq.convert.swap.observed import ObservedLeaf
from torchq.nn.packed_weights import PackedWeights
from torchq.quantization.config import QConfig
from torchq.quantization.qparams import QParams, choose_qparams


def converted_leaf(
    leaf: ObservedLeaf,
    calls: Sequence[Source],
    own: Settled | None,
    weights: PackedWeights,
    must_convert: bool,
) -> nn.Module:
    """Return the quantized leaf, or the float layer where neither graph nor leaf was calibrated.

    What graphs have seen of the source counts as well: most calls take a graph.

    Args:
        leaf: of the prepared model.
        calls: how the layers of graphs read the source.
        own: what the leaf's own calls have recorded; None for nothing, or where it is dynamic.
        weights: of the conversion.
        must_convert: raise in place of returning the float layer.

    Raises:
        RuntimeError: it was never calibrated, and must be; the message names it.
        ValueError: its weight cannot be quantized; the message names it.
    """
    if leaf.observer is None:
        return leaf.convert(weights) if leaf.calibrated or must_convert else leaf.module
    sources = [*calls, *([] if own is None else [own.source(own.plan.layers[0])])]
    if not sources and must_convert:
        leaf.observer.qparams()  # raises
    if not sources:
        return leaf.module
    first, *others = sources
    factors = first.factors if all(_have_one_form(first, call) for call in calls) else None
    src = first.whole if factors is None else first.qparams
    more = [one.whole if factors is None else _divided(one, first, leaf.config) for one in others]
    for other in () if any(call.fixed for call in calls) else more:
        src = _wider(src, other, leaf.config)
    note = own.notes.get(own.plan.layers[0].dst, "") if own is not None and not calls else ""
    return leaf.convert(weights, src, factors, note)


def _have_one_form(a: Source, b: Source) -> bool:
    """Return whether two sources are divided by the same factors."""
    if a.factors is None or b.factors is None:
        return a.factors is b.factors
    return torch.equal(a.factors, b.factors)


def _divided(other: Source, first: Source, config: QConfig) -> QParams:
    """Return parameters of another source, once it is divided by the factors of the first."""
    if _have_one_form(other, first):
        return other.qparams
    ratio = float(first.qparams.scale) / float(first.whole.scale)
    low, high = (bound * ratio for bound in other.whole.range)
    return choose_qparams(low, high, other.whole.dtype, other.whole.bits, config.symmetric)


def _wider(a: QParams, b: QParams, config: QConfig) -> QParams:
    """Return parameters for the values of both."""
    if (a.dtype, a.bits) != (b.dtype, b.bits):
        return b
    if config.symmetric:
        return a if float(a.scale) > float(b.scale) else b
    lows, highs = zip(a.range, b.range, strict=True)
    return choose_qparams(min(lows), max(highs), a.dtype, a.bits)

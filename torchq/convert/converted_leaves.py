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
    own: Settled,
    weights: PackedWeights,
    must_convert: bool,
) -> nn.Module:
    """Return the quantized leaf, or the float layer where neither graph nor leaf was calibrated.

    What graphs have seen of the source counts as well: most calls take a graph.

    Args:
        leaf: of the prepared model.
        calls: how the layers of graphs read the source.
        own: its plan, with what its own calls have recorded.
        weights: of the conversion.
        must_convert: raise in place of returning the float layer.

    Raises:
        RuntimeError: it was never calibrated, and must be; the message names it.
        ValueError: its weight cannot be quantized; the message names it.
    """
    (op,) = own.plan.ops.values()
    config, sample = own.plan.config(op.base), own.samples.get(op.base)
    assert config is not None
    if op.node in own.plan.dynamic_at:
        known = sample is None or sample.calibrated or must_convert
        return leaf.dynamic(config, weights, sample) if known else leaf.module
    layer, observer = own.plan.layer_at.get(op.node), leaf.observer
    if layer is None or observer is None:
        return leaf.module
    sources = [*calls, *([own.source(layer)] if observer.calibrated else [])]
    if not sources and must_convert:
        observer.qparams()  # raises: nothing was recorded
    if not sources:
        return leaf.module
    first, *others = sources
    factors = first.factors if all(_have_one_form(first, call) for call in calls) else None
    src = first.whole if factors is None else first.qparams
    more = [one.whole if factors is None else _divided(one, first, config) for one in others]
    for other in () if any(call.fixed for call in calls) else more:
        src = _wider(src, other, config)
    note = own.notes.get(layer.dst, "") if not calls else ""
    return leaf.static(config, src, factors, weights, note)


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

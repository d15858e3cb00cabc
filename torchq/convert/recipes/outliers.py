# SPDX-License-Identifier: Apache-2.0
"""Keeps a few large channels from coarsening the int8 steps of all others.

One scale and zero point serve all channels of a value. Transformers have values of which one or two
channels are many times as large as the rest, and the rest is then left with few levels. The ranges
of the channels in the calibration data tell where; other values stay as they are.

- What linear layers alone read is multiplied by a factor per channel before it is quantized,
  and the columns of their weights are divided by it: see
  :mod:`torchq.quantization.recipes.smoothing`.
- A hidden layer is a linear layer, a function that becomes its table, and a second linear layer.
  The range of its values is that of all but the large channels, and clips these. What is clipped
  off gets linear layers of its own, with scales of their own, whose products are added to the
  residual.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from torchq.capture.ops import Role
from torchq.convert.settled import Apart, Settled
from torchq.convert.watching import Watch, watched_channels
from torchq.planning.layers import Layer
from torchq.planning.plan import Plan
from torchq.quantization.observers import PerChannelMinMaxObserver
from torchq.quantization.qparams import QParams, choose_qparams
from torchq.quantization.recipes.smoothing import large_channels, static_smoothing
from torchq.report import reasons

# Of the expected error, at most. MiniLM's norms have 0.08 to 0.61; at 0.54 a narrow ConvNeXt of
# random weights lost 6 dB, since the range of smoothed values is not clipped.
_WORTH = 0.45
_STEPS = 256  # of a function, for the range of its results
_WORTH_LAYERS = 0.4  # for layers apart: MiniLM's hidden layers have 0.05 to 0.36, and 0.48


class Outliers:
    """Smooths what linear layers read, and computes large hidden channels apart."""

    def watch(self, plan: Plan) -> Iterator[Watch]:
        """Yield the channels of such values."""
        for node in smoothed_sources(plan):
            yield watched_channels(plan, node, -1)
        for hidden in hidden_layers(plan):
            yield watched_channels(plan, hidden.first.dst, -1)
            yield watched_channels(plan, hidden.function.dst, -1)

    def apply(self, settled: Settled) -> Settled:
        """Return the plan with factors of channels, and with layers for large hidden ones."""
        for node, layers in smoothed_sources(settled.plan).items():
            settled = _smoothed(settled, node, layers)
        for hidden in hidden_layers(settled.plan):
            settled = _split(settled, hidden)
        return settled


class Hidden(NamedTuple):
    """A hidden layer: ``second(function(first(src)))``."""

    first: Layer
    function: Layer
    second: Layer


def smoothed_sources(plan: Plan) -> dict[fx.Node, list[Layer]]:
    """Return float values that linear layers alone quantize, with these layers."""
    readers: dict[fx.Node, list[Layer]] = {}
    for layer in plan.layer_at.values():
        for node in layer.srcs:
            readers.setdefault(plan.root(node), []).append(layer)
        if layer.residual is not None and plan.comes_as_int8(layer.residual):
            readers.setdefault(plan.root(layer.residual), []).append(layer)
    singles = _singles(plan)
    return {
        node: layers
        for node, layers in readers.items()
        if node in singles
        and not plan.comes_as_int8(node)
        and "constant" not in node.meta
        and all(_is_linear(plan, layer) and list(layer.srcs) == [node] for layer in layers)
    }


def hidden_layers(plan: Plan) -> list[Hidden]:
    """Return the hidden layers whose two linear layers, and they alone, read the values between."""
    found, of_source = [], {layer.srcs[0]: layer for layer in plan.layer_at.values()}
    singles = _singles(plan)
    for function, first in plan.table_hosts.items():
        node, second = function.dst, of_source.get(function.dst)
        if second is None or not set(node.users) <= {part.node for part in second.parts}:
            continue
        linear = _is_linear(plan, first) and _is_linear(plan, second)
        plain = not (first.residual or first.clip or first.slopes is not None or function.fake)
        single = {node, first.dst} <= singles
        if linear and plain and single and second.residual not in (None, node):
            floats = (first.srcs[0], second.residual)
            if not any(src is None or plan.comes_as_int8(src) for src in floats):
                found.append(Hidden(first, function, second))
    return found


def _is_linear(plan: Plan, layer: Layer) -> bool:
    """Return whether it is a static linear layer whose ranges are torchq's to choose."""
    module, config = layer.op.module, plan.config(layer.op.base)
    own = layer.op.weight_scale is not None or layer.fake is not None
    if config is None or own or not isinstance(module, nn.Linear) or layer.role is not Role.MATMUL:
        return False
    return config.activation_observer == "histogram" and layer.srcs[0].meta["value"].dtype == (
        torch.float32
    )


def _singles(plan: Plan) -> set[fx.Node]:
    """Return the values that share their scale and zero point with none, and data choose them."""
    groups = Counter(map(plan.root, plan.captured.graph.nodes))
    return {node for node, count in groups.items() if count == 1 and plan.fixed(node) is None}


def _smoothed(settled: Settled, node: fx.Node, layers: list[Layer]) -> Settled:
    """Return the plan with factors for the channels of a value, where they are worth it."""
    weights = [_weight(layer) for layer in layers]
    seen = settled.seen.channels(node, -1, weights[0].shape[1])
    if seen is None:
        return settled
    low, high = seen.min_value, seen.max_value
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    alpha, factors, error = static_smoothing(low, high, weight)
    if error > _WORTH:
        return settled
    largest = _magnitudes(seen)
    text = reasons.SMOOTHED.format(
        alpha=alpha, largest=float(largest.max()), median=float(largest.median()),
        error=_decibels(error),
    )  # fmt: skip
    qparams = _of_range(settled.plan, layers[0], low / factors, high / factors)
    return replace(
        settled,
        factors={**settled.factors, node: factors},
        adjusted={**settled.adjusted, node: qparams},
        shared=settled.shared | {node},
        notes={**settled.notes, **{layer.dst: text for layer in layers}},
    )


def _split(settled: Settled, hidden: Hidden) -> Settled:
    """Return the plan with layers for the large channels of a hidden layer, if they are worth it.

    The ranges of the others then clip these; the layers apart compute what is clipped off.
    """
    ends = hidden.first.dst, hidden.function.dst
    count = _weight(hidden.second).shape[1]
    before, after = (settled.seen.channels(node, -1, count) for node in ends)
    if before is None or after is None:
        return settled
    squares = _weight(hidden.second).square().sum(0)
    large, error = large_channels(after.min_value, after.max_value, squares)
    if error > _WORTH_LAYERS:
        return settled
    others = torch.ones_like(after.min_value, dtype=torch.bool).index_fill(0, large, False)
    of_others = {}
    for node, seen in zip(ends, (before, after), strict=True):
        within = float(seen.min_value[others].min()), float(seen.max_value[others].max())
        of_others[node] = settled.seen.qparams(node, within)
    low, high = before.min_value[large], before.max_value[large]
    steps = torch.linspace(0, 1, _STEPS, dtype=torch.float32, device="cpu")
    steps = low.min() + (high.max() - low.min()) * steps
    ranges = of_others[ends[0]].range, of_others[ends[1]].range
    clipped_off = partial(_clipped_off, hidden, ranges)
    clipped = clipped_off(steps)
    beside = {
        ends[0]: _of_range(settled.plan, hidden.first, low, high),
        ends[1]: _of_range(settled.plan, hidden.first, clipped, clipped),
    }
    src, dst, largest = hidden.first.srcs[0], hidden.second.dst, _magnitudes(after)
    first, second = _of_channels(hidden, large, settled.factors.get(src))
    function = replace(hidden.function, function=clipped_off)
    note = reasons.APART.format(
        large=len(large), count=len(largest), largest=float(largest.max()),
        others=float(largest[others].max()), error=_decibels(error),
    )  # fmt: skip
    return replace(
        settled,
        adjusted={**settled.adjusted, **of_others},
        shared=settled.shared | {src},
        apart={**settled.apart, dst: Apart(first, function, second, beside)},
        notes={**settled.notes, dst: note},
    )


def _clipped_off(
    hidden: Hidden, ranges: tuple[tuple[float, float], tuple[float, float]], values: Tensor
) -> Tensor:
    """Return what the function gives beyond that which the ranges of the others let pass.

    ``ranges`` are of the others, before and after the function.
    """
    function = hidden.function.function
    assert function is not None
    before, after = ranges
    return function(values) - function(values.clamp(*before)).clamp(*after)


def _of_channels(hidden: Hidden, channels: Tensor, factors: Tensor | None) -> tuple[Layer, Layer]:
    """Return the two linear layers of a hidden layer for some of its channels alone.

    ``factors`` are what the channels of its source are divided by.
    """
    rows, columns = (layer.float_module() for layer in (hidden.first, hidden.second))
    assert isinstance(rows, nn.Linear) and isinstance(columns, nn.Linear)
    above, bias = rows.weight[channels], rows.bias
    above = above if factors is None else above * factors
    first = _of(hidden.first, above, None if bias is None else bias[channels])
    second = replace(hidden.second, clip=None, slopes=None)  # both follow the whole sum
    return first, _of(second, columns.weight[:, channels], None)


def _of_range(plan: Plan, layer: Layer, low: Tensor, high: Tensor) -> QParams:
    """Return parameters for all of these ranges, as the layer's configuration has them."""
    config = plan.config(layer.op.base)
    assert config is not None
    options = config.activation_dtype, config.activation_bits, config.symmetric
    return choose_qparams(low.min(), high.max(), *options)


def _magnitudes(seen: PerChannelMinMaxObserver) -> Tensor:
    return torch.maximum(-seen.min_value, seen.max_value)


def _decibels(error: float) -> str:
    return f"{10 * math.log10(max(error, 1e-9)):.1f} dB"


def _weight(layer: Layer) -> Tensor:
    assert isinstance(layer.op.module, nn.Linear)
    return layer.op.module.weight.detach().float()


def _of(layer: Layer, weight: Tensor, bias: Tensor | None) -> Layer:
    """Return the layer with this weight and bias; nothing is left to fold into them."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
    made.weight = nn.Parameter(weight.detach().float(), False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), False)
    return replace(layer, op=replace(layer.op, module=made.eval()), affines=())

# SPDX-License-Identifier: Apache-2.0
"""Keeps a few large channels from coarsening the int8 steps of all others.

One scale and zero point serve all channels of a value. Transformers have values of which one or two
channels are many times as large as the rest, and the rest is then left with few levels. The ranges
of the channels in the calibration data tell where; other values stay as they are.

- What linear layers alone read is multiplied by a power of two per channel before it is quantized,
  and the columns of their weights are divided by it: see
  :mod:`torchq.quantization.recipes.smoothing`.
- A hidden layer is a linear layer, a function that becomes its table, and a second linear layer.
  The int8 range is that of the other channels. The columns of the large ones are zero in the second
  int8 weight; a float path beside it computes their products and adds them to the residual.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, fx, nn

from torchq.convert.fuse import Layer
from torchq.convert.ops import Role
from torchq.convert.plan import Plan
from torchq.quantization.observers import PerChannelMinMaxObserver
from torchq.quantization.qparams import QParams, choose_qparams
from torchq.quantization.recipes.smoothing import static_smoothing

if TYPE_CHECKING:
    from torchq.convert.lower import Lowering
    from torchq.convert.prepared import Prepared

_WORTH = 2 / 3  # of the expected error, at most: MiniLM's norms come to 0.08 to 0.61, noise to 1
_COUNT = 8  # channels of a hidden layer in float: they cost the same as one
_BESIDE = 1.5  # times the largest of the others


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
    return {
        node: layers
        for node, layers in readers.items()
        if _is_single(plan, node)
        and not plan.comes_as_int8(node)
        and "constant" not in node.meta
        and all(_is_linear(plan, layer) and layer.srcs == [node] for layer in layers)
    }


def hidden_layers(plan: Plan) -> list[Hidden]:
    """Return the hidden layers whose two linear layers, and they alone, read the values between."""
    found, of_source = [], {layer.srcs[0]: layer for layer in plan.layer_at.values()}
    for function, first in plan.table_hosts.items():
        node, second = function.dst, of_source.get(function.dst)
        if second is None or not set(node.users) <= {part.node for part in second.parts}:
            continue
        linear = _is_linear(plan, first) and _is_linear(plan, second)
        plain = not (first.residual or first.clip or first.slopes is not None or function.fake)
        single = _is_single(plan, node) and _is_single(plan, first.dst)
        if linear and plain and single and second.residual not in (None, node):
            floats = (first.srcs[0], second.residual)
            if not any(src is None or plan.comes_as_int8(src) for src in floats):
                found.append(Hidden(first, function, second))
    return found


def observed_nodes(plan: Plan) -> list[fx.Node]:
    """Return the values whose channels are observed."""
    nodes = [*smoothed_sources(plan)]
    for hidden in hidden_layers(plan):
        nodes += [hidden.first.dst, hidden.function.dst]
    return nodes


def _is_linear(plan: Plan, layer: Layer) -> bool:
    """Return whether it is a static linear layer whose ranges are torchq's to choose."""
    module, config = layer.op.module, plan.config(layer.op.base)
    own = layer.op.weight_scale is not None or layer.fake is not None
    if config is None or own or not isinstance(module, nn.Linear) or layer.role is not Role.MATMUL:
        return False
    return config.activation_observer == "histogram" and layer.srcs[0].meta["value"].dtype == (
        torch.float32
    )


def _is_single(plan: Plan, node: fx.Node) -> bool:
    """Return whether no other value shares its scale and zero point, and data choose them."""
    alone = not any(
        plan.root(other) is node for other in plan.captured.graph.nodes if other is not node
    )
    return plan.root(node) is node and plan.fixed(node) is None and alone


class Outliers:
    """Decisions of one conversion.

    Attributes:
        factors: value -> what its channels are divided by.
        channels: result of a hidden layer -> the hidden channels in float.
        qparams: value -> parameters without its large channels.
    """

    def __init__(self, prepared: Prepared) -> None:
        """Decide."""
        self._prepared, self._plan = prepared, prepared.plan
        self.factors: dict[fx.Node, Tensor] = {}
        self.channels: dict[fx.Node, Tensor] = {}
        self.qparams: dict[fx.Node, QParams] = {}
        self._hidden: dict[fx.Node, Hidden] = {}
        self._notes: dict[fx.Node, str] = {}
        for node, layers in smoothed_sources(self._plan).items():
            self._smooth(node, layers)
        for hidden in hidden_layers(self._plan):
            self._split(hidden)

    def _smooth(self, node: fx.Node, layers: list[Layer]) -> None:
        seen = self._prepared.channels_of(node)
        if seen is None:
            return
        low, high = seen.min_value, seen.max_value
        weight = torch.cat([_weight(layer) for layer in layers])
        alpha, factors, error = static_smoothing(low, high, weight)
        if error > _WORTH:
            return
        self.factors[node] = factors
        config = self._plan.config(layers[0].op.base)
        assert config is not None
        options = config.activation_dtype, config.activation_bits, config.symmetric
        ends = (low / factors).amin(), (high / factors).amax()
        self.qparams[node] = choose_qparams(*ends, *options)
        largest = _magnitudes(seen)
        text = f"smoothing {alpha:g}: largest channel {float(largest.max()):.3g}, median "
        text += f"{float(largest.median()):.3g}, error {10 * math.log10(max(error, 1e-9)):.1f} dB"
        self._notes |= {layer.dst: text for layer in layers}

    def _split(self, hidden: Hidden) -> None:
        ends = hidden.first.dst, hidden.function.dst
        before, after = (self._prepared.channels_of(node) for node in ends)
        if before is None or after is None or after.min_value.numel() <= _COUNT:
            return
        largest = _magnitudes(after)
        values, order = torch.sort(largest, descending=True, stable=True)
        if float(values[0]) <= _BESIDE * float(values[_COUNT]):
            return
        left = torch.ones_like(largest, dtype=torch.bool)
        left[order[:_COUNT]] = False
        for node, seen in zip(ends, (before, after), strict=True):
            low, high = float(seen.min_value[left].min()), float(seen.max_value[left].max())
            self.qparams[node] = self._prepared.qparams(node, (low, high))
        self.channels[hidden.second.dst] = order[:_COUNT].sort().values
        self._hidden[hidden.second.dst] = hidden
        self._notes[hidden.second.dst] = (
            f"{_COUNT} of {len(largest)} source channels in float: up to "
            f"{float(values[0]):.3g}, others to {float(values[_COUNT]):.3g}"
        )

    def note(self, layer: Layer) -> str:
        """Return what the report says of a layer; "" for nothing."""
        return self._notes.get(layer.dst, "")

    def adjusted(self, layer: Layer) -> Layer:
        """Return the layer with the weight that fits its source."""
        factors, module = self.factors.get(layer.srcs[0]), layer.op.module
        channels = self.channels.get(layer.dst)
        if factors is None and channels is None:
            return layer
        assert isinstance(module, nn.Linear)
        if factors is None:
            factors = torch.ones(module.in_features)
        if channels is not None:
            factors = factors.index_fill(0, channels, 0.0)
        return replace(layer, op=replace(layer.op, module=_multiplied(module, factors)))

    def source(self, lowering: Lowering, node: fx.Node) -> fx.Node:
        """Return the float value that is quantized."""
        src, factors = lowering.float_of(node), self.factors.get(node)
        if factors is None:
            return src
        factor = lowering.constant(f"{node.name}_factor", 1 / factors)  # powers of two: exact
        return lowering.graph.call_function(torch.mul, (src, factor))

    def residual(self, lowering: Lowering, layer: Layer, value: fx.Node) -> fx.Node:
        """Return the residual, and the products of the channels in float."""
        hidden, graph = self._hidden.get(layer.dst), lowering.graph
        if hidden is None:
            return value
        channels, linear = self.channels[layer.dst], nn.functional.linear
        first, second = (v.float_module() for v in (hidden.first, layer))
        assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
        args = [lowering.float_of(hidden.first.srcs[0])]
        args.append(lowering.constant(f"{layer.name}_rows", first.weight[channels]))
        if first.bias is not None:
            args.append(lowering.constant(f"{layer.name}_bias", first.bias[channels]))
        known = {hidden.first.dst: graph.call_function(linear, tuple(args))}
        for part in hidden.function.parts:
            known[part.node] = lowering.copy_with(part.node, known)
        columns = lowering.constant(f"{layer.name}_columns", second.weight[:, channels])
        products = graph.call_function(linear, (known[hidden.function.dst], columns))
        return graph.call_function(torch.add, (value, products))


def _magnitudes(seen: PerChannelMinMaxObserver) -> Tensor:
    return torch.maximum(-seen.min_value, seen.max_value)


def _weight(layer: Layer) -> Tensor:
    assert isinstance(layer.op.module, nn.Linear)
    return layer.op.module.weight.detach().float()


def _multiplied(module: nn.Linear, factors: Tensor) -> nn.Linear:
    """Return a linear layer with factors for the columns of its weight."""
    made = nn.Linear(module.in_features, module.out_features, module.bias is not None, "meta")
    made.weight = nn.Parameter(module.weight.detach().float() * factors, False)
    made.bias = module.bias
    return made.eval()

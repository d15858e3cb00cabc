# SPDX-License-Identifier: Apache-2.0
"""Pairs of layers whose tensor between them has one scale per channel, if that keeps accuracy.

The first layer quantizes its result by such scales. The second one has their ratios in its weight,
and reads the tensor with one scale. So nobody else may read the tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx, nn

from torchq.capture.graph import aten_name
from torchq.capture.ops import Role, shape_of
from torchq.convert.settled import Seen, Settled
from torchq.convert.watching import Watch, watched_channels
from torchq.nn.batch_norm import channels
from torchq.planning.layers import Layer
from torchq.planning.plan import Plan
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.equalization import (
    Between,
    by_channels,
    equalized_between,
    expected_largest,
    with_source_factors,
)

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Equalization:
    """Gives what is between two layers one scale per channel."""

    def watch(self, plan: Plan) -> Iterator[Watch]:
        """Yield the channels of what is between the layers of each pair."""
        for first, _ in pairs(plan):
            yield watched_channels(plan, first.dst, channel_axis(first))

    def apply(self, settled: Settled) -> Settled:
        """Return the plan with the scales of what is between layers."""
        found = between_layers(settled.seen)
        return replace(
            settled,
            adjusted={**settled.adjusted, **{root: one.src for root, one in found.items()}},
            results={**settled.results, **{root: one.dst for root, one in found.items()}},
            factors={**settled.factors, **{root: one.factors for root, one in found.items()}},
        )


def between_layers(seen: Seen) -> dict[fx.Node, Between]:
    """Return by root how a group is quantized whose channels have scales of their own."""
    found, sizes = {}, dict[fx.Node, Tensor]()
    for first, second in pairs(seen.plan):
        assert first.op.module is not None
        seen_channels = seen.channels(first.dst, channel_axis(first), channels(first.op.module))
        if seen_channels is None:
            continue
        given, symmetric = seen.qparams(first.dst), seen.config(first.dst).symmetric
        low, high = seen_channels.min_value, seen_channels.max_value
        before = sizes.get(seen.plan.root(first.srcs[0]))
        largest = magnitudes(first, torch.maximum(low.abs(), high.abs()), before)
        sizes[first.dst] = largest
        names = tuple(part.node.name for part in (second.op, *second.parts))
        scales = float(given.scale), int(given.zero_point), symmetric
        search = partial(between, first, second, largest, float(low.min()), given, symmetric)
        one = seen.once((first.dst.name, names, scales, largest.numpy().tobytes()), search)
        if one is not None:
            found[first.dst] = one
    return found


def pairs(plan: Plan) -> Iterator[tuple[Layer, Layer]]:
    """Yield layers where the second one alone reads what the first one computes."""
    users, joined = plan.users, defaultdict[fx.Node, list[fx.Node]](list)
    for node in (node for node in plan.captured.graph.nodes if node in plan.joined):
        joined[plan.root(node)].append(node)
    for second in plan.layer_at.values():
        root = plan.root(second.srcs[0])
        first = plan.layer_at.get(root)
        if first is None or not (_is_plain(first) and _is_plain(second)):
            continue
        alone = users.get(root, set()) <= {part.node for part in second.parts}
        alone &= second.residual is None or plan.root(second.residual) is not root
        own = first.residual is None and first not in plan.table_hosts.values()
        moved = all(_keeps_channels(plan, node) for node in joined[root])
        moved &= _channels_agree(first, second)
        free = plan.fixed(root) is None and plan.emits_int8(first) and not first.op.flatten
        if alone and own and moved and free and plan.group_config([root])[1].activation_bits == 8:
            yield first, second


def _is_plain(layer: Layer) -> bool:
    trained = layer.fake is not None or layer.op.weight_scale is not None
    return layer.op.role is Role.MATMUL and isinstance(layer.op.module, _LAYERS) and not trained


def _keeps_channels(plan: Plan, node: fx.Node) -> bool:
    """Return whether what moves elements leaves them in the order of their channels."""
    op = plan.ops[node]
    if op.role is Role.MOVE:
        src, dst, name = shape_of(op.srcs[0]), shape_of(node), aten_name(node)
        known = name == "flatten" or (name in ("view", "reshape") and src[0] != src[1])
        return known and len(src) > 2 and dst == (src[0], math.prod(src[1:]))
    return op.role in (Role.PASS, Role.PAD)


def _channels_agree(first: Layer, second: Layer) -> bool:
    """Return whether the second layer multiplies what the first one has as channels."""
    ranks = len(shape_of(first.dst)), len(shape_of(second.srcs[0]))
    for layer, rank in zip((first, second), ranks, strict=True):
        kernel = getattr(layer.op.module, "kernel_size", None)
        if kernel is not None and rank != len(kernel) + 2:  # a call without batch
            return False
    wrote, reads = channel_axis(first) % ranks[0], channel_axis(second) % ranks[1]
    return wrote == (1 if ranks[0] != ranks[1] else reads)


def channel_axis(layer: Layer) -> int:
    """Return the dimension of a layer's result that has its channels.

    That of a linear layer counts from the end: ``squeeze()`` gives another rank for one row.
    """
    return -1 if isinstance(layer.op.module, nn.Linear) else 1


def magnitudes(first: Layer, seen: Tensor, before: Tensor | None) -> Tensor:
    """Return the magnitude of each channel of a layer's result.

    Args:
        first: of :func:`pairs`.
        seen: in calibration, ``[C]``.
        before: of the channels of its source, where they are known.
    """
    module = first.float_module()
    if before is not None:
        module = with_source_factors(module, before)
    assert isinstance(module.weight, Tensor)
    return expected_largest(seen, module.weight.detach().flatten(1).norm(dim=1))


def between(
    first: Layer, second: Layer, largest: Tensor, lowest: float, given: QParams, symmetric: bool
) -> Between | None:
    """Return how to quantize what is between two layers of :func:`pairs`, or None."""
    weight, axis = by_channels(second.float_module(), len(largest)), channel_axis(first)
    return equalized_between(largest, weight, lowest, given, symmetric, axis)

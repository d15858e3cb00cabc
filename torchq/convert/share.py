# SPDX-License-Identifier: Apache-2.0
"""Lets the leaves of a model and the layers of its graphs hold packed weights once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq.nn.attached import graphs_of
from torchq.nn.leaf import QuantizedLeaf

_PACKED = ("weight", "compensation", "pair_bound")


def share_weights(model: nn.Module) -> None:
    """Give a leaf the packed weight of the graph's layer of the same name.

    Batch norms that a graph folds into a weight change its scales. Its integers change by a step
    at most, where the rounding of the product moves one over a tie; those of a channel with a
    negative factor have the other sign, and such a leaf keeps its own.
    """
    for prefix, graph in graphs_of(model):
        layers = dict(graph.named_modules())
        for name, leaf in model.get_submodule(prefix).named_modules():
            layer = layers.get(name)
            if isinstance(leaf, QuantizedLeaf) and layer is not None:
                _share(leaf.layer, layer)


def _share(leaf: nn.Module, layer: nn.Module) -> None:
    own, other = (module._buffers.get("weight") for module in (leaf, layer))
    if own is not None and other is not None and _is_near(own, other):
        for key in _PACKED:
            leaf._buffers[key] = layer._buffers[key]


def _is_near(a: Tensor, b: Tensor) -> bool:
    """Return whether two packed weights differ by a step at most."""
    if a is b or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return torch.equal(a, b) or bool(((a.short() - b.short()).abs() <= 1).all())

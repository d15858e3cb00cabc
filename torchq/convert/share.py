# SPDX-License-Identifier: Apache-2.0
"""Lets the leaves of a model and the layers of its graphs hold packed weights once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq.nn.attached import graphs_of
from torchq.nn.leaf import QuantizedLeaf

_PACKED = ("weight", "compensation", "pair_bound")


def share_weights(model: nn.Module) -> None:
    """Gives a leaf the tensors of the graph's layer of the same name, where they are equal.

    Batch norms that a graph folds into a weight change its scales, and seldom its integers.
    """
    for prefix, graph in graphs_of(model):
        layers = dict(graph.named_modules())
        for name, leaf in model.get_submodule(prefix).named_modules():
            layer = layers.get(name)
            if isinstance(leaf, QuantizedLeaf) and layer is not None:
                _share(leaf.layer, layer)


def _share(leaf: nn.Module, layer: nn.Module) -> None:
    pairs = [(leaf._buffers.get(key), layer._buffers.get(key)) for key in _PACKED]
    if all(_equal(a, b) for a, b in pairs):
        for key, (_, tensor) in zip(_PACKED, pairs, strict=True):
            leaf._buffers[key] = tensor


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))

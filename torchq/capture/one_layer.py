# SPDX-License-Identifier: Apache-2.0
"""The graph of a layer that the model's own code calls: a source, the layer, its result."""

from __future__ import annotations

import torch
from torch import fx, nn

from torchq.capture.graph import Captured, Meta


def one_layer(
    layer: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> Captured:
    """Return the graph of one call of a layer with a tensor of this shape and dtype.

    ``name`` is qualified, of the layer in the model; "" where it is the model.
    """
    parent, _, own = name.rpartition(".")
    model = nn.Module() if own else layer
    if own:
        model.add_module(own, layer)
    graph = fx.Graph()
    src = graph.placeholder("input")
    dst = graph.call_module(own, (src,))
    for node in (src, dst):
        node.meta.update(
            value=Meta(shape, dtype), aten=None, owner="", scope=parent, varying=True,
            static=False, positional=False, sizes=(), phase=None, line=None,
        )  # fmt: skip
    graph.output(dst).meta.update(scope="", varying=True, static=False, positional=False)
    return Captured(graph, model, f"{parent}." if parent else "")

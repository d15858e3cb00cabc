# SPDX-License-Identifier: Apache-2.0
"""Whatever kind of recorder a watch names, leaves and graphs give it the values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchq
from torchq.convert.dispatch import dispatches
from torchq.convert.prepared import Prepared
from torchq.convert.swap.observed import ObservedLeaf
from torchq.convert.watching import KINDS, Watch
from torchq.quantization.observers import Observer


class Sums(Observer):
    """Adds up what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def _record(self, values: torch.Tensor) -> None:
        self.total += float(values.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_and_graphs_record(kind: str) -> None:
    src, model = torch.ones(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)).eval()
    prepared = torchq.prepare(model, src)
    (dispatch,), leaf = dispatches(prepared), prepared[1]
    assert isinstance(dispatch.graph, Prepared) and isinstance(leaf, ObservedLeaf)
    nodes = dispatch.graph.plan.captured.graph.nodes
    node = next(node for node in nodes if node.op == "placeholder")
    watch = Watch(kind, (node,), "sums", Sums)
    for owner in (leaf, dispatch.graph):
        owner.watch([watch])
        owner(src)
        recorder = owner.recorder(watch)
        assert isinstance(recorder, Sums) and recorder.total == 12.0


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be one of observer, .*, got 'zeros'\. Add it"):
        Watch("zeros", (), None, Sums)

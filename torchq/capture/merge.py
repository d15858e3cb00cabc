# SPDX-License-Identifier: Apache-2.0
"""Computes once what a model's code computes again in each of its layers, as a mask from a bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from torchq.capture.rewrites import is_random, is_returned


def merge_equal(graph: fx.Graph, may_merge: Callable[[fx.Node], bool]) -> None:
    """Let the first of several ATen calls of the same on the same stand for all of them.

    Calls stay that give other values each time, that write in place, and whose result the caller
    may write to. What writes to a merged value gets a new one: see ``functional``.
    """
    first: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if may_merge(node) and _is_pure(node.target):
            other = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if other is not node and not is_returned(node):
                node.replace_all_uses_with(other)
                graph.erase_node(node)


def _is_pure(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return not target._schema.is_mutable and not is_random(target)

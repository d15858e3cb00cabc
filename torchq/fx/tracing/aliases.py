# SPDX-License-Identifier: Apache-2.0
"""Copies that are none for other strides, as ``y.t().contiguous()`` of one row.

A write to such a copy changes the original where they share memory. So both get one memory while
a model is traced: where somebody reads the other one afterwards, all that has to do with it stays
float and in order, see :func:`torchq.fx.recognize.rewritten`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.tracing.nodes import compute

__all__ = ["copied_sources", "join", "memory"]

_ALIGNMENT = 16  # bytes, so that elements of every dtype begin there


def memory(value: Any) -> int:
    """Where the first tensor in a value has its elements; 0 if it has none."""
    for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            return leaf.untyped_storage().data_ptr()
    return 0


def copied_sources(root: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The sources whose memory its result is in for other strides of theirs, and not for these.

    It is tried, on sources that are dense or have the strides of the result.
    """
    result = values[node]

    def shares(source: fx.Node, dense: Tensor) -> bool:
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: dense if n is source else values[n]
        )
        try:
            with torch.random.fork_rng(devices=[]):
                return memory(compute(root, node, args, kwargs)) == memory(dense)
        except Exception:  # of a view that these strides do not allow
            return False

    return [
        source for source in _as_large(node, values)
        if any(shares(source, dense) for dense in _dense(values[source], result))
    ]  # fmt: skip


def _as_large(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The sources that a result may be a copy of."""
    result = values[node]
    if node.op == "output" or node.meta["writes"] or not isinstance(result, Tensor):
        return []
    found = ((n, values[n]) for n in node.all_input_nodes if isinstance(values[n], Tensor))
    return [
        n for n, x in found
        if x.numel() == result.numel() and x.dtype == result.dtype
        and 0 != memory(x) != memory(result) != 0
    ]  # fmt: skip


def _dense(source: Tensor, result: Tensor) -> Iterator[Tensor]:
    yield source.clone(memory_format=torch.contiguous_format)
    if result.shape == source.shape:
        yield torch.empty_like(result).copy_(source)


def join(values: dict[fx.Node, Any], first: fx.Node, second: fx.Node) -> None:
    """Moves all that is in the memory of either to one block, as if nothing had been copied."""
    blocks = [values[node].untyped_storage() for node in (first, second)]
    starts = [0, -(-blocks[0].nbytes() // _ALIGNMENT) * _ALIGNMENT]
    joined = torch.empty(
        starts[1] + blocks[1].nbytes(), dtype=torch.uint8, device="cpu"
    ).untyped_storage()
    offsets = dict[int, int]()
    for start, block in zip(starts, blocks, strict=True):
        joined[start : start + block.nbytes()].copy_(block)
        offsets[block.data_ptr()] = start
    known = dict[int, Tensor]()  # one tensor may be the value of several nodes

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or memory(leaf) not in offsets:
            return leaf
        if id(leaf) not in known:
            offset = leaf.storage_offset() + offsets[memory(leaf)] // leaf.itemsize
            new = torch.empty(0, dtype=leaf.dtype, device="cpu")
            known[id(leaf)] = new.set_(joined, offset, leaf.shape, leaf.stride())
        return known[id(leaf)]

    for node, value in values.items():
        values[node] = tree_map(moved, value)

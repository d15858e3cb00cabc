# SPDX-License-Identifier: Apache-2.0
"""Memory that is read and then written in place: the write goes to a copy.

A converted graph reads later than the model: what moves elements when somebody wants the result,
a layer where its last part is. So nothing may change a value behind its readers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.tracing.recorder import Recorder

__all__ = ["spare_readers"]


def spare_readers(graph: fx.Graph, tracer: Recorder) -> None:
    """Puts a copy in front of what writes to memory that others have read.

    Not where somebody reads the memory afterwards, under another name: then all that has to do with
    it stays float and in order, see :func:`torchq.fx.recognize.rewritten`. Nor of parameters and
    buffers: a model that writes to those keeps something.

    Raises:
        TraceError: the write gets the memory under two names.
    """
    nodes = list(graph.nodes)
    position: dict[fx.Node, float] = {node: i for i, node in enumerate(nodes)}
    memory: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        memory[_storage(tracer.values.get(node))].append(node)
    for node in nodes:
        for source in dict.fromkeys(node.meta.get("writes", ())):
            storage = _storage(tracer.values[source])
            names = [n for n in memory[storage] if position[n] < position[node]] if storage else []
            readers = {u for n in names for u in n.users} - {*names, node}
            kept = any(n.op == "get_attr" for n in names)
            later = any(position[reader] > position[node] for reader in readers)
            if kept or later or not any(_holds(tracer, reader) for reader in readers):
                continue
            if len(set(names) & set(node.all_input_nodes)) > 1:
                raise fx.proxy.TraceError("its Python code writes to a view of what it has read")
            with graph.inserting_before(node):
                copied = graph.call_method("clone", (source,))
            known = {k: v for k, v in node.meta.items() if k in ("scope", "place")}
            copied.meta.update(known, varying=True, writes=[], static=False)
            node.replace_input_with(source, copied)
            node.meta["writes"] = [copied if n is source else n for n in node.meta["writes"]]
            moved = [copied, *memory[storage][len(names) :]]
            _move(tracer, source, moved, storage)
            position[copied] = position[node] - 0.5
            memory[storage], memory[_storage(tracer.values[copied])] = names, moved


def _holds(tracer: Recorder, node: fx.Node) -> bool:
    """Whether its value has elements, and is no size or guard."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(tracer.values.get(node)))


def _storage(value: Any) -> int:
    for leaf in _strided(value):
        return leaf.untyped_storage().data_ptr()
    return 0


def _strided(value: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(value) if isinstance(x, Tensor) and x.layout == torch.strided)


def _move(tracer: Recorder, source: fx.Node, nodes: list[fx.Node], storage: int) -> None:
    """The values of these nodes that are in the old memory are in that of the copy."""
    tracer.values[nodes[0]] = tracer.values[source]
    memory = tracer.values[source].untyped_storage().clone()

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            return leaf
        if leaf.untyped_storage().data_ptr() != storage:
            return leaf
        new = torch.empty(0, dtype=leaf.dtype, device="cpu")
        return new.set_(memory, leaf.storage_offset(), leaf.shape, leaf.stride())

    for node in nodes:
        tracer.values[node] = tree_map(moved, tracer.values[node])

# SPDX-License-Identifier: Apache-2.0
"""Conditions on the batch size that single batches may miss, as the graph is right for them.

Code asks ``if positions.shape[0] != batch: positions = positions.expand(batch, -1)``, or whether a
cache has the sizes of this call. A graph traced with a batch of 2 would refuse a batch of 1, for
which it is right all the same: model and graph are called with it, and with sizes that the code
compares the batch with, and then with the example again. Where they agree, inputs of these very
shapes pass the guards; what the code would do with others has not been seen.
"""

from __future__ import annotations

import copy
import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.tracing.guards import expect, have_shapes
from torchq.fx.tracing.memory import agree, with_constants
from torchq.state import twin

__all__ = ["free_batch", "note_shapes"]


def free_batch(model: nn.Module, traced: nn.Module, graph: fx.Graph, inputs: Any) -> None:
    """Lets batches of single sizes pass guards that refuse them, where the graph is right.

    Args:
        model: that the graph computes; copies of it are run.
        traced: has the constants that tracing added.
        graph: of the model.
        inputs: what it was traced with: positional and keyword arguments.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    asks = graph.find_nodes(op="call_function", target=expect)
    if not asks or len({x.size(0) for x in tensors}) != 1 or not tensors[0].size(0):
        return
    size = tensors[0].size(0)
    sources = [node for node in graph.find_nodes(op="placeholder") if node.meta["value"].shape]
    if len(sources) != len(tensors):  # some are in lists or dicts
        return

    def run(n: int) -> _Watched | None:
        watched = _Watched(fx.GraphModule(with_constants(twin(model), traced), graph))
        same = agree(twin(model), watched, [_resized(inputs, size, n), inputs])
        return watched if same else None

    example = run(size)
    if example is None:
        return
    # large ones may not fit in memory
    compared = {n for n in _compared(graph, example, size) if n <= max(16, 4 * size)}
    for n in sorted({1, *compared} - {size}):
        found = run(n)
        for guard in graph.find_nodes(op="call_function", target=expect):
            if found is not None and guard.name in found.failed:
                _let_pass(graph, guard, sources, n)


def note_shapes(model: nn.Module, traced: nn.Module, graph: fx.Graph, inputs: Any) -> None:
    """Where the batch is 1: "doubled" in the ``meta`` of nodes is their shape for a batch of 2.

    What does not depend on the batch, as positions ``(1, L, E)``, looks like a batch of 1. Where
    the graph cannot be run with 2, nothing is noted. Arguments as of :func:`free_batch`.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if not any(x.size(0) == 1 for x in tensors):
        return
    watched = _Watched(fx.GraphModule(with_constants(twin(model), traced), graph))
    args, kwargs = copy.deepcopy(_resized(inputs, 1, 2))
    try:
        with torch.random.fork_rng(devices=[]):
            watched(*args, **kwargs)
    except Exception:  # of the model's own code, which may know no other batch
        return
    for node in graph.nodes:
        if node.name in watched.shapes:
            node.meta["doubled"] = watched.shapes[node.name]


def _compared(graph: fx.Graph, run: _Watched, size: int) -> set[int]:
    """Numbers that the batch size is compared with."""
    found = set()
    for node in graph.nodes:
        if node.target in (operator.eq, operator.ne):
            sizes = [run.sizes.get(x.name) for x in node.all_input_nodes]
            found |= {x for x in node.args if type(x) is int and x > 0 and sizes == [size]}
    return found


def _resized(inputs: Any, size: int, n: int) -> Any:
    """The same with batches of n instead of ``size``; repetitions are rolled along the last dim."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.size(0) != size:
            return leaf
        times = -(-n // leaf.size(0))
        return torch.cat([leaf.roll(i, -1) if leaf.dim() > 1 else leaf for i in range(times)])[:n]

    return tree_map(resize, inputs)


class _Watched(nn.Module):
    """Runs a graph without its guards.

    Attributes:
        failed: names of those that would have raised.
        sizes: name of a node -> its value, of sizes and numbers made of them.
        shapes: name of a node -> shape of its value, of tensors.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module, self.failed, self.sizes = module, set[str](), dict[str, Any]()
        self.shapes = dict[str, tuple[int, ...]]()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the graph's."""
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return _Run(self).run(*bound.arguments.values())


class _Run(fx.Interpreter):
    def __init__(self, watched: _Watched) -> None:
        super().__init__(watched.module)
        self.watched = watched

    def run_node(self, n: fx.Node) -> Any:
        if n.target is not expect:
            result = super().run_node(n)
            if isinstance(result, Tensor):
                self.watched.shapes[n.name] = tuple(result.shape)
            else:
                self.watched.sizes[n.name] = result
            return result
        (value, expected, *_), _ = self.fetch_args_kwargs_from_env(n)
        if value != expected:
            self.watched.failed.add(n.name)
        return None


def _let_pass(graph: fx.Graph, guard: fx.Node, sources: list[fx.Node], n: int) -> None:
    """The guard lets sources of the example's shapes with a batch of ``n`` pass, too."""
    condition, expected, *where = guard.args
    assert isinstance(condition, fx.Node)
    with graph.inserting_before(guard):
        made = [graph.call_function(operator.eq, (condition, expected))]
        shapes = [[n, *source.meta["value"].shape[1:]] for source in sources]
        made.append(graph.call_function(have_shapes, (sources, shapes)))
        made.append(graph.call_function(operator.or_, (made[0], made[1])))
        relaxed = graph.call_function(expect, (made[2], True, *where))
    for node in made:
        node.meta.update(condition.meta)
    relaxed.meta.update(guard.meta)
    graph.erase_node(guard)

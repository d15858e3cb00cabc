# SPDX-License-Identifier: Apache-2.0
"""Conditions on the batch size that make no difference: a graph need not check them.

Code asks ``if positions.shape[0] != batch: positions = positions.expand(batch, -1)``, or whether a
cache has the sizes of this call. Model and graph are called with other batches: of 1, of sizes that
the code compares with, and of one that nothing is compared with. Where they agree although a guard
would have raised, the guard says too much.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.guards import expect
from torchq.fx.memory import agree, with_constants
from torchq.state import twin

__all__ = ["free_batch"]


def free_batch(model: nn.Module, traced: nn.Module, graph: fx.Graph, inputs: Any) -> None:
    """Removes guards from a graph, or lets them pass single sizes, where it computes the same.

    Args:
        model: that the graph computes; copies of it are run.
        traced: has the constants that tracing added.
        graph: of the model.
        inputs: what it was traced with: positional and keyword arguments.
    """
    guards = [node for node in graph.nodes if node.target is expect]
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if not guards or len({x.size(0) for x in tensors}) != 1 or not tensors[0].size(0):
        return
    size = tensors[0].size(0)
    runs: dict[int, _Watched] = {}  # of the batch sizes for which the graph is right

    def run(n: int) -> bool:
        watched = _Watched(fx.GraphModule(with_constants(twin(model), traced), graph))
        if agree(twin(model), watched, _resized(inputs, n)):
            runs[n] = watched
        return n in runs

    if not run(size):
        return
    special = sorted({1, *_compared(graph, runs[size], size)} - {size})
    usual = next(n for n in itertools.count(size + 1) if n not in special)
    for n in (usual, *special):
        run(n)
    for guard in guards:
        failing = [n for n, run in runs.items() if guard.name in run.failed]
        if not failing or not all(_asks_batch(guard, runs, size, n) for n in failing):
            continue
        if usual not in failing:
            _let_pass(graph, guard, failing)
        elif failing == [usual, *special]:
            graph.erase_node(guard)


def _compared(graph: fx.Graph, run: _Watched, size: int) -> set[int]:
    """Numbers that the batch size is compared with."""
    found = set()
    for node in graph.nodes:
        if node.target in (operator.eq, operator.ne):
            sizes = [run.sizes.get(x.name) for x in node.all_input_nodes]
            found |= {x for x in node.args if type(x) is int and x > 0 and sizes == [size]}
    return found


def _resized(inputs: Any, n: int) -> Any:
    """The same with another batch size."""

    def resize(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.dim()
        return leaf[torch.arange(n) % leaf.size(0)] if batched else leaf

    return tree_map(resize, inputs)


class _Watched(nn.Module):
    """Runs a graph without its guards.

    Attributes:
        failed: names of those that would have raised.
        sizes: name of a node -> its value, of sizes and numbers made of them.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module, self.failed, self.sizes = module, set[str](), dict[str, Any]()

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
            if not isinstance(result, Tensor):
                self.watched.sizes[n.name] = result
            return result
        (value, expected, *_), _ = self.fetch_args_kwargs_from_env(n)
        if value != expected:
            self.watched.failed.add(n.name)
        return None


def _asks_batch(guard: fx.Node, runs: dict[int, _Watched], size: int, n: int) -> bool:
    """Whether its condition compares the batch size, and no number made of it and other sizes."""
    condition = guard.args[0]
    todo, seen = [condition], set[fx.Node]()
    while todo:
        node = todo.pop()
        assert isinstance(node, fx.Node)
        if node in seen or node.name not in runs[size].sizes:
            continue
        seen.add(node)
        before, after = (runs[k].sizes[node.name] for k in (size, n))
        if before != after and not isinstance(before, bool):
            sequence = isinstance(before, tuple)
            taken = all(user.target is operator.getitem for user in node.users if user in seen)
            if not (taken if sequence else (before, after) == (size, n)):
                return False
        todo.extend(node.all_input_nodes)
    return True


def _let_pass(graph: fx.Graph, guard: fx.Node, sizes: list[int]) -> None:
    """The guard lets batches of these sizes pass, too."""
    condition, expected, *where = guard.args
    inputs = graph.find_nodes(op="placeholder")
    source = next((node for node in inputs if node.meta["value"].shape), None)
    if source is None:
        return
    with graph.inserting_before(guard):
        batch = graph.call_method("size", (source, 0))
        passes = [graph.call_function(operator.eq, (batch, n)) for n in sizes]
        passes.append(graph.call_function(operator.eq, (condition, expected)))
        made = [batch, *passes]
        either = passes[0]
        for other in passes[1:]:
            either = graph.call_function(operator.or_, (either, other))
            made.append(either)
        relaxed = graph.call_function(expect, (either, True, *where))
    assert isinstance(condition, fx.Node)
    for node in made:
        node.meta.update(condition.meta)
    relaxed.meta.update(guard.meta)
    graph.erase_node(guard)

# SPDX-License-Identifier: Apache-2.0
"""Conditions on the batch size that other batches may miss, as the graph is right for them.

Code asks ``if positions.shape[0] != batch: positions = positions.expand(batch, -1)``, or whether a
cache has the sizes of this call. A graph traced with a batch of 2 would refuse a batch of 1, for
which it is right all the same: model and graph are called with it, and with sizes that the code
compares the batch with. Where they agree, inputs of these very shapes pass the guards.

A condition guards nothing any more where the code that is traced with such a batch is the same on
either way, but for what is expanded to the batch, and asks nothing else.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.guards import GUARDS, expect, have_shapes
from torchq.fx.memory import agree, with_constants
from torchq.state import twin

__all__ = ["free_batch"]


def free_batch(
    model: nn.Module,
    traced: nn.Module,
    graph: fx.Graph,
    inputs: Any,
    trace: Callable[[Any], tuple[nn.Module, fx.Graph] | None],
) -> None:
    """Lets other batches pass guards that refuse them, where the graph is right.

    Args:
        model: that the graph computes; copies of it are run.
        traced: has the constants that tracing added.
        graph: of the model.
        inputs: what it was traced with: positional and keyword arguments.
        trace: inputs -> ``traced`` and ``graph`` of them, where there is a graph.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    asks = graph.find_nodes(op="call_function", target=expect)
    if not asks or len({x.size(0) for x in tensors}) != 1 or not tensors[0].size(0):
        return
    size = tensors[0].size(0)
    sources = [node for node in graph.find_nodes(op="placeholder") if node.meta["value"].shape]
    if len(sources) != len(tensors):  # some are in lists or dicts
        return

    def run(given: Any) -> _Watched:
        watched = _Watched(fx.GraphModule(with_constants(twin(model), traced), graph))
        watched.agrees = agree(twin(model), watched, given)
        return watched

    example = run(inputs)
    if not example.agrees:
        return
    # large ones may not fit in memory
    compared = {n for n in _compared(graph, example, size) if n <= max(16, 4 * size)}
    needless, needed, passing = set[str](), set[str](), dict[str, list[int]]()
    for n in sorted({1, size + 1, size + 3, *compared} - {size}):
        given = _resized(inputs, n)
        found = run(given)
        if not found.agrees:
            needed |= found.failed
            continue
        free = {g for g in asks if g.name in found.failed and type(g.args[1]) is bool}
        if free and _is_one_question(free) and (other := trace(given)):
            needless |= {g.name for g in free} if _same_code((traced, graph), other) else set()
        for name in found.failed if n in {1, *compared} else ():
            passing.setdefault(name, []).append(n)
    for guard in asks:
        if guard.name in needless - needed:
            graph.erase_node(guard)
        elif guard.name in passing:
            _let_pass(graph, guard, sources, passing[guard.name])


def _is_one_question(guards: set[fx.Node]) -> bool:
    """Whether they guard the same computation."""
    known: dict[Any, str] = {}
    names: dict[fx.Node, str] = {}
    for node in next(iter(guards)).graph.nodes:
        own = node.name if node.op == "placeholder" else ""
        names[node] = known.setdefault((node.target, _text(node, names), own), f"%{len(known)}")
    return len({names[guard.all_input_nodes[0]] for guard in guards}) == 1


def _text(node: fx.Node, names: dict[fx.Node, str]) -> str:
    return repr(fx.node.map_arg((node.args, node.kwargs), lambda n: names[n]))


_EXPANDING = ("expand", "expand_as", "broadcast_to", torch.broadcast_to)


def _same_code(one: tuple[nn.Module, fx.Graph], other: tuple[nn.Module, fx.Graph]) -> bool:
    """Whether two traces compute the same, but for expanding, and the other one asks no more."""
    places = [
        {node.args[2] for node in graph.find_nodes(op="call_function", target=expect)}
        for _, graph in (one, other)
    ]
    return places[1] <= places[0] and _code(*one) == _code(*other)


def _code(traced: nn.Module, graph: fx.Graph) -> list[Any]:
    """What a graph computes, without its guards and what they ask for."""
    copied = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target in _EXPANDING:
            values[node] = values[node.args[0]]
        elif node.target not in GUARDS:
            values[node] = copied.node_copy(node, lambda n: values[n])
    for node in reversed(list(copied.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not node.meta["writes"]:
            copied.erase_node(node)
    names = {node: f"%{i}" for i, node in enumerate(copied.nodes)}
    return [(node.op, _target(traced, node), _text(node, names)) for node in copied.nodes]


def _target(traced: nn.Module, node: fx.Node) -> Any:
    """What a node calls or gets: a tensor that is none of the model's by its value."""
    if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
        value = operator.attrgetter(str(node.target))(traced)
        return str(value.dtype), value.tolist()
    return node.target


def _compared(graph: fx.Graph, run: _Watched, size: int) -> set[int]:
    """Numbers that the batch size is compared with."""
    found = set()
    for node in graph.nodes:
        if node.target in (operator.eq, operator.ne):
            sizes = [run.sizes.get(x.name) for x in node.all_input_nodes]
            found |= {x for x in node.args if type(x) is int and x > 0 and sizes == [size]}
    return found


def _resized(inputs: Any, n: int) -> Any:
    """The same with another batch size; what is repeated is rolled along the last dim."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        times = -(-n // leaf.size(0))
        return torch.cat([leaf.roll(i, -1) if leaf.dim() > 1 else leaf for i in range(times)])[:n]

    return tree_map(resize, inputs)


class _Watched(nn.Module):
    """Runs a graph without its guards.

    Attributes:
        agrees: whether it gives what the model gives.
        failed: names of those that would have raised.
        sizes: name of a node -> its value, of sizes and numbers made of them.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module, self.agrees = module, False
        self.failed, self.sizes = set[str](), dict[str, Any]()

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


def _let_pass(graph: fx.Graph, guard: fx.Node, sources: list[fx.Node], batches: list[int]) -> None:
    """The guard lets sources of the example's shapes with other ``batches`` pass, too."""
    condition, expected, *where = guard.args
    assert isinstance(condition, fx.Node)
    with graph.inserting_before(guard):
        made = [graph.call_function(operator.eq, (condition, expected))]
        for n in batches:
            shapes = [[n, *source.meta["value"].shape[1:]] for source in sources]
            fits = graph.call_function(have_shapes, (sources, shapes))
            made += [fits, graph.call_function(operator.or_, (made[-1], fits))]
        relaxed = graph.call_function(expect, (made[-1], True, *where))
    for node in made:
        node.meta.update(condition.meta)
    relaxed.meta.update(guard.meta)
    graph.erase_node(guard)

# SPDX-License-Identifier: Apache-2.0
"""Whether a graph computes what the model does, call after call: it keeps nothing in between.

Model and graph are called with other values first and then with the example inputs. A cache of what
depends on shapes only gives the same either way; one of values, a counter or a history does not.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from torchq.state import State, changed, put_back, state_of, twin

__all__ = ["DIFFERS", "KEEPS", "SHARES", "Calls", "agree", "leaves", "why_other", "with_constants"]

DIFFERS = (
    "its graph computes something else than the model (perhaps its code asks `type(x) is "
    "torch.Tensor` or `isinstance(n, int)` of a size, makes text of sizes, or writes to a view)"
)
SHARES = "its Python code writes to a constant tensor, which all calls of a graph would share"
_IDENTITY = "its results depend on whether two of its arguments are one tensor"
_OUTSIDE = "its results depend on what earlier calls left outside of its modules"
KEEPS = "its results depend on what earlier calls left in {}, which a graph does not keep"


class Calls:
    """What a model gives in two calls, the first one with other values; it runs only once.

    Attributes:
        model: as it is before a call; copies of it are run.
        others: what the first call gets.
        results: of both calls.
        states: behind both calls.
    """

    def __init__(self, model: nn.Module) -> None:
        """Nothing runs yet."""
        self.model, self.others = model, None
        self.results: list[Any] = []
        self.states: list[State] = []

    def run(self, inputs: Any) -> bool:
        """Whether there are such calls; ``inputs`` are what the second one gets."""
        if self.results:
            return True
        for others in (_turned(inputs, True), _turned(inputs, False), inputs):
            try:
                self.results, self.states = _run(twin(self.model), (others, inputs))
            except Exception:  # of the model's own code, which may want sorted values
                continue
            self.others = others
            return True
        return False


def why_other(
    calls: Calls, traced: nn.Module, graph: fx.Graph, inputs: Any, opaque: Iterable[str]
) -> dict[str, str]:
    """Name of a module that a graph cannot stand for -> why; "" is the model, nothing is well.

    Args:
        calls: of the model.
        traced: has the constants that tracing added.
        graph: of the model.
        inputs: what it was traced with: positional and keyword arguments.
        opaque: modules that the graph calls as they are, so that they keep what they keep.
    """
    if written := _written(graph):
        return written
    if not calls.run(inputs):
        return {"": "a second call of it raises an error"}
    model, states = calls.model, calls.states
    try:
        graph_module = fx.GraphModule(with_constants(twin(model), traced), graph)
        found, _ = _run(graph_module, (calls.others, inputs))
    except Exception as error:
        return {"": f"its graph raises {type(error).__name__}, where the model does not: {error}"}
    if not _same(calls.results, found):
        return _culprits(calls, inputs)
    inside = tuple(f"{name}." for name in opaque)
    moved = {n: keys for n, keys in changed(*states).items() if not f"{n}.".startswith(inside)}
    poisoned = {name: _poisoned(name, keys, *states) for name, keys in moved.items()}
    guilty = [n for n, state in poisoned.items() if not _agrees(model, n, state, inputs, found[1])]
    if not guilty and _changes_constants(graph):
        return {"": SHARES}
    if not guilty and _asks_identity(model, graph_module, inputs):
        return {"": _IDENTITY}
    return _reasons({name: moved[name] for name in guilty})


def _asks_identity(model: nn.Module, graph_module: nn.Module, inputs: Any) -> bool:
    """Whether the graph is wrong where tensors of one kind, which differ here, are one tensor."""
    first: dict[Any, Tensor] = {}

    def merge(leaf: Any) -> Any:
        return first.setdefault((leaf.shape, leaf.dtype), leaf) if type(leaf) is Tensor else leaf

    merged = tree_map(merge, inputs)
    if len({id(x) for x in tree_leaves(inputs) if type(x) is Tensor}) == len(first):
        return False
    try:
        _run(twin(model), [merged])
    except Exception:  # of the model's own code, which takes no such call
        return False
    return not agree(twin(model), graph_module, [merged])


def agree(a: nn.Module, b: nn.Module, calls: list[Any]) -> bool:
    """Whether both compute the same, call after call; not if one of them raises."""
    try:
        first, _ = _run(a, calls)
        second, _ = _run(b, calls)
    except Exception:  # of the model's own code
        return False
    return _same(first, second)


def with_constants(model: nn.Module, traced: nn.Module) -> nn.Module:
    """The model, with the constants that tracing added to its twin."""
    for name, value in vars(traced).items():
        if name.startswith("_tensor_constant") and isinstance(value, Tensor):
            setattr(model, name, value.clone())
    for name, buffer in traced.named_buffers(recurse=False):
        if name.startswith("_tensor_constant"):
            model.register_buffer(name, buffer.clone())
    return model


def _written(graph: fx.Graph) -> dict[str, str]:
    """Buffers that the graph writes to in place, and that something reads."""
    kept = {
        node.meta["value"].storage: node
        for node in graph.find_nodes(op="get_attr")
        if not str(node.target).startswith("_tensor_constant")
    }
    written = {
        source.meta["value"].storage
        for node in graph.nodes
        for source in node.meta.get("writes", ())
    } & (kept.keys() - {0})
    found: dict[str, list[str]] = {}
    for storage in written:
        readers = [
            user
            for node in graph.nodes if node.meta["value"].storage == storage
            for user in node.users if user.users or user.op == "output"
        ]  # fmt: skip
        if readers:
            name, _, key = str(kept[storage].target).rpartition(".")
            found.setdefault(name, []).append(key)
    return _reasons(found)


def _changes_constants(graph: fx.Graph) -> bool:
    """Whether it writes to tensors that the model's code made of constants."""
    made = {
        node.meta["value"].storage
        for node in graph.find_nodes(op="get_attr")
        if str(node.target).startswith("_tensor_constant")
    } - {0}
    return any(
        source.meta["value"].storage in made
        for node in graph.nodes
        for source in node.meta.get("writes", ())
    )


def _reasons(kept: dict[str, list[str]]) -> dict[str, str]:
    return {name: KEEPS.format(", ".join(f"'{key}'" for key in keys))
            for name, keys in kept.items()}  # fmt: skip


def _run(model: nn.Module, calls: Iterable[Any]) -> tuple[list[Any], list[State]]:
    """What each call returns and leaves in its arguments, and the state after it."""
    results, states = [], []
    for given in calls:
        args, kwargs = copy.deepcopy(given)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result = model(*args, **kwargs)
            # what it returns may be what it keeps
            results.append(copy.deepcopy(leaves((result, args, kwargs), set())))
        states.append(state_of(model))
    return results, states


def leaves(result: Any, above: set[int]) -> list[Any]:
    """What is in a result: in containers and dataclasses, and objects of unknown classes, too."""
    found: list[Any] = []
    for leaf in tree_leaves(result):
        inside: list[Any] | None = None
        if isinstance(leaf, Mapping):
            inside = [*leaf.keys(), *leaf.values()]
        elif isinstance(leaf, tuple | list | deque):
            inside = list(leaf)
        elif not isinstance(leaf, (Tensor, nn.Module, type)) and getattr(leaf, "__dict__", None):
            inside = [value for _, value in sorted(vars(leaf).items())]
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            inside = [getattr(leaf, field.name, None) for field in fields(leaf)]
        if inside is None:
            found.append(leaf)
        elif id(leaf) not in above:
            found += [len(inside), *leaves(inside, above | {id(leaf)})]
    return found


def _turned(inputs: Any, ints: bool) -> Any:
    """Other values of the same shapes and kinds."""

    def turn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.dtype == torch.bool:
            return leaf
        if leaf.is_floating_point():
            return leaf.flip(-1) * 0.75
        return leaf.flip(-1) if ints and not leaf.is_complex() else leaf

    return tree_map(turn, inputs)


def _culprits(calls: Calls, inputs: Any) -> dict[str, str]:
    """Modules whose state after a call with other values changes the result of the next one."""
    model, second, states = calls.model, calls.results[1], calls.states
    (first,), (after,) = _run(twin(model), [inputs])
    suspects = changed(states[0], after)
    for name, keys in changed(*states).items():
        suspects[name] = list(dict.fromkeys([*suspects.get(name, ()), *keys]))
    guilty = [n for n in suspects if not _agrees(model, n, states[0], inputs, first)]
    if guilty:
        return _reasons({name: suspects[name] for name in guilty})
    if _same(first, second):
        return {"": DIFFERS}
    return _reasons(suspects) or {"": _OUTSIDE}


def _agrees(model: nn.Module, name: str, state: State, inputs: Any, expected: Any) -> bool:
    """Whether the model gives the expected result with the state of one module another one."""
    copied = twin(model)
    put_back(copied, {name: state[name]}, name)
    try:
        (result,), _ = _run(copied, [inputs])
    except Exception:
        return False
    return _same(result, expected)


def _poisoned(name: str, keys: Iterable[str], before: State, after: State) -> State:
    """The state of one module as after many calls: counters further on, histories longer."""
    old, new, known = before.get(name, {}), after[name], dict[int, Any]()
    return {name: {**new, **{key: _further(old.get(key), new.get(key), known) for key in keys}}}


def _further(old: Any, new: Any, known: dict[int, Any]) -> Any:
    """``new`` as after many calls like those that made it of ``old``.

    ``known`` has by id what became of others: two attributes may be one history.
    """
    if type(new) in (int, float):
        return new + 1009 if old is None or old != new else new
    if id(new) in known or old is new or isinstance(new, nn.Module | Tensor | type):
        return known.get(id(new), new)
    try:
        result: Any = copy.copy(new)
    except Exception:  # a file, say
        return new
    if isinstance(new, list | deque):
        known[id(new)] = result
        for i, pair in enumerate(zip(old if type(old) is type(new) else (), new, strict=False)):
            result[i] = _further(*pair, known)
        result.extend([new[-1]] * 8 if new else [])
    elif (owned := _attributes(result)) is not None and result is not new:
        known[id(new)] = result
        was = _attributes(old) or {}
        owned.update({k: _further(was.get(k), v, known) for k, v in owned.items()})
    return result


def _attributes(value: Any) -> dict[Any, Any] | None:
    found = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


def _same(a: Any, b: Any) -> bool:
    """Of results: the same structure, and values as near as other orders of additions give."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_kind = a.shape == b.shape and a.dtype == b.dtype
        return same_kind and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        same_kind = a.shape == b.shape and a.dtype == b.dtype
        return same_kind and _same(a.ravel().tolist(), b.ravel().tolist())
    if isinstance(a, float) and isinstance(b, float):
        return (a != a and b != b) or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5)
    if a is None or isinstance(a, bool | int | float | complex | str | bytes | set | frozenset):
        return bool(a == b)
    return type(a) is type(b)

# SPDX-License-Identifier: Apache-2.0
"""Inputs as trees of what they hold, and copies of them."""

from __future__ import annotations

import contextlib
import copy
from collections import UserDict, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Args = Sequence[object]
Kwargs = Mapping[str, object]
Call = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of one call."""
_MAPPINGS = (UserDict, dict, MappingProxyType)
_Mapping = UserDict[object, object] | dict[object, object] | MappingProxyType[object, object]


def opened(value: object) -> object:
    """Return a value in which pytree finds what mappings hold that it does not know.

    These are subclasses of dict and UserDict, such as BatchEncoding of transformers, and proxies.
    ``tree_unflatten`` makes such mappings again.
    """
    if not any(map(_opens, pytree.tree_leaves(value))):
        return value
    return pytree.tree_map(lambda leaf: _Opened(leaf) if _opens(leaf) else leaf, value)


def _opens(leaf: object) -> bool:
    """Return whether a leaf is a mapping that holds its tensors as items, and nowhere else."""
    if not isinstance(leaf, _MAPPINGS):
        return False
    others = [v for key, v in getattr(leaf, "__dict__", {}).items() if key != "data"]
    return not any(isinstance(x, Tensor) for x in pytree.tree_leaves(others))


class _Opened:
    """A mapping as a node of a tree."""

    def __init__(self, mapping: _Mapping) -> None:
        self.keys = list(mapping)
        self.values = [opened(mapping[key]) for key in self.keys]
        self.form = _Form(mapping)


class _Form:
    """The class and the keys of a mapping, and its attributes that are numbers or text."""

    def __init__(self, mapping: _Mapping) -> None:
        self.empty = _filled(mapping, dict.fromkeys(mapping))
        plain = bool, int, float, str, type(None)
        attributes = getattr(mapping, "__dict__", {}).items()
        constants = {key: value for key, value in attributes if isinstance(value, plain)}
        self.known = type(mapping), list(mapping), constants

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and self.known == other.known

    def __hash__(self) -> int:
        return hash(self.known[0])


def _filled(mapping: _Mapping, items: dict[object, object]) -> _Mapping:
    """Return a mapping of the same class with the same keys."""
    if isinstance(mapping, MappingProxyType):
        return MappingProxyType(items)
    made = copy.copy(mapping)
    for key, value in items.items():
        made[key] = value
    return made


pytree.register_pytree_node(
    _Opened,
    lambda node: (node.values, node.form),
    lambda values, form: _filled(form.empty, dict(zip(form.known[1], values, strict=True))),
    flatten_with_keys_fn=lambda node: (
        [(pytree.MappingKey(k), v) for k, v in zip(node.keys, node.values, strict=True)],
        node.form,
    ),
)


def copied(args: Args, kwargs: Kwargs) -> Call:
    """Return copies of all that a call is given: a model may write to its inputs.

    Tensors need no grad, and are no inference tensors outside inference mode. What refuses to be
    copied stays itself, as modules do.
    """
    leaves, spec = pytree.tree_flatten(opened((tuple(args), dict(kwargs))))
    memo = {id(x): x.detach().clone() for x in leaves if isinstance(x, Tensor)}
    given: Call = pytree.tree_unflatten([_copy(leaf, memo) for leaf in leaves], spec)
    return given


def _copy(leaf: object, memo: Mapping[int, object]) -> object:
    if not isinstance(leaf, nn.Module):
        with contextlib.suppress(Exception):
            return copy.deepcopy(leaf, {**detached(leaf), **memo})
    return leaf


def detached(model: object) -> dict[int, object]:
    """For ``deepcopy``, which refuses what is no leaf: the copies of such tensors in modules."""
    copies, seen, left = dict[int, object](), set[int](), [model]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                copies[id(value)] = value.detach().clone()
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list | tuple | deque):
            left.extend(value)
        elif isinstance(getattr(value, "__dict__", None), dict):
            left.append(value.__dict__)
    return copies

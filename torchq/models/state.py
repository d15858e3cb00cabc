# SPDX-License-Identifier: Apache-2.0
"""Compares and restores a model's state beside its parameters: buffers, caches, counters."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from torchq.models.trees import detached
from torchq.quantization.observers import Observer

State = dict[str, dict[str, Any]]
"""Qualified name of a module -> its buffers and plain attributes, by name."""
_Kept = TypeVar("_Kept")

_INTERNAL = frozenset(vars(nn.Module()))
_LIBRARIES = ("torch.", "torchq.", "torchao.")  # their modules keep nothing in eval mode


def twin(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters and a state of its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def state_of(model: nn.Module) -> State:
    """Return a copy of what others' modules keep; what observers recorded is not the model's."""
    observing = {part for m in model.modules() if isinstance(m, Observer) for part in m.modules()}
    found = {
        name: _kept(module)
        for name, module in model.named_modules()
        if module not in observing and not type(module).__module__.startswith(_LIBRARIES)
    }
    return _copied(found, detached(model) | _skeleton(model))


def _copied(found: _Kept, memo: dict[int, object]) -> _Kept:
    """Return a copy; handles that modules leave out of copies, such as files and locks, stay."""
    try:
        return copy.deepcopy(found, {**memo})
    except Exception:
        return copy.deepcopy(found, memo | _handles(found, memo))


def _handles(value: object, memo: dict[int, object]) -> dict[int, object]:
    """By id, what in a value cannot be copied and holds nothing that Python code can change."""
    found, seen, left = dict[int, object](), set[int](), [value]
    while left:
        x = left.pop()
        if id(x) in seen or _copies(x, memo):
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            left.extend((*x, *x.values()))
        elif isinstance(x, list | tuple | deque | set | frozenset):
            left.extend(x)
        elif isinstance(x, IOBase):
            found[id(x)] = x
        elif hasattr(x, "__dict__"):
            left.extend(vars(x).values())
        elif not isinstance(x, Iterator | torch.Generator) and not hasattr(x, "__slots__"):
            found[id(x)] = x
    return found


def _copies(value: object, memo: dict[int, object]) -> bool:
    try:
        copy.deepcopy(value, {**memo})
    except Exception:
        return False
    return True


def _skeleton(model: nn.Module) -> dict[int, object]:
    """For ``deepcopy``: what stays itself, as what a model keeps refers to it."""
    return {id(x): x for x in (*model.modules(), *model.parameters())}


def _kept(module: nn.Module) -> dict[str, object]:
    dropped = _INTERNAL | {"forward", "__prepare_scriptable__"}
    plain = {key: value for key, value in vars(module).items() if key not in dropped}
    return plain | module._buffers


def changed(before: State, after: State) -> dict[str, list[str]]:
    """Name of a module -> the attributes that differ."""
    found = {}
    for name, now in after.items():
        old = before.get(name, {})
        keys = [key for key in dict.fromkeys((*old, *now)) if not _equal(old, now, key)]
        if keys:
            found[name] = keys
    return found


def put_back(model: nn.Module, before: State) -> None:
    """Give the attributes that differ their old values."""
    modules = {name: model.get_submodule(name) for name in before}
    found = changed(before, {n: _kept(m) for n, m in modules.items()})
    old = {
        n: {key: before[n][key] for key in keys if key in before[n]} for n, keys in found.items()
    }
    old = _copied(old, _skeleton(model))  # at once: modules may share what they keep
    for name, keys in found.items():
        module = modules[name]
        for key in keys:
            owner = module._buffers if key in module._buffers else vars(module)
            owner.pop(key, None)
            if key in old[name]:
                owner[key] = old[name][key]


@contextmanager
def same_numbers() -> Iterator[None]:
    """Let code draw the same random numbers each time, and restore the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Whatever the model keeps when it runs here is afterwards what it was."""
    before = state_of(model)
    try:
        yield
    finally:
        put_back(model, before)


_MISSING = object()


def _equal(old: dict[str, object], new: dict[str, object], key: str) -> bool:
    return is_same(old.get(key, _MISSING), new.get(key, _MISSING))


def is_same(a: object, b: object) -> bool:
    """Return whether values are equal, or what is in them."""
    return _same(a, b, {})


def _same(a: Any, b: Any, seen: dict[tuple[int, int], object]) -> bool:
    """Return whether values are equal, or what is in them; of unknown classes, what pickle sees."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    seen[id(a), id(b)] = a, b  # alive, or other objects may get their ids
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], seen) for key in a)
    if isinstance(a, int | str | bytes | complex | set | frozenset):
        return bool(a == b)
    if isinstance(a, nn.Module):
        return True
    try:
        return _same(a.__reduce_ex__(4), b.__reduce_ex__(4), seen)
    except Exception:  # nothing is known about it
        return False


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Compare tensors; kinds that do not compare, such as nested ones, differ."""
    if a.layout != b.layout or a.dtype != b.dtype:
        return False
    try:
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        alike = a.shape == b.shape
        return alike and bool(torch.eq(a, b).logical_or(a.isnan() & b.isnan()).all())
    except RuntimeError:
        return False

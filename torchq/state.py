# SPDX-License-Identifier: Apache-2.0
"""What a model keeps between calls beside its parameters: buffers, caches, counters, histories."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["State", "as_before", "changed", "put_back", "state_of", "twin"]

State = dict[str, dict[str, Any]]
"""Qualified name of a module -> its buffers and plain attributes, by name."""

_INTERNAL = frozenset(vars(nn.Module()))
_LIBRARIES = ("torch.", "torchq.")  # their modules keep nothing in eval mode but what they observe


def twin(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and a state of its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def state_of(model: nn.Module) -> State:
    """A copy of what the modules of others keep."""
    memo: dict[int, Any] = {id(x): x for x in (*model.modules(), *model.parameters())}
    found = {
        name: _kept(module)
        for name, module in model.named_modules()
        if not type(module).__module__.startswith(_LIBRARIES)
    }
    return copy.deepcopy(found, memo)


def _kept(module: nn.Module) -> dict[str, Any]:
    plain = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
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


def put_back(model: nn.Module, before: State, prefix: str = "") -> None:
    """Gives the attributes that differ their old values, of modules at and under ``prefix``."""
    under = f"{prefix}." if prefix else ""
    modules = {
        name: model.get_submodule(name)
        for name in before
        if name == prefix or name.startswith(under)
    }
    for name, keys in changed(before, {n: _kept(m) for n, m in modules.items()}).items():
        module = modules[name]
        for key in keys:
            owner = module._buffers if key in module._buffers else vars(module)
            owner.pop(key, None)
            if key in before[name]:
                owner[key] = copy.deepcopy(before[name][key])


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Whatever the model keeps when it runs here is afterwards what it was."""
    before = state_of(model)
    try:
        yield
    finally:
        put_back(model, before)


_MISSING = object()


def _equal(old: dict[str, Any], new: dict[str, Any], key: str) -> bool:
    return _same(old.get(key, _MISSING), new.get(key, _MISSING), set())


def _same(a: Any, b: Any, seen: set[int]) -> bool:
    """Whether values, or what is in them, are equal; of unknown classes, their attributes."""
    if a is b or id(a) in seen:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    seen.add(id(a))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], seen) for key in a)
    if isinstance(a, int | str | set):
        return bool(a == b)
    if isinstance(a, nn.Module) or not hasattr(a, "__dict__"):
        return True
    return _same(vars(a), vars(b), seen)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """False, too, of kinds that cannot be compared, as nested ones and those without memory."""
    if a.layout != b.layout or a.dtype != b.dtype:
        return False
    try:
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        alike = a.shape == b.shape
        return alike and bool(torch.eq(a, b).logical_or(a.isnan() & b.isnan()).all())
    except RuntimeError:
        return False

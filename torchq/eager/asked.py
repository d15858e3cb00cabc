# SPDX-License-Identifier: Apache-2.0
"""Which classes a model's code asks for: ``isinstance`` says no of what stands for a module."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["asked_classes"]

_ASKS = frozenset({"isinstance", "issubclass", "type", "__class__"})
_LIBRARY = ("torch.", "torchq.")


def asked_classes(modules: Iterable[nn.Module]) -> set[Any]:
    """Names of classes, and classes, that code of these modules, called by a forward, may ask for.

    As far as its functions name what they call; more may be in it than is asked for.
    """
    modules = list(modules)
    left = [f for m in modules for f in (*vars(m).values(), inspect.getattr_static(m, "forward"))]
    found, seen = set[Any](), set[FunctionType]()
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or function in seen or _is_library(function):
            continue
        seen.add(function)
        names = set[str]()
        asks = False
        for code in _codes(function.__code__):
            names.update(code.co_names)
            asks |= any(step.opname == "MATCH_CLASS" for step in dis.get_instructions(code))
        known = [function.__globals__[name] for name in names & function.__globals__.keys()]
        left += [*known, *_methods(modules, names)]
        if asks or names & _ASKS:
            found |= names
            for value in known:
                found.update(v for v in _flat(value) if isinstance(v, type))
    return found


def _is_library(function: FunctionType) -> bool:
    return (function.__module__ or "").startswith(_LIBRARY)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _methods(modules: list[nn.Module], names: set[str]) -> Iterator[Any]:
    for cls in {type(m) for m in modules}:
        for name in names - set(dir(nn.Module)):
            found = inspect.getattr_static(cls, name, None)
            yield getattr(found, "fget", None) or getattr(found, "__func__", found)


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)

# SPDX-License-Identifier: Apache-2.0
"""Objects that models return their results in: dataclasses and classes of dicts.

TorchScript knows no class of results, such as a dataclass with a field ``logits``: what is scripted
returns a named tuple, or the dict itself of a class of dicts. The tuple has the class's name, with
a number behind it where another has that name, and the fields that its ``__init__`` takes: what
``__post_init__`` adds or changes is not in it.
"""

from __future__ import annotations

import ast
import copyreg
import itertools
from dataclasses import is_dataclass
from typing import Any, NamedTuple, Optional

from torch import Tensor, fx

__all__ = ["is_like", "no_place_for", "scripted"]


def no_place_for(a: Any) -> str:
    """Why an object of a class that a graph does not know cannot be in it."""
    name = type(a).__name__
    reason = f"its Python code returns or takes an object of class {name}, which no graph holds"
    if name.endswith("Cache"):  # of transformers
        reason += "; pass use_cache=False in example_inputs, if the model has it"
    return reason


def is_like(made: Any, a: Any) -> bool:
    """Whether two objects of a class have the same nodes and values."""
    own, others = _attributes(made), _attributes(a)
    if own.keys() != others.keys():
        return False
    pairs = [(value, others[key]) for key, value in own.items()]
    if isinstance(a, dict):
        if list(made) != list(a):
            return False
        pairs += [(value, a[key]) for key, value in made.items()]
    return all(_is_same(x, y) for x, y in pairs)


def _attributes(made: Any) -> dict[str, Any]:
    """With those in ``__slots__``."""
    slots = [name for name in copyreg._slotnames(type(made)) if hasattr(made, name)]  # type: ignore[attr-defined]
    return getattr(made, "__dict__", {}) | {name: getattr(made, name) for name in slots}


def _is_same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if type(x) is not type(y) or isinstance(x, fx.Proxy | Tensor):
        return False
    if type(x) in (list, tuple):
        return len(x) == len(y) and all(map(_is_same, x, y))
    if type(x) is dict:
        return list(x) == list(y) and all(_is_same(x[key], y[key]) for key in x)
    return bool(x == y)


def scripted(source: str, names: dict[str, Any]) -> str:
    """The code with TorchScript's results instead; ``names`` gets the named tuples."""
    results = _Results(names)
    tree = results.visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree)) if results.found else source


class _Results(ast.NodeTransformer):
    """Calls of dataclasses as calls of named tuples, and dicts for their classes.

    Attributes:
        found: whether there are any.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.found, self._names, self._types = False, names, dict[str, Any]()

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        visited = self.generic_visit(node)
        if isinstance(node.targets[0], ast.Name):
            self._types[node.targets[0].id] = self._type(node.value)
        return visited

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        cls = self._names.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if not isinstance(cls, type):
            return node
        if is_dataclass(cls):
            fields = [(str(given.arg), self._type(given.value)) for given in node.keywords]
            made = _named_tuple(cls.__name__, fields)
            node.func = ast.Name(made.__name__, ast.Load())
            self._names[made.__name__], self.found = made, True
        elif issubclass(cls, dict) and len(node.args) == 1:
            self.found = True
            return node.args[0]
        return node

    def _type(self, node: ast.expr) -> Any:
        """Of a value in the code: what is not known is a tensor, as TorchScript takes it."""
        match node:
            case ast.Constant(None):
                return Optional[Tensor]  # noqa: UP045 - TorchScript wants this form
            case ast.Constant(value):
                return type(value)
            case ast.Name(name):
                return self._types.get(name, Tensor)
            case ast.Tuple(parts):
                return tuple.__class_getitem__(tuple(self._type(part) for part in parts))
            case ast.List([first, *_]):
                return list[self._type(first)]  # type: ignore[misc]
            case ast.Dict(values=[first, *_]):
                return dict[str, self._type(first)]  # type: ignore[misc]
            case ast.Call(ast.Name(name)) if name in _NAMED:
                return _NAMED[name]
        return Tensor


_NAMED = dict[str, Any]()
"""Named tuples by name: TorchScript takes one name for one set of fields."""


def _named_tuple(name: str, fields: list[tuple[str, Any]]) -> Any:
    """The named tuple of these fields, with a number behind its name if that is taken."""
    for i in itertools.count():
        label = f"{name}_{i}" if i else name
        made = _NAMED.setdefault(label, NamedTuple(label, fields))
        if list(made.__annotations__.items()) == fields:
            break
    return made

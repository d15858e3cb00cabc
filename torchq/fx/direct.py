# SPDX-License-Identifier: Apache-2.0
"""A converted model's code: for eager mode, for what traces Python, and for TorchScript.

In eager mode modules are found and called without what nn.Module does for it. ``self.features``
fails as an attribute, with a formatted message that nobody reads, before ``nn.Module.__getattr__``
finds it among the modules: four times a layer in a nested model. The call then costs as much as
the op of a small layer (csrc/python/site.cpp).

TorchScript knows no class of results, such as a dataclass with a field ``logits``: what is scripted
returns a named tuple, or the dict itself of a class of dicts. The tuple has the class's name, with
a number behind it where another has that name, and the fields that its ``__init__`` takes: what
``__post_init__`` adds or changes is not in it.
"""

from __future__ import annotations

import ast
import itertools
import linecache
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from torchq._library import new_site
from torchq.nn.module import QModule

__all__ = ["forms_of"]

_PROLOGUE = """    if not _torchq_torch.jit.is_scripting():
        if _torchq_torch.compiler.is_compiling():
            return self._plain({0})
        return self._direct({0})
"""
_numbers = itertools.count()


def forms_of(
    source: str, names: dict[str, Any], modules: Collection[str], arguments: Collection[str]
) -> dict[str, Callable[..., Any]]:
    """The code as methods: ``_direct``, ``_plain``, and a ``forward`` that chooses.

    Args:
        source: of ``forward``, as torch.fx writes it.
        names: what the source refers to.
        modules: full names of the submodules that it calls.
        arguments: of ``forward``, as they are written in a call.
    """
    names = {"torch": torch, **names, "_torchq_torch": torch}
    sites = _Sites(set(modules))
    tree = ast.fix_missing_locations(sites.visit(ast.parse(source)))
    direct = _function(ast.unparse(tree), {**names, **sites.made})
    plain = _function(source, names)
    results = _Results(names)
    scripted = results.visit(ast.parse(source))
    if results.found:
        source = ast.unparse(ast.fix_missing_locations(scripted))
    head, colon, body = source.partition(":\n")
    forward = _function(head + colon + _PROLOGUE.format(", ".join(arguments)) + body, names)
    return {"_direct": direct, "_plain": plain, "forward": forward}


def _function(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function ``forward`` of this source, which tracebacks and TorchScript can read."""
    file, scope = f"<torchq graph {next(_numbers)}>", dict(names)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), scope)
    function: Callable[..., Any] = scope["forward"]
    return function


class _Sites(ast.NodeTransformer):
    """``getattr(self.features, "0")(x)`` as ``site(self._modules["features"]._modules["0"], x)``.

    Attributes:
        made: the sites by their names.
    """

    def __init__(self, modules: set[str]) -> None:
        self._called = modules
        self.made: dict[str, Callable[..., Any]] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        path = _path(node.func)
        if path and ".".join(path) in self._called:
            module: ast.expr = ast.Name("self", ast.Load())
            for name in path:
                modules = ast.Attribute(module, "_modules", ast.Load())
                module = ast.Subscript(modules, ast.Constant(name), ast.Load())
            site = f"_torchq_site_{len(self.made)}"
            self.made[site] = new_site(QModule)
            node.func, node.args = ast.Name(site, ast.Load()), [module, *node.args]
        return self.generic_visit(node)


def _path(node: ast.expr) -> list[str] | None:
    """The names from self on, [] for self, None for what is no submodule."""
    match node:
        case ast.Name("self"):
            return []
        case ast.Attribute(owner, name):
            pass
        case ast.Call(ast.Name("getattr"), [owner, ast.Constant(str(name))]):
            pass
        case _:
            return None
    above = _path(owner)
    return None if above is None else [*above, name]


class _Results(ast.NodeTransformer):
    """Calls of dataclasses as calls of named tuples, which ``names`` gets; see the module.

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

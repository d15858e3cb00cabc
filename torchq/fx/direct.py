# SPDX-License-Identifier: Apache-2.0
"""A converted model's code: for eager mode, for what traces Python, and for TorchScript.

In eager mode modules are found and called without what nn.Module does for it. ``self.features``
fails as an attribute, with a formatted message that nobody reads, before ``nn.Module.__getattr__``
finds it among the modules: four times a layer in a nested model. The call then costs as much as
the op of a small layer (csrc/python/site.cpp).
"""

from __future__ import annotations

import ast
import itertools
import linecache
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from torchq._library import new_site
from torchq.fx.tracing.results import scripted
from torchq.nn.module import QModule

_PROLOGUE = """    if not _torchq_torch.jit.is_scripting():
        if _torchq_torch.compiler.is_compiling():
            return self._plain({0})
        return self._direct({0})
"""
_NAMED = "_torchq_named"
_CALL = re.compile(r"_torchq_site_\d+\((_torchq_module_\d+)")
_numbers = itertools.count()


def _named(error: Exception, graph: nn.Module) -> Exception:
    """Returns the error of an op with the name of the module that called it, where that is known.

    It is in the line of ``_direct`` that failed: looked for only then, calls cost nothing more.
    """
    trace = error.__traceback__
    if trace is None or not str(error).startswith("torchq."):
        return error
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    found = _CALL.search(line)
    module = trace.tb_frame.f_locals.get(found[1]) if found else None
    for name, part in graph.named_modules():
        if part is module:
            return type(error)(f"{error} The module is '{name}'.")
    return error


def direct_and_forward(
    source: str, names: dict[str, Any], modules: Collection[str], arguments: Collection[str]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``_direct``, and a ``forward`` that chooses: ``_plain`` is what torch.fx wrote.

    Args:
        source: of ``forward``, as torch.fx writes it.
        names: what the source refers to.
        modules: full names of the submodules that it calls.
        arguments: of ``forward``, as they are written in a call.
    """
    names = {"torch": torch, **names, "_torchq_torch": torch}
    sites = _Sites(set(modules))
    tree = ast.parse(source)
    sites.visit(tree)
    sites.look_up(tree, arguments)
    ast.fix_missing_locations(tree)
    direct = _function(ast.unparse(tree), {**names, **sites.made, _NAMED: _named})
    head, colon, body = scripted(source, names).partition(":\n")
    forward = _function(head + colon + _PROLOGUE.format(", ".join(arguments)) + body, names)
    return direct, forward


def _function(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function ``forward`` of this source, which tracebacks and TorchScript can read."""
    file, scope = f"<torchq graph {next(_numbers)}>", dict(names)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), scope)
    function: Callable[..., Any] = scope["forward"]
    return function


class _Sites(ast.NodeTransformer):
    """``getattr(self.features, "0")(x)`` as ``site(module, x)``.

    ``module = self.__dict__["_modules"]["features"]._modules["0"]`` is written in front of all, for
    ``self`` may stand in a float module's place (``nn.standing``). Where that is
    no more, as when ``features`` was replaced by what ``torch.compile`` makes of it, ``_plain``
    runs instead, before anything else did.

    Attributes:
        made: the sites by their names.
    """

    def __init__(self, modules: set[str]) -> None:
        self._called = modules
        self.made: dict[str, Callable[..., Any]] = {}
        self._modules: dict[str, ast.expr] = {}  # name of a variable -> the module that it is

    def visit_Call(self, node: ast.Call) -> ast.AST:
        path = _path(node.func)
        if path and ".".join(path) in self._called:
            module: ast.expr = ast.parse('self.__dict__["_modules"]', mode="eval").body
            for i, name in enumerate(path):
                modules = ast.Attribute(module, "_modules", ast.Load()) if i else module
                module = ast.Subscript(modules, ast.Constant(name), ast.Load())
            site, found = (f"_torchq_{kind}_{len(self.made)}" for kind in ("site", "module"))
            self.made[site], self._modules[found] = new_site(QModule), module
            given = ast.Name(found, ast.Load())
            node.func, node.args = ast.Name(site, ast.Load()), [given, *node.args]
        return self.generic_visit(node)

    def look_up(self, tree: ast.Module, arguments: Collection[str]) -> None:
        """Writes that in front of what ``forward`` does."""
        if self._modules:
            plain = ast.parse(f"return self._plain({', '.join(arguments)})").body
            found = [
                ast.Assign([ast.Name(name, ast.Store())], module)
                for name, module in self._modules.items()
            ]
            handler = ast.ExceptHandler(ast.Name("KeyError", ast.Load()), None, plain)
            (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
            say = ast.parse(f"raise {_NAMED}(error, self) from None").body
            ours = ast.parse("TypeError, ValueError", mode="eval").body
            named = ast.ExceptHandler(ours, "error", say)
            function.body = [
                ast.Try(found, [handler], [], []),  # type: ignore[arg-type]
                ast.Try(function.body, [named], [], []),
            ]


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

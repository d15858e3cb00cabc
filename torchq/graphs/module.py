# SPDX-License-Identifier: Apache-2.0
"""The converted graph: a torch.fx GraphModule with code of its own for eager mode."""

from __future__ import annotations

import functools
import itertools
import linecache
import operator
import re
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _format_target
from torch.fx.graph_module import _loader
from typing_extensions import Self

from torchq.graphs.data import graph_of, plain_nodes, with_overloads
from torchq.models.conversions import check_conversions
from torchq.models.inputs import without_gradients
from torchq.nn.module import QModule
from torchq.nn.packed_proof import with_proof
from torchq.runtime.library import new_site

_CHOICE = """    if not _torchq_torch.jit.is_scripting():
        if _torchq_torch.compiler.is_compiling():
            return self._plain({0})
{1}        return self._direct({0})
"""
_LOOK = """    try:
{0}    except KeyError:
        return self._plain({1})
    try:
{2}
    except (TypeError, ValueError) as error:
        raise _torchq_named(error) from None
"""
_OVERLOAD = re.compile(r"\b(torch\.ops\.\w+\.\w+)\.\w+(?=\()")
_READ = re.compile(r"= (self\.\w+|getattr\(self, \"[^\"]*\"\))(?=[;\n])")
CHECK = "torchq_check"
"""Begins the names of nodes that check arguments: ``_direct`` is for calls that meet the guards."""
_numbers = itertools.count()


def direct_and_forward(
    source: str,
    names: dict[str, Any],
    modules: Collection[str],
    tensors: Mapping[str, str],
    arguments: Collection[str],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``_direct``, and a ``forward`` that chooses: ``_plain`` is what torch.fx wrote.

    ``_direct`` finds modules and tensors, and calls modules, without what nn.Module does for it.
    ``self.features`` fails as an attribute, with a formatted message that nobody reads, before
    ``nn.Module.__getattr__`` finds it among the modules: four times a layer in a nested model. The
    call then costs as much as the op of a small layer (csrc/python/site.cpp).

    TorchScript compiles the last part of ``forward``: Note [Overloads] in data.py.

    Args:
        source: of ``forward``, as torch.fx writes it.
        names: what the source refers to.
        modules: full names of the submodules that it calls.
        tensors: name of a tensor that it reads -> the attribute of the graph that holds it.
        arguments: of ``forward``, as they are written in a call.
    """
    names = {"torch": torch, **names, "_torchq_torch": torch}
    given = ", ".join(arguments)
    head, colon, body = source.partition(":\n")
    of_body = body.splitlines(keepends=True)
    last = max(
        (i for i, line in enumerate(of_body, 1) if line.lstrip().startswith(CHECK)), default=0
    )
    checks = [f"        {line}" for line in of_body[:last]]  # and what renames arguments for them
    if checks:  # torch.jit.trace would take sizes for tensors
        checks.insert(0, "        if _torchq_torch._C._get_tracing_state() is None:\n")
    direct = "".join(line for line in of_body if not line.lstrip().startswith(CHECK))
    direct = _through_sites(direct, modules)
    sites, found = dict[str, Any](), []
    for i, name in enumerate(modules):
        sites[f"_torchq_site_{i}"] = new_site(QModule)
        path = "".join(f"._modules[{part!r}]" for part in name.split("."))
        found.append(f"        _torchq_module_{i} = self{path}\n")
    local = {_format_target("self", name): f"_torchq_tensor_{i}" for i, name in enumerate(tensors)}
    direct = _READ.sub(lambda read: f"= {local.get(read[1], read[1])}", direct)
    for name, held in tensors.items():
        found.append(f"        {local[_format_target('self', name)]} = self.{held}[{name!r}]\n")
    if found:  # a module may be gone, as when torch.compile's took its place
        run = "".join(f" {line}" for line in direct.splitlines(keepends=True))
        direct = _LOOK.format("".join(found), given, run)
        lines = (head + colon + direct).splitlines()
        sites["_torchq_named"] = functools.partial(_named, lines, list(modules))
    scripted = _OVERLOAD.sub(r"\1", body)
    choice = _function(head + colon + _CHOICE.format(given, "".join(checks)) + scripted, names)
    return _function(head + colon + direct, {**names, **sites}), choice


def _through_sites(source: str, modules: Collection[str]) -> str:
    """Return code that calls modules by their sites; each line is looked at once."""
    calls = {f"{_format_target('self', name)}(": i for i, name in enumerate(modules)}
    lines = source.splitlines(keepends=True)
    for n, line in enumerate(lines):
        result, _, call = line.partition(" = ")
        ends = [end for end, character in enumerate(call[:_LONGEST_CALL], 1) if character == "("]
        end = next((end for end in ends if call[:end] in calls), None)
        if end is not None:
            i = calls[call[:end]]
            lines[n] = f"{result} = _torchq_site_{i}(_torchq_module_{i}, {call[end:]}"
    return "".join(lines)


_LONGEST_CALL = 2000
"""Characters of what calls a module: four times those of the longest name in a file."""


def _named(lines: list[str], modules: list[str], error: Exception) -> Exception:
    """Return the error of an op with the name of the module that called it.

    The name is looked for in the line that failed, only then: calls cost nothing more.
    """
    trace = error.__traceback__
    site = re.search(r"_torchq_site_(\d+)\(", lines[trace.tb_lineno - 1]) if trace else None
    if site is None or not str(error).startswith("torchq."):
        return error
    return type(error)(f"{error} The module is '{modules[int(site[1])]}'.")


def _function(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return ``forward`` of this source, which tracebacks and TorchScript can read."""
    file, scope = f"<torchq graph {next(_numbers)}>", dict(names)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), scope)
    return _with_source(scope["forward"])


def _with_source(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, and drop its source with it: Python and torch.fx keep sources for good.

    A service that loads models again and again lost 20 KB a model.
    """
    weakref.finalize(function, _forget, function.__code__.co_filename)
    return function


def _forget(file: str) -> None:
    linecache.cache.pop(file, None)
    _loader.eval_cache.pop(file, None)


class QuantizedGraph(fx.GraphModule):
    """A graph of quantized modules and torch functions."""

    # A function of its own: TorchScript reads its source, and GraphModule's gives a warning there.
    def __init__(
        self, root: nn.Module | dict[str, Any], graph: fx.Graph, class_name: str = "QuantizedGraph"
    ) -> None:
        """As a GraphModule; in eval mode, without gradients."""
        super().__init__(root, with_overloads(graph), class_name)
        without_gradients(self.eval())

    def recompile(self) -> fx.graph.PythonCode:
        """As a GraphModule; in eager mode the code calls its modules faster."""
        code, cls = super().recompile(), type(self)
        called = {str(node.target) for node in self.graph.find_nodes(op="call_module")}
        read = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        tensors = {
            n: held for held in ("_buffers", "_parameters") for n in read & vars(self)[held].keys()
        }
        given = [str(node.target) for node in self.graph.find_nodes(op="placeholder")]
        cls._plain = _with_source(cls.forward)  # type: ignore[attr-defined]
        direct, cls.forward = direct_and_forward(code.src, code.globals, called, tensors, given)
        cls._direct = direct  # type: ignore[attr-defined]
        return code

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if recurse:
            check_conversions(self, fn)
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what TorchScript compiles, which checks packed weights when it is loaded."""
        return with_proof(self)

    def _deepcopy_init(self) -> Callable[..., None]:
        return QuantizedGraph.__init__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the modules, and the graph as data.

        A GraphModule pickles its code, which torch.fx would trace anew: without example values, so
        that code that acts on sizes fails.
        """
        nodes = plain_nodes(self.graph, ())
        owned = {
            str(n.target): operator.attrgetter(str(n.target))(self)
            for n in self.graph.nodes
            if n.op in ("call_module", "get_attr")
        }
        return _rebuild, (nodes, owned, type(self).__name__)


def _rebuild(plain: list[tuple[Any, ...]], owned: dict[str, Any], name: str) -> QuantizedGraph:
    return QuantizedGraph(owned, graph_of(plain), name)

# SPDX-License-Identifier: Apache-2.0
"""Graphs that are derived from a converted one: for eager mode, for its checks, for TorchScript."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from torchq.nn.module import QModule
from torchq.runtime.library import new_site

CHECK = "torchq_check"
"""Begins the names of nodes that check arguments, which direct graphs leave out."""


def is_check(node: fx.Node) -> bool:
    """Return whether a node checks arguments, or computes for one that does."""
    return node.name.startswith(CHECK)


def direct_graph(graph: fx.Graph, tensors: Mapping[str, str]) -> fx.Graph:
    """Return a graph that looks for modules and tensors, and calls modules, without nn.Module.

    ``self.features`` fails as an attribute, with a formatted message that nobody reads, before
    ``nn.Module.__getattr__`` finds it among the modules: four times a layer in a nested model. The
    call then costs as much as the op of a small layer (csrc/python/site.cpp). Here all modules are
    looked up at the start, in the dicts that hold them. A call raises KeyError there if one is
    gone, as when torch.compile's took its place.

    Args:
        graph: not changed.
        tensors: name of a tensor that it reads -> the attribute of the module that holds it.
    """
    made, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.find_nodes(op="placeholder"):
        values[node] = made.node_copy(node)
    find = _Lookups(made)
    found = {node: find.module(str(node.target)) for node in graph.find_nodes(op="call_module")}
    for node in graph.find_nodes(op="get_attr"):
        if node.target in tensors:
            values[node] = find.item(tensors[node.target], node.target)
    for node in graph.nodes:
        if node in values or is_check(node):
            continue
        if node in found:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = made.create_node(
                "call_function", _site(), (found[node], *args), kwargs, node.name, node.type
            )
        else:
            values[node] = made.node_copy(node, values.__getitem__)
    return made


class _Lookups:
    """Nodes that find modules and tensors in the dicts of modules, each of them once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._known = graph, dict[tuple[str, ...], fx.Node]()

    def item(self, dictionary: str, key: str) -> fx.Node:
        """Return the node of ``self.<dictionary>[key]``."""
        if (dictionary,) not in self._known:
            self._known[(dictionary,)] = self._graph.get_attr(dictionary)
        return self._graph.call_function(operator.getitem, (self._known[(dictionary,)], key))

    def module(self, name: str) -> fx.Node:
        """Return the node of a module, by its full name."""
        path: tuple[str, ...] = ("_modules",)
        for part in name.split("."):
            above, path = path, (*path, part)
            if path not in self._known:
                self._known[path] = self._inside(above, part)
        return self._known[path]

    def _inside(self, above: tuple[str, ...], part: str) -> fx.Node:
        if len(above) == 1:
            return self.item("_modules", part)
        modules = (*above, "")  # no module has this name
        if modules not in self._known:
            owner = self._known[above]
            self._known[modules] = self._graph.call_function(getattr, (owner, "_modules"))
        return self._graph.call_function(operator.getitem, (self._known[modules], part))


def _site() -> Callable[..., object]:
    """Return a place where one module is called, with the module that torch.fx names it by."""
    site = new_site(QModule)
    site.__module__ = __name__
    return site


def checks_of(graph: fx.Graph) -> fx.Graph | None:
    """Return what a graph computes up to its last check, without a result; None without checks."""
    last = max((i for i, node in enumerate(graph.nodes) if is_check(node)), default=None)
    if last is None:
        return None
    made, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(graph.nodes):
        if i <= last or node.op == "placeholder":
            values[node] = made.node_copy(node, values.__getitem__)
    made.output(None)
    return made


def with_packets(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph for TorchScript: Note [Overloads] in data.py.

    Arguments have their names there. By types alone TorchScript would take a dtype for a size, in
    ``view``, and ``dim=False`` for another argument; so it raises.
    """
    made, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copied = values[node] = made.node_copy(node, values.__getitem__)
        if isinstance(node.target, OpOverload):
            copied.target = node.target.overloadpacket
            names = [argument.name for argument in node.target._schema.arguments]
            copied.kwargs = {**dict(zip(names[1:], copied.args[1:], strict=False)), **copied.kwargs}
            copied.args = copied.args[:1]
        elif node.target == "view" and isinstance(copied.args[-1], torch.dtype):
            copied.args, copied.kwargs = copied.args[:1], {"dtype": copied.args[-1]}
    return made


def holds(module: object, names: Collection[str]) -> bool:
    """Return whether a module has all these parts in the dicts where a direct graph looks."""

    def has(name: str) -> bool:
        modules = getattr(module, "_modules", {})
        for part in name.split("."):
            if part not in modules:
                return False
            modules = getattr(modules[part], "_modules", {})
        return True

    return all(map(has, names))

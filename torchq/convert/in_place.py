# SPDX-License-Identifier: Apache-2.0
"""In-place calls of a captured program that are as good as calls that make a new tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram


def needs_functions(program: ExportedProgram) -> bool:
    """Return whether a program writes to memory that something still reads as it was.

    ``run_decompositions({})`` makes such a program functional, at the price of tracing it anew.
    """
    inner = [m for m in program.graph_module.modules() if m is not program.graph_module]
    graphs = [m.graph for m in inner if isinstance(m, fx.GraphModule)]
    if any(_is_mutable(node.target) for graph in graphs for node in graph.nodes):
        return True
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    aliases: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if _is_mutable(node.target) and not _is_simple(node, aliases, position):
            return True
        if (memory := _memory(node)) is not None:
            aliases.setdefault(memory, []).append(node)
    return False


def functional(target: Any) -> Any:
    """Return the call that makes a new tensor: ``add.Tensor`` for ``add_.Tensor``; else None."""
    name = target._schema.name.partition("::")[2]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name[-1] == "_" else None
    return getattr(packet, target._overloadname, None)


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _is_simple(
    node: fx.Node, aliases: dict[int, list[fx.Node]], position: dict[fx.Node, int]
) -> bool:
    """Return whether nothing behind a call reads what the call writes over."""
    if functional(node.target) is None or not isinstance(node.args[0], fx.Node):
        return False
    memory = _memory(node.args[0])
    before = [] if memory is None else aliases.get(memory, [])
    if not before or before[0].op != "call_function":  # of the caller, or of the module
        return False
    return all(position[user] <= position[node] for alias in before for user in alias.users)


def _memory(node: fx.Node) -> int | None:
    """Return what identifies the memory of a tensor; None for anything else."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None

# SPDX-License-Identifier: Apache-2.0
"""Layers of a graph that compute phases of many periods, which stay float."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import fx

from torchq.convert.graph import aten_name
from torchq.quantization.recipes.phases import ANGLES, why_coarse

_T = TypeVar("_T")


def coarse_phases(
    nodes: Iterable[fx.Node], behind: Mapping[fx.Node, _T], multiplies: Callable[[_T], bool]
) -> dict[_T, str]:
    """Return what computes large phases, and why it stays float.

    Args:
        nodes: of a graph.
        behind: node -> the layer or operation that it is part of.
        multiplies: tells layers that are sums of products; what they read are no phases.
    """
    found: dict[_T, str] = {}
    for node in nodes:
        reason = why_coarse(node.meta.get("phase"))
        if not reason:
            continue
        if node in behind:
            found[behind[node]] = reason
        source: Any = node.args[ANGLES[aten_name(node)][0]]
        while isinstance(source, fx.Node):
            layer = behind.get(source)
            if layer is not None:
                found[layer] = reason
                if multiplies(layer):
                    break
            varying = [n for n in source.all_input_nodes if n.meta["varying"]]
            source = varying[0] if len(varying) == 1 else None
    return found

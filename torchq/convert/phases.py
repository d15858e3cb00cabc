# SPDX-License-Identifier: Apache-2.0
"""Layers that compute phases of many periods: 8 bits do not say where in a period they are."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from torchq.convert.fuse import Layer
from torchq.convert.ops import Role

# An error of 1/883 of a range of 2 (half a step of 255, as its root mean square) is A / 441 in
# phases of up to A. Beyond four periods either way, less than 25 dB of the wave are right.
_LARGEST = 25.0


def coarse_phases(nodes: Iterable[fx.Node], layers: Iterable[Layer]) -> dict[Layer, str]:
    """Layers behind which large phases are, and why they stay float."""
    behind = {part.node: layer for layer in layers for part in layer.parts}
    found: dict[Layer, str] = {}
    for node in nodes:
        largest = node.meta.get("phase")
        if largest is None or largest <= _LARGEST:
            continue
        reason = f"8 bits of what it reads are too coarse for phases of up to {largest:.3g} behind"
        source: fx.Node | None = node
        while source is not None:
            layer = behind.get(source)
            if layer is not None:
                found[layer] = reason
                if layer.role in (Role.MATMUL, Role.PRODUCT):
                    break
            varying = [n for n in source.all_input_nodes if n.meta["varying"]]
            source = varying[0] if len(varying) == 1 else None
    return found

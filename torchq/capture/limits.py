# SPDX-License-Identifier: Apache-2.0
"""Sizes that an op sums exactly: at conversion, and as conditions on the sizes of later calls.

Conversion leaves float what its example shows to be larger. A larger call of the converted model
runs the model's own code, where these functions are float.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from torchq.capture.condition import Condition
from torchq.capture.module_kinds import AVERAGES, MAX_REDUCTION
from torchq.capture.ops import Op, Role, shape_of
from torchq.functional.folding import MAX_SHIFTED_REDUCTION
from torchq.nn.float_modules import Attention
from torchq.report import reasons

_SYMBOL = re.compile(r"\bs\d+\b")
_POSITIONS = 8388608
_WINDOW = reasons.WINDOW.format(positions=_POSITIONS)


class _Sum(NamedTuple):
    """Values that an int8 operation sums: these dims of a source, and how many at most."""

    src: fx.Node
    dims: slice
    largest: int
    reason: str


def _sum(op: Op) -> _Sum | None:
    """Return the longest sum of an operation; None for one that sums few."""
    is_int8 = op.role in (Role.PRODUCT, Role.DYNAMIC) or op.reason == reasons.CACHED_8
    if is_int8 and isinstance(op.module, Attention):
        reason = reasons.KEYS.format(keys=MAX_REDUCTION)
        return _Sum(op.srcs[2], slice(-2, -1), MAX_REDUCTION, reason)
    if op.role is Role.PRODUCT:
        reason = reasons.TOO_LONG.format(products=MAX_SHIFTED_REDUCTION)
        return _Sum(op.srcs[0], slice(-1, None), MAX_SHIFTED_REDUCTION, reason)
    fixed = hasattr(op.module, "kernel_size")
    if _is_average(op) and not fixed and math.prod(shape_of(op.node)[2:]) == 1:
        return _Sum(op.srcs[0], slice(2, None), _POSITIONS, _WINDOW)
    return None


def _is_average(op: Op) -> bool:
    return op.role in (Role.POOL, Role.MEAN) and isinstance(op.module, AVERAGES)


def _positions(op: Op) -> int:
    """Return how many positions each result of an average sums."""
    before, after = (shape_of(node)[2:] for node in (op.srcs[0], op.node))
    kernel: object = getattr(op.module, "kernel_size", None)
    if kernel is None:
        return math.prod(before) // max(math.prod(after), 1)
    return math.prod(kernel if isinstance(kernel, tuple | list) else (kernel,) * len(after))


def why_long(op: Op) -> str:
    """Return why an operation sums too much on the example; "" where it does not."""
    if _is_average(op) and _positions(op) > _POSITIONS:
        return _WINDOW
    found = _sum(op)
    if found is None or math.prod(shape_of(found.src)[found.dims]) <= found.largest:
        return ""
    return found.reason


def limits(graph: fx.Graph, ops: Iterable[Op]) -> list[Condition]:
    """Return conditions on sizes that calls of a graph must meet."""
    known: dict[str, str] = {}
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        for d, size in enumerate(node.meta["sizes"] or ()):
            if _SYMBOL.fullmatch(size):
                known.setdefault(size, f"s{i}[{d}]")
    found: dict[str, None] = {}
    for op in ops:
        if (long := _sum(op)) is None:
            continue
        factors = list(long.src.meta["sizes"] or ())[long.dims]
        text = " * ".join(f if f.isalnum() else f"({f})" for f in factors if f != "1")
        symbols = set(_SYMBOL.findall(text))
        # of other sizes, such as how many values pass a test, the op itself says what is wrong
        if symbols and symbols <= known.keys() and not re.search(r"[A-Za-z_]{2,}", text):
            sizes = _SYMBOL.sub(lambda match: known[match[0]], text)
            found[f"{sizes} <= {long.largest}"] = None
    return [Condition.parse(text) for text in found]

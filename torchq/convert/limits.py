# SPDX-License-Identifier: Apache-2.0
"""Sizes that an op sums exactly, as conditions on the sizes of a call's tensors.

Conversion leaves float what its example shows to be larger. A larger call of the converted model
runs the model's own code, where these functions are float.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx

from torchq.convert.module_kinds import AVERAGES
from torchq.convert.ops import Op, Role
from torchq.convert.plan import Plan
from torchq.convert.recognize import MAX_KEYS, MAX_POSITIONS
from torchq.functional.folding import MAX_SHIFTED_REDUCTION
from torchq.nn.float_modules import Attention

_SYMBOL = re.compile(r"\bs\d+\b")


def limits(plan: Plan) -> list[str]:
    """Return conditions on ``s0[0]`` and the like that calls of a graph must meet."""
    known: dict[str, str] = {}
    for i, node in enumerate(plan.captured.graph.find_nodes(op="placeholder")):
        for d, size in enumerate(node.meta["sizes"] or ()):
            if _SYMBOL.fullmatch(size):
                known.setdefault(size, f"s{i}[{d}]")
    found: dict[str, None] = {}
    for op in plan.ops.values():
        for factors, largest in _sums(op):
            text = " * ".join(f if f.isalnum() else f"({f})" for f in factors if f != "1")
            symbols = set(_SYMBOL.findall(text))
            # of other sizes, such as how many values pass a test, the op itself says what is wrong
            if symbols and symbols <= known.keys() and not re.search(r"[A-Za-z_]{2,}", text):
                sizes = _SYMBOL.sub(lambda match: known[match[0]], text)
                found[f"{sizes} <= {largest}"] = None
    return list(found)


def _sums(op: Op) -> Iterator[tuple[list[str], int]]:
    """Yield the sizes whose product is how many values an int8 operation sums, and the limit."""
    if op.role in (Role.PRODUCT, Role.DYNAMIC) and isinstance(op.module, Attention):
        yield _sizes(op.srcs[2])[-2:-1], MAX_KEYS
    elif op.role is Role.PRODUCT:
        yield _sizes(op.srcs[0])[-1:], MAX_SHIFTED_REDUCTION
    elif op.role in (Role.POOL, Role.MEAN) and isinstance(op.module, AVERAGES):
        fixed = getattr(op.module, "kernel_size", 0)
        if not fixed and set(_sizes(op.node)[2:]) <= {"1"}:
            yield _sizes(op.srcs[0])[2:], MAX_POSITIONS


def _sizes(node: fx.Node) -> list[str]:
    return list(node.meta["sizes"] or ())

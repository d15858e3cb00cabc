# SPDX-License-Identifier: Apache-2.0
"""Checks what a file holds before it becomes a part of generated code."""

from __future__ import annotations

import ast
import keyword
import math
import re
from typing import Any

_JOINED = (
    *(ast.And, ast.Or, ast.BitAnd, ast.BitOr, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt),
    ast.GtE,
)
_PLAIN = (
    *(ast.Expression, ast.BoolOp, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.BinOp, ast.Add),
    *(ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Compare, ast.IfExp, ast.Load),
    *_JOINED,
)  # fmt: skip
_FUNCTIONS = ("max", "min", "abs", "int", "float", "round", "bool")
_OF_MATH = (
    *("floor", "ceil", "trunc", "fabs", "sqrt", "pow", "exp", "log", "log2", "sin", "cos", "tan"),
    *("isfinite", "isnan"),
)
_SIZE = re.compile(r"s\d+")
_LONGEST = 1 << 13
"""Characters of one condition; the longest of torch.export's have a tenth of them."""
_MOST_BITS = 1 << 14
"""Of an integer within a condition, so that a bounded number of terms takes a bounded time."""
_NOT = 1 << 30
"""Bits of what is no condition."""


def is_condition(text: Any) -> bool:
    """Return whether a text is arithmetic and comparisons of numbers and sizes, as ``s0[1]``.

    Its length and its numbers are bounded.
    """
    try:
        known = isinstance(text, str) and len(text) <= _LONGEST
        return known and _bits(ast.parse(text, mode="eval")) <= _MOST_BITS
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _bits(node: ast.AST) -> int:
    """Return the bits that an integer of this term needs at most; too many for any other term."""
    if isinstance(node, ast.Constant):
        known = type(node.value) in (bool, int, float)
        return max(64, node.value.bit_length() if type(node.value) is int else 0) if known else _NOT
    if isinstance(node, ast.Subscript):
        base, at = node.value, node.slice
        sized = isinstance(base, ast.Name) and bool(_SIZE.fullmatch(base.id))
        return 64 if sized and isinstance(at, ast.Constant) and type(at.value) is int else _NOT
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        power = node.right.value if isinstance(node.right, ast.Constant) else None
        small = isinstance(power, int | float) and 0 <= power <= 8
        return _bits(node.left) * max(math.ceil(power), 1) if small else _NOT  # type: ignore[arg-type]
    if isinstance(node, ast.Call):
        known = not node.keywords and _is_function(node.func)
        return max([1024, *map(_bits, node.args)]) if known else _NOT  # 1024: of a float
    if not isinstance(node, _PLAIN):
        return _NOT
    parts = [_bits(part) for part in ast.iter_child_nodes(node)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return sum(parts)
    return max([0, *parts]) + isinstance(node, ast.BinOp)


def _is_function(node: ast.expr) -> bool:
    """Return whether it is a function of numbers that guards of torch.export call."""
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    module, name = node.value.id, node.attr
    of_torch = module == "torch" and name.startswith(("sym_", "_sym_"))
    return of_torch or (module == "math" and name in _OF_MATH)


def is_size(size: Any) -> bool:
    """Return whether it is a fixed size of a tensor, or None for a dynamic one."""
    return size is None or (type(size) is int and size >= 0)


def is_option(name: Any, values: Any) -> bool:
    """Return whether it is the name of an option, with values that are True, False or None."""
    known = isinstance(values, list) and all(v is None or type(v) is bool for v in values)
    return known and is_name(name)


def is_name(name: Any) -> bool:
    """Return whether generated code may have a variable of this name."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def is_path(name: Any) -> bool:
    """Return whether generated code may quote the name of a module or tensor, as ``a-b.weight``."""
    return isinstance(name, str) and name.isprintable() and not {'"', "\\"} & set(name)

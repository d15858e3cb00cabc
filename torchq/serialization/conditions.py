# SPDX-License-Identifier: Apache-2.0
"""Checks what a file holds before it becomes a part of generated code."""

from __future__ import annotations

import ast
import keyword
import re
from typing import Any

_PLAIN = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.IfExp, ast.Load),
)
_FUNCTIONS = ("max", "min", "abs", "int", "float", "round", "bool")
_OF_MATH = (
    *("floor", "ceil", "trunc", "fabs", "sqrt", "pow", "exp", "log", "log2", "sin", "cos", "tan"),
    *("isfinite", "isnan"),
)
_SIZE = re.compile(r"s\d+")


def is_condition(text: Any) -> bool:
    """Return whether a text is arithmetic and comparisons of numbers and sizes, as ``s0[1]``."""
    try:
        return isinstance(text, str) and _is_arithmetic(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (bool, int, float)
    if isinstance(node, ast.Subscript):
        base, at = node.value, node.slice
        sized = isinstance(base, ast.Name) and bool(_SIZE.fullmatch(base.id))
        return sized and isinstance(at, ast.Constant) and type(at.value) is int
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):  # a large one takes for ever
        power = node.right
        small = isinstance(power, ast.Constant) and power.value in range(9)
        return small and _is_arithmetic(node.left)
    if isinstance(node, ast.Call):
        return not node.keywords and _is_function(node.func) and all(map(_is_arithmetic, node.args))
    return isinstance(node, _PLAIN) and all(map(_is_arithmetic, ast.iter_child_nodes(node)))


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

# SPDX-License-Identifier: Apache-2.0
"""The grammar of conditions on sizes: arithmetic, comparisons, and/or/not/if, listed functions.

``s2[1]`` is size 1 of the graph's third tensor. The text is a part of Python's grammar, as
torch.export writes its guards. :func:`parse` checks each part of it; nothing evaluates the text.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

_OPERATORS: dict[type[ast.AST], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"},
    **{ast.Pow: "**", ast.USub: "-x", ast.UAdd: "+x", ast.Not: "not", ast.And: "and"},
    **{ast.Or: "or", ast.BitAnd: "and", ast.BitOr: "or", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
}
COMPUTE: dict[str, Callable[..., object]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv},
    **{"//": operator.floordiv, "%": operator.mod, "**": operator.pow, "-x": operator.neg},
    **{"+x": operator.pos, "not": operator.not_, "==": operator.eq, "!=": operator.ne},
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
}
_OF_MATH = (
    *("floor", "ceil", "trunc", "fabs", "sqrt", "exp", "log", "log2", "isfinite", "isnan"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan"),
)
FUNCTIONS: dict[str, Callable[..., object]] = {
    **{"max": max, "min": min, "abs": abs, "round": round, "int": int, "float": float},
    **{"bool": bool, "torch.sym_float": float, "torch.sym_int": int, "torch.sym_max": max},
    **{"torch.sym_min": min, "torch.sym_not": operator.not_, "torch.sym_sqrt": math.sqrt},
    "torch._sym_sqrt": math.sqrt,
    **{f"math.{name}": getattr(math, name) for name in _OF_MATH},
}
"""Functions that a condition may call, by their names in its text."""
_OF_MANY = ("max", "min", "torch.sym_max", "torch.sym_min")
"""Those of several numbers, by name: torch.export puts others in their place while it captures."""
_CONSTANTS = {"math.inf": math.inf, "math.nan": math.nan}

# How tightly each operator binds in Python, the loosest first.
_LEVELS = (("if",), ("or",), ("and",), ("not",), ("==", "!=", "<", "<=", ">", ">="), ("+", "-"),
           ("*", "/", "//", "%"), ("-x", "+x"), ("**",))  # fmt: skip
_LEVEL = {name: level for level, names in enumerate(_LEVELS) for name in names}
_ATOM = len(_LEVELS)
_FROM_THE_LEFT = ("+", "-", "*", "/", "//", "%")
_CHAINS = ("+", "*", "and", "or")
"""Operators that take any number of operands here: a long sum is no deep one."""

_CHARACTERS, _PARTS, _DEPTH, _POWER, _BITS = 100_000, 5_000, 100, 8, 2_048
"""Limits of a condition: its text, parts, depth, exponents, and bits of what it computes."""


@dataclass(frozen=True, order=True)
class Size:
    """Size ``dim`` of the graph's tensor number ``tensor``."""

    tensor: int
    dim: int

    def __str__(self) -> str:
        """Return its name in conditions."""
        return f"s{self.tensor}[{self.dim}]"


@dataclass(frozen=True)
class Call:
    """An operator or a function, by its name in the text, and its operands."""

    name: str
    operands: tuple[Term, ...]


Term: TypeAlias = "Size | Call | int | float"


def parse(text: str) -> Term:
    """Return the term of a text such as ``s0[1] % 4 == 0``.

    Raises:
        ValueError: the text is no condition on sizes, or exceeds a limit.
    """
    if len(text) > _CHARACTERS:
        raise ValueError(f"a condition has at most {_CHARACTERS} characters, got {len(text)}")
    if not text.isascii():  # Python normalizes other names, in quadratic time
        raise ValueError(f"a condition on sizes is ASCII, got {text[:60]!r}")
    try:
        term = _term(ast.parse(text.strip(), mode="eval").body, _DEPTH)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"a condition on sizes is arithmetic, got {text[:60]!r}") from error
    if (count := sum(1 for _ in parts(term))) > _PARTS:
        raise ValueError(f"a condition has at most {_PARTS} parts, got {count}")
    _bits(term)
    return term


def parts(term: Term) -> Iterator[Term]:
    """Return a term and all that it holds."""
    yield term
    if isinstance(term, Call):
        for operand in term.operands:
            yield from parts(operand)


def computed(term: Term, shapes: Mapping[int, Sequence[int]]) -> object:
    """Return the value of a term for these shapes of the graph's tensors, by their numbers."""
    if isinstance(term, Size):
        return shapes[term.tensor][term.dim]
    if not isinstance(term, Call):
        return term
    values = (computed(operand, shapes) for operand in term.operands)
    if term.name == "and":
        return all(values)
    if term.name == "or":
        return any(values)
    if term.name == "if":
        test, body, otherwise = term.operands
        return computed(body if computed(test, shapes) else otherwise, shapes)
    if term.name in _CHAINS:
        return reduce(COMPUTE[term.name], values)
    return (COMPUTE.get(term.name) or FUNCTIONS[term.name])(*values)


def text_of(
    term: Term, name: Callable[[Size], str] = str, function: Callable[[str], str] = str
) -> str:
    """Return the text of a term, with these names of sizes, and of functions and constants."""

    def written(term: Term) -> tuple[str, int]:
        if isinstance(term, Size):
            return name(term), _ATOM
        if not isinstance(term, Call):
            return _number(term, function), _ATOM if term >= 0 else _LEVEL["-x"]
        level = _LEVEL.get(term.name, _ATOM)
        operands = [written(operand) for operand in term.operands]
        if level == _ATOM:
            return f"{function(term.name)}({', '.join(text for text, _ in operands)})", _ATOM
        loosest = [level + (i > 0 or term.name not in _FROM_THE_LEFT) for i in range(len(operands))]
        texts = [
            text if inner >= least else f"({text})"
            for (text, inner), least in zip(operands, loosest, strict=True)
        ]
        if term.name == "if":
            return f"{texts[1]} if {texts[0]} else {texts[2]}", level
        if len(texts) == 1:
            return f"{'not ' if term.name == 'not' else term.name[0]}{texts[0]}", level
        return f" {term.name} ".join(texts), level

    return written(term)[0]


def _number(number: int | float, function: Callable[[str], str]) -> str:
    if isinstance(number, float) and not math.isfinite(number):
        text = function("math.nan" if math.isnan(number) else "math.inf")
        return f"-{text}" if number < 0 else text
    return repr(number)


def _term(node: ast.expr, depth: int) -> Term:
    if depth == 0:
        raise ValueError(f"a condition on sizes is nested at most {_DEPTH} deep")
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=dim)):
            if name[0] == "s" and name[1:].isdecimal() and type(dim) is int:
                return Size(int(name[1:]), dim)
        case ast.Call(func=function, args=args, keywords=[]) if _name(function) in FUNCTIONS:
            if len(args) == 1 or (args and _name(function) in _OF_MANY):
                return Call(_name(function), tuple(_term(arg, depth - 1) for arg in args))
        case ast.Attribute() if _name(node) in _CONSTANTS:
            return _CONSTANTS[_name(node)]
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return Call("if", tuple(_term(part, depth - 1) for part in (test, body, otherwise)))
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compared([_term(part, depth - 1) for part in (left, *others)], ops)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            term = _term(operand, depth - 1)
            if type(op) is ast.USub and not isinstance(term, Size | Call):
                return -term
            return Call(_OPERATORS[type(op)], (term,))
        case ast.BoolOp(op=op, values=values):
            return Call(_OPERATORS[type(op)], tuple(_term(part, depth - 1) for part in values))
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            name = _OPERATORS[type(op)]
            return Call(name, tuple(_term(part, depth - 1) for part in _chain(node, name)))
    raise ValueError(f"a condition on sizes is arithmetic, got {ast.unparse(node)[:60]!r}")


def _chain(node: ast.expr, name: str) -> list[ast.expr]:
    """Return the operands of ``a + b + c``; two of an operator that is no chain."""
    found: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and _OPERATORS.get(type(node.op)) == name:
        found.append(node.right)
        node = node.left
        if name not in _CHAINS:
            break
    return [node, *found[::-1]]


def _compared(terms: list[Term], ops: list[ast.cmpop]) -> Term:
    """Return ``a < b``, or ``a < b and b < c`` for a longer chain."""
    if not all(type(op) in _OPERATORS for op in ops):
        raise ValueError("a condition on sizes compares by ==, !=, <, <=, > and >= only")
    inner = (part for term in terms[1:-1] for part in parts(term))  # which are there twice below
    if any(isinstance(part, Call) and _LEVEL.get(part.name) == _LEVEL["=="] for part in inner):
        raise ValueError("a condition on sizes compares numbers in the middle of a chain")
    pairs = zip(terms, ops, terms[1:], strict=False)
    calls = tuple(Call(_OPERATORS[type(op)], (a, b)) for a, op, b in pairs)
    return calls[0] if len(calls) == 1 else Call("and", calls)


def _name(node: ast.expr) -> str:
    """Return ``max`` or ``math.floor``; "" for anything but a name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _bits(term: Term) -> int:
    """Return how many bits the integers have, at most, that a term computes.

    Raises:
        ValueError: they are too many, or an exponent is no small number.
    """
    if not isinstance(term, Call):
        return max(term.bit_length(), 1) if isinstance(term, int) else 64
    bits = [_bits(operand) for operand in term.operands]
    if term.name == "*":
        total = sum(bits)
    elif term.name == "**":
        power = term.operands[1]
        if isinstance(power, Size | Call) or not -_POWER <= power <= _POWER:
            raise ValueError(f"exponents in a condition on sizes are numbers of at most {_POWER}")
        total = bits[0] * math.ceil(abs(power))
    else:
        total = max(bits, default=0) + len(bits)
    if total > _BITS:
        raise ValueError(f"a condition on sizes computes integers of at most {_BITS} bits")
    return total

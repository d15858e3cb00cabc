# SPDX-License-Identifier: Apache-2.0
"""Checks each call in the graph of a file: its function, the kinds of its arguments, its numbers.

Kinds are known without running the graph. A number never grows beyond a bound, since the sizes of
Python's integers have none: forty products of a number with itself would never end.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import fx
from torch._C import Argument, FunctionSchema

from torchq.serialization.allowed import (
    DTYPES,
    LARGEST_SIZE,
    PYTHON,
    divisor,
    is_known,
    schemas_of,
    size,
)


class Kind(enum.Enum):
    """Kinds of values that a node gives."""

    TENSOR = "a tensor"
    NUMBER = "a number"
    PARTS = "a list of tensors"
    NUMBERS = "a list of numbers"
    RESULT = "a tensor or a list of tensors, from a module"
    MODULE = "a module"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Fact:
    """Facts about a node: its kind, and the bits that an integer needs at most."""

    kind: Kind
    bits: int = 64


TENSOR, RESULT, MODULE = Fact(Kind.TENSOR), Fact(Kind.RESULT), Fact(Kind.MODULE)
_MOST_BITS = 1 << 14
_FLOAT_BITS = 1024  # of an integer that a float stands for
_WORDS = {
    *("floor", "trunc", "none", "tanh", "constant", "reflect", "replicate", "circular", "same"),
    *("valid", "ij", "xy", "mean", "sum", "prod", "amax", "amin", "left", "right", "fro", "nuc"),
    *("bilinear", "nearest", "bicubic", "zeros", "border", "reflection", "linear", "lower"),
}
_EQUATION = re.compile(r"[A-Za-z., >-]{1,200}")


def _is_scale(value: object) -> bool:
    """Return whether it is a factor of sizes; indices made by others leave the tensor."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(v is None or (isinstance(v, int | float) and 2**-20 <= v <= 2**20) for v in values)


_ARGUMENTS: dict[tuple[str, str], Callable[[object], bool]] = {
    # with these, they write to the running statistics that they are given
    ("batch_norm", "training"): lambda value: value is False,
    ("instance_norm", "running_mean"): lambda value: value is None,
    ("instance_norm", "running_var"): lambda value: value is None,
    # random numbers
    ("scaled_dot_product_attention", "dropout_p"): lambda value: value == 0,
    # elements that other modes leave as they were in memory
    ("grid_sampler", "interpolation_mode"): lambda value: value in (0, 1, 2),
    ("grid_sampler_2d", "interpolation_mode"): lambda value: value in (0, 1, 2),
    ("grid_sampler_3d", "interpolation_mode"): lambda value: value in (0, 1),
    ("grid_sampler", "padding_mode"): lambda value: value in (0, 1, 2),
    ("grid_sampler_2d", "padding_mode"): lambda value: value in (0, 1, 2),
    ("grid_sampler_3d", "padding_mode"): lambda value: value in (0, 1, 2),
    # TorchScript leaves implicit ones out, also where the result has them
    ("expand", "implicit"): lambda value: value is False,
    # bytes that are neither 0 nor 1 are no values of bool
    ("view", "dtype"): lambda value: value is not torch.bool,
    ("einsum", "equation"): lambda value: (
        isinstance(value, str) and bool(_EQUATION.fullmatch(value))
    ),
}
"""Arguments that must be of the file, not computed, and have values for which this holds."""
_SCALES = re.compile(r"scales?_?[dhw]?|scale_factors?")
_OF_NUMBERS = {
    *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod"),
    *("pow", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor"),
}
"""Functions whose second tensor torch takes as a number, too, which stays behind a tensor."""
_WINDOWED = re.compile(
    r"im2col|col2im|pad|re(flect|plicat)ion_pad\dd|(max|avg)_pool\dd(_with_indices)?"
    r"|conv(olution|_transpose)?(\dd)?|arange"
)
"""Functions that compute with numbers before they check them; their products must fit 64 bits."""


class Checker:
    """Knows the nodes of a graph so far."""

    def __init__(self) -> None:
        """Start without nodes."""
        self.facts: dict[fx.Node, Fact] = {}
        self.checks: dict[fx.Node, Callable[[int], int]] = {}
        self.overload = ""

    def call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Fact:
        """Return what a call gives.

        From here on ``checks`` has the numbers in it that have to be checked when the graph runs,
        and ``overload`` is the one that was checked: no other one may run.

        Raises:
            ValueError: a file may not call this function so.
        """
        fact, self.checks = None, {}
        if name in PYTHON and not kwargs:
            fact = self._of_python(name, args)
        elif name not in PYTHON:
            found = self._schema(name, args, kwargs)
            self.overload = "" if found is None else found.overload_name or "default"
            fact = None if found is None else _result(found)
        if fact is None or fact.bits > _MOST_BITS:
            why = "with other arguments than it has" if is_known(name) else "which is not allowed"
            raise ValueError(
                "torchq.load: the file's graph must call functions of torch with tensors and "
                f"numbers, got '{name[:100]}' {why}. Was it written by torchq.save?"
            )
        return fact

    # Functions of Python

    def _of_python(self, name: str, args: tuple[object, ...]) -> Fact | None:
        if name == "torch._assert":
            fine = len(args) == 2 and self._is(args[0], Kind.NUMBER, Kind.TENSOR)
            return Fact(Kind.NOTHING) if fine and type(args[1]) is str else None
        if name == "operator.getitem":
            return self._item(*args) if len(args) == 2 else None
        if name == "len":
            return Fact(Kind.NUMBER) if len(args) == 1 and isinstance(args[0], fx.Node) else None
        of_tensors = name.startswith("operator.") or name == "abs"
        kinds = (Kind.NUMBER, Kind.TENSOR) if of_tensors else (Kind.NUMBER,)
        if not args or not all(self._is(a, *kinds) for a in args):
            return None
        if name == "operator.not_":  # a bool, also of a tensor
            return Fact(Kind.NUMBER, 1)
        if any(isinstance(a, fx.Node) and self._is(a, Kind.TENSOR) for a in args):
            return TENSOR
        if name in ("operator.mod", "operator.floordiv") and not self._may_divide(args):
            return None
        bits = self._bits(name, args)
        return None if bits is None else Fact(Kind.NUMBER, bits)

    def _may_divide(self, args: tuple[object, ...]) -> bool:
        """Return whether the second number is neither 0 nor -1, or checked when the graph runs."""
        if isinstance(by := args[-1], fx.Node):
            self.checks[by] = divisor
        return len(args) == 2 and by not in (0, -1)

    def _bits(self, name: str, args: tuple[object, ...]) -> int | None:
        """Return the bits of a result of numbers; None where it has no bound."""
        given = [self._bits_of(a) for a in args]
        if name in ("operator.add", "operator.sub"):
            return max(given) + 1
        if name == "operator.mul":
            return sum(given)
        if name == "operator.pow":
            power = args[1] if len(args) == 2 else None
            if not isinstance(power, int | float) or abs(power) > 8:
                return None
            return given[0] * max(1, -int(-abs(power) // 1))
        if name in ("int", "math.floor", "math.ceil", "math.trunc"):
            return max(_FLOAT_BITS, *given)
        return max(given)

    def _bits_of(self, value: object) -> int:
        if isinstance(value, fx.Node):
            return self.facts[value].bits
        return value.bit_length() if isinstance(value, int) else _FLOAT_BITS

    def _item(self, source: object, index: object) -> Fact | None:
        """Return what an item is; indices are checked when the graph runs."""
        if not isinstance(source, fx.Node) or not self._is_index(index):
            return None
        kind = self.facts[source].kind
        if kind in (Kind.PARTS, Kind.NUMBERS):
            item = Kind.TENSOR if kind is Kind.PARTS else Kind.NUMBER
            return Fact(kind if isinstance(index, slice) else item)
        return self.facts[source] if kind in (Kind.TENSOR, Kind.RESULT) else None

    def _is_index(self, index: object) -> bool:
        if isinstance(index, tuple | list):
            return all(map(self._is_index, index))
        if isinstance(index, slice):
            ends = index.start, index.stop, index.step
            return all(end is None or self._is_int(end) for end in ends)
        fixed = index is None or index is ...
        return fixed or self._is_int(index) or self._is(index, Kind.TENSOR, Kind.RESULT)

    # Functions of torch

    def _schema(
        self, name: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> FunctionSchema | None:
        """Return the schema that a call fits; one that takes its numbers as numbers, if it can."""
        for numbers in (False, True):
            for schema in schemas_of(name):
                if self._fits_schema(schema, args, kwargs, numbers):
                    return schema
        return None

    def _fits_schema(
        self,
        schema: FunctionSchema,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        numbers: bool,
    ) -> bool:
        """Return whether a call fits; with ``numbers`` one may stand for the second tensor."""
        positional = [a.name for a in schema.arguments if not a.kwarg_only]
        given = dict(zip(positional, args, strict=False))
        named = {"self" if name == "input" and "self" in positional else name: value
                 for name, value in kwargs.items()}  # fmt: skip
        if len(args) > len(positional) or given.keys() & named.keys():
            return False
        given |= named
        known = {a.name for a in schema.arguments}
        base = schema.name.partition("::")[2]
        if given.get("rounding_mode") == "trunc" and not self._is_divisor(given["other"]):
            return False
        if given.get("mode") == "circular" and not _only_adds(given["pad"]):
            return False
        numbers = numbers and base in _OF_NUMBERS
        return known.issuperset(given) and all(
            self._fits(given[a.name], a, base)
            or (
                numbers and a.name in ("other", "exponent") and self._is(given[a.name], Kind.NUMBER)
            )
            if a.name in given
            else a.has_default_value()
            for a in schema.arguments
        )

    def _is_divisor(self, value: object) -> bool:
        """Return whether it is a number of the file that no integer type has as -1.

        The least integer by -1 ends the process.
        """
        return _is_number(value) and not (isinstance(value, int) and value % 2**32 == 2**32 - 1)

    def _fits(self, value: object, argument: Argument, base: str) -> bool:
        """Return whether an argument of a call fits its type, and what torch does not check."""
        kind, name = str(argument.real_type), argument.name
        if kind.startswith("Optional["):
            kind = kind[len("Optional[") : -1]
            if value is None:
                return True
        literal = _ARGUMENTS.get((base, name))
        if literal is not None and (isinstance(value, fx.Node) or not literal(value)):
            return False
        if "upsample" in base and _SCALES.fullmatch(name) and not _is_scale(value):
            return False
        if base.endswith("_aa") and name.startswith("scales_"):  # beside sizes they may differ from
            return False
        if (
            kind.startswith("List[")
            and getattr(argument, "N", None) is None
            and self._is(value, Kind.NUMBER)
        ):
            return False  # TorchScript would take another overload
        if _WINDOWED.fullmatch(base) and (base == "arange" or kind == "List[int]"):
            return self._is_of(value, kind) and self._are_sizes(value)
        return self._is_of(value, kind)

    def _are_sizes(self, value: object) -> bool:
        """Return whether numbers are at most 2**31, or can be checked when the graph runs."""
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, fx.Node):
                if self.facts[each].kind is not Kind.NUMBER:
                    return False
                self.checks[each] = size
            elif isinstance(each, int | float) and not abs(each) <= LARGEST_SIZE:
                return False
        return True

    def _is_of(self, value: object, kind: str) -> bool:
        if kind.startswith("List["):
            return self._is_list(value, kind[len("List[") : -1])
        if kind == "Tensor":
            return self._is(value, Kind.TENSOR, Kind.RESULT)
        if kind == "int":
            return self._is_int(value)
        if kind in ("number", "float"):
            return self._is(value, Kind.NUMBER)
        if kind == "bool":
            return type(value) is bool
        if kind == "str":
            return type(value) is str and (value in _WORDS or bool(_EQUATION.fullmatch(value)))
        if kind == "ScalarType":
            return isinstance(value, torch.dtype) and value in DTYPES
        return kind == "MemoryFormat" and isinstance(value, torch.memory_format)

    def _is_list(self, value: object, kind: str) -> bool:
        if kind.startswith("Optional["):
            kind = kind[len("Optional[") : -1]
            if isinstance(value, list | tuple):
                value = [v for v in value if v is not None]
        if isinstance(value, list | tuple):
            small = kind != "int" or all(abs(v) <= LARGEST_SIZE for v in value if type(v) is int)
            return small and all(self._is_of(v, kind) for v in value)
        if kind == "Tensor":
            return self._is(value, Kind.PARTS, Kind.RESULT) and isinstance(value, fx.Node)
        if isinstance(value, fx.Node) and self.facts[value].kind is Kind.NUMBERS:
            return kind == "int"
        return self._is_of(value, kind)

    # Values

    def _is(self, value: object, *kinds: Kind) -> bool:
        """Return whether a node, or a number of the file, is of one of these kinds."""
        if isinstance(value, fx.Node):
            return self.facts[value].kind in kinds
        return Kind.NUMBER in kinds and _is_number(value)

    def _is_int(self, value: object) -> bool:
        return self._is(value, Kind.NUMBER) and not isinstance(value, float | complex)


def _only_adds(pad: object) -> bool:
    """Return whether padding has no negative number: circular padding then leaves elements out."""
    return isinstance(pad, list | tuple) and all(type(v) is int and v >= 0 for v in pad)


def _is_number(value: object) -> TypeGuard[complex]:
    return isinstance(value, float | complex) or (
        isinstance(value, int) and -(2**63) <= value < 2**64
    )


def _result(schema: FunctionSchema) -> Fact:
    kinds = [str(result.real_type) for result in schema.returns]
    if len(kinds) > 1 or kinds[0] == "List[Tensor]":
        return Fact(Kind.PARTS)
    if kinds[0].startswith("List["):
        return Fact(Kind.NUMBERS)
    return TENSOR if kinds[0] == "Tensor" else Fact(Kind.NUMBER)


def has_tensors(fact: Fact) -> bool:
    """Return whether a module may be called with such a value first: others pass through some."""
    return fact.kind in (Kind.TENSOR, Kind.RESULT, Kind.PARTS)


def are_values(values: object) -> bool:
    """Return whether a module may be called with these."""
    if isinstance(values, list | tuple):
        return all(map(are_values, values))
    plain = values is None or isinstance(values, bool | int | float | str)
    return plain or isinstance(values, fx.Node)

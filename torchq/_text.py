# SPDX-License-Identifier: Apache-2.0
"""The text of post-ops and attributes: locale-free scalars, strict reading with positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchq._arguments import DTYPE_NAMES, check_choice, to_dtype, to_float32

ELTWISE_ALGS = (
    *("relu", "linear", "clip", "abs", "elu", "exp", "gelu_erf", "gelu_tanh", "hardsigmoid"),
    *("hardswish", "log", "logistic", "mish", "pow", "round", "soft_relu", "sqrt", "square"),
    *("swish", "tanh"),
)
BINARY_ALGS = (
    *("add", "sub", "mul", "div", "max", "min"),
    *("ge", "gt", "le", "lt", "eq", "ne", "select"),
)
POST_OP_NAMES = ["sum", *(f"eltwise_{alg}" for alg in ELTWISE_ALGS)]
POST_OP_NAMES += [*(f"binary_{alg}" for alg in BINARY_ALGS), "prelu", "dw_conv"]


def float_text(value: float) -> str:
    """The shortest text that reads back as this float32, whether read as float32 or as float64.

    It never holds a ``+`` (the separator of post-ops): 3.4e38, 1e-45, 6, -0.
    """
    single = np.float32(value)
    if value == 0 or 1e-4 <= abs(value) < 1e16:
        text = np.format_float_positional(single, trim="-")
    else:
        text = np.format_float_scientific(single, trim="-", exp_digits=1)
    if np.float32(float(text)) != single:  # rounding twice misses it, as with 7.038531e-26
        text = repr(float(single))
    return text.replace("e+", "e")


def parse_float(where: str, text: str) -> float:
    """The inverse of `float_text`; takes any decimal text without a ``+``."""
    if not re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]{1,3})?", text):
        raise ValueError(f"{where} must be a number like 6, 0.5, 1e-5 or 1e20 (without '+')")
    return to_float32(where, float(text))


def parse_int(where: str, text: str) -> int:
    """A decimal integer of at most 10 digits."""
    if not re.fullmatch(r"0|-?[1-9][0-9]{0,9}", text):
        raise ValueError(f"{where} must be an integer like 0 or 128")
    return int(text)


def parse_groups(where: str, text: str) -> list[int]:
    """Group sizes of the last two dims, ``32x1``."""
    return [parse_int(where, size) for size in text.split("x")]


def split_at(text: str, separator: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """The (position, text) of the parts between separators; ``text`` itself is at ``start``."""
    for part in text.split(separator):
        yield start, part
        start += len(part) + len(separator)


@contextmanager
def at_position(op: str, position: int, got: str) -> Iterator[None]:
    """Adds the op, the position (from 0) and the text there to a ValueError from inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"torchq.{op}: at position {position}, got {got!r}: {error}") from None


def _join(name: str, *fields: tuple[str, str]) -> str:
    """Joins a name and its (text, default) fields with ``:``, without the trailing defaults."""
    kept = list(fields)
    while kept and kept[-1][0] == kept[-1][1]:
        kept.pop()
    return ":".join([name, *(text for text, _ in kept)])


@dataclass(frozen=True)
class Sum:
    """``x = x + scale * (old - zero_point)``; ``dtype`` None means the dtype of dst."""

    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype | None = None
    name = "sum"

    def __str__(self) -> str:
        """The post-op as text."""
        dtype = DTYPE_NAMES[self.dtype] if self.dtype else ""
        fields = (float_text(self.scale), "1"), (str(self.zero_point), "0"), (dtype, "")
        return _join(self.name, *fields)


@dataclass(frozen=True)
class Eltwise:
    """``x = scale * f(x)``; ``alpha`` and ``beta`` as oneDNN defines them for ``alg``."""

    alg: str
    alpha: float = 0.0
    beta: float = 0.0
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The post-op's name in text, ``eltwise_<alg>``."""
        return f"eltwise_{self.alg}"

    def __str__(self) -> str:
        """The post-op as text."""
        scalars = (self.alpha, "0"), (self.beta, "0"), (self.scale, "1")
        return _join(self.name, *((float_text(value), default) for value, default in scalars))


@dataclass(frozen=True)
class Binary:
    """``x = alg(x, src1)``; ``values`` is src1, 1-D, None when supplied at execution."""

    alg: str
    mask: int
    dtype: torch.dtype = torch.float32
    values: Tensor | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The post-op's name in text, ``binary_<alg>``."""
        return f"binary_{self.alg}"

    def __str__(self) -> str:
        """The post-op as text."""
        return _join(self.name, (str(self.mask), ""), (DTYPE_NAMES[self.dtype], "f32"))


@dataclass(frozen=True)
class PReLU:
    """``x = x >= 0 ? x : x * weight``; ``values`` is weight, 1-D, None when given at execution."""

    mask: int
    values: Tensor | None = field(default=None, compare=False)
    name = "prelu"

    def __str__(self) -> str:
        """The post-op as text."""
        return _join(self.name, (str(self.mask), ""))


@dataclass(frozen=True)
class DwConv:
    """``x = depthwise(quantize(x))``: the result so far is stored as ``dtype`` and convolved.

    ``bias_dtype`` None: without a bias. ``weight`` and ``bias`` None: supplied at execution.
    """

    kernel: int
    stride: int
    padding: int
    dtype: torch.dtype = torch.uint8
    bias_dtype: torch.dtype | None = None
    weight: Tensor | None = field(default=None, compare=False)
    bias: Tensor | None = field(default=None, compare=False)
    name = "dw_conv"

    @property
    def values(self) -> list[Tensor | None]:
        """The weight, and the bias if there is one."""
        return [self.weight] if self.bias_dtype is None else [self.weight, self.bias]

    def padding_end(self, sizes: Sequence[int]) -> list[int]:
        """Padding behind each dim, so that ``ceil(size / stride)`` outputs come of it."""
        ends = []
        for size in sizes:
            reach = (-(-size // self.stride) - 1) * self.stride + self.kernel
            ends.append(reach - size - self.padding)
        return ends

    def __str__(self) -> str:
        """The post-op as text."""
        window = ((str(value), "") for value in (self.kernel, self.stride, self.padding))
        bias = "" if self.bias_dtype is None else DTYPE_NAMES[self.bias_dtype]
        return _join(self.name, *window, (DTYPE_NAMES[self.dtype], "u8"), (bias, ""))


PostOp: TypeAlias = Sum | Eltwise | Binary | PReLU | DwConv


_READERS: dict[str, Callable[[str, str], Any]] = {
    "scale": parse_float,
    "shift": parse_float,
    "alpha": parse_float,
    "beta": parse_float,
    "zero_point": parse_int,
    "mask": parse_int,
    "dtype": to_dtype,
    "bias_dtype": to_dtype,
    "kernel": parse_int,
    "stride": parse_int,
    "padding": parse_int,
    "groups": parse_groups,
    "mode": lambda _, text: text,
}


def read_fields(
    op: str, position: int, token: str, names: Sequence[str], required: int = 0
) -> dict[str, Any]:
    """Reads ``<head>:<field>:...`` by the fields' names; the first ``required`` must be there."""
    (_, head), *parts = split_at(token, ":", position)
    if not required <= len(parts) <= len(names):
        form = "".join([f":<{name}>" for name in names[:required]])
        form += "".join(f"[:<{name}>]" for name in names[required:])
        with at_position(op, position, token):
            raise ValueError(f"must have the form {head}{form}")
    fields = {}
    for name, (start, text) in zip(names, parts, strict=False):
        with at_position(op, start, text):
            fields[name] = _READERS[name](name, text)
    return fields


def read_post_ops(post_ops: object, text: str, start: int, op: str) -> None:
    """Calls the append methods that ``text`` asks for.

    Errors name ``op`` and count positions from ``start``.
    """
    for position, token in split_at(text, "+", start) if text else ():
        name = token.partition(":")[0]
        with at_position(op, position, name):
            check_choice("post-op", name, POST_OP_NAMES)
        method, args, names, required = _grammar(name)
        fields = read_fields(op, position, token, names, required)
        with at_position(op, position, token):
            getattr(post_ops, f"append_{method}")(*args, **fields)


def _grammar(name: str) -> tuple[str, list[str | None], list[str], int]:
    """The append method, what it takes first, its fields and how many of them are required."""
    kind, _, alg = name.partition("_")
    if kind == "sum":
        return "sum", [], ["scale", "zero_point", "dtype"], 0
    if kind == "eltwise":
        return "eltwise", [alg], ["alpha", "beta", "scale"], 0
    if kind == "binary":
        return "binary", [alg, None], ["mask", "dtype"], 1
    if kind == "dw":
        names = ["kernel", "stride", "padding", "dtype", "bias_dtype"]
        return "dw_conv", [None], names, 3
    return "prelu", [None], ["mask"], 1


# The sections of an Attr's text, in order: the setter, and its fields after <arg> (if it has one).
ATTR_GRAMMAR = {
    "output_scales": ("set_output_scales", ("mask",)),
    "scales": ("set_scales", ("mask", "groups")),
    "zero_points": ("set_zero_points", ("mask", "groups")),
    "rounding": ("set_rounding", ("mode",)),
    "rnn_data": ("set_rnn_data_qparams", ("scale", "shift")),
    "rnn_weights": ("set_rnn_weights_qparams", ("mask",)),
    "rnn_weights_projection": ("set_rnn_weights_projection_qparams", ("mask",)),
}
WITH_ARG = ("scales", "zero_points", "rounding")


def read_attr(attr: object, post_ops: object, text: str) -> None:
    """Calls the setters of an Attr and the append methods of its PostOps that ``text`` asks for."""
    op, seen = "Attr.parse", set[str]()
    for position, token in split_at(text, " ") if text else ():
        name, _, body = token.partition(":")
        with at_position(op, position, token):
            check_choice("section", name, [*ATTR_GRAMMAR, "post_ops"])
            if name in seen or not body:
                raise ValueError(f"must have {name}:<text> once")
        seen.add(name)
        if name == "post_ops":
            read_post_ops(post_ops, body, position + len("post_ops:"), op)
        else:
            _read_section(attr, name, position, token)


def _read_section(attr: object, name: str, position: int, token: str) -> None:
    op, seen = "Attr.parse", set[str]()
    setter, names = ATTR_GRAMMAR[name]
    head = len(name) + 1
    with_arg = name in WITH_ARG
    items = split_at(token[head:], "+", position + head) if with_arg else [(position, token)]
    for start, item in items:
        args = [item.partition(":")[0]] if with_arg else []
        fields = read_fields(op, start, item, names, len(names) - ("groups" in names))
        with at_position(op, start, item):
            if not seen.isdisjoint(args):
                raise ValueError(f"{name} must have {args[0]} once")
            getattr(attr, setter)(*args, **fields)
        seen.update(args)

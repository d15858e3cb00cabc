# SPDX-License-Identifier: Apache-2.0
"""The post-ops, and how each is written as text and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from torchq._arguments import DTYPE_NAMES, check_choice
from torchq._text import at_position, float_text, join_fields, read_fields, split_at

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
        return join_fields(self.name, *fields)


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
        return join_fields(self.name, *((float_text(value), default) for value, default in scalars))


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
        return join_fields(self.name, (str(self.mask), ""), (DTYPE_NAMES[self.dtype], "f32"))


@dataclass(frozen=True)
class PReLU:
    """``x = x >= 0 ? x : x * weight``; ``values`` is weight, 1-D, None when given at execution."""

    mask: int
    values: Tensor | None = field(default=None, compare=False)
    name = "prelu"

    def __str__(self) -> str:
        """The post-op as text."""
        return join_fields(self.name, (str(self.mask), ""))


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
        return join_fields(self.name, *window, (DTYPE_NAMES[self.dtype], "u8"), (bias, ""))


PostOp: TypeAlias = Sum | Eltwise | Binary | PReLU | DwConv


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

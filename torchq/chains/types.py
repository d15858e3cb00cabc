# SPDX-License-Identifier: Apache-2.0
"""The post-ops, and how each is written as text and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, get_args

import torch
from torch import Tensor

from torchq._arguments import DTYPE_NAMES, check_choice
from torchq._options import BinaryAlg, EltwiseAlg
from torchq._text import at_position, float_text, join_fields, read_fields, split_at

ELTWISE_ALGS: tuple[str, ...] = get_args(EltwiseAlg)
BINARY_ALGS: tuple[str, ...] = get_args(BinaryAlg)
ELTWISE_DEFAULTS: dict[str, tuple[float | None, float | None]] = {
    "clip": (None, None),
    "elu": (1.0, 0.0),
    "hardsigmoid": (1 / 6, 0.5),
    "hardswish": (1 / 6, 0.5),
    "linear": (None, 0.0),
    "pow": (1.0, None),
    "soft_relu": (1.0, 0.0),
    "swish": (1.0, 0.0),
}
"""alpha and beta where they are left out, None: they must be given. Of all others 0."""
NEEDED_FOR = {
    "clip": "min(max(x, alpha), beta)",
    "linear": "alpha * x + beta",
    "pow": "alpha * x ** beta",
}
TEXT_FIELDS = {"hardsigmoid": 2, "hardswish": 2, "pow": 2}
"""How many of alpha and beta the text has at least, where not 1 for those of ELTWISE_DEFAULTS."""
ELTWISE_ALIASES = {
    **{"bounded_relu": "clip", "hardtanh": "clip", "relu6": "clip", "leaky_relu": "relu"},
    **{"sigmoid": "logistic", "silu": "swish", "softplus": "soft_relu", "logsigmoid": "soft_relu"},
}
"""Names of oneDNN v2 and torch, and what to take instead."""
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
    """``x = scale * f(x)``; ``alpha`` and ``beta`` as :mod:`torchq.post_ops` has them."""

    alg: EltwiseAlg
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
        kept = _text_fields(self.alg)  # a 0 that nobody asked for is not to be read from it
        fields = enumerate(scalars)
        return join_fields(
            self.name, *((float_text(v), "" if i < kept else default) for i, (v, default) in fields)
        )


@dataclass(frozen=True)
class Binary:
    """``x = alg(x, src1)``; ``values`` is src1, 1-D, None when supplied at execution."""

    alg: BinaryAlg
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
            check_choice("post-op", name, POST_OP_NAMES, _NAME_ALIASES)
        method, args, names, required = _grammar(name)
        fields = read_fields(op, position, token, names, required)
        if method == "eltwise":  # the text leaves zeros out, and no other default
            fields = {"alpha": 0.0, "beta": 0.0} | fields
        with at_position(op, position, token):
            getattr(post_ops, f"append_{method}")(*args, **fields)


_NAME_ALIASES = {f"eltwise_{old}": f"eltwise_{new}" for old, new in ELTWISE_ALIASES.items()}


def _text_fields(alg: str) -> int:
    """How many of alpha and beta the text must have."""
    return TEXT_FIELDS.get(alg, int(alg in ELTWISE_DEFAULTS))


def _grammar(name: str) -> tuple[str, list[str | None], list[str], int]:
    """The append method, what it takes first, its fields and how many of them are required."""
    kind, _, alg = name.partition("_")
    if kind == "sum":
        return "sum", [], ["scale", "zero_point", "dtype"], 0
    if kind == "eltwise":
        return "eltwise", [alg], ["alpha", "beta", "scale"], _text_fields(alg)
    if kind == "binary":
        return "binary", [alg, None], ["mask", "dtype"], 1
    if kind == "dw":
        names = ["kernel", "stride", "padding", "dtype", "bias_dtype"]
        return "dw_conv", [None], names, 3
    return "prelu", [None], ["mask"], 1

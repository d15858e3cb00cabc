# SPDX-License-Identifier: Apache-2.0
"""The post-ops: their text, the checks of their arguments, the sources that they read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard, get_args

import torch
from torch import Tensor

from torchq.attributes.arguments import (
    DTYPE_NAMES,
    INT32,
    Values,
    as_float32,
    at_position,
    check_choice,
    check_count,
    check_single,
    check_type,
    float_text,
    float_values,
    join_fields,
    read_fields,
    selected_dims,
    split_at,
    to_dtype,
    to_float32,
    to_int,
)
from torchq.attributes.options import BinaryAlg, EltwiseAlg

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
WHERE = "torchq.PostOps.append_dw_conv"
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
        """Return the post-op as text."""
        dtype = DTYPE_NAMES[self.dtype] if self.dtype else ""
        fields = (float_text(self.scale), "1"), (str(self.zero_point), "0"), (dtype, "")
        return join_fields(self.name, *fields)


@dataclass(frozen=True)
class Eltwise:
    """``x = scale * f(x)``; ``alpha`` and ``beta`` as ``post_ops.py`` has them."""

    alg: EltwiseAlg
    alpha: float = 0.0
    beta: float = 0.0
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The post-op's name in text, ``eltwise_<alg>``."""
        return f"eltwise_{self.alg}"

    def __str__(self) -> str:
        """Return the post-op as text."""
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
        """Return the post-op as text."""
        return join_fields(self.name, (str(self.mask), ""), (DTYPE_NAMES[self.dtype], "f32"))


@dataclass(frozen=True)
class PReLU:
    """``x = x >= 0 ? x : x * weight``; ``values`` is weight, 1-D, None when given at execution."""

    mask: int
    values: Tensor | None = field(default=None, compare=False)
    name = "prelu"

    def __str__(self) -> str:
        """Return the post-op as text."""
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
        """Return the padding behind each dim that makes ``ceil(size / stride)`` outputs."""
        ends = []
        for size in sizes:
            reach = (-(-size // self.stride) - 1) * self.stride + self.kernel
            ends.append(reach - size - self.padding)
        return ends

    def __str__(self) -> str:
        """Return the post-op as text."""
        window = ((str(value), "") for value in (self.kernel, self.stride, self.padding))
        bias = "" if self.bias_dtype is None else DTYPE_NAMES[self.bias_dtype]
        return join_fields(self.name, *window, (DTYPE_NAMES[self.dtype], "u8"), (bias, ""))


PostOp: TypeAlias = Sum | Eltwise | Binary | PReLU | DwConv


def read_post_ops(post_ops: object, text: str, start: int, op: str) -> None:
    """Call the append methods that ``text`` asks for.

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
    """Return how many of alpha and beta the text must have."""
    return TEXT_FIELDS.get(alg, int(alg in ELTWISE_DEFAULTS))


def _grammar(name: str) -> tuple[str, list[str | None], list[str], int]:
    """Return the append method, its first arguments, its fields and how many are required."""
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


def make_eltwise(alg: EltwiseAlg, alpha: float | None, beta: float | None, scale: float) -> Eltwise:
    """Return the post-op; None is the algorithm's default."""
    where = "torchq.PostOps.append_eltwise"
    check_choice(f"{where}: alg", alg, ELTWISE_ALGS, ELTWISE_ALIASES)
    defaults, scalars = ELTWISE_DEFAULTS.get(alg, (0.0, 0.0)), dict[str, float]()
    for name, value, default in zip(("alpha", "beta"), (alpha, beta), defaults, strict=True):
        number = default if value is None else value
        if number is None:
            raise ValueError(
                f"{where}: {name} must be given for {alg}, {NEEDED_FOR[alg]}, got none. Pass a "
                "number."
            )
        scalars[name] = to_float32(f"{where}: {name}", number)
    op = Eltwise(alg, **scalars, scale=to_float32(f"{where}: scale", scale))
    if alg == "clip" and op.beta < op.alpha:
        raise ValueError(
            f"{where}: beta must be >= alpha for clip, got alpha {op.alpha}, beta {op.beta}. "
            "The order is lower, upper; in text eltwise_clip:<alpha>:<beta>."
        )
    if alg == "soft_relu" and op.alpha == 0:
        raise ValueError(
            f"{where}: alpha must be nonzero for soft_relu, (1/alpha) * log(1 + "
            "exp(alpha * x)), got 0. Use alpha=1 for oneDNN v2's soft_relu."
        )
    return op


def make_dw_conv(
    weight: Tensor | None,
    bias: Tensor | None,
    window: tuple[int, int, int],
    dtype: torch.dtype | str,
    bias_dtype: torch.dtype | str | None,
) -> DwConv:
    """Return the post-op; ``window`` is kernel, stride and padding. A weight decides the kernel."""
    kernel, stride, padding = window
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            check_type(f"{WHERE}: {name}", value, Tensor, "Pass a tensor, or None.")
    if weight is not None:
        weight, kernel = _checked_weight(weight)
    kernel = to_int(f"{WHERE}: kernel", kernel, 1, INT32.max)
    stored = to_dtype(f"{WHERE}: dtype", dtype)
    if stored not in (torch.uint8, torch.int8):
        raise NotImplementedError(
            f"{WHERE}: dtype must be torch.uint8 or torch.int8, got {dtype}. The nearest "
            "supported form for other intermediate results is two convolutions."
        )
    bias = None if bias is None else as_float32(bias)
    given = bias_dtype if bias is None else bias.dtype
    wanted = None if given is None else to_dtype(f"{WHERE}: bias_dtype", given)
    if wanted not in (None, torch.float32, torch.int32):
        raise TypeError(
            f"{WHERE}: bias must be float32 (real units) or int32 (accumulator units), got "
            f"{wanted}. Convert it with .float()."
        )
    stride = to_int(f"{WHERE}: stride", stride, 1, INT32.max)
    padding = to_int(f"{WHERE}: padding", padding, 0, kernel - 1)
    copied = None if bias is None else bias.detach().cpu().clone()
    return DwConv(kernel, stride, padding, stored, wanted, weight, copied)


def with_dw_values(op: DwConv, values: Sequence[Any]) -> DwConv:
    """Return the post-op with this weight, and bias if it has one."""
    where = "torchq.PostOps.with_values: dw_conv"
    for value in values:
        if not isinstance(value, Tensor):
            raise TypeError(f"{where} takes tensors, got {value!r}. Pass weight and bias.")
    bias = values[1] if len(values) > 1 else None
    window = (op.kernel, op.stride, min(op.padding, values[0].shape[-1] - 1))
    made = make_dw_conv(values[0], bias, window, op.dtype, None)
    if str(made) != str(op):
        raise ValueError(
            f"{where} must be {op}, got values for {made}. Give a weight of that kernel size and a "
            "bias of that dtype."
        )
    return made


def _checked_weight(weight: Tensor) -> tuple[Tensor, int]:
    """Return a copy, and the kernel's size."""
    if weight.dtype not in (torch.uint8, torch.int8):
        raise TypeError(
            f"{WHERE}: weight must be torch.uint8 or torch.int8, got {weight.dtype}. Quantize it "
            "first: torchq.functional.quantize(weight, scale, zero_point)."
        )
    shape = list(weight.shape)
    if not 3 <= len(shape) <= 5 or shape[1] != 1 or len(set(shape[2:])) != 1 or shape[2] == 0:
        raise NotImplementedError(
            f"{WHERE}: weight must be (C, 1, k...) with the same k in each dimension, got {shape}. "
            "The nearest supported form for other kernels is two convolutions."
        )
    return weight.detach().cpu().clone(), shape[2]


def check_zero_point(where: str, zero_point: int, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless a source of ``dtype`` can have this zero point."""
    if dtype is None:
        return
    if dtype.is_floating_point and zero_point != 0:
        raise ValueError(
            f"{where}: zero_point must be 0 for a {dtype} source, got {zero_point}. "
            "Only integers have one: if the source is quantized, give dtype, such as torch.uint8."
        )
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        to_int(f"{where}: zero_point of a {dtype} source", zero_point, limits.min, limits.max)


def operand_values(where: str, src: Values, mask: int, dtype: torch.dtype | None) -> Tensor:
    """Return a private 1-D copy of the operand of a binary or prelu."""
    if isinstance(src, Tensor) and src.is_meta:  # to be loaded
        values = src.detach().reshape(-1)
    elif isinstance(src, Tensor) and src.dtype in (torch.uint8, torch.int8, torch.int32):
        values = src.detach().cpu().reshape(-1).clone()
    else:
        values = float_values(where, src)
    if dtype is not None and values.dtype != dtype:
        raise ValueError(f"{where} must be {dtype}, got {values.dtype}. Convert it to {dtype}.")
    check_single(where, mask, values)
    return values


CHANNEL_MASKS = (0, 2)
"""Masks whose values are folded; an operand with any other is a source of the op."""


def is_full(op: PostOp) -> TypeGuard[Binary | PReLU]:
    """Return whether the operand is a source of the op rather than values per channel."""
    return isinstance(op, Binary | PReLU) and op.mask not in CHANNEL_MASKS


def has_full_values(op: PostOp) -> bool:
    """Return whether it is a source that the caller need not supply."""
    return is_full(op) and op.values is not None


def owners_of(ops: Iterable[PostOp]) -> list[PostOp]:
    """Return the post-op of each source; a select's operand comes before its condition."""
    owners = list[PostOp]()
    for op in ops:
        owners += [op] * (isinstance(op, Sum) + is_full(op) + selects(op))
    return owners


def merged_sources(
    ops: Iterable[PostOp],
    op_name: str,
    dims: Callable[[], Sequence[int]],
    srcs: Sequence[Tensor],
    every: bool = False,
) -> list[Tensor]:
    """Return ``srcs`` and the values of masks other than 0 and 2, or ``every``, in order."""
    rows = not every and op_name in ("linear", "matmul")
    remaining, result = iter(srcs), list[Tensor]()
    for op in ops:
        own = has_full_values(op) or (every and not is_full(op))
        if isinstance(op, Binary | PReLU) and own:
            if op.values is None:
                raise ValueError(
                    f"torchq.{op_name}: values must be present in {op}, got none. Supply them: "
                    "post_ops.with_values([...])."
                )
            result.append(op.values.reshape(_operand_shape(op_name, op, dims(), rows)))
        elif isinstance(op, Sum) or is_full(op):
            result.append(next(remaining))
        if selects(op):
            result.append(next(remaining))
    return result


def selects(op: PostOp) -> bool:
    """Return whether the post-op has a condition, which is a source."""
    return isinstance(op, Binary) and op.alg == "select"


def _operand_shape(op_name: str, op: Binary | PReLU, dims: Sequence[int], rows: bool) -> list[int]:
    """Return the dims of dst that the mask selects, 1 elsewhere; check that the values fit."""
    logical = (math.prod(dims[:-1]), dims[-1]) if rows else dims
    where = f"torchq.{op_name}: values of {op}"
    check_count(where, op.mask, op.values, selected_dims(where, op.mask, logical), logical)
    bits = [int(d + 1 == len(dims)) if rows else d for d in range(len(dims))]
    return [size if op.mask >> bit & 1 else 1 for size, bit in zip(dims, bits, strict=True)]

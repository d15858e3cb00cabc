# SPDX-License-Identifier: Apache-2.0
"""Checked arguments of post-ops: coefficients, zero points, operands, depthwise convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchq._arguments import (
    INT32,
    Values,
    check_choice,
    check_single,
    check_type,
    float_values,
    to_dtype,
    to_float32,
    to_int,
)
from torchq._options import EltwiseAlg
from torchq.chains.types import (
    ELTWISE_ALGS,
    ELTWISE_ALIASES,
    ELTWISE_DEFAULTS,
    NEEDED_FOR,
    DwConv,
    Eltwise,
)

WHERE = "torchq.PostOps.append_dw_conv"


def make_eltwise(alg: EltwiseAlg, alpha: float | None, beta: float | None, scale: float) -> Eltwise:
    """The post-op; None is the algorithm's default."""
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
    """The post-op; ``window`` is kernel, stride and padding. A weight decides the kernel."""
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
    """The post-op with this weight, and bias if it has one."""
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
    """A copy, and the kernel's size."""
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
    """Raises ValueError unless a source of ``dtype`` can have this zero point."""
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
    """A private 1-D copy of the operand of a binary or prelu."""
    if isinstance(src, Tensor) and src.dtype in (torch.uint8, torch.int8, torch.int32):
        values = src.detach().cpu().reshape(-1).clone()
    else:
        values = float_values(where, src)
    if dtype is not None and values.dtype != dtype:
        raise ValueError(f"{where} must be {dtype}, got {values.dtype}. Convert it to {dtype}.")
    check_single(where, mask, values)
    return values

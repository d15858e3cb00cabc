# SPDX-License-Identifier: Apache-2.0
"""BLAS-like products of int8 matrices with int32 results."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.attributes.arguments import INT32, check_type, to_int
from torchq.attributes.options import OffsetC
from torchq.functional.arguments import integer


def gemm_u8s8s32(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    co: int | Tensor = 0,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    offsetc: OffsetC = "F",
    alpha: float = 1.0,
    beta: float = 0.0,
    ao: int = 0,
    bo: int = 0,
) -> Tensor:
    """``saturate_s32(alpha * (op(A) - ao) @ (op(B) - bo) + beta * C + co)``, row-major.

    With alpha 1 and beta 0 or 1 the result is the exact integer, saturated. Otherwise
    ``(alpha * acc + beta * c) + co`` in float64, each operation rounded, then rounded to an
    integer, half to even, and saturated. K = 0 is BLAS's: ``beta * C + co`` (oneDNN leaves C
    untouched).

    Args:
        a: uint8 ``(M, K)``, with ``trans_a`` ``(K, M)``.
        b: int8 ``(K, N)``, with ``trans_b`` ``(N, K)``.
        c: int32 ``(M, N)``; needed unless ``beta`` is 0. It is not changed.
        co: int32, one value (``offsetc`` "F"), one per row ("C", a column) or per column ("R").
        trans_a: whether ``a`` is transposed.
        trans_b: whether ``b`` is transposed.
        offsetc: which of these ``co`` is.
        alpha: finite.
        beta: finite.
        ao: zero point of ``a``, in its range.
        bo: zero point of ``b``, in its range.

    Returns:
        int32 ``(M, N)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that do not fit, ``ao`` or ``bo`` out of range, or K above 65793 (33025
            with ``bo``).
    """
    check_type("torchq.gemm_u8s8s32: a", a, Tensor, "Pass a uint8 matrix.")
    if a.dtype != torch.uint8:
        raise TypeError(
            f"torchq.gemm_u8s8s32: a must be torch.uint8, got {a.dtype}. Use gemm_s8s8s32 for int8."
        )
    return _gemm("gemm_u8s8s32", a, b, c, co, trans_a, trans_b, offsetc, alpha, beta, ao, bo)


def gemm_s8s8s32(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    co: int | Tensor = 0,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    offsetc: OffsetC = "F",
    alpha: float = 1.0,
    beta: float = 0.0,
    ao: int = 0,
    bo: int = 0,
) -> Tensor:
    """As :func:`gemm_u8s8s32` for an int8 ``a``."""
    check_type("torchq.gemm_s8s8s32: a", a, Tensor, "Pass an int8 matrix.")
    if a.dtype != torch.int8:
        raise TypeError(
            f"torchq.gemm_s8s8s32: a must be torch.int8, got {a.dtype}. Use gemm_u8s8s32 for uint8."
        )
    return _gemm("gemm_s8s8s32", a, b, c, co, trans_a, trans_b, offsetc, alpha, beta, ao, bo)


def _gemm(
    op: str,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    co: int | Tensor,
    trans_a: bool,
    trans_b: bool,
    offsetc: OffsetC,
    alpha: float,
    beta: float,
    ao: int,
    bo: int,
) -> Tensor:
    if not isinstance(co, Tensor):
        value = to_int(f"torchq.{op}: co", co, INT32.min, INT32.max)
        co = torch.tensor([value], dtype=torch.int32, device="cpu")
    ao, bo = integer(op, "ao", ao), integer(op, "bo", bo)
    result: Tensor = torch.ops.torchq.gemm(
        a, b, c, trans_a, trans_b, alpha, beta, ao, bo, offsetc, co.contiguous()
    )
    return result

# SPDX-License-Identifier: Apache-2.0
"""Reductions and resampling of uint8 and int8 tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attr import Attr
from torchq.functional.arguments import (
    Ints,
    check_8bit,
    eltwise_post_ops,
    real_params,
    spatial_dims,
    spread,
)
from torchq.ops import dtype_code


def reduction(
    src: Tensor,
    alg: str,
    dims: Ints,
    keepdim: bool = False,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``real(dst) = alg of real(src)`` over ``dims``.

    ``sum``, ``max``, ``min``: ``src_scale * alg(q - zero_point)``, ``mean``: that of the sum,
    divided by the number of values; integers exactly, then double, rounded to float32 once.
    ``mul``: the product of ``src_scale * (q - zero_point)`` in double, in row-major order. An int32
    destination of sum, max or min where both scales are 1 is exact, and saturated.

    Args:
        src: uint8 or int8, any strides.
        alg: ``sum``, ``mean``, ``max``, ``min`` or ``mul``.
        dims: one or several, different; may be negative.
        keepdim: whether the reduced dims stay, with size 1, as oneDNN has them.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; eltwise post-ops.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale).

    Raises:
        TypeError: ``src`` is neither uint8 nor int8.
        ValueError: ``dims`` are wrong, or there is nothing to reduce.
        NotImplementedError: another ``alg``, mask or post-op.
    """
    check_8bit("reduction", "src", src)
    attr = Attr() if attr is None else attr
    scales, zero_points = real_params("reduction", attr, ["src", "dst"])
    rest = eltwise_post_ops("reduction", attr)
    result: Tensor = torch.ops.torchq.reduction(
        src,
        alg,
        list(dims) if isinstance(dims, Sequence) else [dims],
        keepdim,
        scales,
        zero_points,
        dtype_code(dst_dtype, "reduction"),
        rest,
    )
    return result


def resampling(
    src: Tensor,
    size: Ints,
    alg: str = "nearest",
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
) -> Tensor:
    """Resizes the spatial dims of ``(N, C, spatial...)`` to ``size``; dst is channels-last.

    Output ``o`` reads at ``s = (o + 0.5) * input / output - 0.5`` (float32). ``nearest`` takes the
    value at ``s`` rounded half away from zero: for whole factors that of ``torch``'s ``nearest``,
    else of its ``nearest-exact`` but for ties. ``linear`` weighs the neighbors by distance, as
    ``torch``'s ``linear``, ``bilinear`` and ``trilinear`` with ``align_corners=False``, in double,
    rounded to float32 once.

    Args:
        src: uint8 or int8 with one to three spatial dims.
        size: one number, or one per spatial dim; 1 to 2^24.
        alg: ``nearest`` or ``linear``.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; eltwise post-ops.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale); None is that of ``src``.

    Errors as in :func:`reduction`.
    """
    check_8bit("resampling", "src", src)
    attr = Attr() if attr is None else attr
    scales, zero_points = real_params("resampling", attr, ["src", "dst"])
    rest = eltwise_post_ops("resampling", attr)
    sizes = spread("resampling", "size", size, spatial_dims("resampling", src))
    code = dtype_code(dst_dtype or src.dtype, "resampling")
    result: Tensor = torch.ops.torchq.resampling(src, alg, sizes, scales, zero_points, code, rest)
    return result

# SPDX-License-Identifier: Apache-2.0
"""Reductions of any tensor, and resampling of uint8 and int8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attributes.attr import Attr
from torchq.attributes.options import ReductionAlg, ResamplingAlg
from torchq.functional.arguments import (
    Ints,
    check_8bit,
    check_any,
    integer,
    real_arguments,
    spatial_dims,
    spread,
)
from torchq.runtime.windows import reduced_sizes


def reduction(
    src: Tensor,
    alg: ReductionAlg,
    dims: Ints,
    keepdim: bool = False,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    p: float = 2.0,
    eps: float = 0.0,
) -> Tensor:
    """``real(dst) = alg of real(src)`` over ``dims``.

    ``sum``, ``max``, ``min``: ``src_scale * alg(q - zero_point)``, ``mean``: that of the sum,
    divided by the number of values; integers exactly, float32 in double, then double, rounded to
    float32 once. ``mul``: the product of ``src_scale * (q - zero_point)`` in double, in row-major
    order. An int32 destination of sum, max or min of integers where both scales are 1 is exact, and
    saturated.

    Norms are of ``s``, the sum of ``abs(x) ** p`` in double::

        norm_lp_power_p_sum: s + eps         norm_lp_sum: (s + eps) ** (1 / p)
        norm_lp_power_p_max: max(s, eps)     norm_lp_max: max(s, eps) ** (1 / p)

    Args:
        src: uint8, int8, int32 or float32, any strides.
        alg: ``sum``, ``mean``, ``max``, ``min``, ``mul`` or a norm.
        dims: one or several, different; may be negative. An empty sequence reduces nothing (that
            is each value by itself), where ``torch.sum`` would reduce everything.
        keepdim: whether the reduced dims stay, with size 1, as oneDNN has them.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; post-ops, in float32, their
            masks indexing the dims of dst.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale).
        post_op_srcs: as in :func:`eltwise`.
        p: of a norm, at least 1.
        eps: of a norm, at least 0.

    Raises:
        TypeError: ``src``, or one of ``post_op_srcs``, has another dtype.
        ValueError: ``dims``, ``alg``, ``p`` or ``eps`` are wrong, there is nothing to reduce, or
            shapes do not fit.
        NotImplementedError: another mask of scales or zero points, or ``dw_conv``.
    """
    check_any("reduction", "src", src)
    given = dims if isinstance(dims, Sequence) else [dims]
    gone = [integer("reduction", "dims", dim) for dim in given]
    real = real_arguments(
        "reduction",
        attr,
        ["src", "dst"],
        dst_dtype,
        post_op_srcs,
        lambda: reduced_sizes(src.shape, gone, keepdim),
    )
    result: Tensor = torch.ops.torchq.reduction(src, alg, gone, keepdim, *real, p, eps)
    return result


def resampling(
    src: Tensor,
    size: Ints,
    alg: ResamplingAlg = "nearest",
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Resize the spatial dims of ``(N, C, spatial...)`` to ``size``; dst is channels-last.

    Output ``o`` reads at ``s = (o + 0.5) * input / output - 0.5`` (float32). ``nearest`` takes the
    value at ``s`` rounded half away from zero: for whole factors that of ``torch``'s ``nearest``,
    else of its ``nearest-exact`` but for ties. ``linear`` weighs the neighbors by distance, as
    ``torch``'s ``linear``, ``bilinear`` and ``trilinear`` with ``align_corners=False``: in float32,
    one fused multiply-add per neighbor.

    Args:
        src: uint8 or int8 with one to three spatial dims.
        size: one number, or one per spatial dim; 1 to 2^24.
        alg: ``nearest`` or ``linear``.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; post-ops.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale); None is that of ``src``.
        post_op_srcs: as in :func:`reduction`.

    Errors as in :func:`reduction`; only uint8 and int8 are taken.
    """
    check_8bit("resampling", "src", src)
    dst_dtype = src.dtype if dst_dtype is None else dst_dtype
    sizes = spread("resampling", "size", size, spatial_dims("resampling", src))
    given = ["src", "dst"], dst_dtype, post_op_srcs
    real = real_arguments("resampling", attr, *given, lambda: [*src.shape[:2], *sizes])
    result: Tensor = torch.ops.torchq.resampling(src, alg, sizes, *real)
    return result

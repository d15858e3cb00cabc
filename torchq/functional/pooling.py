# SPDX-License-Identifier: Apache-2.0
"""Pooling in 1 to 3 dimensions, by the rank of src.

Without ``attr`` and another ``dst_dtype``, scale and zero point stay as they are and dst has src's
dtype. With them a pool computes in real units, ``x = src_scale * max(q - z)`` or ``x = src_scale *
(float(sum of q - z) / float(count))`` in float32, applies the post-ops, and writes
``clamp(rne(fma(x, 1 / dst_scale, dst_zero_point)))``, or ``x`` itself to float32.

Sums of integers are exact. Those of int32, and of float32 in double, are divided in double:
``float(sum / count)``, and ``rne(sum / count)`` where dst is int32 without ``attr``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchq.attributes.attr import Attr
from torchq.functional.arguments import (
    Ints,
    Zeros,
    check_any,
    conv_geometry,
    integer,
    real_arguments,
    spatial_dims,
    spread,
    to_zero_point,
)
from torchq.runtime.windows import pool_sizes


def max_pool(
    src: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Maximum over windows of ``(N, C, spatial...)``; padding is never picked.

    The other arguments and the defaults are those of ``torch.nn.functional.max_pool2d``.

    Args:
        src: uint8, int8, int32 or float32, of which NaN stays NaN.
        kernel_size: one number, or one per spatial dim, as the next three.
        stride: None is ``kernel_size``.
        padding: at most half of the kernel.
        dilation: of the window.
        ceil_mode: whether a window may begin where it does not end inside.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; post-ops, in float32, their
            masks indexing the dims of dst.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale); None is that of ``src``.
        post_op_srcs: as in :func:`eltwise`.

    Raises:
        TypeError: ``src``, or one of ``post_op_srcs``, has another dtype.
        ValueError: the window does not fit, ``attr`` sets other arguments, or shapes do not fit.
        NotImplementedError: another mask of scales or zero points, or ``dw_conv``.
    """
    geometry = _geometry("max_pool", src, kernel_size, stride, padding, dilation)

    def sizes() -> list[int]:
        return pool_sizes(src.shape, geometry, ceil_mode)

    real = _real("max_pool", src, attr, dst_dtype, post_op_srcs, sizes)
    result: Tensor = torch.ops.torchq.max_pool(src, geometry, ceil_mode, *real)
    return result


def avg_pool(
    src: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    zero_point: Zeros = 0,
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``rne(float(sum) / float(count))`` over windows of ``(N, C, spatial...)``.

    Padding counts as real zero (``zero_point``) with ``count_include_pad``. ``divisor_override``
    takes a zero point in ``attr`` only: a sum divided by another number does not keep
    ``zero_point``, NotImplementedError. The other arguments and the defaults are those of
    ``torch.nn.functional.avg_pool2d``; the last three, which leave the zero point to ``attr``, and
    the errors, are those of :func:`max_pool`.
    """
    geometry = _geometry("avg_pool", src, kernel_size, stride, padding, 1)

    def sizes() -> list[int]:
        return pool_sizes(src.shape, geometry, ceil_mode)

    real = _real("avg_pool", src, attr, dst_dtype, post_op_srcs, sizes)
    zero = to_zero_point("torchq.avg_pool: zero_point", zero_point)
    if real and zero.any():
        raise ValueError(
            f"torchq.avg_pool: zero_point must be 0 with attr or dst_dtype, got {zero_point}. Use "
            "attr.set_zero_points('src', 0, ...)."
        )
    divisor = divisor_override
    if divisor is not None:
        divisor = integer("avg_pool", "divisor_override", divisor)
    result: Tensor = torch.ops.torchq.avg_pool(
        src, zero, geometry, ceil_mode, count_include_pad, divisor, *real
    )
    return result


def adaptive_avg_pool(
    src: Tensor,
    output_size: Ints,
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Average over ``output_size`` windows a dimension; 1 is the global average.

    The last three arguments, and the errors, are those of :func:`max_pool`.
    """
    check_any("adaptive_avg_pool", "src", src)
    dims = spatial_dims("adaptive_avg_pool", src)
    size = spread("adaptive_avg_pool", "output_size", output_size, dims)
    real = _real(
        "adaptive_avg_pool", src, attr, dst_dtype, post_op_srcs, lambda: [*src.shape[:2], *size]
    )
    result: Tensor = torch.ops.torchq.adaptive_avg_pool(src, size, *real)
    return result


def _real(
    op: str,
    src: Tensor,
    attr: Attr | None,
    dst_dtype: torch.dtype | None,
    srcs: Sequence[Tensor],
    sizes: Callable[[], Sequence[int]],
) -> tuple[object, ...]:
    """Return the last arguments of a pool in real units; of any other, none."""
    dtype = src.dtype if dst_dtype is None else dst_dtype
    if attr is None and dtype == src.dtype and not srcs:
        return ()
    return real_arguments(op, attr, ["src", "dst"], dtype, srcs, sizes)


def _geometry(
    op: str, src: Tensor, kernel_size: Ints, stride: Ints | None, padding: Ints, dilation: Ints
) -> list[int]:
    check_any(op, "src", src)
    kernel = spread(op, "kernel_size", kernel_size, spatial_dims(op, src))
    step = kernel if stride is None else stride
    return conv_geometry(op, kernel, step, padding, None, dilation)

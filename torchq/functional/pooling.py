# SPDX-License-Identifier: Apache-2.0
"""Pooling in 1 to 3 dimensions, by the rank of src; scale and zero point stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.functional.arguments import (
    Ints,
    Zeros,
    check_8bit,
    conv_geometry,
    spatial_dims,
    spread,
    to_zero_point,
)


def max_pool(
    src: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Maximum over windows of ``(N, C, spatial...)``; padding is never picked.

    The arguments and defaults are those of ``torch.nn.functional.max_pool2d``.
    """
    geometry = _geometry("max_pool", src, kernel_size, stride, padding, dilation)
    result: Tensor = torch.ops.torchq.max_pool(src, geometry, ceil_mode)
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
) -> Tensor:
    """``rne(float(sum) / float(count))`` over windows of ``(N, C, spatial...)``.

    Padding counts as real zero (``zero_point``) with ``count_include_pad``. The other arguments
    and the defaults are those of ``torch.nn.functional.avg_pool2d``.
    """
    geometry = _geometry("avg_pool", src, kernel_size, stride, padding, 1)
    zero = to_zero_point("torchq.avg_pool: zero_point", zero_point)
    result: Tensor = torch.ops.torchq.avg_pool(
        src, zero, geometry, ceil_mode, count_include_pad, divisor_override
    )
    return result


def adaptive_avg_pool(src: Tensor, output_size: Ints) -> Tensor:
    """Average over ``output_size`` windows a dimension; 1 is the global average."""
    check_8bit("adaptive_avg_pool", "src", src)
    dims = spatial_dims("adaptive_avg_pool", src)
    size = spread("adaptive_avg_pool", "output_size", output_size, dims)
    result: Tensor = torch.ops.torchq.adaptive_avg_pool(src, size)
    return result


def _geometry(
    op: str, src: Tensor, kernel_size: Ints, stride: Ints | None, padding: Ints, dilation: Ints
) -> list[int]:
    check_8bit(op, "src", src)
    kernel = spread(op, "kernel_size", kernel_size, spatial_dims(op, src))
    step = kernel if stride is None else stride
    return conv_geometry(op, kernel, step, padding, None, dilation)

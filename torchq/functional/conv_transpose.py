# SPDX-License-Identifier: Apache-2.0
"""Transposed convolution (deconvolution): an exact int32 sum, then scales, bias and post-ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.attributes.attr import Attr
from torchq.functional.arguments import (
    Ints,
    check_channels,
    check_source,
    conv_transpose_geometry,
    integer,
    packed_layer,
    spatial_dims,
    spread,
)
from torchq.functional.packing import PackedWeight, pack_conv_transpose
from torchq.runtime.windows import conv_transpose_sizes


def conv_transpose1d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """As :func:`conv_transpose2d` for ``src`` (N, C, L) and ``weight`` (C, OC/groups, k)."""
    window = _Window(stride, padding, padding_end, dilation, output_padding, groups)
    return _conv_transpose(1, src, weight, bias, window, attr, dst_dtype, post_op_srcs)


def conv_transpose2d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """Quantize ``post_ops(src_scale * weight_scale * deconv(src - src_zero_point) + bias)``.

    ``deconv`` is that of :func:`torch.nn.functional.conv_transpose2d`:
    ``dst[o] = sum of src[i] * weight[k]`` over ``o + padding == i * stride + k * dilation``.

    Args:
        src: uint8 or int8 ``(N, C, H, W)``; channels-last is read in place, others are copied.
        weight: int8 or uint8 ``(C, OC/groups, kh, kw)`` as torch has it, or packed by
            :func:`~torchq.packing.pack_conv_transpose`. oneDNN's (OC, C, kh, kw) is
            ``weight.transpose(0, 1)``, (G, OC/G, C/G, kh, kw) ``weight.transpose(1, 2).flatten(0,
            1)``.
        bias: ``[OC]``; float32 or int32 as in :func:`~torchq.functional.linear`.
        stride: one number or one per spatial dimension; so are the others.
        padding: cut off before, and after unless ``padding_end`` is given.
        output_padding: added after; below ``stride`` or ``dilation``.
        groups: divides both channel counts.
        dilation: distance between taps; 1 is dense.
        attr: as in :func:`~torchq.functional.linear`. Weight masks index oneDNN's logical dims
            (OC, C, kh, kw), not torch's order: mask 1 is per output channel; with groups
            (G, OC/G, C/G, kh, kw): mask 3 per group and channel, mask 2 is OC/G values shared by
            the groups. dst is (N, OC, OH, OW), mask 2 per channel.
        dst_dtype: torch.uint8, int8, int32 or float32, as in :func:`~torchq.functional.linear`.
        post_op_srcs: as in :func:`~torchq.functional.linear`.
        padding_end: padding after, where it differs.

    Returns:
        ``(N, OC, OH, OW)``, channels-last; ``OH = (H - 1) * stride - padding - padding_end +
        dilation * (kh - 1) + output_padding + 1``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit, or output
            scales with a float32 source.
        NotImplementedError: masks or post-ops without a kernel.
    """
    window = _Window(stride, padding, padding_end, dilation, output_padding, groups)
    return _conv_transpose(2, src, weight, bias, window, attr, dst_dtype, post_op_srcs)


def conv_transpose3d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """As :func:`conv_transpose2d` for (N, C, D, H, W) and ``weight`` (C, OC/groups, kd, kh, kw)."""
    window = _Window(stride, padding, padding_end, dilation, output_padding, groups)
    return _conv_transpose(3, src, weight, bias, window, attr, dst_dtype, post_op_srcs)


def deconvolution(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """As :func:`conv_transpose2d` for one to three spatial dimensions, those of ``src``."""
    check_type("torchq.deconvolution: src", src, Tensor, "Pass a uint8 or int8 tensor.")
    window = _Window(stride, padding, padding_end, dilation, output_padding, groups)
    dims = spatial_dims("deconvolution", src)
    return _conv_transpose(dims, src, weight, bias, window, attr, dst_dtype, post_op_srcs)


class _Window(NamedTuple):
    stride: Ints
    padding: Ints
    padding_end: Ints | None
    dilation: Ints
    output_padding: Ints
    groups: int


def _conv_transpose(
    dims: int,
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    window: _Window,
    attr: Attr | None,
    dst_dtype: torch.dtype,
    post_op_srcs: Sequence[Tensor],
) -> Tensor:
    op = f"conv_transpose{dims}d"
    attr = Attr() if attr is None else attr
    check_source(op, src, attr)
    window = window._replace(groups=integer(op, "groups", window.groups))
    packed = _packed(op, dims, weight, window)
    asks = f"weight {list(packed.shape)} (OC, C/groups, kernel...) and groups={packed.groups}"
    check_channels(op, src, dims, packed.in_channels, asks)
    geometry = conv_transpose_geometry(op, packed.shape[2:], *window, packed.in_channels)
    operands = src, packed, geometry, bias, attr, dst_dtype, post_op_srcs
    return packed_layer(
        op,
        torch.ops.torchq.conv_transpose,
        *operands,
        lambda: conv_transpose_sizes(src.shape, packed.channels, geometry),
    )


def _packed(op: str, dims: int, weight: Tensor | PackedWeight, window: _Window) -> PackedWeight:
    stride = tuple(spread(op, "stride", window.stride, dims))
    dilation = tuple(spread(op, "dilation", window.dilation, dims))
    if not isinstance(weight, PackedWeight):
        check_type(f"torchq.{op}: weight", weight, Tensor, "Pass an int8 or uint8 tensor.")
    shape = tuple(weight.shape)
    if len(shape) != dims + 2:
        raise ValueError(
            f"torchq.{op}: weight must be (C, OC/groups, kernel...) with {dims + 2} dims, got "
            f"{list(shape)}. Use conv_transpose1d, 2d or 3d by its number of dims; oneDNN's "
            "(G, OC/G, C/G, kernel...) is weight.transpose(1, 2).flatten(0, 1) here."
        )
    if not isinstance(weight, PackedWeight):
        return pack_conv_transpose(weight, window.groups, stride, dilation)
    packed_for = (weight.groups, weight.stride, weight.dilation)
    if packed_for != (window.groups, stride, dilation):
        raise ValueError(
            f"torchq.{op}: weight must be packed for groups={window.groups}, stride={stride}, "
            f"dilation={dilation}, got groups={weight.groups}, stride={weight.stride}, "
            f"dilation={weight.dilation}. Call pack_conv_transpose with these."
        )
    return weight

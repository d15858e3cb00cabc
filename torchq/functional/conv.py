# SPDX-License-Identifier: Apache-2.0
"""Convolution in 1 to 3 dimensions: an exact int32 sum, then scales, bias and post-ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.attributes.attr import Attr, check_attr_type
from torchq.functional.arguments import (
    Ints,
    check_channels,
    check_source,
    conv_geometry,
    integer,
    packed_layer,
    spatial_dims,
    spread,
)
from torchq.functional.depthwise import padding_end, split_at_dw_conv
from torchq.functional.packing import PackedWeight, pack_conv
from torchq.runtime.windows import conv_sizes


def conv1d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """As :func:`conv2d` for ``src`` (N, C, L) and ``weight`` (OC, C/groups, k)."""
    window = _Window(stride, padding, padding_end, dilation, groups)
    return _conv(1, src, weight, bias, window, attr, dst_dtype, post_op_srcs)


def conv2d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """Quantize ``post_ops(src_scale * weight_scale * conv(src - src_zero_point) + bias)``.

    Padding is real zero: it contributes nothing, whatever the zero point.

    Args:
        src: uint8 or int8 ``(N, C, H, W)``; channels-last is read in place, others are copied.
        weight: int8 or uint8 ``(OC, C/groups, kh, kw)``, or packed by
            :func:`~torchq.packing.pack_conv`. oneDNN's (G, OC/G, C/G, kh, kw) is
            ``weight.flatten(0, 1)``.
        bias: ``[OC]``; float32 or int32 as in :func:`~torchq.functional.linear`.
        stride: one number or one per spatial dimension; so are ``padding`` and ``dilation``.
        padding: added before, and after unless ``padding_end`` is given.
        dilation: distance between taps; 1 is dense.
        groups: divides both channel counts; weight masks then index (G, OC/G, C/G, kh, kw): mask
            3 is per group and channel, mask 2 is OC/G values shared by the groups.
        attr: as in :func:`~torchq.functional.linear`; dst is (N, OC, OH, OW), mask 2 per channel.
            With a ``dw_conv`` in the chain, scale (mask 0) and zero point of ``dst`` are those of
            the result in front of it; scales and zero points of ``dw_weights`` and ``dw_dst`` and
            ``dst_dtype`` those of the depthwise convolution: see
            :meth:`torchq.PostOps.append_dw_conv`.
        dst_dtype: torch.uint8, int8, int32 or float32, as in :func:`~torchq.functional.linear`.
        post_op_srcs: as in :func:`~torchq.functional.linear`.
        padding_end: padding after, where it differs.

    Returns:
        ``(N, OC, OH, OW)``, channels-last.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit, or output
            scales with a float32 source.
        NotImplementedError: masks or post-ops without a kernel.

    Example:
        >>> src = torch.ones(1, 2, 5, 5, dtype=torch.uint8)
        >>> weight = torch.ones(4, 2, 3, 3, dtype=torch.int8)
        >>> attr = torchq.Attr().set_scales("src", 0, 0.5)
        >>> dst = torchq.functional.conv2d(src, weight, padding=1, attr=attr)
        >>> dst.shape, dst[0, 0, 0].tolist()
        (torch.Size([1, 4, 5, 5]), [4.0, 6.0, 6.0, 6.0, 4.0])
    """
    window = _Window(stride, padding, padding_end, dilation, groups)
    return _conv(2, src, weight, bias, window, attr, dst_dtype, post_op_srcs)


def conv3d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """As :func:`conv2d` for ``src`` (N, C, D, H, W) and ``weight`` (OC, C/groups, kd, kh, kw)."""
    window = _Window(stride, padding, padding_end, dilation, groups)
    return _conv(3, src, weight, bias, window, attr, dst_dtype, post_op_srcs)


def convolution(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """As :func:`conv2d` for one to three spatial dimensions, those of ``src``."""
    check_type("torchq.convolution: src", src, Tensor, "Pass a uint8 or int8 tensor.")
    window = _Window(stride, padding, padding_end, dilation, groups)
    dims = spatial_dims("convolution", src)
    return _conv(dims, src, weight, bias, window, attr, dst_dtype, post_op_srcs)


class _Window(NamedTuple):
    stride: Ints
    padding: Ints
    padding_end: Ints | None
    dilation: Ints
    groups: int


def _conv(
    dims: int,
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    window: _Window,
    attr: Attr | None,
    dst_dtype: torch.dtype,
    post_op_srcs: Sequence[Tensor],
) -> Tensor:
    op = f"conv{dims}d"
    attr = Attr() if attr is None else attr
    check_attr_type(op, attr)
    if (parts := split_at_dw_conv(op, attr)) is not None:
        first, dw, filters, second = parts
        count = first.post_ops.num_srcs
        mid = _conv(dims, src, weight, bias, window, first, dw.dtype, post_op_srcs[:count])
        inner = _Window(dw.stride, dw.padding, padding_end(op, dw, mid), 1, mid.shape[1])
        srcs = post_op_srcs[count:]
        return _conv(dims, mid, filters, dw.bias, inner, second, dst_dtype, srcs)
    check_source(op, src, attr)
    window = window._replace(groups=integer(op, "groups", window.groups))
    packed = _packed(op, dims, weight, window)
    asks = f"weight {list(packed.shape)} and groups={packed.groups}"
    check_channels(op, src, dims, packed.in_channels, asks)
    geometry = conv_geometry(op, packed.shape[2:], *window, packed.in_channels)
    operands = src, packed, geometry, bias, attr, dst_dtype, post_op_srcs
    return packed_layer(
        op,
        torch.ops.torchq.conv,
        *operands,
        lambda: conv_sizes(src.shape, packed.channels, geometry),
    )


def _packed(op: str, dims: int, weight: Tensor | PackedWeight, window: _Window) -> PackedWeight:
    dilation = tuple(spread(op, "dilation", window.dilation, dims))
    if not isinstance(weight, PackedWeight):
        check_type(f"torchq.{op}: weight", weight, Tensor, "Pass an int8 or uint8 tensor.")
    shape = tuple(weight.shape)
    if len(shape) != dims + 2:
        remedy = "Use conv1d, conv2d, conv3d or linear by its number of dims."
        if len(shape) == dims + 3:
            remedy = (
                "A grouped weight (G, OC/G, C/G, kernel...) is weight.flatten(0, 1) here, with "
                "groups=G."
            )
        raise ValueError(
            f"torchq.{op}: weight must be (OC, C/groups, kernel...) with {dims + 2} dims, got "
            f"{list(shape)}. {remedy}"
        )
    if not isinstance(weight, PackedWeight):
        return pack_conv(weight, window.groups, dilation)
    if weight.stride:
        raise ValueError(
            f"torchq.{op}: weight must be packed by pack_conv, got the packed weight of a "
            "transposed convolution. Use conv_transpose1d, 2d or 3d."
        )
    if (weight.groups, weight.dilation) != (window.groups, dilation):
        raise ValueError(
            f"torchq.{op}: weight must be packed for groups={window.groups}, dilation={dilation}, "
            f"got groups={weight.groups}, dilation={weight.dilation}. Call pack_conv with these."
        )
    return weight

# SPDX-License-Identifier: Apache-2.0
"""Linear and convolution: an exact int32 sum, then scales, bias and post-ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchq._text import Sum
from torchq.attr import Attr
from torchq.folding import Folded, fold
from torchq.functional.arguments import Ints, check_8bit, conv_geometry, spread
from torchq.functional.depthwise import padding_end, split_at_dw_conv
from torchq.ops import conv_sizes, dtype_code
from torchq.packing import PackedWeight, pack_conv, pack_linear


def linear(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Quantizes ``post_ops(src_scale * weight_scale * (src - src_zero_point) @ weight.T + bias)``.

    Args:
        src: uint8 or int8 ``(*, in_features)``.
        weight: int8 or uint8 ``(out_features, in_features)``, or packed by
            :func:`~torchq.packing.pack_linear` (do that once where the weight is constant).
        bias: ``[out_features]``; float32 in real units, added after scaling, or int32 in
            accumulator units, added before. With output scales any bias is added before.
        attr: scales of ``src`` (mask 0), ``weights`` (0, or 1: per output channel) and ``dst``
            (0, or 2: per channel, the last dim of dst), zero points of ``src`` (mask 0),
            ``weights`` (0 or 1) and ``dst`` (0; or 2 where the post-ops fold and no sum is
            float32), or output scales (0 or 2); post-ops. What is not set is 1 (zero points: 0).
        dst_dtype: torch.uint8, int8, int32 or float32. Without scales, int32 gives the exact
            accumulators. A float32 dst has neither scale nor zero point.
        post_op_srcs: in the order of the chain, a tensor of dst's shape and the sum's dtype for
            each ``sum``; for each binary or prelu with another mask than 0 and 2 and without values
            its operand, of dst's shape with 1 where the mask has no bit; the condition of each
            select.

    Returns:
        ``(*, out_features)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit, or output
            scales with a float32 source.
        NotImplementedError: masks or post-ops without a kernel.
    """
    attr = Attr() if attr is None else attr
    check_source("linear", src, attr)
    packed = weight if isinstance(weight, PackedWeight) else pack_linear(weight)
    if packed.dilation or src.dim() == 0 or src.shape[-1] != packed.shape[1]:
        raise ValueError(
            f"torchq.linear: src must be (*, {packed.shape[1]}) for weight {list(packed.shape)}, "
            f"a matrix, got {list(src.shape)}. Check the layer's in_features."
        )
    folded = fold("linear", attr, packed, bias, dst_dtype)
    result: Tensor = torch.ops.torchq.linear(
        src,
        *packed_arguments(packed, folded),
        packed.in_channels,
        dtype_code(dst_dtype),
        folded.post_ops,
        folded.post_op_params,
        post_op_sources(
            "linear", attr, dst_dtype, post_op_srcs, lambda: (*src.shape[:-1], packed.channels)
        ),
        folded.weight_zero_point,
    )
    return result


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
    """Quantizes ``post_ops(src_scale * weight_scale * conv(src - src_zero_point) + bias)``.

    Padding is real zero: it contributes nothing, whatever the zero point.

    Args:
        src: uint8 or int8 ``(N, C, H, W)``; channels-last is read in place, others are copied.
        weight: int8 or uint8 ``(OC, C/groups, kh, kw)``, or packed by
            :func:`~torchq.packing.pack_conv`.
        bias: ``[OC]``; float32 or int32 as in :func:`linear`.
        stride: one number or one per spatial dimension; so are ``padding`` and ``dilation``.
        padding: added before, and after unless ``padding_end`` is given.
        dilation: distance between taps; 1 is dense.
        groups: divides both channel counts; weight masks then index (G, OC/G, C/G, kh, kw): mask
            3 is per group and channel, mask 2 is OC/G values shared by the groups.
        attr: as in :func:`linear`; dst is (N, OC, OH, OW), mask 2 per channel. With a ``dw_conv``
            in the chain, scale (mask 0) and zero point of ``dst`` are those of the result in front
            of it; scales and zero points of ``dw_weights`` and ``dw_dst`` and ``dst_dtype`` those
            of the depthwise convolution: see :meth:`torchq.PostOps.append_dw_conv`.
        dst_dtype: torch.uint8, int8, int32 or float32, as in :func:`linear`.
        post_op_srcs: in the order of the chain, a tensor of dst's shape and the sum's dtype for
            each ``sum``; for each binary or prelu with another mask than 0 and 2 and without values
            its operand, of dst's shape with 1 where the mask has no bit; the condition of each
            select.
        padding_end: padding after, where it differs.

    Returns:
        ``(N, OC, OH, OW)``, channels-last.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit, or output
            scales with a float32 source.
        NotImplementedError: masks or post-ops without a kernel.
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
    if (parts := split_at_dw_conv(op, attr)) is not None:
        first, dw, filters, second = parts
        count = first.post_ops.num_srcs
        mid = _conv(dims, src, weight, bias, window, first, dw.dtype, post_op_srcs[:count])
        inner = _Window(dw.stride, dw.padding, padding_end(op, dw, mid), 1, mid.shape[1])
        srcs = post_op_srcs[count:]
        return _conv(dims, mid, filters, dw.bias, inner, second, dst_dtype, srcs)
    check_source(op, src, attr)
    packed = _packed(op, dims, weight, window)
    if src.dim() != dims + 2 or src.shape[1] != packed.in_channels:
        raise ValueError(
            f"torchq.{op}: src must be (N, {packed.in_channels}, spatial...) with "
            f"{dims + 2} dims for weight {list(packed.shape)} and groups={packed.groups}, got "
            f"{list(src.shape)}. Add a batch dimension with unsqueeze(0) if it is missing."
        )
    geometry = conv_geometry(op, packed.shape[2:], *window, packed.in_channels)
    folded = fold(op, attr, packed, bias, dst_dtype)

    def dst_sizes() -> list[int]:
        return conv_sizes(src.shape, packed.channels, geometry)

    result: Tensor = torch.ops.torchq.conv(
        src,
        *packed_arguments(packed, folded),
        geometry,
        dtype_code(dst_dtype),
        folded.post_ops,
        folded.post_op_params,
        post_op_sources(op, attr, dst_dtype, post_op_srcs, dst_sizes),
        folded.weight_zero_point,
    )
    return result


def _packed(op: str, dims: int, weight: Tensor | PackedWeight, window: _Window) -> PackedWeight:
    dilation = tuple(spread(op, "dilation", window.dilation, dims))
    shape = tuple(weight.shape)
    if len(shape) != dims + 2:
        raise ValueError(
            f"torchq.{op}: weight must be (OC, C/groups, kernel...) with {dims + 2} dims, got "
            f"{list(shape)}. Use conv1d, conv2d, conv3d or linear by its number of dims."
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


def check_source(op: str, src: Tensor, attr: Attr) -> None:
    """Raises TypeError unless ``src`` is uint8 or int8; ValueError for float with output scales."""
    if src.is_floating_point() and attr.mask("dst", "output_scales") is not None:
        raise ValueError(
            f"torchq.{op}: src must be torch.uint8 or torch.int8 with output_scales, which are "
            f"only for integer computation, got {src.dtype} with {attr}. Quantize src, or drop "
            "the output scales and multiply the result."
        )
    check_8bit(op, "src", src)


def post_op_sources(
    op: str,
    attr: Attr,
    dst_dtype: torch.dtype,
    srcs: Sequence[Tensor],
    dst_sizes: Callable[[], Sequence[int]],
) -> list[Tensor]:
    """The sources of the chain, in its order; those of sums are checked for their dtype."""
    sources = attr.post_ops.sources(op, dst_sizes, srcs)
    for index, (post_op, src) in enumerate(zip(attr.post_ops.source_owners, sources, strict=True)):
        expected = (post_op.dtype or dst_dtype) if isinstance(post_op, Sum) else src.dtype
        if src.dtype != expected:
            raise TypeError(
                f"torchq.{op}: post_op_srcs[{index}] must be {expected}, the dtype of its sum (by "
                f"default that of dst), got {src.dtype}. Give append_sum its dtype."
            )
    return sources


def packed_arguments(packed: PackedWeight, folded: Folded) -> tuple[Tensor | None, ...]:
    """The arguments between src and the geometry or dst_dtype, in the order of the ops."""
    return (
        packed.weight,
        packed.compensation,
        packed.pair_bound,
        folded.multiplier,
        folded.offset,
        folded.acc_bias,
        folded.src_zero_point,
    )

# SPDX-License-Identifier: Apache-2.0
"""Fully connected layers: static, and dynamic with scales from the values of each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from torchq.attributes.arguments import FLOATS, as_float32, check_type
from torchq.attributes.attr import Attr
from torchq.attributes.options import SrcRange
from torchq.attributes.post_ops import PostOps
from torchq.functional.arguments import (
    Floats,
    check_source,
    from_float,
    packed_layer,
    real_arguments,
    to_scale,
)
from torchq.functional.int4 import PackedInt4
from torchq.functional.packing import PackedWeight, pack_linear
from torchq.quantization.ranges import SMALLEST_SCALE, activation_range, check_choice
from torchq.runtime.library import dtype_code


def linear(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Quantize ``post_ops(src_scale * weight_scale * (src - src_zero_point) @ weight.T + bias)``.

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

    Example:
        >>> src = torch.tensor([[130, 126]], dtype=torch.uint8)
        >>> weight = torch.tensor([[10, 20], [30, -40]], dtype=torch.int8)
        >>> attr = torchq.Attr().set_scales("src", 0, 0.5).set_zero_points("src", 0, 128)
        >>> torchq.functional.linear(src, weight, None, attr.set_scales("weights", 0, 0.1))
        tensor([[-1.,  7.]])
    """
    return _linear("linear", src, weight, bias, attr, dst_dtype, post_op_srcs)


def inner_product(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """As :func:`linear`; also sums over the spatial dims of ``(N, C, ...)``, as oneDNN does.

    A weight of more than two dims is ``(OC, C, ...)``, with the channels and sizes of ``src``. The
    result is ``(N, OC)``.

    Example:
        >>> src = torch.ones(2, 3, 4, 4, dtype=torch.uint8)
        >>> weight = torch.ones(5, 3, 4, 4, dtype=torch.int8)
        >>> torchq.functional.inner_product(src, weight)[0]
        tensor([48., 48., 48., 48., 48.])
    """
    if isinstance(src, Tensor) and isinstance(weight, Tensor) and weight.dim() != 2:
        if weight.dim() < 2 or src.shape[1:] != weight.shape[1:]:
            raise ValueError(
                "torchq.inner_product: src and weight must be (N, C, ...) and (OC, C, ...) with "
                f"the same channels and sizes, got {list(src.shape)} and {list(weight.shape)}. "
                "Resize src to what the weight was made for, or flatten both."
            )
        src, weight = src.flatten(1), weight.flatten(1)
    return _linear("inner_product", src, weight, bias, attr, dst_dtype, post_op_srcs)


def _linear(
    op: str,
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    attr: Attr | None,
    dst_dtype: torch.dtype,
    post_op_srcs: Sequence[Tensor],
) -> Tensor:
    attr = Attr() if attr is None else attr
    check_source(op, src, attr)
    packed = weight if isinstance(weight, PackedWeight) else pack_linear(weight)
    if packed.dilation or src.dim() == 0 or src.shape[-1] != packed.shape[1]:
        raise ValueError(
            f"torchq.{op}: src must be (*, {packed.shape[1]}) for weight {list(packed.shape)}, "
            f"a matrix, got {list(src.shape)}. Check the layer's in_features."
        )
    operands = src, packed, packed.in_channels, bias, attr, dst_dtype, post_op_srcs
    return packed_layer(
        op,
        torch.ops.torchq.linear,
        *operands,
        lambda: (*src.shape[:-1], packed.channels),
    )


RANGES: tuple[str, ...] = get_args(SrcRange)
"""What one scale of a dynamic source covers."""


def requantize_dynamic(
    acc: Tensor, scale: Floats, dst_dtype: torch.dtype = torch.uint8
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize an int32 result by its own range: the three steps of dynamic quantization.

    1. ``acc`` is the result in higher precision; it stands for ``scale * acc``.
    2. Its smallest and largest real value, 0 included, give scale and zero point, as in
       :doc:`/concepts/quantization`.
    3. ``q = clamp(rne(fma(float(acc), scale / dst_scale, zero_point)))``.

    Args:
        acc: int32, any shape; an empty one gets scale 1.
        scale: real units per step of ``acc``: a number, or a tensor that broadcasts over ``acc``.
        dst_dtype: torch.uint8 or torch.int8.

    Returns:
        ``(q, dst_scale, zero_point)``: float32 ``[]`` and int32 ``[]``.

    Raises:
        TypeError: ``acc`` is not int32.
        ValueError: a scale is not finite and greater than 0, or ``dst_dtype`` is another.
    """
    check_type("torchq.requantize_dynamic: acc", acc, Tensor, "Pass an int32 tensor.")
    if acc.dtype != torch.int32:
        raise TypeError(
            f"torchq.requantize_dynamic: acc must be torch.int32, got {acc.dtype}. Ask the op for "
            "dst_dtype=torch.int32."
        )
    low, high = activation_range(dst_dtype)
    factor = to_scale("torchq.requantize_dynamic: scale", scale)
    real = acc.to(torch.float64) * factor.to(torch.float64) if factor.numel() > 1 else acc
    if acc.numel() == 0:
        bounds = torch.zeros(2, dtype=torch.float64, device="cpu")
    else:
        bounds = torch.stack(real.aminmax()).to(torch.float64)
        bounds = bounds * (1.0 if factor.numel() > 1 else factor.reshape(1).to(torch.float64))
    smallest, largest = bounds[0].clamp(max=0), bounds[1].clamp(min=0)
    steps = high - low
    span = largest - smallest
    span = torch.where(span > 0, span.clamp(min=steps * SMALLEST_SCALE), float(steps))
    dst_scale = (span / steps).to(torch.float32)
    zero_point = torch.round(low - smallest * steps / span).clamp(low, high).to(torch.int32)
    q: Tensor = torch.ops.torchq.requantize(
        acc,
        factor,
        torch.zeros((), dtype=torch.int32, device="cpu"),
        dst_scale,
        zero_point,
        dtype_code(dst_dtype),
    )
    return q, dst_scale, zero_point


def check_dynamic_weight(op: str, weight: PackedWeight) -> None:
    """Refuse packed weights that dynamic layers would misread."""
    if weight.dilation:
        raise ValueError(
            f"torchq.{op}: weight must be packed by pack_linear, got {list(weight.shape)}. The "
            "dynamic form of a convolution is torchq.nn.DynamicQConv1d, 2d or 3d."
        )
    check_signed(op, weight)


def check_signed(op: str, weight: PackedWeight) -> None:
    """Raise TypeError for uint8 weights, which have zero points."""
    if weight.dtype != torch.int8:
        raise TypeError(
            f"torchq.{op}: weight must be int8, got {weight.dtype}: a dynamic layer's weights have "
            "no zero point. Quantize them with torchq.functional.quantize_weight."
        )


def dynamic_linear(
    src: Tensor,
    weight: Tensor | PackedWeight,
    weight_scale: Floats,
    bias: Tensor | None = None,
    src_range: SrcRange = "per_row",
    post_ops: PostOps | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Float in, float out: quantizes ``src`` by its own range, multiplies in int8, scales back.

    The source becomes uint8. Its scale and zero point are those of the range from the smallest to
    the largest value of the row, or of all rows, with 0 included. ``acc`` is the exact sum of
    ``(q - zero_point) * weight``::

        dst = post_ops((float(acc) * weight_scale[n]) * src_scale[row] + bias[n])

    Per row, each row depends on nothing but itself: a batch gives the bits of its rows one by one.

    Args:
        src: float32 ``(*, in_features)``, finite.
        weight: int8 ``(out_features, in_features)``, or packed by
            :func:`~torchq.packing.pack_linear`.
        weight_scale: a number, or float32 ``[1]`` or ``[out_features]``.
        bias: float32 ``[out_features]``.
        src_range: what one scale covers, ``"per_row"`` or ``"per_tensor"``.
        post_ops: sums, eltwise functions other than linear, and binaries whose operand comes in
            ``post_op_srcs`` (masks other than 0 and 2).
        post_op_srcs: what the post-ops read, as in :func:`linear`.

    Returns:
        float32 ``(*, out_features)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that do not fit, NaN or inf in ``src``, or a ``weight_scale`` that is not
            finite and greater than 0.
        NotImplementedError: other post-ops.
    """
    check_choice("dynamic_linear", "src_range", src_range, RANGES)
    packed = weight if isinstance(weight, PackedWeight) else pack_linear(weight)
    check_dynamic_weight("dynamic_linear", packed)
    scale = to_scale("torchq.dynamic_linear: weight_scale", weight_scale).reshape(-1)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(
            f"torchq.dynamic_linear: weight_scale must be finite and greater than 0, got "
            f"{weight_scale}. Check what computed it."
        )
    if scale.numel() == 1:
        scale = scale.expand(packed.channels)
    result: Tensor = torch.ops.torchq.dynamic_linear(
        src,
        packed.weight,
        packed.compensation,
        packed.pair_bound,
        scale.contiguous(),
        bias,
        packed.in_channels,
        src_range == "per_row",
        "" if post_ops is None else str(post_ops),
        list(post_op_srcs) or None,
    )
    return result


def dynamic_linear_int4(
    src: Tensor,
    weight: PackedInt4,
    bias: Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Float in, float out: quantizes each row of ``src`` to int8, multiplies with 4-bit weights.

    With ``src_scale`` the largest magnitude of a row, at least 1e-30, divided by 127,
    ``q = rne(src / src_scale)``, and the exact sums of each group::

        sum[g] = sum over k in group g of q[row, k] * (code[n, k] - zero_point[n, g])
        acc = fma(float(sum[g]), scale[n, g], acc) for each g in order, from acc = 0
        dst = post_ops(acc * src_scale[row] + bias[n])

    Each row depends on nothing but itself, and all tiers and numbers of threads give the same bits.

    Args:
        src: float32, bfloat16 or float16 ``(*, in_features)``, finite.
        weight: packed by :func:`torchq.packing.pack_linear_int4`.
        bias: float32 ``[out_features]``.
        attr: scale and zero point of an integer dst; post-ops, as of :func:`eltwise`.
        dst_dtype: torch.uint8, int8, int32 or a float one; None is that of ``src``.
        post_op_srcs: as in :func:`eltwise`.

    Returns:
        ``(*, out_features)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that do not fit, or NaN or inf in ``src``.
        NotImplementedError: masks other than 0, or ``dw_conv``.

    Example:
        >>> codes, scale = torchq.functional.quantize_weight_int4(torch.randn(64, 128))
        >>> weight = torchq.packing.pack_linear_int4(codes, scale)
        >>> torchq.functional.dynamic_linear_int4(torch.randn(3, 128), weight).shape
        torch.Size([3, 64])
    """
    op, attr = "dynamic_linear_int4", Attr() if attr is None else attr
    check_type(f"torchq.{op}: src", src, Tensor, "Pass a float32 tensor.")
    pack = "Pack codes and scales with torchq.packing.pack_linear_int4."
    check_type(f"torchq.{op}: weight", weight, PackedInt4, pack)
    own = src.dtype if src.dtype in FLOATS else torch.float32
    dst_dtype = own if dst_dtype is None else dst_dtype
    n, k = weight.shape
    layer = weight.weight, weight.params, bias, k, n, weight.group_size, weight.symmetric
    given = ["dst"], dst_dtype, post_op_srcs
    *_, chain, operands = real_arguments(op, attr, *given, lambda: [*src.shape[:-1], n])
    if dst_dtype == own and attr.mask("dst") is attr.mask("dst", "zero_points") is None:
        result: Tensor = torch.ops.torchq.dynamic_linear_int4(src, *layer, chain, operands)
        return result
    with torch.autocast("cpu", enabled=False):
        real = torch.ops.torchq.dynamic_linear_int4(as_float32(src), *layer)
    return from_float(op, real, attr, dst_dtype, post_op_srcs)

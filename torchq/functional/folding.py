# SPDX-License-Identifier: Apache-2.0
"""From an :class:`~torchq.Attr` to the folded parameters that the hot ops take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchq.attributes.arguments import HALVES, check_type, computed_dtype, to_int
from torchq.attributes.attr import Attr, check_attr_type
from torchq.attributes.post_op import CHANNEL_MASKS, Eltwise, Sum
from torchq.attributes.post_ops import PostOps, foldable, post_ops_of
from torchq.functional.packing import PackedWeight
from torchq.runtime.library import dtype_code

MAX_SHIFTED_REDUCTION = 33025
"""255 * 255 * 33025 < 2^31: the longest sum of weights less their zero points."""

Masks = Mapping[tuple[str, str], tuple[int, ...] | None]
"""What an op reads: (kind, arg) of an Attr to the masks it has kernels for, None for any."""


class Folded(NamedTuple):
    """Arguments of the hot ops that depend on scales, zero points, bias and post-ops."""

    multiplier: Tensor
    offset: Tensor
    acc_bias: Tensor | None
    src_zero_point: Tensor | None
    post_op_params: Tensor
    post_ops: str
    weight_zero_point: Tensor | None = None
    """int32, one per channel, of the packed int8 weight; None: all are 0."""


def check_attr(op: str, attr: Attr, masks: Masks) -> None:
    """Refuse what ``op`` would otherwise ignore.

    Raises:
        TypeError: ``attr`` is no Attr.
        ValueError: something is set for an argument the op does not have.
        NotImplementedError: a mask without a kernel, or a rounding mode.
    """
    check_attr_type(op, attr)
    known = ", ".join(f"{kind} of {arg}" for kind, arg in masks)
    if attr.rnn_data_qparams is not None:
        raise ValueError(
            f"torchq.{op}: attr must set only {known}, got rnn_data, which recurrent modules read "
            f"(torchq.nn.QLSTM.from_float and the like): {attr}. Use scales and zero points."
        )
    for arg, mode in attr._rounding.items():
        if ("rounding", arg) in masks:
            continue
        raise NotImplementedError(
            f"torchq.{op}: rounding of {arg} must be nearest (half to even), got {mode}. The "
            "nearest supported form is a float32 dst and torchq.functional.reorder of that, which "
            "takes the rounding of dst."
        )
    for (kind, arg), param in attr._params.items():
        if (kind, arg) not in masks:
            raise ValueError(
                f"torchq.{op}: attr must set only {known}, got {kind} of {arg}: {attr}. "
                "Name the argument as this op does."
            )
        allowed = masks[kind, arg]
        if allowed is not None and param.mask not in allowed:
            raise NotImplementedError(
                f"torchq.{op}: {kind} of {arg} must have mask {' or '.join(map(str, allowed))}, "
                f"got {param.mask}: {attr}. The nearest supported is mask {allowed[-1]}."
            )


def fold(
    op: str, attr: Attr, weight: PackedWeight, bias: Tensor | None, dst_dtype: torch.dtype
) -> Folded:
    """Fold scales, zero points, bias and post-ops for one layer.

    ``multiplier[n] = src_scale * weight_scale[n] / dst_scale[n]`` and
    ``offset[n] = bias[n] / dst_scale[n] + dst_zero_point``, with the post-ops multiplied out, in
    double and rounded once. An int32 bias is added to the accumulator instead. With
    ``output_scales`` the multiplier is the output scale, and any bias is added before it.

    What is not set is 1 (zero points: 0). An int32 destination without scales, float bias or
    post-ops gets the exact accumulators.

    Raises:
        TypeError: the bias is neither float32, bfloat16, float16, int8, uint8 nor int32.
        ValueError: ``attr`` sets something for another argument, values are missing or their
            number is not the product of the selected dims, or an int32 bias could overflow.
        NotImplementedError: a mask or post-op that has no kernel; names the nearest that has.
    """
    dst_dtype = computed_dtype(dst_dtype)
    code = dtype_code(dst_dtype, op)
    bias = real_bias(bias) if isinstance(bias, Tensor) else bias
    _check(op, attr, weight, dst_dtype)
    weight_zero_point = _weight_zero_point(op, attr, weight)
    _check_bias(op, bias, weight, _range(weight_zero_point))
    chain = _bounded(attr, dst_dtype) if attr.mask("dst", "zero_points") else attr.post_ops
    _check_channel_zero_points(op, attr, chain, dst_dtype)
    text, values = str(chain), attr.post_ops.channel_values
    acc_bias = bias.contiguous() if bias is not None and bias.dtype == torch.int32 else None
    float_bias = bias.detach().contiguous() if bias is not None and acc_bias is None else None
    src_zero_point = attr.values("src", "zero_points")
    if attr.mask("dst", "output_scales") is not None:
        folded = torch.ops.torchq.fold_output_scales(
            attr.values("dst", "output_scales"),
            float_bias,
            weight.channels,
            code,
            text,
            values,
            attr.values("dst", "zero_points"),
        )
    elif _is_raw(attr, float_bias, dst_dtype):
        folded = (torch.empty(0, dtype=torch.float32, device="cpu"),) * 3
        dst_zero_point = attr.values("dst", "zero_points")
        acc_bias = _shifted(op, acc_bias, dst_zero_point, weight, _range(weight_zero_point))
    else:
        dst_dims = (1, weight.channels, *(1 for _ in weight.dilation))
        folded = torch.ops.torchq.fold(
            attr.resolve("src", ()).reshape(1),
            _per_channel(attr.resolve("weights", weight.logical_dims), weight),
            float_bias,
            attr.resolve("dst", dst_dims).reshape(-1) if attr.mask("dst") is not None else None,
            attr.values("dst", "zero_points"),
            weight.channels,
            code,
            text,
            values,
        )
    multiplier, offset, params = folded
    return Folded(multiplier, offset, acc_bias, src_zero_point, params, text, weight_zero_point)


def real_bias(bias: Tensor) -> Tensor:
    """Return a bias in real units as float32, which is exact; int32 and others as they are."""
    return bias.float() if bias.dtype in (*HALVES, torch.int8, torch.uint8) else bias


def check_int32_bias(op: str, bias: Tensor, reduction: int, weight_range: int = 128) -> None:
    """Raise ValueError if an int32 bias could overflow the accumulator.

    ``weight_range`` is the largest weight, less its zero point, in magnitude.
    """
    limit = 2**31 - 1 - 255 * weight_range * reduction
    largest = int(bias.to(torch.int64).abs().max()) if bias.numel() else 0
    if largest > limit:
        raise ValueError(
            f"torchq.{op}: int32 bias must be at most {limit} in magnitude for {reduction} "
            f"products, got {largest}. Use a float32 bias, which is added after scaling."
        )


def _check(op: str, attr: Attr, weight: PackedWeight, dst_dtype: torch.dtype) -> None:
    per_channel = (0, 1) if weight.groups == 1 else (0, 1, 2, 3)
    masks: Masks = {
        ("scales", "src"): (0,),
        ("scales", "weights"): per_channel,
        ("scales", "dst"): (0, 2),
        ("zero_points", "src"): (0,),
        ("zero_points", "weights"): per_channel,
        ("zero_points", "dst"): (0, 2),
        ("output_scales", "dst"): (0, 2),
    }
    check_attr(op, attr, masks)
    attr.post_ops.check_supported(op, dst_dtype)
    attr.check("weights", weight.logical_dims)
    dst_dims = (1, weight.channels, *(1 for _ in weight.dilation))
    attr._check_params("dst", dst_dims)
    attr.post_ops.check(dst_dims, CHANNEL_MASKS)
    has_scale = attr.mask("dst") is not None
    zero_point = attr.values("dst", "zero_points")
    if dst_dtype == torch.float32 and (has_scale or zero_point is not None):
        raise ValueError(
            f"torchq.{op}: dst must be an integer to have a scale or zero point, got dst_dtype "
            f"{dst_dtype} with {attr}. Leave them out: a float32 dst is in real units."
        )
    if zero_point is not None:
        limits = torch.iinfo(dst_dtype)
        where = f"torchq.{op}: zero point of a {dst_dtype} dst"
        for value in (zero_point.min(), zero_point.max()) if zero_point.numel() else ():
            to_int(where, int(value), limits.min, limits.max)


def _bounded(attr: Attr, dst_dtype: torch.dtype) -> PostOps:
    """Return the chain with a clip for a relu at its end: bounds per channel are those of a clip.

    Its sums name dst's dtype where they left it out, which the op checks.
    """
    ops = [
        replace(step, dtype=dst_dtype) if isinstance(step, Sum) and step.dtype is None else step
        for step in attr.post_ops
    ]
    if ops and ops[-1] == Eltwise("relu"):
        ops[-1] = Eltwise("clip", 0.0, torch.finfo(torch.float32).max)
    return post_ops_of(ops)


def _check_channel_zero_points(op: str, attr: Attr, chain: PostOps, dst_dtype: torch.dtype) -> None:
    """Zero points of dst per channel are part of the offset, which takes a chain that folds."""
    if not attr.mask("dst", "zero_points") or dst_dtype == torch.float32:
        return
    floats = any(isinstance(step, Sum) and step.dtype == torch.float32 for step in chain)
    if floats or not foldable(chain, dst_dtype):
        raise NotImplementedError(
            f"torchq.{op}: zero points of dst with mask 2 must come with post-ops that fold (sums "
            "of integers, linears, adds and multiplies per channel, at most one relu or clip at "
            f"the end), got {attr}. The nearest supported is mask 0."
        )


def _range(weight_zero_point: Tensor | None) -> int:
    return 128 if weight_zero_point is None else 255


def _weight_zero_point(op: str, attr: Attr, weight: PackedWeight) -> Tensor | None:
    """Zero points of the packed weight: 128 less than given where the weight is uint8."""
    shift = 128 if weight.dtype == torch.uint8 else 0
    if attr.mask("weights", "zero_points") is None and shift == 0:
        return None
    given = attr.resolve("weights", weight.logical_dims, "zero_points")
    limits = torch.iinfo(weight.dtype)
    where = f"torchq.{op}: zero point of {weight.dtype} weights"
    for value in (given.min(), given.max()) if given.numel() else ():
        to_int(where, int(value), limits.min, limits.max)
    if weight.reduction > MAX_SHIFTED_REDUCTION:
        raise ValueError(
            f"torchq.{op}: weights with zero points, and uint8 weights, must have at most "
            f"{MAX_SHIFTED_REDUCTION} products per output, got {weight.reduction}: int32 could "
            "overflow. Split the reduction, or quantize to int8 without zero points."
        )
    result = _per_channel(given, weight).expand(weight.channels) - shift
    return result.contiguous() if result.any() else None


def _check_bias(op: str, bias: Tensor | None, weight: PackedWeight, weight_range: int) -> None:
    if bias is None:
        return
    check_type(f"torchq.{op}: bias", bias, Tensor, "Pass a float32 or int32 tensor, or None.")
    if bias.dtype not in (torch.float32, torch.int32):
        raise TypeError(
            f"torchq.{op}: bias must be float32, bfloat16, float16, int8 or uint8 (real units) or "
            f"int32 (accumulator units), got {bias.dtype}. Convert it with .float()."
        )
    if tuple(bias.shape) != (weight.channels,):
        raise ValueError(
            f"torchq.{op}: bias must have shape [{weight.channels}], one value per output channel, "
            f"got {list(bias.shape)}. Check the layer's output channels."
        )
    if bias.dtype == torch.int32:
        check_int32_bias(op, bias, weight.reduction, weight_range)


def _per_channel(scale: Tensor, weight: PackedWeight) -> Tensor:
    """Return resolved weight scales or zero points as one value, or one per output channel."""
    if scale.numel() == 1:
        return scale.reshape(1)
    outer = weight.logical_dims[: 1 if weight.groups == 1 else 2]
    return scale.reshape(scale.shape[: len(outer)]).expand(outer).reshape(-1).contiguous()


def _is_raw(attr: Attr, float_bias: Tensor | None, dst_dtype: torch.dtype) -> bool:
    """Exact int32 accumulators: an int32 destination and nothing that scales."""
    unscaled = all(attr.mask(arg) is None for arg in ("src", "weights", "dst"))
    return dst_dtype == torch.int32 and unscaled and float_bias is None and not attr.post_ops


def _shifted(
    op: str,
    acc_bias: Tensor | None,
    zero_point: Tensor | None,
    weight: PackedWeight,
    weight_range: int,
) -> Tensor | None:
    """Return the bias of raw accumulators whose destination has a zero point."""
    if zero_point is None:
        return acc_bias
    shift = zero_point.to(torch.int64).expand(weight.channels)
    total = shift if acc_bias is None else shift + acc_bias
    check_int32_bias(op, total, weight.reduction, weight_range)
    return total.to(torch.int32)

# SPDX-License-Identifier: Apache-2.0
"""Float weights become integers with a scale, or a scale and zero point, per output channel."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from torchq.attributes.arguments import as_float32, float_values
from torchq.attributes.options import Granularity
from torchq.functional.packing import PackedWeight, pack_conv, pack_conv_transpose, pack_linear
from torchq.nn.batch_norm import TRANSPOSED, weight_of
from torchq.quantization.qparams import choose_qparams, output_channel_rows, weight_qparams
from torchq.runtime.library import dtype_code


class QuantizedWeight(NamedTuple):
    """The weight of a linear layer or convolution.

    Attributes:
        packed: its integers.
        scale: float32, one or one per output channel.
        zero_point: int32, one or one per output channel, or None.
    """

    packed: PackedWeight
    scale: Tensor
    zero_point: Tensor | None = None


def packed_weight(
    module: nn.Module,
    granularity: Granularity,
    bits: int,
    scale: Tensor | None = None,
    affine: bool = False,
) -> QuantizedWeight:
    """Quantize the weight of a float layer and pack it; for the arguments see quantized_weight."""
    weight = weight_of(module).detach()
    if isinstance(module, TRANSPOSED):
        groups = module.groups
        q, scale, zero_point = quantized_weight(weight, granularity, bits, scale, 1, groups, affine)
        packed = pack_conv_transpose(q, groups, module.stride, module.dilation)
        return QuantizedWeight(packed, scale, zero_point)
    q, scale, zero_point = quantized_weight(weight, granularity, bits, scale, affine=affine)
    if isinstance(module, _ConvNd):
        return QuantizedWeight(pack_conv(q, module.groups, module.dilation), scale, zero_point)
    return QuantizedWeight(pack_linear(q), scale, zero_point)


def quantized_weight(
    weight: Tensor,
    granularity: Granularity,
    bits: int,
    scale: Tensor | None = None,
    axis: int = 0,
    groups: int = 1,
    affine: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``clamp(rne(weight / scale))`` as int8, and its scales, one or one per output channel.

    With ``affine`` the weight is uint8 and has zero points, which come third: `choose_qparams` of
    its range. Otherwise there are none.

    Given scales are kept, unless a channel's weights would go beyond them: a factor below zero
    turns -128 steps into 128. Then it gets one that they fit.

    Args:
        weight: float32, bfloat16 or float16.
        granularity: of scales that are chosen.
        bits: 8 or 7, where scales are chosen.
        scale: finite float32 values > 0, one or ``[OC]``; None chooses.
        axis: of the output channels, inside of ``groups`` that split dimension 0 if it is 1.
        groups: see there.
        affine: not with given scales.
    """
    if affine:
        if scale is not None:
            raise ValueError(
                "torchq.nn: weight_scale must be None for an affine weight, whose zero points are "
                "chosen with the scales, got scales. Pack the weight yourself, and give "
                "weight_zero_point."
            )
        return _affine_weight(weight, granularity, bits, axis, groups)
    weight, limit = as_float32(weight), 2 ** (bits - 1) - 1
    if scale is None:
        scale = weight_qparams(weight, granularity, bits, axis, groups).scale.reshape(-1)
    else:
        scale = float_values("torchq.nn: weight_scale", scale, positive=True)
        channels = weight.shape[axis] * (groups if axis else 1)
        if scale.numel() not in (1, channels):
            raise ValueError(
                f"torchq.nn: weight_scale must have 1 or {channels} values, one per output "
                f"channel, got {scale.numel()}. Leave it out to have one chosen."
            )
        limit = 128  # of torch's fake quantizers; int8 saturates at the other end
        rows = output_channel_rows(weight, axis, groups)
        rows = rows.reshape(1, -1) if scale.numel() == 1 else rows
        largest = rows.amax(1) if rows.shape[1] else torch.zeros_like(scale)
        scale = torch.where(largest > 127.5 * scale, largest / 127, scale)
    zero = torch.zeros(1, dtype=torch.int32, device="cpu")
    quantized = _by_channel(weight, scale, zero, torch.int8, axis, groups)
    return quantized.clamp_(-limit, limit - (limit == 128)), scale, None


def _affine_weight(
    weight: Tensor, granularity: Granularity, bits: int, axis: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = output_channel_rows(weight, axis, groups)
    rows = rows.reshape(1, -1) if granularity == "per_tensor" else rows
    ends = (rows.amin(1), rows.amax(1)) if rows.shape[1] else (rows.new_zeros(len(rows)),) * 2
    params = choose_qparams(*ends, torch.uint8, bits, axis=0)
    scale, zero_point = params.scale, params.zero_point
    quantized = _by_channel(weight, scale, zero_point, torch.uint8, axis, groups)
    return quantized.clamp_(*params.integers), scale, zero_point


def _by_channel(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    dtype: torch.dtype,
    axis: int,
    groups: int,
) -> Tensor:
    """Return the weight with one scale and zero point, or one per output channel."""
    split = groups if axis else 1
    shape = [split, 1, -1] if axis else [1, -1, 1]
    shape = [*shape, *[1] * (weight.dim() - 2)] if scale.numel() != 1 else [1]
    grouped = weight.reshape(split, weight.shape[0] // split, *weight.shape[1:])
    zeros = zero_point.reshape(shape) if zero_point.numel() != 1 else zero_point
    q: Tensor = torch.ops.torchq.quantize(grouped, scale.reshape(shape), zeros, dtype_code(dtype))
    return q.reshape(weight.shape)

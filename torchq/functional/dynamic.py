# SPDX-License-Identifier: Apache-2.0
"""Dynamic quantization: scales from the values of this call."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from torchq._arguments import check_type
from torchq._options import SrcRange
from torchq.functional.arguments import Floats, to_scale
from torchq.ops import dtype_code
from torchq.packing import PackedWeight, pack_linear
from torchq.ranges import SMALLEST_SCALE, activation_range, check_choice

RANGES: tuple[str, ...] = get_args(SrcRange)
"""What one scale of a dynamic source covers."""


def requantize_dynamic(
    acc: Tensor, scale: Floats, dst_dtype: torch.dtype = torch.uint8
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes an int32 result by its own range: the three steps of dynamic quantization.

    1. ``acc`` is the result in higher precision; it stands for ``scale * acc``.
    2. Its smallest and largest real value, 0 included, give scale and zero point as
       :func:`torchq.qparams.choose_qparams` does.
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
    """Refuses packed weights that dynamic layers would misread."""
    if weight.dilation:
        raise ValueError(
            f"torchq.{op}: weight must be packed by pack_linear, got {list(weight.shape)}. A "
            "convolution has no dynamic form."
        )
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
) -> Tensor:
    """Float in, float out: quantizes ``src`` by its own range, multiplies in int8, scales back.

    The source becomes uint8 with :func:`torchq.qparams.choose_qparams` of its smallest and largest
    value.
    ``acc`` is the exact sum of ``(q - zero_point) * weight``::

        per_tensor:  fma(float(acc), float(src_scale * weight_scale[n]), bias[n])
        per_row:     (float(acc) * weight_scale[n]) * src_scale[row] + bias[n]

    Per row, each row depends on nothing but itself: a batch gives the bits of its rows one by one.

    Args:
        src: float32 ``(*, in_features)``, finite.
        weight: int8 ``(out_features, in_features)``, or packed by
            :func:`~torchq.packing.pack_linear`.
        weight_scale: a number, or float32 ``[1]`` or ``[out_features]``.
        bias: float32 ``[out_features]``.
        src_range: what one scale covers, ``"per_row"`` or ``"per_tensor"``.

    Returns:
        float32 ``(*, out_features)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that do not fit, NaN or inf in ``src``, or a ``weight_scale`` that is not
            finite and greater than 0.
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
    )
    return result

# SPDX-License-Identifier: Apache-2.0
"""Linear layers of rows in groups: each group has a weight of its own, as experts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.functional.arguments import Floats, to_scale
from torchq.functional.int4 import PackedInt4
from torchq.functional.packing import pack_linear

PANEL = 16
"""Channels of a panel; those of a group fill whole ones."""


def stacked(values: Tensor) -> Tensor:
    """Return ``(groups, channels, ...)`` as ``(groups * padded, ...)``, with zeros as padding.

    ``padded`` is the next multiple of 16. Without padding, the result is a view.
    """
    groups, channels, *rest = values.shape
    padded = -(-channels // PANEL) * PANEL
    if padded > channels:
        zeros = values.new_zeros(groups, padded - channels, *rest)
        values = torch.cat([values, zeros], 1)
    return values.reshape(groups * padded, *rest)


def grouped_linear(
    src: Tensor,
    offsets: Tensor,
    weight: Tensor,
    weight_scale: Floats,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of each group by the group's own weight, as :func:`dynamic_linear` does.

    Rows lie group by group: those of group ``g`` are ``src[offsets[g - 1]:offsets[g]]``, from row 0
    on. Their results have the bits of :func:`dynamic_linear` of these rows with ``weight[g]``. The
    weight of a group without rows is not read. Rows behind the last group give zeros.

    Each call packs the weights anew; :class:`torchq.nn.DynamicQGroupedLinear` packs them once.

    Args:
        src: float32, bfloat16 or float16 ``(rows, in_features)``, finite.
        offsets: int32 ``[groups]``, ascending: where the rows of each group end.
        weight: int8 ``(groups, out_features, in_features)``.
        weight_scale: a number, or float32 that broadcasts to ``[groups, out_features]``.
        bias: float32 ``[groups, out_features]``.

    Returns:
        ``(rows, out_features)`` of the source's dtype.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that do not fit, offsets that descend or pass the last row, NaN or inf
            in ``src``, or a ``weight_scale`` that is not finite and greater than 0.

    Example:
        >>> weight = torch.ones(3, 2, 4, dtype=torch.int8)
        >>> scale = torch.tensor([[1.0], [2.0], [3.0]])
        >>> offsets = torch.tensor([1, 1, 3], dtype=torch.int32)  # rows 0; none; 1 and 2
        >>> torchq.functional.grouped_linear(torch.ones(3, 4), offsets, weight, scale)[:, 0].round()
        tensor([ 4., 12., 12.])
    """
    _check_weight(weight)
    groups, channels, inputs = weight.shape
    scale = to_scale("torchq.grouped_linear: weight_scale", weight_scale)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(
            "torchq.grouped_linear: weight_scale must be finite and greater than 0, got "
            f"{weight_scale}. Check what computed it."
        )
    packed = pack_linear(stacked(weight))
    result: Tensor = torch.ops.torchq.grouped_linear(
        src,
        offsets,
        packed.weight,
        packed.compensation,
        packed.pair_bound,
        stacked(_by_channel("weight_scale", scale, groups, channels)).contiguous(),
        None if bias is None else stacked(_by_channel("bias", bias, groups, channels)),
        inputs,
        channels,
    )
    return result


def _check_weight(weight: object) -> None:
    check_type("torchq.grouped_linear: weight", weight, Tensor, "Pass an int8 tensor.")
    assert isinstance(weight, Tensor)
    if weight.dtype != torch.int8:
        raise TypeError(
            f"torchq.grouped_linear: weight must be int8, got {weight.dtype}. Quantize it with "
            "torchq.functional.quantize_weight."
        )
    if weight.dim() != 3:
        raise ValueError(
            "torchq.grouped_linear: weight must be (groups, out_features, in_features), got "
            f"{list(weight.shape)}. Stack the weights of the groups."
        )


def _by_channel(name: str, values: Tensor, groups: int, channels: int) -> Tensor:
    """Return values that broadcast to one for each channel of each group, as these."""
    try:
        return values.expand(groups, channels)
    except RuntimeError:
        raise ValueError(
            f"torchq.grouped_linear: {name} must broadcast to [{groups}, {channels}], one for each "
            f"channel of each group, got {list(values.shape)}. Stack those of the groups."
        ) from None


def grouped_linear_int4(
    src: Tensor, offsets: Tensor, weights: Sequence[PackedInt4], bias: Tensor | None = None
) -> Tensor:
    """Multiply rows in groups by 4-bit weights, as :func:`dynamic_linear_int4` does.

    Rows and ``offsets`` are those of :func:`grouped_linear`. Weights are stacked anew in each call;
    a :class:`torchq.nn.DynamicQGroupedLinearInt4` has the stack.

    Args:
        src: float32, bfloat16 or float16 ``(rows, in_features)``, finite.
        offsets: int32 ``[groups]``, ascending: where the rows of each group end.
        weights: at least one, each packed by :func:`torchq.packing.pack_linear_int4`; all of one
            shape, group size and symmetry.
        bias: float32 ``[groups, out_features]``.

    Returns:
        ``(rows, out_features)`` of the source's dtype.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes or weights that do not fit, offsets that descend or pass the last row, or
            NaN or inf in ``src``.

    Example:
        >>> codes = torch.full((2, 4), 9, dtype=torch.uint8)  # 1 step above the zero point, 8
        >>> pack = torchq.packing.pack_linear_int4
        >>> weights = [pack(codes, torch.full((2, 1), scale)) for scale in (1.0, 2.0)]
        >>> offsets = torch.tensor([1, 3], dtype=torch.int32)
        >>> torchq.functional.grouped_linear_int4(torch.ones(3, 4), offsets, weights)[:, 0]
        tensor([4., 8., 8.])
    """
    kinds = {
        (w.shape, w.group_size, w.symmetric) if isinstance(w, PackedInt4) else None for w in weights
    }
    if len(kinds) != 1 or None in kinds:
        told = sorted({type(w).__name__ for w in weights}) if None in kinds else list(kinds)
        raise ValueError(
            "torchq.grouped_linear_int4: weights must be PackedInt4 of one shape, group size and "
            f"symmetry, at least one, got {told}. Pack each with torchq.packing.pack_linear_int4."
        )
    first = weights[0]
    channels, inputs = first.shape
    if bias is not None:
        bias = stacked(_by_channel("bias", bias, len(weights), channels))
    result: Tensor = torch.ops.torchq.grouped_linear_int4(
        src,
        offsets,
        torch.cat([w.weight for w in weights]),
        torch.cat([w.params for w in weights]),
        bias,
        inputs,
        channels,
        first.group_size,
        first.symmetric,
    )
    return result

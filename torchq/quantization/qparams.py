# SPDX-License-Identifier: Apache-2.0
"""Scales and zero points: what they are, and how a range of real values becomes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchq.attributes.arguments import INT32, to_float32, to_int
from torchq.attributes.options import WEIGHT_GRANULARITIES, Granularity
from torchq.quantization.ranges import (
    activation_range,
    check_bits,
    check_choice,
    check_dtype,
    solve_qparams,
    weight_range,
)


@dataclass(frozen=True, eq=False)
class QParams:
    """How integers stand for real numbers: ``real = scale * (q - zero_point)``.

    Attributes:
        scale: float32 ``[]`` (per tensor) or ``[C]`` (per channel), real units per step, > 0.
        zero_point: int32, same shape as ``scale``, within the range of ``dtype``.
        dtype: ``torch.uint8`` or ``torch.int8``.
        axis: the dimension that ``C`` runs over; None exactly if ``scale`` is ``[]``.
        bits: 8, or 7 where only half of the integers are used.

    Raises:
        TypeError: a field has another type or dtype.
        ValueError: shapes disagree, or a scale or zero point is outside its range.

    Example:
        >>> q = torchq.QParams.per_tensor(0.5, 128)
        >>> torchq.functional.quantize(torch.tensor([-1.0, 2.0]), q.scale, q.zero_point)
        tensor([126, 132], dtype=torch.uint8)
    """

    scale: Tensor
    zero_point: Tensor
    dtype: torch.dtype
    axis: int | None = None
    bits: int = 8

    def __post_init__(self) -> None:
        """Validate every field."""
        check_dtype("QParams", self.dtype)
        check_bits("QParams", "bits", self.bits)
        _check_tensor("scale", self.scale, torch.float32)
        _check_tensor("zero_point", self.zero_point, torch.int32)
        self._check_shapes()
        self._check_values()

    def _check_shapes(self) -> None:
        scale, zero_point = tuple(self.scale.shape), tuple(self.zero_point.shape)
        if len(scale) > 1:
            raise ValueError(
                f"torchq.QParams: scale must have shape [] or [C], got {list(scale)}. "
                "Flatten it to one value per channel."
            )
        if zero_point != scale:
            raise ValueError(
                f"torchq.QParams: zero_point must have the shape of scale, {list(scale)}, "
                f"got {list(zero_point)}. Expand it: zero_point.expand_as(scale).contiguous()."
            )
        if type(self.axis) not in (int, type(None)):
            raise TypeError(
                f"torchq.QParams: axis must be int or None, got {type(self.axis).__name__}. "
                "Pass the index of the channel dimension."
            )
        if (self.axis is None) == bool(scale):
            raise ValueError(
                "torchq.QParams: axis must be an int for scales [C] and None for scales [], got "
                f"axis={self.axis} with scale {list(scale)}. Pass the channel dimension."
            )

    def _check_values(self) -> None:
        if self.scale.is_meta:
            return
        valid = torch.isfinite(self.scale) & (self.scale > 0)
        if not bool(valid.all()):
            bad = self.scale[~valid].flatten()[0].item()
            raise ValueError(
                f"torchq.QParams: scale must be finite and > 0, got {bad}. Check the data."
            )
        info = torch.iinfo(self.dtype)
        fits = (self.zero_point >= info.min) & (self.zero_point <= info.max)
        if not bool(fits.all()):
            bad = self.zero_point[~fits].flatten()[0].item()
            raise ValueError(
                f"torchq.QParams: zero_point must be in [{info.min}, {info.max}] for {self.dtype}, "
                f"got {bad}. A range that contains zero always has such a zero point."
            )

    @classmethod
    def per_tensor(
        cls, scale: float | Tensor, zero_point: int | Tensor = 0, dtype: torch.dtype = torch.uint8
    ) -> QParams:
        """Build per-tensor parameters from numbers; ``scale`` is rounded to float32."""
        where = "torchq.QParams.per_tensor: "
        scale = to_float32(f"{where}scale", scale)
        number = zero_point.item() if isinstance(zero_point, Tensor) else zero_point
        zero_point = to_int(f"{where}zero_point", number, INT32.min, INT32.max)
        scales = torch.tensor(scale, dtype=torch.float32, device="cpu")
        return cls(scales, torch.tensor(zero_point, dtype=torch.int32, device="cpu"), dtype)

    @property
    def integers(self) -> tuple[int, int]:
        """The smallest and largest activation these parameters stand for."""
        return activation_range(self.dtype, self.bits)

    @property
    def range(self) -> tuple[float, float]:
        """The real values of these integers; there must be one scale."""
        scale, zero_point = float(self.scale), int(self.zero_point)
        low, high = self.integers
        return scale * (low - zero_point), scale * (high - zero_point)

    @property
    def is_per_channel(self) -> bool:
        """Return whether there is one scale per channel."""
        return self.axis is not None

    def broadcast(self, ndim: int) -> tuple[Tensor, Tensor]:
        """Return views of ``scale`` and ``zero_point`` that broadcast against ``ndim`` dimensions.

        Raises:
            ValueError: ``axis`` is not a dimension of such a tensor.
        """
        if self.axis is None:
            return self.scale, self.zero_point
        if not -ndim <= self.axis < ndim:
            raise ValueError(
                f"torchq.QParams: axis must be a dimension of a {ndim}-d tensor, got {self.axis}. "
                "Choose the parameters for the tensor they are used with."
            )
        shape = [1] * ndim
        shape[self.axis] = -1
        return self.scale.reshape(shape), self.zero_point.reshape(shape)

    def __eq__(self, other: object) -> bool:
        """Compare all fields, tensors by value."""
        if not isinstance(other, QParams):
            return NotImplemented
        same_kind = (self.dtype, self.axis, self.bits) == (other.dtype, other.axis, other.bits)
        same_scale = same_kind and torch.equal(self.scale, other.scale)
        return same_scale and torch.equal(self.zero_point, other.zero_point)

    # Equality looks at tensor values, which may change in place: no stable hash exists.
    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """One line, such as ``u8 scale=0.0123 zero_point=7``."""
        name = "u8" if self.dtype == torch.uint8 else "s8"
        if self.axis is None:
            return f"{name} scale={self.scale.item():.4g} zero_point={self.zero_point.item()}"
        text = f"{name} axis={self.axis} channels={self.scale.numel()}"
        if self.scale.numel() == 0:
            return text
        return f"{text} scale={self.scale.min().item():.4g}..{self.scale.max().item():.4g}"


def choose_qparams(
    min_value: float | Tensor,
    max_value: float | Tensor,
    dtype: torch.dtype = torch.uint8,
    bits: int = 8,
    symmetric: bool = False,
    axis: int | None = None,
) -> QParams:
    """Quantization parameters that cover ``[min_value, max_value]``.

    With ``lo = min(min_value, 0)``, ``hi = max(max_value, 0)`` and the integers ``qmin..qmax`` of
    :func:`activation_range`, in float64, the scale rounded to
    float32 at the end::

        affine:     scale = (hi - lo) / (qmax - qmin)
                    zero_point = clamp(rne(qmin - lo * (qmax - qmin) / (hi - lo)), qmin, qmax)
        symmetric:  zero_point = 0 for s8, 128 for u8 (64 at 7 bits)
                    scale = max(-lo, hi) / 127 (63 at 7 bits)

    Zero is always exactly representable; a non-negative range in u8 gets zero point 0. The empty
    range ``lo == hi == 0`` gets scale 1. Scales are at least the smallest normal float32.

    Args:
        min_value: smallest real value, a number or a tensor ``[]`` or ``[C]``.
        max_value: largest real value, same shape.
        dtype: ``torch.uint8`` or ``torch.int8``.
        bits: 8 or 7. Seven-bit activations leave headroom for instructions that saturate pairs.
        symmetric: fix the zero point in the middle of the integers.
        axis: the channel dimension; required exactly if the ranges are ``[C]``.

    Raises:
        TypeError: ``dtype`` is not a ``torch.dtype``.
        ValueError: a bound is not finite, a range is inverted, or an argument is out of its domain.
    """
    integers = activation_range(dtype, bits)
    low, high = _bounds(min_value), _bounds(max_value)
    if low.shape != high.shape:
        raise ValueError(
            "torchq.choose_qparams: max_value must have the shape of min_value, "
            f"{list(low.shape)}, got {list(high.shape)}. Pass both per tensor or both per channel."
        )
    for name, bound in (("min_value", low), ("max_value", high)):
        if not np.isfinite(bound).all():
            raise ValueError(
                f"torchq.choose_qparams: {name} must be finite, got "
                f"{bound[~np.isfinite(bound)].flat[0]}. Remove NaN and inf from the data."
            )
    inverted = low > high
    if inverted.any():
        raise ValueError(
            "torchq.choose_qparams: min_value must be <= max_value, got "
            f"{low[inverted].flat[0]} > {high[inverted].flat[0]}. Swap them."
        )
    scale, zero_point = solve_qparams(low, high, integers, symmetric)
    return QParams(torch.from_numpy(scale), torch.from_numpy(zero_point), dtype, axis, bits)


def weight_qparams(
    weight: Tensor,
    granularity: Granularity = "per_channel",
    bits: int = 8,
    channel_axis: int = 0,
    groups: int = 1,
) -> QParams:
    """Symmetric int8 parameters of a weight: ``scale = max|weight| / 127`` (63 at 7 bits).

    Linear and convolution weights have their output channels in dimension 0. The weight of a
    transposed convolution is ``(IC, OC/groups, k...)``: pass ``channel_axis=1`` and its ``groups``,
    and the result holds one scale per output channel ``g * OC/groups + j``, in that order.

    Args:
        weight: floating point, finite.
        granularity: "per_channel" or "per_tensor".
        bits: 8 or 7.
        channel_axis: dimension of the output channels.
        groups: groups that split dimension 0 when ``channel_axis`` is not 0.

    Returns:
        QParams with dtype int8 and zero point 0; ``axis`` is ``channel_axis``, or None.

    Raises:
        TypeError: ``weight`` is not a floating-point tensor.
        ValueError: an argument is out of its domain, or ``weight`` contains NaN or inf.
    """
    check_bits("weight_qparams", "bits", bits)
    check_choice("weight_qparams", "granularity", granularity, WEIGHT_GRANULARITIES)
    rows = output_channel_rows(weight, channel_axis, groups)
    per_channel = granularity == "per_channel"
    rows = rows if per_channel else rows.reshape(1, -1)
    # amax of an empty row is an error in torch, yet layers without inputs are legal.
    largest = rows.new_zeros(rows.shape[0])
    if rows.shape[1]:  # without a temporary of the weight's size, as abs() is one
        largest = torch.maximum(rows.amax(1), -rows.amin(1)).abs()  # no -0.0
    if not bool(largest.isfinite().all()):  # NaN comes through amax, too
        bad = int((~rows.isfinite()).sum())
        raise ValueError(
            f"torchq.weight_qparams: weight must be finite, got {bad} NaN or inf values of "
            f"{rows.numel()}. Repair the checkpoint or keep this module float."
        )
    bound = largest.to(torch.float64).numpy()
    scale, zero_point = solve_qparams(-bound, bound, weight_range(bits), symmetric=True)
    if not per_channel:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    axis = channel_axis % weight.ndim if per_channel else None
    return QParams(torch.from_numpy(scale), torch.from_numpy(zero_point), torch.int8, axis, bits)


def output_channel_rows(weight: Tensor, channel_axis: int = 0, groups: int = 1) -> Tensor:
    """Rearrange a weight to ``[output channels, values per channel]``, detached.

    Raises:
        TypeError: ``weight`` is not a floating-point tensor.
        ValueError: ``channel_axis`` is not a dimension, or ``groups`` does not divide dimension 0.
    """
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(
            f"torchq.weight_qparams: weight must be a floating-point tensor, got {got}. "
            "Pass the float module's weight."
        )
    if not -weight.ndim <= channel_axis < weight.ndim:
        raise ValueError(
            "torchq.weight_qparams: channel_axis must be a dimension of weight "
            f"{list(weight.shape)}, got {channel_axis}. Output channels are usually dimension 0."
        )
    axis = channel_axis % weight.ndim
    split = groups if axis != 0 else 1
    if groups < 1 or weight.shape[0] % groups:
        raise ValueError(
            "torchq.weight_qparams: groups must divide dimension 0 of weight "
            f"{list(weight.shape)}, got {groups}. Pass the groups of the float module."
        )
    inner = [weight.shape[0] // split, *weight.shape[1:]]
    rows = weight.detach().reshape([split, *inner]).movedim(axis + 1, 1)
    channels = split * inner[axis]
    return rows.reshape(channels, weight.numel() // channels if channels else 0)


def _check_tensor(name: str, value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor) or value.dtype != dtype:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"torchq.QParams: {name} must be a {dtype} tensor, got {got}. "
            "Convert it, or use QParams.per_tensor(scale, zero_point)."
        )


def _bounds(value: float | Tensor) -> NDArray[np.float64]:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64).numpy()
    return np.asarray(float(value), dtype=np.float64)

# SPDX-License-Identifier: Apache-2.0
"""Rounding in training, with the gradients of the straight-through estimator or of LSQ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchq.nn.fake_quantize import FakeQuantize
from torchq.quantization.ranges import SMALLEST_SCALE

MOMENTUM = 0.1
"""Weight of the newest batch in the range of an activation, as in a batch norm."""


class _Round(torch.autograd.Function):
    """``scale * (q - zero_point)`` with ``q = clamp(rne(src / scale + zero_point))``.

    The steps of torchq's ``quantize`` and ``dequantize``, so that training rounds as they do.
    Gradients go straight through where nothing is clipped. That of a learned scale is LSQ's (Esser
    et al., 2020), times ``1 / sqrt(N * Qp)``: ``N`` values share the step, ``Qp`` is the highest
    level.
    """

    @staticmethod
    def forward(
        ctx: Any,
        src: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        low: int,
        high: int,
        shared_by: int,
    ) -> Tensor:
        """Round; ``shared_by`` values have one step."""
        step = scale.float().clamp_min(SMALLEST_SCALE)
        # a fused multiply-add: the product of two float32 is exact in float64
        position = (src.double() * step.reciprocal().double() + zero_point).float()
        q = position.round()
        clamped = q.clamp(low, high)
        if ctx.needs_input_grad[1]:
            inside = (position > low) & (position < high)
            slope = torch.where(inside, q - position, clamped - zero_point)
            slope *= torch.rsqrt(max(shared_by, 1) * (high - zero_point).clamp_min(1))
            ctx.save_for_backward(inside, slope)
        else:
            ctx.save_for_backward(clamped == q)
        ctx.shape, ctx.dtype = scale.shape, scale.dtype
        return (step * (clamped - zero_point)).to(src.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``src`` and ``scale``."""
        inside, *slope = ctx.saved_tensors
        of_scale = None
        if slope:
            of_scale = (grad.float() * slope[0]).sum_to_size(ctx.shape).to(ctx.dtype)
        return grad * inside, of_scale, None, None, None, None


def affine(
    low: Tensor, high: Tensor, integers: tuple[int, int], symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point for a range, as ``quantization.ranges.solve_qparams``."""
    smallest, largest = integers
    middle = (smallest + largest + 1) // 2
    low, high = low.detach().double().clamp_max(0), high.detach().double().clamp_min(0)
    steps = largest - (middle if symmetric else smallest)
    span = torch.maximum(-low, high) if symmetric else high - low
    span = torch.where(span > 0, span.clamp_min(steps * SMALLEST_SCALE), steps)
    scale = (span / steps).float()
    if symmetric:
        return scale, torch.full_like(scale, middle)
    zero_point = torch.round(smallest - low * steps / span).clamp(smallest, largest)
    return scale, zero_point.float()


class Quantizer(nn.Module):
    """Base of what rounds to int8 levels in training; float in, float out.

    Attributes:
        integers: the lowest and the highest.
        axis: of a scale per channel; None for one scale.
        scale: float32 parameter where it is learned; None where it follows from a range.
    """

    scale: nn.Parameter | None

    def __init__(self, integers: tuple[int, int], axis: int | None = None) -> None:
        """Round to ``integers``."""
        super().__init__()
        self.integers, self.axis = integers, axis
        self.register_parameter("scale", None)

    def affine(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point for ``src``."""
        raise NotImplementedError

    def _shared_by(self, src: Tensor) -> int:
        """Return how many values share a step."""
        raise NotImplementedError

    def fixed(self, src: Tensor) -> FakeQuantize:
        """Return what it computes now, with its scale as a constant."""
        scale, zero_point = self.affine(src)
        scale = scale.detach().clamp_min(SMALLEST_SCALE)
        return FakeQuantize.from_affine(scale, zero_point, *self.integers, self.axis)

    def forward(self, src: Tensor) -> Tensor:
        """Round to levels."""
        scale, zero_point = self.affine(src)
        if self.axis is not None:
            shape = [1] * src.dim()
            shape[self.axis] = -1
            scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
        shared_by = self._shared_by(src)
        result: Tensor = _Round.apply(src, scale, zero_point, *self.integers, shared_by)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        """Return the settings."""
        learned = ", learned scale" if self.scale is not None else ""
        axis = "" if self.axis is None else f", axis={self.axis}"
        return f"{self.integers[0]}..{self.integers[1]}{axis}{learned}"


class WeightQuantizer(Quantizer):
    """Parametrization of a weight: symmetric, by its largest value or a learned scale."""

    def __init__(
        self, weight: Tensor, integers: tuple[int, int], axis: int | None, learn: bool
    ) -> None:
        """Round a weight like ``weight``."""
        super().__init__(integers, axis)
        if learn:
            self.scale = nn.Parameter(self.affine(weight)[0])

    def affine(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point for the weight."""
        if self.scale is not None:
            return self.scale, torch.zeros_like(self.scale)
        weight = src.detach().abs()
        bound = weight.amax() if self.axis is None else weight.movedim(self.axis, 0).flatten(1)
        bound = bound if self.axis is None else bound.amax(1)
        return affine(-bound, bound, self.integers, symmetric=True)

    def _shared_by(self, src: Tensor) -> int:
        return src.numel() // (1 if self.axis is None else src.shape[self.axis])


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


class ActivationQuantizer(Quantizer):
    """Rounds an activation, by a moving average of its range or a learned scale.

    The first batch is :meth:`begin`'s. In training each batch moves the range, until it is frozen.

    Attributes:
        symmetric: fix the zero point in the middle of the integers.
        freeze_after: how many batches move the range; None: all.
        recording: note the range only, and round nothing.
        min_value, max_value: float32 ``[]``; inf and -inf before the first batch.
        steps: batches of training, int64 ``[]``.
    """

    min_value: Tensor
    max_value: Tensor
    steps: Tensor
    zero_point: Tensor

    def __init__(
        self, integers: tuple[int, int], symmetric: bool, learn: bool, freeze_after: int | None
    ) -> None:
        """Start without data, recording."""
        super().__init__(integers)
        self.symmetric, self.freeze_after, self.recording = symmetric, freeze_after, True
        self.register_buffer("min_value", _number(torch.inf))
        self.register_buffer("max_value", _number(-torch.inf))
        self.register_buffer("steps", torch.tensor(0, dtype=torch.int64, device="cpu"))
        if learn:
            self.scale = nn.Parameter(_number(1.0))
            self.register_buffer("zero_point", _number(0.0))

    @property
    def has_data(self) -> bool:
        """Return whether a range is known."""
        return bool(torch.isfinite(self.min_value) & torch.isfinite(self.max_value))

    @torch.no_grad()
    def begin(self) -> None:
        """Round from now on; a learned scale starts from the range."""
        self.recording = False
        if self.scale is not None:
            scale, zero_point = self._from_range()
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)

    def _from_range(self) -> tuple[Tensor, Tensor]:
        return affine(self.min_value, self.max_value, self.integers, self.symmetric)

    def affine(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point."""
        if self.scale is not None:
            return self.scale, self.zero_point
        return self._from_range()

    def _shared_by(self, src: Tensor) -> int:
        return src.numel() // max(src.shape[0] if src.dim() else 1, 1)

    def forward(self, src: Tensor) -> Tensor:
        """Round to levels; in training, move the range first."""
        if src.numel() and (self.recording or (self.training and self.scale is None)):
            self._move(src.detach())
        return src if self.recording else super().forward(src)

    @torch.no_grad()
    def _move(self, src: Tensor) -> None:
        """Widen the range while recording, else move it; batches with inf or NaN do not count."""
        low, high = (bound.float() for bound in torch.aminmax(src))
        known = torch.isfinite(low) & torch.isfinite(high)
        if self.recording:
            moved = torch.minimum(self.min_value, low), torch.maximum(self.max_value, high)
        else:
            moved = self.min_value.lerp(low, MOMENTUM), self.max_value.lerp(high, MOMENTUM)
            if self.freeze_after is not None:
                known &= self.steps < self.freeze_after
            self.steps += 1
        self.min_value.copy_(torch.where(known, moved[0], self.min_value))
        self.max_value.copy_(torch.where(known, moved[1], self.max_value))

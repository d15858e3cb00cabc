# SPDX-License-Identifier: Apache-2.0
"""Observers of the smallest and the largest value."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Self

from torchq.quantization.observers.base import Observer


class MinMaxObserver(Observer):
    """The smallest and largest value ever seen. Merging is exact."""

    def _record(self, values: Tensor) -> None:
        self._widen(*self._min_max(values))

    def _merge(self, other: Self) -> None:
        self._widen(other.min_value, other.max_value)


class MovingAverageObserver(Observer):
    """Moving averages of each batch's minimum and maximum.

    ``average = average + momentum * (batch - average)``, started with the first batch.

    Args:
        momentum: weight of the newest batch, in (0, 1], as in ``nn.BatchNorm2d``.

    Raises:
        ValueError: ``momentum`` is out of range.
    """

    def __init__(self, momentum: float = 0.1) -> None:
        """Start without data."""
        super().__init__()
        if not 0 < momentum <= 1:
            raise ValueError(
                f"torchq.MovingAverageObserver: momentum must be in (0, 1], got {momentum}. "
                "It is the weight of the newest batch; 0.1 is usual."
            )
        self.momentum = momentum

    def check_merge(self) -> None:
        """Refuse: the average depends on the order of the batches.

        Raises:
            RuntimeError: always.
        """
        problem = "merge is impossible, a moving average depends on the order of the batches"
        remedy = 'Use activation_observer="histogram" or "minmax", which merge exactly.'
        raise RuntimeError(self._text(problem, remedy))

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"momentum={self.momentum}"

    def _record(self, values: Tensor) -> None:
        low, high = self._min_max(values)
        if self.calibrated:
            low = torch.lerp(self.min_value, low, self.momentum)
            high = torch.lerp(self.max_value, high, self.momentum)
        self.min_value.copy_(low)
        self.max_value.copy_(high)


class PerChannelMinMaxObserver(Observer):
    """The smallest and largest value of each channel. Merging is exact.

    The buffers are empty until the first value arrives, then ``[C]``.

    Args:
        axis: the channel dimension; negative counts from the end.
    """

    def __init__(self, axis: int = 1) -> None:
        """Start without data."""
        super().__init__()
        self.axis = axis
        self._resize(0)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"axis={self.axis}"

    @property
    def _channel_axis(self) -> int | None:
        return self.axis

    def forget(self) -> None:
        """Start anew."""
        self._resize(0)

    def _resize(self, channels: int) -> None:
        self._set_buffer(
            "min_value",
            lambda: torch.full((channels,), torch.inf, dtype=torch.float32, device="cpu"),
        )
        self._set_buffer(
            "max_value",
            lambda: torch.full((channels,), -torch.inf, dtype=torch.float32, device="cpu"),
        )

    def _match(self, channels: int) -> None:
        if self.min_value.numel() == 0:
            self._resize(channels)
        elif self.min_value.numel() != channels:
            problem = (
                f"axis {self.axis} must have {self.min_value.numel()} channels, got {channels}"
            )
            raise ValueError(self._text(problem, "Observe one kind of tensor per observer."))

    def _record(self, values: Tensor) -> None:
        if not -values.ndim <= self.axis < values.ndim:
            problem = f"src must have dimension {self.axis}, got shape {list(values.shape)}"
            raise ValueError(self._text(problem, "Pass the channel dimension as axis."))
        axis = self.axis % values.ndim
        others = tuple(dim for dim in range(values.ndim) if dim != axis)
        # torch takes an empty tuple of dimensions for all of them.
        low, high = (values.amin(others), values.amax(others)) if others else (values, values)
        self._check_finite(values, low, high)
        self._match(values.shape[axis])
        self._widen(low + 0.0, high + 0.0)

    def _merge(self, other: Self) -> None:
        self._match(other.min_value.numel())
        self._widen(other.min_value, other.max_value)

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, *args: object, **kwargs: object
    ) -> None:
        saved = state_dict.get(prefix + "min_value")
        if isinstance(saved, Tensor) and saved.ndim == 1 and saved.shape != self.min_value.shape:
            self._resize(saved.numel())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

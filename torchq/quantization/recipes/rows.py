# SPDX-License-Identifier: Apache-2.0
"""The row rule: one scale for a whole tensor is too coarse for rows far smaller than the largest.

A result of a layer depends on a row of its source: the features of a token or step, or the patch
that a convolution's window covers. A row of mean square ``p`` in steps of ``s`` has, as rounding is
of variance ``s ** 2 / 12``, the signal-to-noise ratio

    10 * log10(p / (s ** 2 / 12)) dB

Zeros are exact and do not count. The ratio of the whole tensor is that of its largest rows; the
median over rows tells what happens to most results.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from torchq.quantization.observers.base import Observer
from torchq.quantization.qparams import QParams
from torchq.report import reasons

# In dB. Convolutions of trained networks that lose nothing have 29 and more; silero-vad's that
# change its decisions have 25 and 23, resemblyzer's LSTM 8. MiniLM's linear layers have 19 and
# more: smoothing and channels apart suit them, at no cost.
LEAST = 27.0
_LEAST_LINEAR = 15.0
_PER_OCTAVE = 4  # bins of 0.75 dB
_OCTAVES = 128  # below 1, and above
_POOLS: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class RowPowers(Observer):
    """Counts the rows of a layer's source by their mean square. Merging is exact.

    The rows of a convolution are patches side by side, for each group of channels.

    Args:
        window: size of the kernel; None for rows of features.
        groups: of a convolution.

    Buffers:
        counts: int64, of rows; bin ``k`` begins at ``2 ** (k / 4 - 128)``.
    """

    counts: Tensor

    def __init__(self, window: tuple[int, ...] | None = None, groups: int = 1) -> None:
        """Start without data."""
        super().__init__()
        self.window, self.groups, self.least = window, groups, LEAST
        self._add_buffer("counts", [0] * (2 * _OCTAVES * _PER_OCTAVE), torch.int64)

    @classmethod
    def of(cls, layer: nn.Module) -> Self:
        """Return the observer for what a linear layer, convolution or recurrent network reads."""
        if isinstance(layer, nn.Linear):
            linear = cls()
            linear.least = _LEAST_LINEAR
            return linear
        if not isinstance(layer, nn.modules.conv._ConvNd):
            return cls()
        window = (1,) * len(layer.kernel_size) if layer.transposed else layer.kernel_size
        return cls(tuple(window), layer.groups)

    @property
    def calibrated(self) -> bool:
        """Return whether a row was counted."""
        return bool(self.counts.any())

    def forget(self) -> None:
        """Start anew."""
        self.counts.zero_()

    def why_coarse(self, src: QParams) -> str:
        """Return why a scale of one for all does not suit the layer; "" where it does."""
        found = self.decibels(src)
        if found is None or found >= self.least:
            return ""
        at_most = found + 0.4  # the upper end of the bin
        return reasons.ROWS.format(decibels=at_most)

    def decibels(self, src: QParams) -> float | None:
        """Return the median with 8 bits for the range of ``src``; None without data."""
        below = self.counts.cumsum(0)
        if not below[-1]:
            return None
        k = int((2 * below >= below[-1]).nonzero()[0])
        low, high = src.integers
        step = float(src.scale) * (high - low) / 255
        octaves = (k + 0.5) / _PER_OCTAVE - _OCTAVES
        return 10 * (octaves * math.log10(2) - math.log10(step**2 / 12))

    def check_state(self) -> None:
        """See the base class."""
        super().check_state()
        positive = (self.counts >= 0).all() & (self.counts.double().sum() < 2**60)
        self._check_loaded(positive, "counts")

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"window={self.window}, groups={self.groups}"

    def _record(self, values: Tensor) -> None:
        axis = -1 if self.window is None else -len(self.window) - 1
        if values.shape[axis] != self.groups:  # sums over channels, in an order that varies
            values = values.double()
        squares, counts = self._rows(values.square()), self._rows((values != 0).to(values.dtype))
        kept = squares > 0  # neither zeros nor NaN, which the observer of ranges refuses
        octaves = (squares[kept] / counts[kept]).log2()
        index = ((octaves + _OCTAVES) * _PER_OCTAVE).clamp(0, len(self.counts) - 1).long()
        self.counts += index.bincount(minlength=len(self.counts))

    def _rows(self, values: Tensor) -> Tensor:
        """Return sums over rows, or means over patches."""
        if self.window is None:
            return values.sum(-1).flatten()
        spatial = values.shape[-len(self.window) :]
        channels = values.shape[-len(spatial) - 1] // self.groups
        if channels > 1:
            values = values.reshape(-1, self.groups, channels, *spatial).sum(2)
        window = [min(pair) for pair in zip(self.window, spatial, strict=True)]
        if max(window) > 1:
            values = _POOLS[len(spatial)](values, window, window)
        return values.flatten()

    def _merge(self, other: Self) -> None:
        self.counts += other.counts

# SPDX-License-Identifier: Apache-2.0
"""Rows of a layer's source that stand for all of the calibration data."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Self

from torchq.quantization.observers.base import Observer

ROWS = 1024


class SourceSample(Observer):
    """Keeps every n-th row of what it sees, and the largest magnitude of each channel.

    ``n`` is the smallest power of two with which the rows fit. The sample depends on nothing but
    the rows and their order, however they are cut into batches.

    Buffers:
        largest: float32 ``[channels]``, over all rows.
        rows: float32 ``[ROWS, channels]``, of which the first ``kept`` count.
        seen, step: int64 ``[]``; row ``i`` is kept where ``i % step == 0``.
    """

    largest: Tensor
    rows: Tensor
    seen: Tensor
    step: Tensor

    def __init__(self, channels: int, name: str = "") -> None:
        """Start without rows; ``name`` is that of the layer, for messages."""
        super().__init__()
        self.channels, self.name = channels, name
        self._add_buffer("largest", [0.0] * channels)
        self._set_buffer("rows", lambda: torch.zeros(ROWS, channels, device="cpu"))
        self._add_buffer("seen", 0, torch.int64)
        self._add_buffer("step", 1, torch.int64)

    @property
    def kept(self) -> Tensor:
        """Return the rows of the sample."""
        return self.rows[: -(-int(self.seen) // int(self.step))]

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"channels={self.channels}"

    def _record(self, values: Tensor) -> None:
        rows = values.reshape(-1, self.channels)
        self._widen(*self._min_max(rows))
        torch.maximum(self.largest, rows.abs().amax(0), out=self.largest)
        self._take(rows)

    def _take(self, rows: Tensor) -> None:
        seen, step = int(self.seen), int(self.step)
        total = seen + len(rows)
        while -(-total // step) > ROWS:
            half = self.rows[: -(-seen // step) : 2].clone()
            self.rows[: len(half)] = half
            step *= 2
        first = -(-seen // step)
        taken = rows[first * step - seen :: step]
        self.rows[first : first + len(taken)] = taken
        self.seen.fill_(total)
        self.step.fill_(step)

    def _merge(self, other: Self) -> None:
        """Take the other's rows as if they were all that it saw."""
        self._widen(other.min_value, other.max_value)
        torch.maximum(self.largest, other.largest, out=self.largest)
        self._take(other.kept)

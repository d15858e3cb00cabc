# SPDX-License-Identifier: Apache-2.0
"""Rows of a layer's source that stand for all of the calibration data."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Self

from torchq.quantization.observers.base import Observer

ROWS = 1024
_SIGN = -(2**63)


class SourceSample(Observer):
    """Keeps the rows with the smallest hashes, and the largest magnitude of each channel.

    A row's hash is computed from its bits, so equal rows are kept once. The sample depends on
    nothing but the set of rows: not on their order, batches, or the ranks that saw them.

    Buffers:
        largest: float32 ``[channels]``, over all rows.
        rows: float32 ``[ROWS, channels]``, of which the first ``count`` hold the sample.
        hashes: int64 ``[ROWS]``, ascending.
        count: int64 ``[]``.
    """

    largest: Tensor
    rows: Tensor
    hashes: Tensor
    count: Tensor

    def __init__(self, channels: int, name: str = "") -> None:
        """Start without rows; ``name`` is that of the layer, for messages."""
        super().__init__()
        self.channels, self.name = channels, name
        self._add_buffer("largest", [0.0] * channels)
        self._set_buffer(
            "rows", lambda: torch.zeros(ROWS, channels, dtype=torch.float32, device="cpu")
        )
        self._set_buffer("hashes", lambda: torch.zeros(ROWS, dtype=torch.int64, device="cpu"))
        self._add_buffer("count", 0, torch.int64)

    @property
    def kept(self) -> Tensor:
        """Return the rows of the sample."""
        return self.rows[: int(self.count)]

    def check_state(self) -> None:
        """See the base class."""
        super().check_state()
        self._check_loaded(0 <= int(self.count) <= ROWS, "count")
        finite = self.rows.isfinite().all() & self.largest.isfinite().all()
        self._check_loaded(finite & (self.largest >= 0).all(), "its rows")

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"channels={self.channels}"

    def _record(self, values: Tensor) -> None:
        rows = values.reshape(-1, self.channels).float()
        self._widen(*self._min_max(rows))
        torch.maximum(self.largest, rows.abs().amax(0), out=self.largest)
        self._take(rows)

    def _take(self, rows: Tensor) -> None:
        hashes = torch.cat([self.hashes[: int(self.count)], _hashes(rows)])
        order = torch.sort(hashes, stable=True).indices
        ascending = hashes[order]
        is_first = torch.ones_like(ascending, dtype=torch.bool)
        is_first[1:] = ascending[1:] != ascending[:-1]
        chosen = order[is_first][:ROWS]
        self.rows[: len(chosen)] = torch.cat([self.kept, rows])[chosen]
        self.hashes[: len(chosen)] = hashes[chosen]
        self.count.fill_(len(chosen))

    def _merge(self, other: Self) -> None:
        """Take the other's rows."""
        self._widen(other.min_value, other.max_value)
        torch.maximum(self.largest, other.largest, out=self.largest)
        self._take(other.kept)


def _hashes(rows: Tensor) -> Tensor:
    """Return int64 ``[rows]``: a multilinear hash of each row's bits, modulo 2^64, then mixed."""
    generator = torch.Generator("cpu").manual_seed(0)
    factors = (
        torch.randint(_SIGN, -_SIGN - 1, (rows.shape[1],), generator=generator, device="cpu") | 1
    )
    bits = (rows + 0.0).contiguous().view(torch.int32).to(torch.int64)  # -0.0 as 0.0
    sums = (bits * factors).sum(1)
    return (sums ^ (sums >> 29)) * -7046029254386353131  # the odd golden ratio of 64 bits

# SPDX-License-Identifier: Apache-2.0
"""What stays in the places of modules that were fused into another one."""

from typing import Any

import torch
from torch import Tensor

from torchq.nn.module import QModule


class Absorbed(QModule):
    """Was fused into another module; returns its source."""

    def __init__(self) -> None:
        """No state but the spec."""
        super().__init__()
        self._set_spec()

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> "Absorbed":
        """See the base class."""
        return cls()

    def forward(self, src: Tensor) -> Tensor:
        """Returns ``src``."""
        return src


class FusedClip(QModule):
    """A relu, relu6 or hardtanh that was fused into the layer in front of it.

    Quantized tensors pass: they are clipped already. On float32 it still clips, which changes
    nothing behind a layer that did, and keeps other calls of a shared activation right.
    """

    def __init__(self, low: float, high: float) -> None:
        """The bounds in real units."""
        super().__init__()
        self.low, self.high = low, high
        self._set_spec(low=str(low), high=str(high))  # text, since JSON has no infinity

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> "FusedClip":
        """See the base class."""
        return cls(float(spec["low"]), float(spec["high"]))

    def extra_repr(self) -> str:
        """The bounds."""
        return f"{self.low}, {self.high}"

    def forward(self, src: Tensor) -> Tensor:
        """Clips float32, passes the rest."""
        return torch.clamp(src, self.low, self.high) if src.is_floating_point() else src


class ResidualFirst(QModule):
    """Swaps the arguments of a fused residual addition, for ``add(residual, y)``."""

    def __init__(self, layer: QModule) -> None:
        """``layer`` takes (src, residual)."""
        super().__init__()
        self.layer = layer
        self._set_spec()

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> "ResidualFirst":
        """The layer is put in by its own spec."""
        return cls(Absorbed())

    def forward(self, residual: Tensor, src: Tensor) -> Tensor:
        """Runs the layer."""
        dst: Tensor = self.layer(src, residual)
        return dst

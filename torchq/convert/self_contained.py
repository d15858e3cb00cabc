# SPDX-License-Identifier: Apache-2.0
"""Modules that are quantized by themselves: float32 in and out, whatever is around them.

They are the recurrent networks and cells, and the experts of a mixture. Both flows put an observed
module in the place of the float one and convert it where it stands, so it may be called any number
of times, with any states, and its results may be unpacked, dropped or returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from torchq.nn.experts import QExperts
from torchq.nn.from_float import naming
from torchq.nn.grouped import Grouped, grouped_from_float
from torchq.nn.module import QModule
from torchq.nn.rnn_observed import ObservedRNN, ObservedRNNCell
from torchq.quantization.config import QConfig

if TYPE_CHECKING:
    from torchq.nn.packed_weights import PackedWeights


class Deferred(nn.Module):
    """Float experts that become dynamic; there is nothing to observe."""

    def __init__(self, module: nn.Module, config: QConfig, name: str) -> None:
        """``config`` tells how to quantize the weights of the module with this name."""
        super().__init__()
        self.module, self.config, self.name = module, config, name

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the float module."""
        return self.module(*args, **kwargs)

    def convert(self, weights: PackedWeights) -> QModule:
        """Return the quantized module; ``weights`` are of the conversion."""

        def quantize(name: str, weight: Tensor, bias: Tensor | None) -> Grouped:
            return grouped_from_float(f"{self.name}.{name}", weight, bias, self.config, weights)

        return QExperts.from_float(self.module, quantize)


SelfContained = ObservedRNN | ObservedRNNCell | Deferred
SELF_CONTAINED = (ObservedRNN, ObservedRNNCell, Deferred)
"""What a prepared model has in their places."""


def observed(module: nn.Module, config: QConfig, name: str) -> SelfContained:
    """Return what takes the module's place while calibrating."""
    if isinstance(module, nn.RNNBase):
        return ObservedRNN(module, config, name)
    if isinstance(module, nn.RNNCellBase):
        return ObservedRNNCell(module, config, name)
    return Deferred(module, config, name)


def converted(module: SelfContained, name: str, weights: PackedWeights) -> QModule:
    """Return the quantized form of an observed module; experts share ``weights`` with graphs.

    Raises:
        RuntimeError: it was never calibrated; the message names it.
        ValueError: a weight cannot be quantized; the message names the module.
    """
    with naming(name):
        return module.convert(weights) if isinstance(module, Deferred) else module.convert()

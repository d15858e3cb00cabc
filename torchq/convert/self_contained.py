# SPDX-License-Identifier: Apache-2.0
"""Modules that are quantized by themselves: float32 in and out, whatever is around them.

They are the recurrent networks and cells and, in a dynamic configuration, linear layers. Both flows
put an observed module in the place of the float one and convert it where it stands, so it may be
called any number of times, with any states, and its results may be unpacked, dropped or returned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchq.config import QConfig
from torchq.convert.from_float import dynamic_from_float, naming
from torchq.convert.module_kinds import EXPOSED, MAX_REDUCTION, inherits, is_patched
from torchq.nn.experts import QExperts, is_experts
from torchq.nn.module import QModule
from torchq.nn.rnn_observed import ObservedRNN, ObservedRNNCell

FOREIGN = "it is a recurrent module with code of its own, which has no int8 form"
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class DynamicLinear(nn.Module):
    """A float linear layer that becomes a dynamic one; there is nothing to observe."""

    def __init__(self, module: nn.Linear, config: QConfig) -> None:
        """``config`` tells how to quantize the weight."""
        super().__init__()
        self.module, self.config = module, config

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the float layer's result."""
        dst: torch.Tensor = self.module(input)
        return dst

    def convert(self) -> QModule:
        """Returns the quantized layer."""
        return dynamic_from_float(self.module, self.config)


class FloatExperts(nn.Module):
    """Experts of a mixture that become dynamic ones; there is nothing to observe."""

    def __init__(self, module: nn.Module, config: QConfig) -> None:
        """``config`` tells how to quantize the weights."""
        super().__init__()
        self.module, self.config = module, config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the float experts."""
        return self.module(*args, **kwargs)

    def convert(self) -> QExperts:
        """Returns the quantized experts."""
        granularity, bits = self.config.weight_granularity, self.config.weight_bits
        return QExperts.from_float(self.module, granularity=granularity, bits=bits)


STANDALONE = (ObservedRNN, ObservedRNNCell, DynamicLinear, FloatExperts)
"""What a prepared model has in their places."""


def is_foreign(module: nn.Module) -> bool:
    """Whether it is a recurrent module with a forward of its own, which may compute anything."""
    known = inherits(type(module)) and not is_patched(module)
    return isinstance(module, RECURRENT) and not known


def stands_alone(module: nn.Module | None, config: QConfig | None) -> bool:
    """Whether this module concerns these functions, and not the planning of int8 tensors."""
    linear = isinstance(module, nn.Linear) and config is not None and config.dynamic
    return linear or isinstance(module, RECURRENT)


def why_float(
    module: nn.Module, config: QConfig | None, dtypes: set[torch.dtype], exposed: bool
) -> str:
    """Returns why such a module must stay float; "" where it need not.

    Args:
        module: for which :func:`stands_alone` holds.
        config: of the module; None keeps it float.
        dtypes: of the tensors that it was called with.
        exposed: whether the model reads its parameters by itself.
    """
    if config is None:
        return "kept float by an override"
    if is_foreign(module):
        return FOREIGN
    if exposed:
        return EXPOSED
    if other := dtypes - {torch.float32}:
        return f"its source is {other.pop()}, not torch.float32"
    if max(weight.size(-1) for weight in module.parameters() if weight.dim() > 1) > MAX_REDUCTION:
        return f"it sums more than {MAX_REDUCTION} products, which could overflow int32"
    return ""


def observed(module: nn.Module, config: QConfig, name: str) -> nn.Module:
    """Returns what takes the module's place while calibrating."""
    if isinstance(module, nn.RNNBase):
        return ObservedRNN(module, config, name)
    if isinstance(module, nn.RNNCellBase):
        return ObservedRNNCell(module, config, name)
    if is_experts(module):
        return FloatExperts(module, config)
    assert isinstance(module, nn.Linear)
    return DynamicLinear(module, config)


def converted(module: Any, name: str) -> QModule:
    """Returns the quantized form of an observed module.

    Raises:
        RuntimeError: it was never calibrated; the message names it.
        ValueError: a weight cannot be quantized; the message names the module.
    """
    with naming(name):
        result: QModule = module.convert()
    return result

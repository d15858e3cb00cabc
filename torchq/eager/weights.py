# SPDX-License-Identifier: Apache-2.0
"""What reads or computes the weights of layers beside their forward, and must not."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.utils import parametrize

from torchq.kinds import QUANTIZABLE


def settle_weights(model: nn.Module, besides: Collection[str] = ()) -> None:
    """Computes the weights of parametrized layers once, of all ``besides`` these names.

    Not with ``remove_parametrizations``: that changes the class, which the original has, too.
    """
    for name, module in list(model.named_modules()):
        if name in besides or not isinstance(module, QUANTIZABLE):
            continue
        if parametrize.is_parametrized(module):
            names = list(module.parametrizations)  # type: ignore[arg-type]
            values = {name: getattr(module, name).detach().clone() for name in names}
            del module.parametrizations
            module.__class__ = type(module).__mro__[1]
            for name, value in values.items():
                module.register_parameter(name, nn.Parameter(value, False))


def leave_fast_paths(model: nn.Module) -> None:
    """Makes transformer encoders call their linears instead of reading their weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False

# SPDX-License-Identifier: Apache-2.0
"""Make layers plain: weights that are computed for each call, code that goes around ``forward``."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from torchq.capture.module_kinds import MATMUL, RECURRENT, is_patched
from torchq.models.inputs import Model, working_copy
from torchq.nn.fake_scales import is_fake
from torchq.nn.multihead import SplitMultiheadAttention


def settled(model: nn.Module, besides: Collection[str] = ()) -> nn.Module:
    """Return the model with parametrized layers replaced by plain ones of the same weights.

    Those with fake-quantized weights stay: the graph takes their scales.

    Args:
        model: changed in its places, and returned, unless it is such a layer itself.
        besides: names of layers to leave.
    """
    memo: dict[int, object] = {
        id(module): plain_layer(module)
        for name, module in model.named_modules()
        if name not in besides
        and isinstance(module, (*MATMUL, *RECURRENT))
        and parametrize.is_parametrized(module)
        and not any(map(is_fake, module.modules()))
    }
    return copy.deepcopy(model, memo) if memo else model


def plain_layer(module: nn.Module) -> nn.Module:
    """Return a layer of the class that ``parametrize`` derived from.

    Not ``remove_parametrizations``: copies share the derived class, which that changes.
    """
    cls: Any = type(module).__mro__[1]
    names = dict(module.get_submodule("parametrizations").named_children())
    values = {name: getattr(module, name).detach().clone() for name in names}
    plain = cls.__new__(cls)
    state = {key: copy.copy(value) for key, value in vars(module).items()}
    plain.__setstate__(state)
    del plain.parametrizations
    for name, value in values.items():
        setattr(plain, name, nn.Parameter(value, False))
    result: nn.Module = plain
    return result


def split_attention(model: Model, names: Collection[str]) -> Model:
    """Return the model, or a copy whose attention modules of these names have layers."""
    memo: dict[int, object] = {}
    for name, module in model.named_modules():
        if name in names and type(module) is nn.MultiheadAttention and not is_patched(module):
            memo[id(module)] = SplitMultiheadAttention.of(module)
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return working_copy(model, shared | memo) if memo else model


def leave_fast_paths(model: nn.Module) -> None:
    """Make transformer encoders call their linears instead of reading their weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False

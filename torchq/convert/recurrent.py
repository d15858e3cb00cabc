# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers as one call of a graph: torch.export would unroll their steps."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq.convert.module_kinds import is_foreign

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)

_library = torch.library.Library("torchq_capture", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "recurrent(Tensor[] srcs, str name, str kind, int hidden, int projected, int layers, "
    "int directions, bool batch_first) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_library, "recurrent", "Meta")
def _fake(
    srcs: list[Tensor], name: str, kind: str, hidden: int, projected: int, layers: int,
    directions: int, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    """Return results without values: the output, and the last states."""
    src = srcs[0]
    if kind.endswith("Cell"):
        shape = [*src.shape[:-1], hidden]
        return [src.new_empty(shape) for _ in range(2 if kind == "LSTMCell" else 1)]
    batch = [] if src.dim() == 2 else [src.shape[0 if batch_first else 1]]
    output = src.new_empty([*src.shape[:-1], projected * directions])
    state = src.new_empty([layers * directions, *batch, projected])
    if kind != "LSTM":
        return [output, state]
    return [output, state, src.new_empty([layers * directions, *batch, hidden])]


def as_one_call(model: nn.Module) -> nn.Module:
    """Make each recurrent module of a copy of a model call ``torchq_capture::recurrent``."""
    for name, module in model.named_modules():
        if isinstance(module, RECURRENT) and not is_foreign(module):
            vars(module)["_torchq_name"] = name
            vars(module)["forward"] = types.MethodType(_forward, module)
    return model


def _forward(module: Any, input: Any, hx: Any = None) -> Any:
    """Call the op; give the results as the module does."""
    if isinstance(input, PackedSequence):
        raise TypeError(f"'{module._torchq_name}' reads a packed sequence")
    if module._forward_hooks or module._forward_pre_hooks:
        raise TypeError(f"'{module._torchq_name}' has hooks, which its quantized form keeps")
    kind = next(cls.__name__ for cls in type(module).__mro__ if cls in RECURRENT)
    states = [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)
    cell = kind.endswith("Cell")
    hidden = module.hidden_size
    projected = hidden if cell else module.proj_size or hidden
    found = torch.ops.torchq_capture.recurrent(
        [input, *states], module._torchq_name, kind, hidden, projected,
        1 if cell else module.num_layers, 2 if not cell and module.bidirectional else 1,
        False if cell else module.batch_first,
    )  # fmt: skip
    if cell:
        return tuple(found) if kind == "LSTMCell" else found[0]
    return found[0], tuple(found[1:]) if kind == "LSTM" else found[1]

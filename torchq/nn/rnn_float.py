# SPDX-License-Identifier: Apache-2.0
"""From torch's recurrent modules to quantized layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.attributes.arguments import as_float32
from torchq.attributes.options import Cell, Granularity
from torchq.nn.rnn_attr import RnnParams
from torchq.nn.rnn_layer import GATES, UNIT_STATE, QRecurrentLayer
from torchq.nn.rnn_packing import RecurrentWeight
from torchq.quantization.qparams import QParams

NOTHING = RnnParams()


def cell_of(module: nn.Module) -> Cell:
    """Return the cell of a float module: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    if isinstance(module, nn.GRU | nn.GRUCell):
        return "gru"
    return "rnn_relu" if module.nonlinearity == "relu" else "rnn_tanh"


def _stacked(module: nn.Module, name: str, layer: int, gates: int) -> Tensor | None:
    """Return a parameter of a layer, ``[directions, gates, ...]``; None if there is none."""
    suffixes = ("", "_reverse") if getattr(module, "bidirectional", False) else ("",)
    names = [f"{name}_l{layer}{suffix}" for suffix in suffixes]
    if isinstance(module, nn.RNNCellBase):
        names = [name]
    values = [getattr(module, each, None) for each in names]
    if any(value is None for value in values):
        return None
    both = torch.stack([as_float32(value.detach()) for value in values if value is not None])
    return both.reshape(len(values), gates, -1, *both.shape[2:])


def data_params(
    op: str, params: RnnParams, src: QParams | None, others: Sequence[object]
) -> QParams | None:
    """Return the source's parameters, of ``src`` or of the Attr; ValueError if both tell."""
    if params.data is None:
        return src
    if src is not None or any(other is not None for other in others):
        raise ValueError(
            f"torchq.nn.{op}: source and states must have their parameters from attr's rnn_data or "
            "from arguments, got both. Leave one of them out."
        )
    return params.data


def layer_from_float(
    module: nn.Module,
    layer: int,
    src: QParams | None,
    state: QParams | None,
    granularity: Granularity,
    bits: int,
    params: RnnParams = NOTHING,
    **options: Any,
) -> QRecurrentLayer:
    """Quantize one layer of a float module; the factors of ``params`` come before the others."""
    cell = cell_of(module)
    gates = GATES[cell]

    def quantized(name: str, count: int, factors: Tensor | None) -> RecurrentWeight | None:
        value = _stacked(module, name, layer, count)
        if value is None:
            return None
        return RecurrentWeight.choose(value, factors, granularity, bits)

    weight_src = quantized("weight_ih", gates, params.weights)
    weight_state = quantized("weight_hh", gates, params.weights)
    assert weight_src is not None and weight_state is not None
    return QRecurrentLayer(
        cell,
        weight_src,
        weight_state,
        _stacked(module, "bias_ih", layer, gates),
        _stacked(module, "bias_hh", layer, gates),
        projection=quantized("weight_hr", 1, params.projection),
        src=src,
        state=UNIT_STATE if state is None else state,
        **options,
    )


def check_bound(op: str, name: str, module: nn.Module, src: QParams | None, state: object) -> None:
    """Raise ValueError where [-1, 1] would not hold the states of a static network."""
    relu, projection = cell_of(module) == "rnn_relu", bool(getattr(module, "proj_size", 0))
    if src is not None and state is None and (relu or projection):
        kind = "relu" if relu else "a projection"
        raise ValueError(
            f"torchq.nn.{op}: {name} must be given for {kind}, whose hidden state has no bound, "
            "got None. Observe it (torchq.nn.ObservedRNN), or use a dynamic network (src=None)."
        )

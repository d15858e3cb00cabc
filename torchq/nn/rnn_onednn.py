# SPDX-License-Identifier: Apache-2.0
"""Weights of oneDNN's recurrent primitives, in torch's order (see ``rnn_attr.py``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.attributes.attr import Attr
from torchq.attributes.options import Cell
from torchq.nn.rnn_attr import gate_order, read_attr
from torchq.nn.rnn_layer import GATES, UNIT_STATE, QRecurrentLayer
from torchq.nn.rnn_packing import RecurrentWeight


class OneDnnWeights(NamedTuple):
    """Weights and biases, one item per layer.

    Attributes:
        src: floating point or int8 ``[directions, gates, units, inputs]``, torch's gates.
        state: the same, of the hidden state.
        projection: ``[directions, 1, units, hidden]``, or None.
        bias_src: float32 ``[directions, gates, units]``, or None.
        bias_state: the same; only the new gate of a GRU that resets behind the matmul has one.
    """

    src: list[Tensor]
    state: list[Tensor]
    projection: list[Tensor] | list[None]
    bias_src: list[Tensor] | list[None]
    bias_state: list[Tensor] | list[None]


def layers_from_onednn(
    op: str,
    cell: Cell,
    weights: OneDnnWeights,
    attr: Attr | None,
    data_dtype: torch.dtype,
    dst_dtype: torch.dtype,
    h_n_dtype: torch.dtype,
) -> list[QRecurrentLayer]:
    """Quantized layers, each of which reads what the one before emits.

    Raises:
        ValueError: int8 weights come without scales; or what :func:`read_attr` raises.
    """
    count, hidden, units = len(weights.src), weights.src[0].shape[2], weights.state[0].shape[3]
    projection = 0 if weights.projection[0] is None else units
    params = read_attr(op, attr, GATES[cell], hidden, projection, data_dtype)

    def quantized(weight: Tensor | None, factors: Tensor | None) -> RecurrentWeight | None:
        if weight is None:
            return None
        if weight.dtype == torch.int8 and factors is None:
            raise ValueError(
                f"torchq.{op}: attr must have the scales of int8 weights, got none. Call "
                "set_rnn_weights_qparams, and set_rnn_weights_projection_qparams."
            )
        return RecurrentWeight.choose(weight, factors, "per_channel", 8)

    layers = []
    for i in range(count):
        src, state = (quantized(w[i], params.weights) for w in (weights.src, weights.state))
        assert src is not None and state is not None
        inner = torch.float32 if params.data is None else data_dtype
        layers.append(
            QRecurrentLayer(
                *(cell, src, state, weights.bias_src[i], weights.bias_state[i]),
                projection=quantized(weights.projection[i], params.projection),
                src=params.data,
                state=params.data or UNIT_STATE,
                hidden=params.data,
                dst_dtype=inner if i < count - 1 else dst_dtype,
                h_n_dtype=h_n_dtype,
            )
        )
    return layers


def read_weights(
    op: str,
    cell: Cell,
    gates: int,
    weights_layer: Tensor,
    weights_iter: Tensor,
    bias: Tensor | None,
    weights_projection: Tensor | None,
) -> OneDnnWeights:
    """Tensors of oneDNN, in torch's order.

    Raises:
        TypeError: a weight is no tensor.
        ValueError: shapes do not fit.
        NotImplementedError: several layers with two directions.
    """
    order = gate_order(gates)
    src = _ldigo(op, "weights_layer", weights_layer, gates)
    state = _ldigo(op, "weights_iter", weights_iter, gates)
    layers, directions, _, units, _ = src.shape
    if layers > 1 and directions > 1:
        raise NotImplementedError(
            f"torchq.{op}: weights must be of one layer or one direction, got {layers} layers and "
            f"{directions} directions. oneDNN's directions are chains of their own, torch's layers "
            "read both: make one network per direction, and flip the source of the second."
        )
    fits = state.shape[:2] == src.shape[:2] and state.shape[3] == units
    if not fits:
        raise ValueError(
            f"torchq.{op}: weights_iter must have the layers, directions and outputs of "
            f"weights_layer {list(weights_layer.shape)}, got {list(weights_iter.shape)}. Both are "
            "ldigo."
        )
    projection: list[Tensor] | list[None] = [None] * layers
    if weights_projection is not None:
        expected = [layers, directions, units, state.shape[4]]
        projection = list(_ldio(op, weights_projection, expected))
    bias_src: list[Tensor] | list[None] = [None] * layers
    bias_state: list[Tensor] | list[None] = [None] * layers
    if bias is not None:
        check_type(f"torchq.{op}: bias", bias, Tensor, "Pass a tensor.")
        expected = [layers, directions, gates + (cell == "gru"), units]
        if list(bias.shape) != expected:
            raise ValueError(
                f"torchq.{op}: bias must be ldgo {expected} for {cell}, got {list(bias.shape)}. A "
                "GRU that resets behind the matmul (lbr_gru) has a fourth one, of the new gate."
            )
        bias_src = list(bias[:, :, order])
        if cell == "gru":
            last = torch.zeros_like(bias[:, :, :3])
            last[:, :, 2] = bias[:, :, 3]
            bias_state = list(last)
    return OneDnnWeights(list(src), list(state), projection, bias_src, bias_state)


def _ldio(op: str, weights_projection: Tensor, expected: list[int]) -> Tensor:
    """``[layers, directions, 1, projection, units]``."""
    check_type(f"torchq.{op}: weights_projection", weights_projection, Tensor, "Pass a tensor.")
    if list(weights_projection.shape) != expected:
        raise ValueError(
            f"torchq.{op}: weights_projection must be ldio {expected}, got "
            f"{list(weights_projection.shape)}. Its outputs are the inputs of weights_iter."
        )
    return weights_projection.transpose(2, 3)[:, :, None].contiguous()


def _ldigo(op: str, name: str, weight: Tensor, gates: int) -> Tensor:
    """``[layers, directions, gates, units, inputs]``, torch's gates."""
    check_type(f"torchq.{op}: {name}", weight, Tensor, "Pass a tensor.")
    if weight.dim() != 5 or weight.shape[3] != gates or weight.shape[1] not in (1, 2):
        raise ValueError(
            f"torchq.{op}: {name} must be ldigo [layers, directions, inputs, {gates} gates, "
            f"outputs], got {list(weight.shape)}. Permute it."
        )
    return weight.detach().permute(0, 1, 3, 4, 2)[:, :, gate_order(gates)].contiguous()

# SPDX-License-Identifier: Apache-2.0
"""The cells' logistic and tanh against float64 on every tier: biases are the arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq.nn import QLSTM, QRNN

UNITS = 1024


def arguments() -> Tensor:
    """A dense grid where the functions bend, and far out."""
    bend = torch.linspace(-12, 12, UNITS - 64)
    return torch.cat([bend, torch.linspace(-100, 100, 62), torch.tensor([0.0, 1e-6])])


def float_cell(kind: type[nn.RNNBase], gates: int, bias: Tensor) -> nn.RNNBase:
    cell = kind(4, UNITS)
    with torch.no_grad():
        cell.bias_ih_l0.copy_(bias)
        cell.bias_hh_l0.zero_()
    assert bias.numel() == gates * UNITS
    return cell.eval()


def test_tanh_is_within_5e_7(isa: str) -> None:
    x = arguments()
    layer = QRNN.from_float(float_cell(nn.RNN, 1, x))
    with torch.no_grad():
        h, _ = layer(torch.zeros(1, 1, 4))
    assert (h.flatten().double() - x.double().tanh()).abs().max() < 5e-7


def test_logistic_is_within_5e_7(isa: str) -> None:
    """c = logistic(forget) * 1 + logistic(input) * tanh(0)"""
    x = arguments()
    zeros = torch.zeros(UNITS)
    layer = QLSTM.from_float(float_cell(nn.LSTM, 4, torch.cat([zeros, x, zeros, zeros])))
    states = torch.zeros(1, 1, UNITS), torch.ones(1, 1, UNITS)
    with torch.no_grad():
        h, (_, c) = layer(torch.zeros(1, 1, 4), states)
    exact = x.double().sigmoid()
    assert (c.flatten().double() - exact).abs().max() < 5e-7
    assert (h.flatten().double() - 0.5 * exact.tanh()).abs().max() < 1e-6

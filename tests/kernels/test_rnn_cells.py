# SPDX-License-Identifier: Apache-2.0
"""The cells' formulas against float64 on every tier: biases are the arguments."""

from __future__ import annotations

import pytest
import reference_rnn
import torch
from calls import F32, assert_same
from rnn_cases import Case, inputs, make, oracle_layer
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


HELD = [
    Case("lstm", 8, 40, steps=1000, batch=5, peephole=True),
    Case("lstm", 8, 40, steps=1000, src=F32),
    Case("gru", 8, 40, steps=1000, batch=5),
    Case("gru", 8, 40, steps=1000, src=F32),
    Case("gru_vanilla", 8, 40, steps=1000, batch=5),
    Case("gru_vanilla", 8, 40, steps=1000, src=F32),
]


@pytest.mark.parametrize("case", HELD, ids=str)
def test_saturated_gates_hold_what_they_keep(isa: str, case: Case) -> None:
    """For 1000 steps and to the last bit, as float64 does, large or small, whatever else is new.

    Half a digit of float32, lost in the same direction in every step, would be 3e-5 of it.
    """
    layer = make(case)
    closed, open_ = (0, 1) if case.cell == "lstm" else (None, 1)  # i and f; z
    layer.bias_src[:, open_] += 80
    if closed is not None:
        layer.bias_src[:, closed] -= 80
    layer.refold()
    src, h_0, c_0 = inputs(case, layer)
    assert h_0 is not None
    h_0 *= torch.logspace(-6, 0, case.hidden)
    if c_0 is not None:
        c_0 *= torch.logspace(-6, 0, case.hidden)
    dst, _, c_n = layer(src, None, h_0, c_0)
    start = h_0[0]
    emitted_0 = start
    if not layer.dynamic:
        zero_point = layer.state_zero_point
        emitted_0 = torch.round(start.double() / layer.state_scale + zero_point)
        if case.cell == "gru_vanilla":  # it goes on with what it emits
            start = (emitted_0 - zero_point).float() * layer.state_scale
    emitted = dst if layer.dynamic else torch.round(dst.double() / layer.state_scale) + zero_point
    expected, _, last = reference_rnn.run(
        oracle_layer(layer, 0), src, emitted, start, None if c_0 is None else c_0[0], emitted_0
    )
    if c_0 is None:
        assert (expected.float() == start).all()
        assert_same(dst, start.expand_as(dst))
    else:
        assert last is not None and (last == c_0[0]).all()
        assert_same(c_n, c_0)

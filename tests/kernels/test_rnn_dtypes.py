# SPDX-License-Identifier: Apache-2.0
"""Recurrent networks in every combination of dtypes that oneDNN names, and its other options."""

from __future__ import annotations

import copy

import pytest
import torch
from calls import F32, S8, U8, assert_same
from cases import random_q
from torch import Tensor, nn

from torchq.nn import QGRU, QLSTM, QRecurrentLayer, RecurrentWeight
from torchq.nn.rnn_layer import UNIT_STATE, UNIT_STATE_S8
from torchq.quantization.qparams import QParams

# src_iter, src_layer, dst_iter, dst_layer; "q" is the quantized dtype
CONFIGS = ("qqqq", "qqqf", "fqfq", "fqff")


def real(q: Tensor, params: QParams) -> Tensor:
    return (q.float() - params.zero_point) * params.scale


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [U8, S8], ids=["u8", "s8"])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU], ids=["lstm", "gru"])
def test_dtypes_of_source_states_and_results(
    isa: str, make: type[nn.RNNBase], dtype: torch.dtype, config: str
) -> None:
    """Whatever the dtypes are, the values are those of the all-float form of the same states."""
    state = UNIT_STATE if dtype == U8 else UNIT_STATE_S8
    torch.manual_seed(3)
    module = make(20, 40, num_layers=2, bidirectional=True).eval()
    cls = QLSTM if make is nn.LSTM else QGRU
    kinds = {"q": dtype, "f": F32}
    h_kind, _, h_n_kind, dst_kind = (kinds[each] for each in config)
    q = cls.from_float(module, state, state, dst_dtype=dst_kind, h_n_dtype=h_n_kind)
    plain = cls.from_float(module, state, state)
    src = random_q((5, 3, 20), dtype, 1)
    h_0 = random_q((4, 3, 40), dtype, 2)
    given = h_0 if h_kind == dtype else real(h_0, state)
    c_0 = torch.randn(4, 3, 40)
    is_lstm = make is nn.LSTM
    dst, last = q(src, (given, c_0) if is_lstm else given)
    exact, exact_last = plain(src, (real(h_0, state), c_0) if is_lstm else real(h_0, state))
    h_n, exact_h_n = (last[0], exact_last[0]) if is_lstm else (last, exact_last)
    assert (dst.dtype, h_n.dtype) == (dst_kind, h_n_kind)
    if is_lstm:
        assert_same(last[1], exact_last[1])
    for got, expected in ((dst, exact), (h_n, exact_h_n)):
        if got.dtype == F32:
            assert_same(got, expected)
        else:
            exact_steps = expected.double() / state.scale.double() + state.zero_point
            assert (got.double() - exact_steps).abs().max() <= 0.5001


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_seven_bits_are_63_steps(granularity: str) -> None:
    """oneDNN's advice for CPUs without VNNI: the factor 63 / max|W|."""
    weight = torch.randn(2, 4, 16, 24, generator=torch.Generator().manual_seed(0))
    q = RecurrentWeight.quantize(weight, granularity, bits=7)
    axes = (3,) if granularity == "per_channel" else (0, 1, 2, 3)
    largest = weight.abs().amax(axes)
    assert q.weight.abs().max() == 63
    torch.testing.assert_close(q.scale.reshape(largest.shape), largest / 63, rtol=1e-6, atol=0)
    factor = (63 / largest).reshape(*largest.shape, *([1] * (4 - largest.dim())))
    assert ((weight * factor - q.weight).abs() <= 0.5001).all()


def vanilla(directions: int, inputs: int, seed: int) -> QRecurrentLayer:
    """One layer of oneDNN's kind of GRU, which resets before the matmul."""
    generator = torch.Generator().manual_seed(seed)

    def weight(columns: int) -> RecurrentWeight:
        values = torch.randn(directions, 3, 24, columns, generator=generator) * 0.3
        return RecurrentWeight.quantize(values)

    bias = torch.randn(directions, 3, 24, generator=generator)
    src = QParams.per_tensor(1 / 127, 128)
    return QRecurrentLayer("gru_vanilla", weight(inputs), weight(24), bias, src=src)


def test_a_network_of_vanilla_gru_layers() -> None:
    """Two layers, both directions: its layers one after another; copied, scripted and restored."""
    layers = [vanilla(2, 20, 1), vanilla(2, 48, 2)]
    q = QGRU(layers, batch_first=True).eval()
    x = random_q((3, 7, 20), U8, 5)
    h_0 = torch.rand(4, 3, 24) - 0.5
    dst, h_n = q(x, h_0)
    first, h_first, _ = layers[0](x.transpose(0, 1), None, h_0[:2])
    second, h_second, _ = layers[1](first, None, h_0[2:])
    assert_same(dst, second.transpose(0, 1))
    assert_same(h_n, torch.cat([h_first, h_second]))
    twin = QGRU.from_spec(q.read_spec())
    twin.load_state_dict(q.state_dict())
    for run in (twin, copy.deepcopy(q), torch.jit.script(q)):
        assert_same(run(x, h_0)[0], dst)

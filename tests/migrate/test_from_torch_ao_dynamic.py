# SPDX-License-Identifier: Apache-2.0
"""Models quantized dynamically with torch.ao: the same weights, and no less accuracy."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from calls import assert_same
from torch import Tensor, nn
from torch.ao.quantization import quantize_fx

import torchq


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.ao says in each call that it is going
        yield


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(50, 16), nn.EmbeddingBag(50, 16, mode="sum")
        self.lstm, self.gru = nn.LSTM(16, 12, 2, bidirectional=True), nn.GRU(16, 8)
        self.cells = nn.ModuleList(
            [nn.LSTMCell(16, 6), nn.GRUCell(16, 6), nn.RNNCell(16, 6, nonlinearity="relu")]
        )
        self.head, self.norm = nn.Linear(16, 4), nn.LayerNorm(24)

    def forward(self, index: Tensor, offsets: Tensor) -> list[Tensor]:
        x = self.words(index)
        states = [cell(x[0]) for cell in self.cells]
        found = [self.head(x), self.norm(self.lstm(x)[0]), self.gru(x)[0], *states[0], *states[1:]]
        return [*found, self.bag(index.flatten(), offsets)]


def test_dynamic_models():
    model = Sequences().eval()
    index, offsets = torch.randint(0, 50, (3, 4)), torch.tensor([0, 5])
    kinds = (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    spec = dict.fromkeys(kinds, ao.default_dynamic_qconfig)
    spec |= dict.fromkeys((nn.Embedding, nn.EmbeddingBag), ao.float_qparams_weight_only_qconfig)
    old = ao.quantize_dynamic(model, spec)
    new = torchq.from_torch_ao(old)
    results = zip(model(index, offsets), old(index, offsets), new(index, offsets), strict=True)
    for expected, theirs, ours in results:
        assert torchq.sqnr(expected, ours) > torchq.sqnr(expected, theirs) - 1 > 20
    rows = {row.name: row for row in torchq.explain(new).rows}
    assert {"lstm", "gru", "head", "cells.0", "cells.1", "cells.2"} == rows.keys()
    assert all(row.quantized for row in rows.values()) and rows["lstm"].kind == "LSTM"
    weight = old.head.weight()
    assert_same(new.head.layer.packed().unpack(), weight.int_repr())
    assert_same(new.head.layer.weight_scale[:1], torch.tensor([weight.q_scale()]))
    assert int(weight.int_repr().min()) == -128 or int(weight.int_repr().max()) == 127
    assert_same(
        new.lstm.weight_hh_l1_reverse, old.lstm.get_weight()["weight_hh_l1_reverse"].dequantize()
    )
    torch.testing.assert_close(  # q * scale + offset here, (q - zero_point) * scale there
        new.words.weight + 0, old.words.weight().dequantize(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("qconfig", (ao.default_dynamic_qconfig, ao.per_channel_dynamic_qconfig))
def test_dynamic_by_fx(qconfig: Any):
    model, src = (
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(),
        torch.randn(3, 16),
    )
    mapping = ao.QConfigMapping().set_global(qconfig)
    old = quantize_fx.convert_fx(quantize_fx.prepare_fx(model, mapping, (src,)))
    new = torchq.from_torch_ao(old)
    assert torchq.sqnr(model(src), new(src)) > torchq.sqnr(model(src), old(src)) - 1
    assert [row.quantized for row in torchq.explain(new).rows] == [True, True]


def test_dynamic_convolution():
    layer = nn.Conv1d(8, 6, 3)
    layer.qconfig = ao.default_dynamic_qconfig
    old = nn.Sequential(torch.ao.nn.quantized.dynamic.Conv1d.from_float(layer))
    src = torch.randn(2, 8, 9)
    assert torchq.sqnr(layer(src), torchq.from_torch_ao(old)(src)) > 30

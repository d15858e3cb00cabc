# SPDX-License-Identifier: Apache-2.0
"""torchq::rnn on every tier, against the oracle in float64 and against itself."""

from __future__ import annotations

from typing import Any

import pytest
import reference_rnn
import torch
from calls import F32, U8, assert_same
from rnn_cases import CASES, Case, inputs, make, oracle_layer
from torch import Tensor

import torchq
from torchq.nn.rnn_layer import QRecurrentLayer


def check_direction(
    case: Case, d: int, src: Tensor, starts: Any, real: Any, states: Tensor
) -> None:
    """Each emitted state, and the float results, are what the step before implies."""
    layer = make(case)
    oracle = oracle_layer(layer, d)
    units = case.projection or case.hidden
    h_0, c_0 = starts
    dst, h_n, c_n = real
    n = case.batch
    h = torch.zeros(n, units) if h_0 is None else h_0[d]
    c = None
    if case.cell == "lstm":
        c = torch.zeros(n, case.hidden) if c_0 is None else c_0[d]
    scale, zero_point, low, high = oracle.state
    emitted_0 = h
    if not layer.dynamic:
        emitted_0 = torch.round(h.double() / scale + zero_point).clamp(low, high)
        if case.cell == "gru_vanilla":
            h = ((emitted_0 - zero_point) * scale).float()
    emitted = states[:, :, d * units : (d + 1) * units]
    float_dst = dst[:, :, d * units : (d + 1) * units]
    if d == 1:
        src, emitted, float_dst = src.flip(0), emitted.flip(0), float_dst.flip(0)
    expected, slack, last_c = reference_rnn.run(oracle, src, emitted, h, c, emitted_0)
    growth = 1 if case.cell not in ("rnn_relu",) and not case.projection else 20
    if layer.dynamic:
        assert ((float_dst - expected).abs() <= 4e-6 * growth + slack * 1.01).all()
    else:
        exact = (expected / scale + zero_point).clamp(low, high)
        off = (emitted.double() - exact).abs()
        assert (off <= 0.5 + reference_rnn.TIE + 1.01 * slack / scale).all(), off.max()
        if case.cell != "gru_vanilla":
            assert ((float_dst - expected).abs() <= 4e-6 * growth + slack * 1.01).all()
        else:
            assert_same(float_dst, ((emitted.float() - zero_point) * torch.tensor(scale)))
    assert_same(h_n[d], float_dst[-1])
    if last_c is not None and not case.projection:
        assert (c_n[d] - last_c).abs().max() < 2e-5


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rnn_is_what_the_oracle_says(isa: str, case: Case) -> None:
    layer = make(case)
    src, h_0, c_0 = inputs(case, layer)
    real = layer(src, None, h_0, c_0)
    states = (
        real[0] if layer.dynamic else make(case, case.state, case.state)(src, None, h_0, c_0)[0]
    )
    for d in range(case.directions):
        check_direction(case, d, src, (h_0, c_0), real, states)
    with torchq.use_isa("reference"):
        for got, expected in zip(real, layer(src, None, h_0, c_0), strict=True):
            assert_same(got, expected)
    assert torchq.last_kernel() == f"rnn{'_dynamic' if layer.dynamic else ''}:reference"


def same_on_threads(
    layer: QRecurrentLayer, src: Tensor, h_0: Tensor | None, c_0: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns one thread's results, and checks that two and three threads give the same."""
    torch.set_num_threads(1)
    whole: tuple[Tensor, ...] = layer(src, None, h_0, c_0)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for got, expected in zip(layer(src, None, h_0, c_0), whole, strict=True):
            assert_same(got, expected, threads)
    return whole


@pytest.mark.parametrize("src", [U8, F32], ids=["static", "dynamic"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru_vanilla"])
def test_threads_batch_and_time_change_no_bit(isa: str, cell: str, src: torch.dtype) -> None:
    """Large enough for several threads; halves of the batch and of the sequence agree with all."""
    case = Case(cell, 72, 200, steps=6, batch=4, src=src, projection=56 if cell == "lstm" else 0)
    layer = make(case)
    x, h_0, c_0 = inputs(case, layer)
    whole = same_on_threads(layer, x, h_0, c_0)

    def rows(state: Tensor | None, part: slice) -> Tensor | None:
        return None if state is None else state[:, part]

    for part in (slice(0, 1), slice(1, 4)):
        dst, h_n, _ = layer(x[:, part], None, rows(h_0, part), rows(c_0, part))
        assert_same(dst, whole[0][:, part])
        assert_same(h_n, whole[1][:, part])
    first, h, c = layer(x[:2], None, h_0, c_0)
    second, h, c = layer(x[2:], None, h, c if cell == "lstm" else None)
    assert_same(torch.cat([first, second]), whole[0])
    assert_same(h, whole[1])
    assert_same(c, whole[2])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_threads_and_time_change_no_bit_of_one_sequence(isa: str, cell: str) -> None:
    """Each thread multiplies the inputs of its own units ahead, eight steps at a time."""
    case = Case(cell, 90, 320, steps=21)
    layer = make(case)
    x, h_0, c_0 = inputs(case, layer)
    whole = same_on_threads(layer, x, h_0, c_0)
    first, h, c = layer(x[:9], None, h_0, c_0)
    second, h, c = layer(x[9:], None, h, c if cell == "lstm" else None)
    assert_same(torch.cat([first, second]), whole[0])
    assert_same(h, whole[1])
    assert_same(c, whole[2])


def test_a_thread_may_have_no_units(isa: str) -> None:
    """Threads share what is projected to, which may be more than the units."""
    case = Case("lstm", 300, 16, steps=16, projection=1024)
    layer = make(case)
    same_on_threads(layer, *inputs(case, layer))


PACKED = [
    *(CASES[i] for i in (2, 4, 5, 7, 9)),
    Case("gru", 64, 64, batch=53, directions=2),
    Case("lstm", 16, 224, batch=53, directions=2),
    Case("rnn_tanh", 12, 40, batch=5, directions=2),
    Case("gru_vanilla", 12, 40, batch=5, directions=2),
]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences_are_their_rows_one_by_one(isa: str, case: Case) -> None:
    lengths = [6, 4, 4, 3, 1][: case.batch] if case.batch <= 5 else [6] * 5 + [4] * 25 + [2] * 23
    layer = make(case)
    src, h_0, c_0 = inputs(case, layer)
    packed = torch.nn.utils.rnn.pack_padded_sequence(src[:6].float(), torch.tensor(lengths))
    data = packed.data.to(src.dtype)
    dst, h_n, c_n = layer(data, packed.batch_sizes, h_0, c_0)
    result = torch.nn.utils.rnn.PackedSequence(dst, packed.batch_sizes)
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(result)
    for n, length in enumerate(lengths):
        c = None if c_0 is None else c_0[:, n : n + 1]
        alone = layer(src[:length, n : n + 1], None, h_0[:, n : n + 1], c)
        assert_same(padded[:length, n : n + 1], alone[0])
        assert_same(h_n[:, n : n + 1], alone[1])
        if c_0 is not None:
            assert_same(c_n[:, n : n + 1], alone[2])


def test_strided_sources(isa: str) -> None:
    check_strided_sources(Case("lstm", 16, 24, steps=4, batch=3))
    check_strided_sources(Case("lstm", 64, 24, steps=4, batch=7))


def check_strided_sources(case: Case) -> None:
    layer = make(case)
    src, h_0, c_0 = inputs(case, layer)
    expected = layer(src, None, h_0, c_0)
    for strided in (
        src.transpose(0, 1).contiguous().transpose(0, 1),
        src.repeat(1, 1, 2)[..., : case.inputs],
    ):
        for got, same in zip(layer(strided, None, h_0, c_0), expected, strict=True):
            assert_same(got, same)
    wide = src.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert_same(layer(wide, None, h_0, c_0)[0], expected[0])


def test_an_empty_batch_gives_empty_results() -> None:
    dst, h_n, c_n = make(Case("lstm", 12, 20))(torch.zeros(3, 0, 12, dtype=U8))
    assert (dst.shape, h_n.shape, c_n.shape) == ((3, 0, 20), (1, 0, 20), (1, 0, 20))

# SPDX-License-Identifier: Apache-2.0
"""torchq::rnn on every tier, against the oracle in float64 and against itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import reference_rnn
import torch
from calls import F32, S8, U8, assert_same
from cases import random_q
from torch import Tensor

import torchq
from torchq.nn.rnn_layer import GATES, UNIT_STATE, UNIT_STATE_S8, QRecurrentLayer
from torchq.nn.rnn_weight import RecurrentWeight
from torchq.quantization.qparams import QParams


@dataclass(frozen=True)
class Case:
    cell: str
    inputs: int
    hidden: int
    steps: int = 7
    batch: int = 1
    projection: int = 0
    directions: int = 1
    src: torch.dtype = U8  # float32: dynamic
    state: torch.dtype = U8
    peephole: bool = False
    per_tensor: bool = False
    initial: bool = True
    narrow: bool = False

    def __str__(self) -> str:
        words = [self.cell, f"i{self.inputs}h{self.hidden}t{self.steps}n{self.batch}"]
        words += [f"p{self.projection}"] if self.projection else []
        words += [f"d{self.directions}", str(self.src)[6:], str(self.state)[6:]]
        words += ["peephole"] if self.peephole else []
        return "-".join(words)


CASES = [
    Case("lstm", 16, 16),
    Case("lstm", 1, 1, batch=2),
    Case("lstm", 13, 37, batch=3, directions=2),
    Case("lstm", 24, 40, batch=7, src=S8, state=S8, directions=2),
    Case("lstm", 20, 33, batch=2, peephole=True, per_tensor=True),
    Case("lstm", 9, 50, batch=5, projection=21, directions=2),
    Case("lstm", 9, 50, batch=5, projection=21, state=S8, narrow=True),
    Case("lstm", 17, 30, batch=3, src=F32, directions=2),
    Case("lstm", 17, 30, batch=3, src=F32, projection=11, peephole=True),
    Case("gru", 18, 35, batch=3, directions=2),
    Case("gru", 18, 35, src=S8, state=S8, initial=False, narrow=True),
    Case("gru", 6, 20, batch=4, src=F32, directions=2),
    Case("gru_vanilla", 12, 34, batch=3, directions=2),
    Case("gru_vanilla", 12, 34, src=S8, state=S8),
    Case("rnn_tanh", 10, 19, batch=2, directions=2),
    Case("rnn_tanh", 10, 19, batch=8, src=F32),
    Case("rnn_relu", 10, 19, batch=2, state=S8),
    Case("lstm", 70, 300, steps=4),  # several blocks of groups, walked back and forth
    Case("gru", 70, 437, steps=4, src=F32),
    # Many rows: inputs in the steps, and what a matrix unit reads in whole, shared or padded tiles.
    Case("lstm", 64, 128, steps=4, batch=9),
    Case("lstm", 128, 64, steps=3, batch=20, state=S8),
    Case("lstm", 64, 64, steps=2, batch=71, src=F32),
    Case("lstm", 40, 128, steps=2, batch=50, projection=64),
    Case("gru", 64, 192, steps=2, batch=49, directions=2),
    Case("gru_vanilla", 64, 64, steps=3, batch=17, src=F32),
    Case("gru_vanilla", 30, 320, steps=3),
    # Many rows of many inputs, whose cells ride: tiles of three and of four, states in one go and
    # more, inputs before them and in the steps.
    Case("lstm", 20, 128, steps=3, batch=7),  # the fewest, as of the GRU
    Case("lstm", 20, 144, steps=3, batch=11),
    Case("lstm", 20, 256, steps=3, batch=13, directions=2),
    Case("lstm", 32, 224, steps=3, batch=71),
    Case("lstm", 20, 800, steps=2, batch=7),  # 50 KB a group
    Case("gru", 20, 176, steps=3, batch=10, directions=2),
    Case("gru", 16, 224, steps=3, batch=131),
    # One row that reads its weights as streams, one or two, and cells among their products: whole
    # groups and not, quads that are left, parts too short to be parted.
    Case("rnn_tanh", 20, 528, steps=3),
    Case("rnn_relu", 20, 544, steps=3, state=S8),
    Case("lstm", 20, 256, steps=4, directions=2),
    Case("lstm", 20, 250, steps=3, src=F32),
    Case("lstm", 20, 180, steps=3, state=S8, peephole=True),
    Case("lstm", 20, 176, steps=3),
    Case("lstm", 20, 640, steps=3, projection=28),
    Case("lstm", 20, 272, steps=3, projection=256),
    Case("gru", 20, 128, steps=4, directions=2),
    Case("gru", 20, 208, steps=3),
    Case("gru", 20, 187, steps=3, src=F32),
    Case("lstm", 8, 1030, steps=3),  # long panels
    Case("gru", 8, 1024, steps=3),
    # More than eight steps of them, which multiply the inputs of the next eight: whole and fewer,
    # panels in pairs and not, tiles in one piece and in many.
    Case("lstm", 80, 256, steps=20, directions=2),
    Case("lstm", 410, 160, steps=9, src=S8, state=S8),
    Case("lstm", 45, 176, steps=17, directions=2),
    Case("lstm", 0, 160, steps=10),
    Case("lstm", 70, 250, steps=16, src=F32),
    Case("lstm", 90, 272, steps=10, projection=256),
    Case("lstm", 260, 1030, steps=11),
    Case("gru", 61, 208, steps=16),
    Case("gru", 260, 187, steps=25, src=F32, directions=2),
    Case("rnn_tanh", 64, 128, steps=2, batch=50, src=S8, per_tensor=True),
]


def weight(shape: tuple[int, ...], seed: int, case: Case) -> RecurrentWeight:
    """Full-range integers whose real values make gates of order 1."""
    q = random_q(shape, S8, seed)
    q = q.clamp(-60, 60) if case.narrow else q.clamp_min(-127)
    per = torch.rand(shape[:3], generator=torch.Generator().manual_seed(seed)) + 0.5
    scale = per / (60 * max(shape[3], 1) ** 0.5)
    return RecurrentWeight(q, scale.flatten()[:1] if case.per_tensor else scale)


def make(case: Case, dst: torch.dtype = F32, h_n: torch.dtype = F32) -> QRecurrentLayer:
    d, g, h = case.directions, GATES[case.cell], case.hidden
    units = case.projection or h
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dynamic = case.src == F32
    zero = 100 if case.src == U8 else -9
    state = UNIT_STATE if case.state == U8 else UNIT_STATE_S8
    if case.cell == "rnn_relu" or case.projection:
        state = QParams.per_tensor(3 / 127, 128 if case.state == U8 else -20, case.state)
    return QRecurrentLayer(
        case.cell,
        weight((d, g, h, case.inputs), 1, case),
        weight((d, g, h, units), 2, case),
        normal(d, g, h) * 0.5,
        normal(d, g, h) * 0.5,
        projection=weight((d, 1, units, h), 3, case) if case.projection else None,
        peephole=normal(d, 3, h) * 0.5 if case.peephole else None,
        src=None if dynamic else QParams.per_tensor(0.02, zero, case.src),
        state=state,
        dst_dtype=dst,
        h_n_dtype=h_n,
    )


def inputs(case: Case, layer: QRecurrentLayer) -> tuple[Tensor, Tensor | None, Tensor | None]:
    d, n = case.directions, case.batch
    src = random_q((case.steps, n, case.inputs), U8 if case.src == F32 else case.src, 7)
    if case.src == F32:
        src = torch.randn(src.shape, generator=torch.Generator().manual_seed(8)) + 0.3
    if not case.initial:
        return src, None, None
    generator = torch.Generator().manual_seed(9)
    h_0 = torch.rand(d, n, case.projection or case.hidden, generator=generator) * 2 - 1
    c_0 = torch.randn(d, n, case.hidden, generator=generator) if case.cell == "lstm" else None
    return src, h_0, c_0


def oracle_layer(layer: QRecurrentLayer, d: int) -> reference_rnn.Layer:
    def scale(name: str) -> Tensor:
        values = getattr(layer, f"scale_{name}")
        return values if values.numel() == 1 else values[d]

    projects = layer.projection_size > 0
    low, high = layer.geometry[5:]
    return reference_rnn.Layer(
        layer.cell,
        layer.unpacked("src")[d],
        layer.unpacked("state")[d],
        scale("src"),
        scale("state"),
        layer.bias_src[d],
        layer.bias_state[d],
        None if layer.dynamic else (layer.src_scale.item(), layer.src_zero_point.item()),
        (layer.state_scale.item(), layer.state_zero_point.item(), low, high),
        layer.unpacked("projection")[d, 0] if projects else None,
        scale("projection").reshape(-1) if projects else None,
        (layer.hidden_scale.item(), layer.hidden_zero_point.item()),
        None if layer.peephole is None else layer.peephole[d],
    )


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
    """What one thread computes, which two and three compute, too."""
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


ERRORS = {
    "src must be uint8, int8 or, for a dynamic layer, float32": lambda x: (
        x | {"src": x["src"].int()}
    ),
    "src must have 12 features": lambda x: x | {"src": x["src"][..., :5].contiguous()},
    "src must be [T, N, inputs]": lambda x: x | {"src": x["src"][0]},
    "src must have at least one step": lambda x: x | {"src": x["src"][:0]},
    "h_0 must have shape [1, 2, 20]": lambda x: x | {"h_0": x["h_0"][:, :1]},
    "h_0 must be float32 or uint8": lambda x: x | {"h_0": x["h_0"].double()},
    "h_0 must be finite": lambda x: x | {"h_0": x["h_0"] * torch.inf},
    "c_0 must have shape [1, 2, 20]": lambda x: x | {"c_0": x["c_0"][..., :3]},
    "weight_src must have shape": lambda x: x | {"weight_src": x["weight_src"][:1]},
    "weight_state must be int8": lambda x: x | {"weight_state": x["weight_state"].int()},
    "bias must have": lambda x: x | {"bias": x["bias"][:7]},
    "extra must have": lambda x: x | {"extra": torch.zeros(5)},
    "weight_projection must come": lambda x: x | {"weight_projection": x["weight_src"]},
    "pair_bounds must have": lambda x: x | {"pair_bounds": x["pair_bounds"][:1]},
    "scales must be normal": lambda x: x | {"scales": torch.tensor([0.0, 1.0])},
    "zero_points must lie": lambda x: x | {"zero_points": torch.tensor([0, 300, 0]).int()},
    "geometry must be": lambda x: x | {"geometry": [9, *x["geometry"][1:]]},
    "geometry's lo and hi": lambda x: x | {"geometry": [*x["geometry"][:5], -128, 127]},
    "dst_dtype and h_n_dtype must": lambda x: x | {"dst_dtype": 1},
    "batch_sizes must be positive": lambda x: packed(x, [2, 3]),
    "batch_sizes must sum": lambda x: packed(x, [2, 1]),
}
NAMES = [
    *("src", "batch_sizes", "h_0", "c_0", "weight_src", "compensation_src", "multiplier_src"),
    *("weight_state", "compensation_state", "multiplier_state", "bias", "extra"),
    *("weight_projection", "compensation_projection", "multiplier_projection", "pair_bounds"),
    *("scales", "zero_points", "geometry", "dst_dtype", "state_dtype", "h_n_dtype"),
]


def packed(x: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    return x | {"src": x["src"].flatten(0, 1), "batch_sizes": torch.tensor(sizes)}


def arguments(case: Case) -> dict[str, Any]:
    layer = make(case)
    values = {name: getattr(layer, name, None) for name in NAMES}
    src, h_0, c_0 = inputs(case, layer)
    bounds = [layer.pair_bound_src, layer.pair_bound_state, layer.pair_bound_projection]
    values |= {"src": src, "h_0": h_0, "c_0": c_0, "dst_dtype": 6, "h_n_dtype": 6}
    values |= {"pair_bounds": [b for b in bounds if b is not None]}
    return values | {"state_dtype": layer.state_code}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    given = arguments(Case("lstm", 12, 20, steps=2, batch=2))
    torch.ops.torchq.rnn(*given.values())
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        torch.ops.torchq.rnn(*ERRORS[message](given).values())
    assert str(caught.value).startswith(f"torchq.rnn: {message}")


def test_a_source_with_grad_is_refused() -> None:
    given = arguments(Case("gru", 12, 20, src=F32))
    given["src"].requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ops.torchq.rnn(*given.values())


@pytest.mark.parametrize("case", [CASES[2], CASES[5], CASES[7], CASES[9], CASES[14]], ids=str)
def test_opcheck(case: Case) -> None:
    given = arguments(case)
    torch.library.opcheck(torch.ops.torchq.rnn.default, tuple(given.values()))
    sizes = {"src": given["src"].flatten(0, 1), "batch_sizes": torch.full([case.steps], case.batch)}
    torch.library.opcheck(torch.ops.torchq.rnn.default, tuple((given | sizes).values()))


def test_an_empty_batch_gives_empty_results() -> None:
    dst, h_n, c_n = make(Case("lstm", 12, 20))(torch.zeros(3, 0, 12, dtype=U8))
    assert (dst.shape, h_n.shape, c_n.shape) == ((3, 0, 20), (1, 0, 20), (1, 0, 20))

# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers of full-range integers, their inputs, and the oracle's form of them."""

from __future__ import annotations

from dataclasses import dataclass

import reference_rnn
import torch
from calls import F32, S8, U8
from cases import random_q
from torch import Tensor

from torchq.nn.rnn_layer import GATES, UNIT_STATE, UNIT_STATE_S8, QRecurrentLayer
from torchq.nn.rnn_packing import RecurrentWeight
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

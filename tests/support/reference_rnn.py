# SPDX-License-Identifier: Apache-2.0
"""The oracle of recurrent layers: int64 sums and float64 cells, from readable arguments.

A quantized state is rounded in every step, so that two correct computations with the smallest
difference part ways at a tie. The oracle is therefore led by the states that the layer itself
emitted: it checks that each is what the one before it implies. A state that is a step off, or an
error that accumulates, cannot hide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TIE = 2e-3  # in steps of the state: what float32 cells may be off by near a tie


@dataclass
class Layer:
    """One direction of one layer; gates i f g o or r z n, weights ``[gates, units, inputs]``."""

    cell: str
    weight_src: Tensor
    weight_state: Tensor
    scale_src: Tensor  # [gates, units] or [1]
    scale_state: Tensor
    bias_src: Tensor  # [gates, units]
    bias_state: Tensor
    src: tuple[float, int] | None  # scale, zero point; None: dynamic
    state: tuple[float, int, int, int]  # scale, zero point, lowest, highest
    projection: Tensor | None = None  # [units, hidden]
    scale_projection: Tensor | None = None
    hidden: tuple[float, int] = (1 / 127, 128)
    peephole: Tensor | None = None


def product(q: Tensor, zero_point: Tensor | int, weight: Tensor, scale: Tensor) -> Tensor:
    """Real ``(q - zero_point) @ weight`` as ``[N, gates, units]``; scale per gate and unit."""
    centered = q.long() - zero_point
    sums = torch.einsum("nk,guk->ngu", centered, weight.long())
    return sums.double() * scale.double()


def quantize_affine(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of float32 as u8, each with scale and zero point from its range and zero."""
    low, high = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
    scale = ((high * 0.5 - low * 0.5) / 127.5).float()
    zero_point = torch.round(-low / scale).clamp_max(255)
    inverse = 1 / scale
    y = (x.double() * inverse.double()[..., None] + zero_point.double()[..., None]).float()
    return torch.round(y).clamp(0, 255), scale, zero_point.long()


def quantize_symmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of float32 as u8 around 128, each with the scale of its largest value."""
    scale = (x.abs().amax(-1) / 127).clamp_min(1.17549435e-38)
    y = (x.double() * (1 / scale).double()[..., None] + 128).float()
    return torch.round(y).clamp(0, 255), scale


def run(
    layer: Layer, src: Tensor, emitted: Tensor, h: Tensor, c: Tensor | None, emitted_0: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes what every step should be, given the states it emitted.

    Args:
        layer: parameters.
        src: ``[T, N, inputs]``, integers, or float32 for a dynamic layer.
        emitted: ``[T, N, units]``, the layer's states: integers, or float32 for a dynamic layer.
        h: float ``[N, units]``, the real initial state.
        c: float ``[N, hidden]`` of an LSTM.
        emitted_0: the initial state as in ``emitted``.

    Returns:
        Real states ``[T, N, units]`` in float64, how far each may be off because a value in between
        was near a tie, and the last c.
    """
    states, slacks = [], []
    h, c = h.double(), None if c is None else c.double()
    for t in range(src.shape[0]):
        before = emitted_0 if t == 0 else emitted[t - 1]
        h, c, slack = step(layer, src[t], before, h, c)
        if layer.cell == "gru_vanilla":  # what it emits is what it goes on with
            scale, zero_point = layer.state[:2]
            kept = emitted[t].double()
            h, real = (kept if layer.src is None else (kept - zero_point) * scale), h
            states.append(real)
        else:
            states.append(h)
        slacks.append(slack)
    return torch.stack(states), torch.stack(slacks), c


def _state_product(layer: Layer, state: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    if layer.src is None:
        q, row_scale = quantize_symmetric(state)
        return product(q, 128, weight, scale) * row_scale.double()[:, None, None]
    return product(state, layer.state[1], weight, scale * layer.state[0])


def _middle(
    layer: Layer, x: Tensor, weight: Tensor, scale: Tensor, params: tuple[float, int]
) -> tuple[Tensor, Tensor]:
    """The product with a value that is quantized but not emitted, and its slack."""
    if layer.src is None:  # scale per row: a step is its largest value / 127
        row = x.abs().amax(-1, keepdim=True) / 127
        y = x / row + 128
        step_size, zero_point = row, 128
    else:
        y = x / params[0] + params[1]
        step_size, zero_point = torch.full_like(x[:, :1], params[0]), params[1]
    near = ((y - torch.floor(y) - 0.5).abs() < TIE).double()
    q = torch.round(y).clamp(layer.state[2], layer.state[3])
    real = product(q, zero_point, weight, scale) * step_size[:, :, None]
    slack = torch.einsum("nk,guk->ngu", near, weight.abs().double()) * scale.double()
    return real, slack * step_size[:, :, None]


def step(
    layer: Layer, src: Tensor, state: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """One step: the real h, c, and the slack of h."""
    if layer.src is None:
        q, row_scale, zero_point = quantize_affine(src)
        x = product(q, zero_point[:, None], layer.weight_src, layer.scale_src)
        x = x * row_scale.double()[:, None, None]
    else:
        scale, zero = layer.src
        x = product(src, zero, layer.weight_src, layer.scale_src * scale)
    x = x + layer.bias_src.double()
    bias = layer.bias_state.double()
    weight, scales = layer.weight_state, layer.scale_state.expand(layer.weight_state.shape[:2])
    slack = torch.zeros_like(h)
    if layer.cell == "lstm":
        assert c is not None
        a = x + _state_product(layer, state, weight, scales) + bias
        i, f, g, o = a.unbind(1)
        p = layer.peephole
        if p is not None:
            i, f = i + p[0].double() * c, f + p[1].double() * c
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        if p is not None:
            o = o + p[2].double() * c
        h = torch.sigmoid(o) * torch.tanh(c)
        if layer.projection is not None:
            assert layer.scale_projection is not None
            w = layer.projection[None]
            y, slack = _middle(
                layer, h, w, layer.scale_projection.expand(w.shape[:2]), layer.hidden
            )
            return y[:, 0], c, slack[:, 0]
        return h, c, slack
    if layer.cell == "gru":
        r, z, n = (_state_product(layer, state, weight, scales) + bias).unbind(1)
        r, z = torch.sigmoid(x[:, 0] + r), torch.sigmoid(x[:, 1] + z)
        n = torch.tanh(x[:, 2] + r * n)
        return z * h + (1 - z) * n, None, slack
    if layer.cell == "gru_vanilla":
        gates = x[:, :2] + _state_product(layer, state, weight[:2], scales[:2]) + bias[:2]
        r, z = torch.sigmoid(gates).unbind(1)
        y, slack = _middle(layer, r * h, weight[2:], scales[2:], layer.state[:2])
        n = torch.tanh(x[:, 2] + y[:, 0] + bias[2])
        return z * h + (1 - z) * n, None, slack[:, 0]
    a = (x + _state_product(layer, state, weight, scales) + bias)[:, 0]
    return (torch.tanh(a) if layer.cell == "rnn_tanh" else a.clamp_min(0)), None, slack

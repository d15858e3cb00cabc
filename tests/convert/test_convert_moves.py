# SPDX-License-Identifier: Apache-2.0
"""Calls that move elements between two convolutions: int8, or float with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flows import sqnr
from models import Wired
from torch import Tensor, nn
from torch.nn import functional as F

import torchq

# From a tensor of 2x8x6x6 to one that a convolution of 8 channels takes.
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "broadcast_to": lambda x: x[:, :, :1].broadcast_to(2, 8, 6, 6),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "expand": lambda x: x[:, :, :1].expand(-1, -1, 6, -1),
    "flip": lambda x: x.flip(2, 3),
    "index": lambda x: x[:, torch.tensor([7, 0, 1, 2, 3, 4, 5, 6])],
    "index_select": lambda x: x.index_select(1, torch.tensor([7, 0, 1, 2, 3, 4, 5, 6])),
    "movedim": lambda x: x.movedim(1, -1).movedim(-1, 1),
    "narrow": lambda x: x.narrow(2, 1, 4),
    "pad_circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "pad_constant": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5),
    "pad_reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "pad_replicate": lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"),
    "permute": lambda x: x.permute(0, 1, 3, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2).repeat(1, 4, 1, 1),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2)[:, :8],
    "repeat": lambda x: x[:, :4].repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x[:, :4].repeat_interleave(2, 1),
    "roll": lambda x: x.roll((1, 2), (2, 3)),
    "select": lambda x: x.select(2, 3).unsqueeze(2),
    "split": lambda x: torch.cat(x.split([3, 5], 1)[::-1], 1),
    "swapaxes": lambda x: x.swapaxes(2, 3),
    "tensor_split": lambda x: torch.cat(x.tensor_split((2, 5), 1), 1),
    "tile": lambda x: x[:, :4].tile(1, 2, 1, 1),
    "unbind": lambda x: torch.stack(x.unbind(2)[::-1], 2),
    "unflatten": lambda x: x.flatten(2).unflatten(2, (4, 9)),
    "unfold": lambda x: x.unfold(2, 2, 2).flatten(3),
    "upsample": lambda x: F.interpolate(x, scale_factor=2),
}
FLOAT: dict[str, Callable[[Tensor], Tensor]] = {
    "im2col": lambda x: F.unfold(x, 3, padding=1).view(2, 8, 9, 36),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "grid_sample": lambda x: F.grid_sample(
        x, F.affine_grid(torch.eye(2, 3).repeat(2, 1, 1), [2, 8, 6, 6], False), align_corners=False
    ),
    "gather": lambda x: x.gather(1, torch.zeros(2, 8, 6, 6, dtype=torch.long)),
    "tril": lambda x: x.tril(),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(8, 1).values,
}


@pytest.mark.parametrize("name", [*MOVES, *FLOAT])
def test_moves_between_convolutions(name: str) -> None:
    move = (MOVES | FLOAT)[name]
    torch.manual_seed(0)
    model = Wired(
        lambda m, x: m.b(move(m.a(x))), a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 4, 1)
    ).eval()
    data = [torch.randn(2, 3, 6, 6) for _ in range(4)]
    quantized = torchq.quantize(model, data)
    with torch.no_grad():
        floats, ints = model(data[0]), quantized(data[0])
    assert ints.shape == floats.shape and sqnr(floats, ints) > 25
    runs_int8 = {row.name: row.quantized for row in torchq.explain(quantized).rows}
    assert runs_int8["a"] and runs_int8["b"]

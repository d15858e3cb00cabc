# SPDX-License-Identifier: Apache-2.0
"""Networks with an answer per pixel or cell: a U-Net, and a detector in the manner of YOLOv5n."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.blocks import ConvNorm


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(inputs, outputs, 3), ConvNorm(outputs, outputs, 3))


class UNet(nn.Module):
    """Four levels; transposed convolutions go up, each level joins its counterpart."""

    def __init__(self, width: int = 64, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        pairs = list(itertools.pairwise(widths))
        self.first = double(3, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(double(b, a) for a, b in reversed(pairs))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(self.pool(levels[-1])))
        x = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([levels.pop(), up(x)], dim=1))
        return self.head(x)


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> ConvNorm:
    return ConvNorm(inputs, outputs, kernel, stride, act=nn.SiLU, eps=1e-3)


class Cell(nn.Module):
    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels), conv(channels, channels, 3))
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.shortcut else self.body(x)


class CrossStage(nn.Module):
    """Half of the channels pass through cells, half go around them."""

    def __init__(self, inputs: int, outputs: int, cells: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.into, self.around = conv(inputs, half), conv(inputs, half)
        self.cells = nn.Sequential(*(Cell(half, shortcut) for _ in range(cells)))
        self.join = conv(2 * half, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat((self.cells(self.into(x)), self.around(x)), 1))


class PyramidPool(nn.Module):
    """Maxima over windows of 5, 9 and 13 pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow, self.join = conv(channels, channels // 2), conv(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        pools = [self.narrow(x)]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        return self.join(torch.cat(pools, 1))


class Detector(nn.Module):
    """A pyramid down and up again, with boxes, objectness and classes for 3 anchors a cell."""

    def __init__(self, width: int = 16, classes: int = 80) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            ConvNorm(3, w, 6, 2, padding=2, act=nn.SiLU, eps=1e-3),
            *(conv(w, 2 * w, 3, 2), CrossStage(2 * w, 2 * w)),
        )
        self.fine = nn.Sequential(conv(2 * w, 4 * w, 3, 2), CrossStage(4 * w, 4 * w, 2))
        self.middle = nn.Sequential(conv(4 * w, 8 * w, 3, 2), CrossStage(8 * w, 8 * w, 3))
        coarse = (conv(8 * w, 16 * w, 3, 2), CrossStage(16 * w, 16 * w), PyramidPool(16 * w))
        self.coarse = nn.Sequential(*coarse, conv(16 * w, 8 * w))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.up_middle = nn.Sequential(CrossStage(16 * w, 8 * w, 1, False), conv(8 * w, 4 * w))
        self.up_fine = CrossStage(8 * w, 4 * w, 1, False)
        self.down_middle, self.down_coarse = conv(4 * w, 4 * w, 3, 2), conv(8 * w, 8 * w, 3, 2)
        self.out_middle = CrossStage(8 * w, 8 * w, 1, False)
        self.out_coarse = CrossStage(16 * w, 16 * w, 1, False)
        outputs = 3 * (classes + 5)
        self.heads = nn.ModuleList(nn.Conv2d(c * w, outputs, 1) for c in (4, 8, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.fine(self.stem(x))
        middle = self.middle(fine)
        coarse = self.coarse(middle)
        middle = self.up_middle(torch.cat((self.up(coarse), middle), 1))
        fine = self.up_fine(torch.cat((F.interpolate(middle, scale_factor=2.0), fine), 1))
        joined = self.out_middle(torch.cat((self.down_middle(fine), middle), 1))
        coarse = self.out_coarse(torch.cat((self.down_coarse(joined), coarse), 1))
        return self.heads[0](fine), self.heads[1](joined), self.heads[2](coarse)

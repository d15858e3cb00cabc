# SPDX-License-Identifier: Apache-2.0
"""ConvNeXt-T: depthwise 7x7 filters, layer norms over channels, linear layers and GELU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.filter = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.narrow = nn.Linear(4 * channels, channels)
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.filter(x).permute(0, 2, 3, 1))
        y = self.narrow(self.act(self.wide(y)))
        return x + self.layer_scale * y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(
        self,
        depths: Sequence[int] = (3, 3, 9, 3),
        widths: Sequence[int] = (96, 192, 384, 768),
        classes: int = 1000,
    ) -> None:
        super().__init__()
        inputs = widths[0]
        layers: list[nn.Module] = [nn.Conv2d(3, inputs, 4, 4), ChannelNorm(inputs, eps=1e-6)]
        for depth, width in zip(depths, widths, strict=True):
            if width != inputs:
                layers += [ChannelNorm(inputs, eps=1e-6), nn.Conv2d(inputs, width, 2, 2)]
            layers += [ConvNextBlock(width) for _ in range(depth)]
            inputs = width
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(inputs, eps=1e-6)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x).mean((2, 3))))

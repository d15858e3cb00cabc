# SPDX-License-Identifier: Apache-2.0
"""Classifiers that concatenate: DenseNet-121 and Inception-V3 (without auxiliary classifier)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.blocks import ConvNorm, Size


class DenseLayer(nn.Module):
    """Appends ``growth`` channels; norm and relu come before each convolution."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = (
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
        )
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        grown = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(grown)))], 1)


class DenseNet(nn.Module):
    def __init__(
        self,
        depths: Sequence[int] = (6, 12, 24, 16),
        growth: int = 32,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [ConvNorm(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1)]
        for stage, depth in enumerate(depths):
            if stage:
                layers += [nn.BatchNorm2d(channels), nn.ReLU()]
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels, growth))
                channels += growth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.features(x), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))


Row = tuple[int, Size] | tuple[int, Size, int, Size]


def tower(inputs: int, *rows: Row) -> nn.Sequential:
    """Convolutions (channels, kernel), which keep the size, or with (..., stride, padding)."""
    layers = []
    for channels, kernel, *window in rows:
        stride, padding = window or (1, None)
        layers.append(ConvNorm(inputs, channels, kernel, stride, padding=padding, eps=1e-3))
        inputs = channels
    return nn.Sequential(*layers)


class Pool(nn.Module):
    """The 3x3 average in front of a 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = tower(inputs, (outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))


class Fork(nn.Module):
    """Two branches behind a common trunk."""

    def __init__(self, trunk: nn.Module, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.trunk, self.left, self.right = trunk, left, right

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return torch.cat([self.left(x), self.right(x)], 1)


class Branches(nn.ModuleList):
    """All branches read the same, their results are concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def inception_v3(width: int = 16, classes: int = 1000) -> nn.Module:
    w = width  # all channel numbers are multiples of 16
    down: tuple[int, int] = (2, 0)
    layers: list[nn.Module] = [
        tower(3, (2 * w, 3, *down), (2 * w, 3, 1, 0), (4 * w, 3)),
        nn.MaxPool2d(3, 2),
        tower(4 * w, (5 * w, 1), (12 * w, 3, 1, 0)),
        nn.MaxPool2d(3, 2),
    ]
    inputs = 12 * w
    for pooled in (2 * w, 4 * w, 4 * w):
        five, three = ((3 * w, 1), (4 * w, 5)), ((4 * w, 1), (6 * w, 3), (6 * w, 3))
        towers = [tower(inputs, (4 * w, 1)), tower(inputs, *five), tower(inputs, *three)]
        layers.append(Branches([*towers, Pool(inputs, pooled)]))
        inputs = 14 * w + pooled
    double = tower(inputs, (4 * w, 1), (6 * w, 3), (6 * w, 3, *down))
    layers.append(Branches([tower(inputs, (24 * w, 3, *down)), double, nn.MaxPool2d(3, 2)]))
    inputs = 48 * w
    for c in (8 * w, 10 * w, 10 * w, 12 * w):
        seven = tower(inputs, (c, 1), (c, (1, 7)), (12 * w, (7, 1)))
        double = tower(inputs, (c, 1), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (12 * w, (1, 7)))
        layers.append(Branches([tower(inputs, (12 * w, 1)), seven, double, Pool(inputs, 12 * w)]))
    three = tower(inputs, (12 * w, 1), (20 * w, 3, *down))
    seven = tower(inputs, *((12 * w, k) for k in (1, (1, 7), (7, 1))), (12 * w, 3, *down))
    layers.append(Branches([three, seven, nn.MaxPool2d(3, 2)]))
    inputs = 80 * w
    for _ in range(2):
        forks = []
        for trunk in (tower(inputs, (24 * w, 1)), tower(inputs, (28 * w, 1), (24 * w, 3))):
            forks.append(Fork(trunk, *(tower(24 * w, (24 * w, k)) for k in ((1, 3), (3, 1)))))
        layers.append(Branches([tower(inputs, (20 * w, 1)), *forks, Pool(inputs, 12 * w)]))
        inputs = 128 * w
    head = [nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers, *head)

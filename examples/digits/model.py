# SPDX-License-Identifier: Apache-2.0
"""A small residual network for 16x16 digits, written as any PyTorch model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two 3x3 convolutions around an addition; a 1x1 convolution where the width changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        same = inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_bn(inputs, outputs, 1))
        self.body = nn.Sequential(
            *conv_bn(inputs, outputs, 3), nn.ReLU(), *conv_bn(outputs, outputs, 3)
        )
        self.relu = nn.ReLU()

    def forward(self, src: Tensor) -> Tensor:
        return self.relu(self.body(src) + self.shortcut(src))


class DigitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.residual1 = Residual(32, 64)
        self.depthwise = nn.Sequential(*conv_bn(64, 64, 3, stride=2, groups=64), nn.ReLU6())
        self.pointwise = nn.Sequential(*conv_bn(64, 128, 1), nn.ReLU())
        self.residual2 = Residual(128, 128)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(128, 10)

    def forward(self, src: Tensor) -> Tensor:
        x = self.residual1(self.stem(src))
        x = self.residual2(self.pointwise(self.depthwise(x)))
        return self.classifier(torch.flatten(self.pool(x), 1))

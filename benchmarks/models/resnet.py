# SPDX-License-Identifier: Apache-2.0
"""Residual networks: ResNet-18 and -50, RegNetX-400MF, and ResNet-18 on video (R3D)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from benchmarks.models.blocks import ConvNorm


class Residual(nn.Module):
    """``relu(shortcut(x) + body(x))``; the shortcut is a 1x1 convolution where shapes differ."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int, dims: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else ConvNorm(inputs, outputs, 1, stride, act=None, dims=dims)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        return self.relu(self.body(x) + identity)


def basic(inputs: int, width: int, stride: int, dims: int = 2) -> Residual:
    first = ConvNorm(inputs, width, 3, stride, dims=dims)
    body = nn.Sequential(first, ConvNorm(width, width, 3, act=None, dims=dims))
    return Residual(body, inputs, width, stride, dims)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    narrow, filtered = ConvNorm(inputs, width), ConvNorm(width, width, 3, stride)
    body = nn.Sequential(narrow, filtered, ConvNorm(width, 4 * width, act=None))
    return Residual(body, inputs, 4 * width, stride, 2)


def grouped(inputs: int, width: int, stride: int, group_width: int) -> Residual:
    narrow = ConvNorm(inputs, width)
    filtered = ConvNorm(width, width, 3, stride, groups=width // group_width)
    body = nn.Sequential(narrow, filtered, ConvNorm(width, width, act=None))
    return Residual(body, inputs, width, stride, 2)


class Classifier(nn.Module):
    """Stem, stages, the mean over all pixels, and a linear layer."""

    def __init__(
        self, stem: nn.Module, stages: Sequence[nn.Module], features: int, classes: int, dims: int
    ) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool3d(1) if dims == 3 else nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stages(self.stem(x)))
        return self.head(x.flatten(1))


def resnet18(
    depths: Sequence[int] = (2, 2, 2, 2), width: int = 64, classes: int = 1000
) -> nn.Module:
    stem = nn.Sequential(ConvNorm(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
    stages, inputs = [], width
    for index, depth in enumerate(depths):
        for block in range(depth):
            stages.append(basic(inputs, width << index, 2 if index and not block else 1))
            inputs = width << index
    return Classifier(stem, stages, inputs, classes, 2)


def resnet50(
    depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
) -> nn.Module:
    stem = nn.Sequential(ConvNorm(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
    stages, inputs = [], width
    for index, depth in enumerate(depths):
        for block in range(depth):
            stages.append(bottleneck(inputs, width << index, 2 if index and not block else 1))
            inputs = 4 * width << index
    return Classifier(stem, stages, inputs, classes, 2)


def regnet_x_400mf(
    depths: Sequence[int] = (1, 2, 7, 12),
    widths: Sequence[int] = (32, 64, 160, 400),
    group_width: int = 16,
    classes: int = 1000,
) -> nn.Module:
    stages, inputs = [], 32
    for depth, width in zip(depths, widths, strict=True):
        for block in range(depth):
            stages.append(grouped(inputs, width, 1 if block else 2, group_width))
            inputs = width
    return Classifier(ConvNorm(3, 32, 3, 2), stages, inputs, classes, 2)


def r3d18(depths: Sequence[int] = (2, 2, 2, 2), width: int = 64, classes: int = 400) -> nn.Module:
    stem = ConvNorm(3, width, (3, 7, 7), (1, 2, 2), dims=3)
    stages, inputs = [], width
    for index, depth in enumerate(depths):
        for block in range(depth):
            stages.append(basic(inputs, width << index, 2 if index and not block else 1, dims=3))
            inputs = width << index
    return Classifier(stem, stages, inputs, classes, 3)

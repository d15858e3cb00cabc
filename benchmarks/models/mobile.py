# SPDX-License-Identifier: Apache-2.0
"""Small classifiers: MobileNet-V2 and -V3, EfficientNet-B0, ShuffleNet-V2, SqueezeNet 1.1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.blocks import ConvNorm, InvertedResidual, SqueezeExcite, divisible


class Pooled(nn.Module):
    """Features, their mean over all pixels, and a classifier."""

    def __init__(self, features: Sequence[nn.Module], classifier: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.classifier(x.mean([2, 3]))


def mobilenet_v2(
    scale: float = 1.0, head: int = 1280, classes: int = 1000, rows: int | None = None
) -> nn.Module:
    table = (  # widening, channels, blocks, stride
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    )
    inputs = divisible(32 * scale)
    features: list[nn.Module] = [ConvNorm(3, inputs, 3, 2, act=nn.ReLU6)]
    for widening, channels, blocks, stride in table[:rows]:
        outputs = divisible(channels * scale)
        for i in range(blocks):
            shape = (inputs, widening * inputs, outputs, 3, 1 if i else stride)
            features.append(InvertedResidual(*shape, act=nn.ReLU6))
            inputs = outputs
    features.append(ConvNorm(inputs, head, act=nn.ReLU6))
    return Pooled(features, nn.Sequential(nn.Dropout(0.2), nn.Linear(head, classes)))


def mobilenet_v3(
    scale: float = 1.0, head: int = 1280, classes: int = 1000, rows: int | None = None
) -> nn.Module:
    table = (  # kernel, hidden, channels, squeeze and excite, hardswish, stride
        *((3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1)),
        *((5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1)),
        *((3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1)),
        *((3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1)),
        *((5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1)),
    )
    inputs, eps = divisible(16 * scale), 1e-3
    features: list[nn.Module] = [ConvNorm(3, inputs, 3, 2, act=nn.Hardswish, eps=eps)]
    for kernel, widened, channels, with_excite, hard, stride in table[:rows]:
        hidden, outputs = divisible(widened * scale), divisible(channels * scale)
        excite = None
        if with_excite:
            excite = SqueezeExcite(hidden, divisible(hidden / 4), nn.ReLU, nn.Hardsigmoid)
        act = nn.Hardswish if hard else nn.ReLU
        shape = (inputs, hidden, outputs, kernel, stride)
        features.append(InvertedResidual(*shape, act, excite, eps))
        inputs = outputs
    features.append(ConvNorm(inputs, 6 * inputs, act=nn.Hardswish, eps=eps))
    first, last = nn.Linear(6 * inputs, head), nn.Linear(head, classes)
    return Pooled(features, nn.Sequential(first, nn.Hardswish(), nn.Dropout(0.2), last))


def efficientnet_b0(
    scale: float = 1.0, head: int = 1280, classes: int = 1000, rows: int | None = None
) -> nn.Module:
    table = (  # widening, channels, blocks, kernel, stride
        *((1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2)),
        *((6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1)),
    )
    inputs = divisible(32 * scale)
    features: list[nn.Module] = [ConvNorm(3, inputs, 3, 2, act=nn.SiLU)]
    for widening, channels, blocks, kernel, stride in table[:rows]:
        outputs = divisible(channels * scale)
        for i in range(blocks):
            hidden = widening * inputs
            excite = SqueezeExcite(hidden, max(1, inputs // 4), nn.SiLU, nn.Sigmoid)
            shape = (inputs, hidden, outputs, kernel, 1 if i else stride)
            features.append(InvertedResidual(*shape, nn.SiLU, excite))
            inputs = outputs
    features.append(ConvNorm(inputs, head, act=nn.SiLU))
    return Pooled(features, nn.Sequential(nn.Dropout(0.2), nn.Linear(head, classes)))


def shuffle(x: Tensor, groups: int = 2) -> Tensor:
    """Takes channels from the groups in turn."""
    batch, channels, height, width = x.shape
    x = x.view(batch, groups, channels // groups, height, width)
    return x.transpose(1, 2).reshape(batch, channels, height, width)


class ShuffleUnit(nn.Module):
    """Works on half of the channels, or with a stride on all of them twice; then shuffles."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        branch, source = outputs // 2, inputs if stride > 1 else outputs // 2
        self.main = nn.Sequential(
            ConvNorm(source, branch),
            ConvNorm(branch, branch, 3, stride, groups=branch, act=None),
            ConvNorm(branch, branch),
        )
        self.side = None
        if stride > 1:
            filtered = ConvNorm(inputs, inputs, 3, stride, groups=inputs, act=None)
            self.side = nn.Sequential(filtered, ConvNorm(inputs, branch))

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            kept, changed = x.chunk(2, dim=1)
            return shuffle(torch.cat((kept, self.main(changed)), dim=1))
        return shuffle(torch.cat((self.side(x), self.main(x)), dim=1))


def shufflenet_v2(
    channels: Sequence[int] = (24, 116, 232, 464, 1024),
    depths: Sequence[int] = (4, 8, 4),
    classes: int = 1000,
) -> nn.Module:
    stem, *stages, head = channels
    features: list[nn.Module] = [ConvNorm(3, stem, 3, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = stem
    for outputs, depth in zip(stages, depths, strict=True):
        for i in range(depth):
            features.append(ShuffleUnit(inputs, outputs, 1 if i else 2))
            inputs = outputs
    features.append(ConvNorm(inputs, head))
    return Pooled(features, nn.Linear(head, classes))


class Fire(nn.Module):
    """Narrow, then widen with 1x1 and 3x3 filters side by side."""

    def __init__(self, inputs: int, narrow: int, wide: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, narrow, 1)
        self.left = nn.Conv2d(narrow, wide, 1)
        self.right = nn.Conv2d(narrow, wide, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x), inplace=True)
        return torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], 1)


class SqueezeNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4 * width, 3, stride=2)
        rows = ((1, 4), (1, 4), (2, 8), (2, 8), (3, 12), (3, 12), (4, 16), (4, 16))
        inputs, stages = 4 * width, []
        for i, (narrow, wide) in enumerate(rows):
            if i in (0, 2, 4):
                stages.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            stages.append(Fire(inputs, narrow * width, wide * width))
            inputs = 2 * wide * width
        self.stages = nn.Sequential(*stages)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Conv2d(inputs, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.stem(x)))
        x = F.relu(self.head(self.dropout(x)))
        return torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)

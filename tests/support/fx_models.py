# SPDX-License-Identifier: Apache-2.0
"""Small float networks written as people write them: with functions and operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import models
import torch
import torch.nn.functional as F
from models import Case, conv, register, register_wired
from torch import Tensor, nn

CASES: dict[str, Case] = {}
case = partial(register, CASES)


class Basic(nn.Module):
    """A ResNet block with F.relu and +."""

    def __init__(self, c_in: int, c_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.down: nn.Module | None = None
        if stride != 1 or c_in != c_out:
            self.down = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x if self.down is None else self.down(x)
        return F.relu(out)


@case("resnet", (2, 3, 32, 32), 7)
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.layer1, self.layer2 = Basic(16, 16), Basic(16, 24, 2)
        self.fc = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.stem(x))), 3, 2, 1)
        x = self.layer2(self.layer1(x))
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return self.fc(x.view(x.size(0), -1))


class Inverted(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(c, 2 * c, 1), nn.BatchNorm2d(2 * c), nn.ReLU6(True))
        self.depth = nn.Sequential(
            nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c), nn.BatchNorm2d(2 * c), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(2 * c, c, 1), nn.BatchNorm2d(c))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.depth(self.expand(x)))


@case("mobilenet_v2", (2, 3, 16, 16), 8)
class MobileNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.blocks = nn.Sequential(Inverted(16), Inverted(16))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(F.relu6(self.stem(x))).mean([2, 3]))


class SqueezeExcite(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(c, 8, 1), nn.Conv2d(8, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = F.silu(self.fc1(x.mean((2, 3), keepdim=True)))
        return x * F.hardsigmoid(self.fc2(s))


def _hswish(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y = y * F.relu6(y + 3) / 6
    return m.c(m.se(m.b(y)).sigmoid())


def _shuffle(m: Any, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    left, right = m.a(x).chunk(2, dim=1)
    y = torch.cat((left, F.relu(m.b(right))), dim=1)
    y = y.view(n, 2, c // 2, h, w)
    y = torch.transpose(y, 1, 2).contiguous().view(n, -1, h, w)
    return m.c(y).flatten(1)


def _unet(m: Any, x: Tensor) -> Tensor:
    down = F.relu(m.a(x))
    deep = F.leaky_relu(m.b(F.max_pool2d(down, 2)), 0.1)
    up = F.interpolate(deep, size=down.shape[2:], mode="nearest")
    return m.c(torch.cat([up, down], 1))


def _dense(m: Any, x: Tensor) -> Tensor:
    features = [m.stem(x)]
    for i in range(2):
        norm, layer = getattr(m, f"norm{i}"), getattr(m, f"conv{i}")
        features.append(layer(F.relu(norm(torch.cat(features, 1)))))
    return m.head(F.relu(m.last(torch.cat(features, 1))))


class Standardized(nn.Conv2d):
    """Weight standardization: the weight is computed in forward."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _causal(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(m.a(F.pad(x, (2, 0))))
    y = m.b(F.pad(y, (4, 0))) + y
    return m.c(F.pad(m.norm(y), (1, 1)))[:, :, 1:-1]


def _odd(m: Any, x: Tensor) -> Tensor:
    if x.dim() == 4 and x.shape[-1] % 2 == 1:
        x = F.pad(x, (0, 1, 0, 1))
    return m.b(m.a(x))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin1(x)
        if y.mean() > 1e6:
            return x
        return self.lin2(F.relu(y))


class Fourfold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 4 if float(x.sum()) > -1e9 else x


def _split(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    first, second = torch.split(y, [3, 5], dim=1)
    return {"out": (m.b(y) - 1).abs(), "parts": [first.relu(), m.c(second)]}


wired = partial(register_wired, CASES)
IMAGE = models.IMAGE
TWO = {"a": conv, "b": conv}
wired("hswish_se", IMAGE, 5, _hswish, **TWO, se=lambda: SqueezeExcite(8), c=conv)
wired("shuffle", IMAGE, 3, _shuffle, a=conv, b=lambda: conv(4, 4), c=conv)
wired("unet", IMAGE, 3, _unet, **TWO, c=lambda: conv(16))
wired("dense", IMAGE, 4, _dense, stem=conv, norm0=lambda: nn.BatchNorm2d(8), conv0=conv,
      norm1=lambda: nn.BatchNorm2d(16), conv1=lambda: conv(16), head=lambda: conv(24),
      last=lambda: nn.BatchNorm2d(24))  # fmt: skip
wired("standardized", IMAGE, 2, lambda m, x: m.b(F.relu(m.a(x))),
      a=lambda: Standardized(8, 8, 3, padding=1), b=conv)  # fmt: skip
wired("causal", (2, 8, 20), 3, _causal, a=lambda: nn.Conv1d(8, 8, 3),
      b=lambda: nn.Conv1d(8, 8, 3, dilation=2), c=lambda: nn.Conv1d(8, 4, 3),
      norm=lambda: nn.BatchNorm1d(8))  # fmt: skip
wired("odd", (2, 8, 9, 9), 2, _odd, **TWO)
wired("swapped_inside", (4, 8), 4, lambda m, x: m.b(m.inner(F.relu(m.a(x)))),
      a=lambda: nn.Linear(8, 8), inner=Untraceable, b=lambda: nn.Linear(8, 4))  # fmt: skip
wired("float_inside", IMAGE, 2, lambda m, x: m.b(m.f(m.a(x))), **TWO, f=Fourfold)
wired("split", IMAGE, 3, _split, **TWO, c=lambda: conv(5))
wired("token", (3, 6, 8), 2, lambda m, x: m.b(torch.cat([m.p["t"].expand(x.shape[0], -1, -1),
      m.a(x)], 1) + m.p["e"]), a=lambda: nn.Linear(8, 8), b=lambda: nn.Linear(8, 8),
      p=lambda: nn.ParameterDict({"t": torch.randn(1, 1, 8), "e": torch.randn(1, 7, 8)})
      )  # fmt: skip

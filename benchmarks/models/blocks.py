# SPDX-License-Identifier: Apache-2.0
"""Blocks that several networks share."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
Size = int | tuple[int, ...]


def half(kernel: Size) -> Size:
    """The padding that keeps the size at stride 1."""
    return kernel // 2 if isinstance(kernel, int) else tuple(k // 2 for k in kernel)


def divisible(channels: float, by: int = 8) -> int:
    """The nearest multiple, but at least 90 % of ``channels``."""
    nearest = max(by, int(channels + by / 2) // by * by)
    return nearest + by if nearest < 0.9 * channels else nearest


class ConvNorm(nn.Sequential):
    """A convolution without bias, its batch norm and, unless ``act`` is None, an activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: Size = 1,
        stride: Size = 1,
        *,
        padding: Size | None = None,
        groups: int = 1,
        act: type[nn.Module] | None = nn.ReLU,
        eps: float = 1e-5,
        dims: int = 2,
    ) -> None:
        padding = half(kernel) if padding is None else padding
        conv = _CONVS[dims](inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        layers: list[nn.Module] = [conv, _NORMS[dims](outputs, eps=eps)]
        super().__init__(*layers, *([] if act is None else [act()]))


class SqueezeExcite(nn.Module):
    """Weighs each channel by what all pixels together say."""

    def __init__(
        self, channels: int, squeezed: int, act: type[nn.Module], gate: type[nn.Module]
    ) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)
        self.act, self.gate = act(), gate()

    def forward(self, x: Tensor) -> Tensor:
        weight = F.adaptive_avg_pool2d(x, 1)
        weight = self.excite(self.act(self.squeeze(weight)))
        return x * self.gate(weight)


class InvertedResidual(nn.Module):
    """Widen, filter each channel, optionally squeeze and excite, narrow."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        kernel: int,
        stride: int,
        act: type[nn.Module],
        excite: nn.Module | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if hidden != inputs:
            layers.append(ConvNorm(inputs, hidden, act=act, eps=eps))
        layers.append(ConvNorm(hidden, hidden, kernel, stride, groups=hidden, act=act, eps=eps))
        if excite is not None:
            layers.append(excite)
        layers.append(ConvNorm(hidden, outputs, act=None, eps=eps))
        self.layers = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)

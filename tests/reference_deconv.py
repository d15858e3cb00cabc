# SPDX-License-Identifier: Apache-2.0
"""Transposed convolution in exact arithmetic, and the shapes its tests run on."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from geometries import Sizes, spread
from reference import finish, pad
from reference_arithmetic import Number, f64
from torch import Tensor


def conv_transpose(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    src_zero_point: Number = 0,
    *,
    stride: Sequence[int],
    padding: tuple[Sequence[int], Sequence[int]],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int = 1,
    **params: Any,
) -> Tensor:
    """src (N, C, ...), weight (C, OC / groups, ...). `params`: see `reference.finish`.

    Every source value is spread over the whole of dst; padding then cuts it, and output_padding
    extends it with positions that no tap reaches.
    """
    deconvolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.ndim - 3]
    shifted = src.double() - f64(src_zero_point)
    acc = deconvolve(shifted, weight.double(), None, tuple(stride), 0, 0, groups, tuple(dilation))
    acc = pad(acc, [0] * len(stride), output_padding, 0)
    acc = pad(acc, *([-cut for cut in cuts] for cuts in padding), 0)
    channels = weight.shape[1] * groups
    return finish(acc.long(), channels, 1, bias, **params)


@dataclass(frozen=True)
class DeconvShape:
    """Dilation 1 is dense, as in PyTorch. Sizes have one entry per spatial dimension."""

    name: str
    channels_in: int
    channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding_begin: tuple[int, ...]
    padding_end: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int = 1
    batch: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def src(self) -> tuple[int, ...]:
        return (self.batch, self.channels_in, *self.size)

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.channels_in, self.channels // self.groups, *self.kernel)

    @property
    def dst(self) -> tuple[int, ...]:
        parts = (self.size, self.kernel, self.stride, self.padding_begin, self.padding_end)
        sizes = zip(*parts, self.dilation, self.output_padding, strict=True)
        spatial = [(n - 1) * s - b - e + d * (k - 1) + o + 1 for n, k, s, b, e, d, o in sizes]
        return (self.batch, self.channels, *spatial)

    @property
    def reduction(self) -> int:
        """Products of a typical destination, for the scales."""
        return max(1, self.channels_in // self.groups * math.prod(self.kernel)) // max(
            1, math.prod(self.stride)
        )

    @property
    def geometry(self) -> list[int]:
        parts = (self.kernel, self.stride, self.padding_begin, self.padding_end, self.dilation)
        tail = (self.output_padding, (self.groups, self.channels_in))
        return list(itertools.chain(*parts, *tail))

    @property
    def oracle(self) -> dict[str, Any]:
        names = ("stride", "dilation", "output_padding", "groups")
        padding = (self.padding_begin, self.padding_end)
        return {name: getattr(self, name) for name in names} | {"padding": padding}


def deconv(
    name: str,
    channels: tuple[int, int],
    size: tuple[int, ...],
    kernel: Sizes = 3,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    padding_end: Sizes | None = None,
    groups: int = 1,
    batch: int = 1,
) -> DeconvShape:
    end = padding if padding_end is None else padding_end
    window = spread(len(size), kernel, stride, padding, end, dilation, output_padding)
    return DeconvShape(name, *channels, size, *window, groups, batch)


SHAPES = [
    deconv("unet_up", (64, 32), (7, 9), 2, 2),
    deconv("gan", (32, 48), (8, 8), 4, 2, 1, batch=2),
    deconv("odd", (24, 20), (6, 7), 3, 2, 1, 1),
    deconv("stride1", (16, 24), (9, 8), 3, 1, 1),
    deconv("stride1_wide", (16, 24), (9, 8), 5),
    deconv("tail_channels", (13, 19), (5, 6), 3, 2, 1, batch=3),
    deconv("three_channels", (3, 16), (9, 8), 4, 2, 1),
    deconv("stride_over_kernel", (8, 8), (4, 5), 2, 3, 0, 1),
    deconv("stride_over_kernel_cut", (8, 18), (4, 5), 1, 4, 2, 0),
    deconv("dilated", (8, 12), (6, 7), 3, 2, 2, 1, dilation=2),
    deconv("dilated_coprime", (8, 12), (6, 7), 3, 2, 3, 1, dilation=3),
    deconv("dilated_over_stride", (8, 12), (6, 7), 3, 2, 0, 3, dilation=4),
    deconv("asymmetric", (12, 16), (5, 6), (3, 4), (2, 3), (1, 0), (0, 2), (1, 1), (0, 2)),
    deconv("grouped", (24, 40), (5, 6), 3, 2, 1, groups=4),
    deconv("grouped_wide", (32, 64), (4, 5), 4, 2, 1, groups=2),
    deconv("depthwise", (24, 24), (5, 6), 4, 2, 1, groups=24),
    deconv("depthwise_many", (40, 80), (4, 3), 3, 2, 1, groups=40),
    deconv("one_pixel", (16, 32), (1, 1), 4, 2, 1),
    deconv("padding_wider_than_kernel", (8, 8), (9, 9), 3, 1, 5),
    deconv("many_classes", (5, 6), (7, 8), 9, 1, 2),
    deconv("few_rows_per_class", (8, 6), (3, 4), 7, 2, 0),
    deconv("fcn", (6, 6), (3, 4), 16, 8, 4, groups=1),
    deconv("pointwise", (24, 40), (5, 7), 1, batch=2),
    deconv("1d", (12, 20), (15,), 5, 3, 2, 1, batch=2),
    deconv("1d_vocoder", (32, 16), (20,), 16, 8, 4),
    deconv("3d", (8, 12), (3, 4, 5), 3, 2, 1, 1),
    deconv("3d_up", (16, 16), (2, 3, 4), 2, 2, batch=2),
]


def random_shapes(count: int, dims: int) -> list[DeconvShape]:
    rng = random.Random(dims)
    found: list[DeconvShape] = []

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(dims))

    while len(found) < count:
        groups = rng.choice([1, 1, 2, 3, 6])
        stride, dilation = each(1, 4), each(1, 3)
        extra = tuple(rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True))
        shape = DeconvShape(
            f"random{len(found)}", groups * rng.randint(1, 9), groups * rng.randint(1, 20),
            each(1, 7 - dims), each(1, 5), stride, each(0, 4), each(0, 4), dilation, extra, groups,
            rng.randint(1, 2),
        )  # fmt: skip
        if min(shape.dst) > 0:
            found.append(shape)
    return found


def random_weight(shape: DeconvShape, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape.weight, generator=rng).to(torch.int8)

# SPDX-License-Identifier: Apache-2.0
"""Shapes of linear layers and convolutions. `str(shape)` is the test id."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LinearShape:
    m: int
    n: int
    k: int
    name: str = "linear"

    def __str__(self) -> str:
        return f"{self.name}-{self.m}x{self.k}x{self.n}"

    @property
    def src(self) -> tuple[int, ...]:
        return (self.m, self.k)

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.n, self.k)

    @property
    def dst(self) -> tuple[int, ...]:
        return (self.m, self.n)

    @property
    def channels(self) -> int:
        return self.n

    @property
    def reduction(self) -> int:
        return self.k


@dataclass(frozen=True)
class ConvShape:
    """Dilation 1 is dense, as in PyTorch. Sizes have one entry per spatial dimension."""

    batch: int
    in_channels: int
    out_channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding_begin: tuple[int, ...]
    padding_end: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    name: str

    def __str__(self) -> str:
        def by_x(sizes: tuple[int, ...]) -> str:
            return "x".join(map(str, sizes))

        text = f"{self.name}-{self.batch}x{self.in_channels}x{by_x(self.size)}"
        text += f"-o{self.out_channels}k{by_x(self.kernel)}"
        text += f"s{by_x(self.stride)}" if max(self.stride) > 1 else ""
        text += f"p{by_x(self.padding_begin)}" if max(self.padding_begin + self.padding_end) else ""
        text += f"e{by_x(self.padding_end)}" if self.padding_end != self.padding_begin else ""
        text += f"d{by_x(self.dilation)}" if max(self.dilation) > 1 else ""
        return text + (f"g{self.groups}" if self.groups > 1 else "")

    @property
    def src(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.size)

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def dst(self) -> tuple[int, ...]:
        return (self.batch, self.out_channels, *self.dst_size)

    @property
    def dst_size(self) -> tuple[int, ...]:
        parts = (self.size, self.kernel, self.stride, *self.padding, self.dilation)
        return tuple(
            (size + begin + end - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, begin, end, dilation in zip(*parts, strict=True)
        )

    @property
    def channels(self) -> int:
        return self.out_channels

    @property
    def reduction(self) -> int:
        return self.in_channels // self.groups * math.prod(self.kernel)

    @property
    def padding(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.padding_begin, self.padding_end)

    @property
    def geometry(self) -> list[int]:
        """The op's argument."""
        channels = (self.groups, self.in_channels)
        parts = (self.kernel, self.stride, *self.padding, self.dilation, channels)
        return list(itertools.chain(*parts))

    @property
    def oracle(self) -> dict[str, Any]:
        """Keyword arguments of reference.conv."""
        names = ("stride", "padding", "dilation", "groups")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ConvTransposeShape(ConvShape):
    """Padding is cut off the result, and output padding added behind it."""

    output_padding: tuple[int, ...]

    def __str__(self) -> str:
        extra = "x".join(map(str, self.output_padding))
        return super().__str__() + (f"+{extra}" if max(self.output_padding) else "")

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel)

    @property
    def dst_size(self) -> tuple[int, ...]:
        parts = (self.size, self.kernel, self.stride, *self.padding, self.dilation)
        sizes = zip(*parts, self.output_padding, strict=True)
        return tuple((n - 1) * s - b - e + d * (k - 1) + o + 1 for n, k, s, b, e, d, o in sizes)

    @property
    def reduction(self) -> int:
        """Products of a typical destination, for the scales."""
        return max(1, super().reduction) // max(1, math.prod(self.stride))

    @property
    def geometry(self) -> list[int]:
        *window, groups, channels = super().geometry
        return [*window, *self.output_padding, groups, channels]

    @property
    def oracle(self) -> dict[str, Any]:
        """Keyword arguments of reference.conv_transpose."""
        return super().oracle | {"output_padding": self.output_padding}


Sizes = int | tuple[int, ...]


def spread(dims: int, *sizes: Sizes) -> list[tuple[int, ...]]:
    """Each with one entry per spatial dimension."""
    return [(size,) * dims if isinstance(size, int) else size for size in sizes]


def conv(
    name: str,
    channels: tuple[int, int],
    size: tuple[int, ...],
    kernel: Sizes = 3,
    stride: Sizes = 1,
    padding: Sizes = 0,
    padding_end: Sizes | None = None,
    dilation: Sizes = 1,
    groups: int = 1,
    batch: int = 1,
) -> ConvShape:
    end = padding if padding_end is None else padding_end
    window = spread(len(size), kernel, stride, padding, end, dilation)
    return ConvShape(batch, *channels, size, *window, groups, name)


def depthwise(
    name: str, channels: int, size: tuple[int, ...], multiplier: int = 1, **kwargs: Any
) -> ConvShape:
    return conv(name, (channels, channels * multiplier), size, groups=channels, **kwargs)


def conv_transpose(
    name: str,
    channels: tuple[int, int],
    size: tuple[int, ...],
    kernel: Sizes = 3,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    **kwargs: Any,
) -> ConvTransposeShape:
    shape = conv(name, channels, size, kernel, stride, padding, **kwargs)
    return ConvTransposeShape(**vars(shape), output_padding=spread(len(size), output_padding)[0])

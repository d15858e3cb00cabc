# SPDX-License-Identifier: Apache-2.0
"""Shapes of results. The ops check the arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _windows(size: int, fields: Sequence[int], ceil_mode: bool = False) -> int:
    """Return how many windows there are along one dimension."""
    kernel, stride, begin, end, dilation = fields
    stride = stride or 1  # the op refuses 0
    span = size + begin + end - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return span // stride + 1
    count = -(-span // stride) + 1
    return count - 1 if (count - 1) * stride >= size + begin else count


def conv_sizes(src: Sequence[int], channels: int, geometry: Sequence[int]) -> list[int]:
    """Shape of a convolution's dst (csrc/ops/conv/geometry.h tells what ``geometry`` holds)."""
    dims = len(src) - 2
    spatial = [_windows(src[d + 2], geometry[d : 5 * dims : dims]) for d in range(dims)]
    return [src[0], channels, *spatial]


def conv_transpose_sizes(src: Sequence[int], channels: int, geometry: Sequence[int]) -> list[int]:
    """Shape of a transposed convolution's dst."""
    dims, spatial = len(src) - 2, list[int]()
    for d in range(dims):
        kernel, stride, begin, end, dilation, extra = geometry[d : 6 * dims : dims]
        size = (src[d + 2] - 1) * stride - begin - end
        spatial.append(size + dilation * (kernel - 1) + extra + 1)
    return [src[0], channels, *spatial]


def pool_sizes(src: Sequence[int], geometry: Sequence[int], ceil_mode: bool) -> list[int]:
    """Shape of a pool's dst."""
    dims = len(src) - 2
    spatial = [_windows(src[d + 2], geometry[d::dims], ceil_mode) for d in range(dims)]
    return [*src[:2], *spatial]


def reduced_sizes(src: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    """Shape of a reduction's dst."""
    gone = {d for d in range(len(src)) if d in dims or d - len(src) in dims}
    return [1 if d in gone else size for d, size in enumerate(src) if keepdim or d not in gone]


def broadcast(*shapes: Sequence[int]) -> torch.Size:
    """Return the shape that shapes broadcast to."""
    shape: torch.Size = torch.broadcast_shapes(*shapes)
    return shape

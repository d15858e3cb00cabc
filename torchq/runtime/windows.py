# SPDX-License-Identifier: Apache-2.0
"""Sizes of what windows make. They are checked here, too: sizes without a number reach no op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIMIT = 1 << 24
_MOST_TAPS = 1 << 23
_FIELDS = ("kernel", "stride", "padding", "padding at the end", "dilation")


def check_images(op: str, src: Sequence[int]) -> None:
    """Raise ValueError unless ``src`` is (N, C, spatial...) with one to three spatial dims."""
    if not 3 <= len(src) <= 5:
        raise ValueError(
            f"torchq.{op}: src must be (N, C, spatial...) with one to three spatial dimensions, "
            f"got {list(src)}. Add a batch dimension with unsqueeze(0) if it is missing."
        )


def check_window(op: str, src: Sequence[int], geometry: Sequence[int], extra: int = 0) -> None:
    """Raise ValueError for a geometry that is none, as ``parse_window`` does.

    ``parse_window`` is in csrc/ops/conv/geometry.cpp. ``extra`` entries follow the window.
    """
    check_images(op, src)
    spatial, values = len(src) - 2, len(geometry) - extra
    dims = values // 5
    if dims != spatial and values % 5 == 0 and 1 <= dims <= 3:
        raise ValueError(
            f"torchq.{op}: src must have {dims + 2} dims, [N, C, ...] with {dims} spatial ones as "
            f"in geometry {list(geometry)}, got {len(src)}. Add a batch of one with "
            "src.unsqueeze(0), or remove it."
        )
    if values != 5 * spatial:
        more = ", groups, in_channels" if extra else ""
        raise ValueError(
            f"torchq.{op}: geometry must be [kernel, stride, padding_begin, padding_end, "
            f"dilation{more}], {5 * spatial + extra} values for {spatial} spatial dimensions, got "
            f"{list(geometry)}."
        )
    for i, value in enumerate(geometry[:values]):
        name = _FIELDS[i // spatial]
        least = int(not name.startswith("padding"))
        if not least <= value < _LIMIT:
            raise ValueError(
                f"torchq.{op}: {name} must be at least {least} and less than 2^24, got {value} in "
                f"geometry {list(geometry)}."
            )
    taps = 1
    for size in geometry[:spatial]:
        taps *= size
    if taps > _MOST_TAPS:
        raise ValueError(
            f"torchq.{op}: a window must have at most {_MOST_TAPS} positions, got geometry "
            f"{list(geometry)}. Pool or convolve in two steps."
        )


def _windows(size: int, fields: Sequence[int], ceil_mode: bool = False) -> int:
    """Return how many windows there are along one dimension."""
    kernel, stride, begin, end, dilation = fields
    span = size + begin + end - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return span // stride + 1
    count = -(-span // stride) + 1
    return count - 1 if (count - 1) * stride >= size + begin else count


def conv_sizes(src: Sequence[int], channels: int, geometry: Sequence[int]) -> list[int]:
    """Shape of a convolution's dst (csrc/ops/conv/geometry.h tells what ``geometry`` holds)."""
    check_window("conv", src, geometry, 2)
    dims = len(src) - 2
    spatial = [_windows(src[d + 2], geometry[d : 5 * dims : dims]) for d in range(dims)]
    if _too_small(spatial):
        raise ValueError(
            f"torchq.conv: src {list(src)} is smaller than the kernel with geometry "
            f"{list(geometry)}. Enlarge the input or its padding."
        )
    return [src[0], channels, *spatial]


def conv_transpose_sizes(src: Sequence[int], channels: int, geometry: Sequence[int]) -> list[int]:
    """Shape of a transposed convolution's dst."""
    op, dims = "conv_transpose", len(src) - 2
    check_images(op, src)
    if len(geometry) != 6 * dims + 2:
        raise ValueError(
            f"torchq.{op}: geometry must be [kernel, stride, padding_begin, padding_end, dilation, "
            f"output_padding, groups, in_channels], {6 * dims + 2} values for {dims} spatial "
            f"dimensions, got {list(geometry)}."
        )
    check_window(op, src, geometry[: 5 * dims])
    sizes = [src[0], channels]
    for d in range(dims):
        kernel, stride, begin, end, dilation, extra = geometry[d : 6 * dims : dims]
        if not 0 <= extra < max(stride, dilation):
            raise ValueError(
                f"torchq.{op}: output_padding must be at least 0 and below stride or dilation, got "
                f"geometry {list(geometry)}. It only resolves which of `stride` source sizes the "
                "destination stands for."
            )
        size = (src[d + 2] - 1) * stride - begin - end
        sizes.append(size + dilation * (kernel - 1) + extra + 1)
    if _too_small(sizes[2:]):
        raise ValueError(
            f"torchq.{op}: src {list(src)} leaves nothing of dst with geometry {list(geometry)}. "
            "Use less padding."
        )
    return sizes


def pool_sizes(op: str, src: Sequence[int], geometry: Sequence[int], ceil_mode: bool) -> list[int]:
    """Shape of a pool's dst."""
    check_window(op, src, geometry)
    dims = len(src) - 2
    spatial = []
    for d in range(dims):
        kernel, _, begin, end, dilation = fields = geometry[d::dims]
        if 2 * max(begin, end) > (kernel - 1) * dilation + 1:
            raise ValueError(
                f"torchq.{op}: padding must be at most half of the kernel, got geometry "
                f"{list(geometry)}. Pad with torchq.functional.pad in front instead."
            )
        spatial.append(_windows(src[d + 2], fields, ceil_mode))
        if _too_small(spatial):
            raise ValueError(
                f"torchq.{op}: src {list(src)} is smaller than the window with geometry "
                f"{list(geometry)}. Enlarge the input or its padding."
            )
    return [*src[:2], *spatial]


def reduced_sizes(src: Sequence[int], dims: Sequence[int], keepdim: bool) -> list[int]:
    """Shape of a reduction's dst."""
    rank, gone = len(src), set[int]()
    for d in dims:
        if not -rank <= d < rank:
            raise ValueError(
                f"torchq.reduction: dims must lie in [{-rank}, {rank - 1}] for src {list(src)}, "
                f"got {d}."
            )
        if d % rank in gone:
            raise ValueError(f"torchq.reduction: dims must differ, got {list(dims)}.")
        gone.add(d % rank)
    if _too_small([src[d] for d in gone]):
        raise ValueError(
            "torchq.reduction: src must have at least one value to reduce, got src "
            f"{list(src)} and dims {list(dims)}."
        )
    sizes = [1 if d in gone else size for d, size in enumerate(src)]
    return [size for d, size in enumerate(sizes) if keepdim or d not in gone]


def broadcast(*shapes: Sequence[int]) -> torch.Size:
    """Return the shape that shapes broadcast to."""
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def _too_small(sizes: Sequence[int]) -> bool:
    """Return whether one is below 1; a symbolic one is not asked, which would add a guard."""
    return any(type(size) is int and size < 1 for size in sizes)

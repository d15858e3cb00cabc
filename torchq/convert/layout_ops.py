# SPDX-License-Identifier: Apache-2.0
"""Float modules of pools, and of what moves elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from torchq.convert.ops import Arguments, Made, Role, shape_of


def pool(cls: type[nn.Module]) -> Callable[[Arguments], Made | str]:
    """Return the maker of a pool of this class."""

    def make(a: Arguments) -> Made | str:
        if a.varying("input"):
            return "its window is computed at run time"
        options = {name: value for name, value in a.items() if name not in ("input", "_stacklevel")}
        if "stride" in options and not options["stride"]:
            options["stride"] = None
        module = cls(**options)
        return Made(Role.POOL, module, [a.input], reason=check_pool(module))

    return make


def check_pool(module: Any) -> str:
    """Return why a pool has no int8 form, or ""."""
    if getattr(module, "return_indices", False) or getattr(module, "divisor_override", None):
        return "its options have no int8 form"
    return ""


_GLOBAL = {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}


def mean(a: Arguments) -> Made | str:
    """Make a mean over all spatial dims."""
    rank = len(shape_of(a.input))
    dims = a.dim if isinstance(a.dim, Sequence) else [a.dim]
    if a.dim is None or a.dtype is not None or rank not in _GLOBAL:
        return "a mean other than over all spatial dims has no int8 form"
    if sorted(d % rank for d in dims) != list(range(2, rank)):
        return "a mean other than over all spatial dims has no int8 form"
    return Made(Role.POOL, _GLOBAL[rank](1), [a.input], flatten=not a.keepdim)


# What moves elements


def move(a: Arguments) -> Made | str:
    """Torch's own operation on any dtype."""
    return Made(Role.MOVE, None, [a.nodes["input"]])


def index(a: Arguments) -> Made | str:
    """Make an item of a tensor, or of sizes."""
    if a.input.meta["value"].shape is None and not a.input.meta["value"].is_sequence:
        return Made(Role.SHAPE, None, [])  # of a size
    return Made(Role.MOVE, None, [a.input])


def interpolate(a: Arguments) -> Made | str:
    """``F.interpolate`` of nearest neighbors, or linear with the centers of pixels aligned."""
    if a.mode in ("nearest", "nearest-exact"):
        return Made(Role.MOVE, None, [a.input])
    if a.mode not in ("linear", "bilinear", "trilinear") or a.antialias:
        return f"interpolation of mode '{a.mode}' has no int8 form"
    if a.align_corners:
        return "interpolation with align_corners=True has no int8 form"
    dims, size, factor = len(shape_of(a.input)) - 2, a.size, a.scale_factor
    if a.varying("input", "size"):
        return f"its {a.varying('input', 'size')[0]} is computed at run time"
    factors = [] if factor is None else list(factor) if isinstance(factor, Sequence) else [factor]
    if any(f != int(f) or f < 1 for f in factors):
        return f"interpolation by {factor} has no int8 form, only by whole numbers"
    module = nn.Upsample(None, None, a.mode)
    module.scale_factor = tuple((factors * dims)[:dims]) or None
    made = Made(Role.POOL, module, [a.input])
    if a.varying("input"):
        one = isinstance(size, fx.Node) and size.meta["value"].is_number
        made.size = [size] * dims if one else list(size) if isinstance(size, tuple) else size
    elif size is not None:
        module.size = tuple(size) if isinstance(size, Sequence) else (size,) * dims
    return made


def pad(a: Arguments) -> Made | str:
    """``F.pad`` with zeros."""
    rank, pad = len(shape_of(a.input)), a.pad
    if a.mode in ("reflect", "replicate", "circular"):
        return Made(Role.MOVE, None, [a.input])
    if a.mode != "constant" or a.value not in (None, 0, 0.0):
        return "padding with anything but constant zeros has no int8 form"
    if a.varying("input"):
        return Made(Role.PAD, None, [a.input])  # by sizes
    return Made(Role.PAD, None, [a.input], pad=_spatial_pad(rank, pad))


def _spatial_pad(rank: int, pad: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """None where it is not the zero padding of a convolution."""
    dims = rank - 2
    pairs = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)][::-1]  # last dim comes first
    outer, inner = pairs[: -dims or None], pairs[-dims:]
    if dims < 1 or (len(pairs) > dims and any(p != (0, 0) for p in outer)):
        return None
    inner = [(0, 0)] * (dims - len(inner)) + inner
    if any(p < 0 for pair in inner for p in pair):
        return None
    return [p[0] for p in inner], [p[1] for p in inner]

# SPDX-License-Identifier: Apache-2.0
"""Float modules of combinations, functions of each element, pools and what moves elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from torchq.capture.ops import Arguments, Pointwise, Recognized, Role, shape_of
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.fake_scales import why_not_fixed
from torchq.nn.float_modules import Cat
from torchq.report import reasons

# Combining


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def binary(
    module: type[nn.Module] | None, function: Callable[..., object]
) -> Callable[[Arguments], Recognized | str]:
    """Two tensors combine; a tensor and a number are a function of the tensor."""

    def make(a: Arguments) -> Recognized | str:
        if a.get("alpha", 1) != 1 or a.get("rounding_mode") is not None:
            return reasons.OPTIONS
        if not all(isinstance(x, fx.Node | Tensor) or _number(x) for x in (a.input, a.other)):
            return reasons.OPERAND
        position = 0 if isinstance(a.input, fx.Node) else 1  # of the tensor that varies
        src, other = (a.input, a.other) if position == 0 else (a.other, a.input)
        if isinstance(other, fx.Node):
            if other.meta["value"].shape is None or src.meta["value"].shape is None:
                return reasons.NUMBER_OF_SIZES
            if module is None:
                return reasons.OF_TWO.format(function=function.__name__)
            return Recognized(Role.COMBINE, module(), [a.input, a.other])
        if isinstance(other, Tensor) and not bool(torch.isfinite(other).all()):
            srcs = [a.nodes["input"], a.nodes["other"]]
            return Recognized(
                Role.COMBINE, None if module is None else module(), srcs, reason=reasons.NOT_FINITE
            )
        affine = _affine(function, torch.as_tensor(other, device="cpu"), position)
        if _number(other) or other.dim() == 0:
            pointwise = Pointwise(function, float(other), position=position)
            return Recognized(Role.UNARY, pointwise, [src], affine=affine)
        if module is not None:
            return Recognized(
                Role.COMBINE, module(), [a.nodes["input"], a.nodes["other"]], affine=affine
            )
        if affine is None:
            return reasons.OF_TWO.format(function=function.__name__)
        return Recognized(
            Role.NORM, Pointwise(function, other, position=position), [src], affine=affine
        )

    return make


def _affine(
    function: Callable[..., object], other: Tensor, position: int
) -> tuple[Tensor, Tensor] | None:
    """(scale, shift), if a function of a tensor at ``position`` and a constant is linear."""
    value = other.detach().double()
    one = torch.ones((), dtype=torch.float64, device="cpu")
    zero = torch.zeros_like(one)
    found = {
        (torch.add, 0): (one, value),
        (torch.add, 1): (one, value),
        (torch.sub, 0): (one, -value),
        (torch.sub, 1): (-one, value),
        (torch.mul, 0): (value, zero),
        (torch.mul, 1): (value, zero),
        (torch.div, 0): (1 / value, zero),
    }.get((function, position))
    finite = found is not None and all(bool(torch.isfinite(v).all()) for v in found)
    return found if finite else None


def cat(a: Arguments) -> Recognized | str:
    """Make ``torch.cat`` of sources that are listed one by one."""
    if isinstance(a.tensors, fx.Node):
        return reasons.NOT_LISTED
    return Recognized(Role.COMBINE, Cat(a.dim), list(a.nodes["tensors"]))


# Functions of each element


def unary(make: Callable[[Arguments], nn.Module]) -> Callable[[Arguments], Recognized | str]:
    """Return the maker of a function of one tensor, whose other arguments are constants."""

    def unary(a: Arguments) -> Recognized | str:
        return a.why_varying("input") or Recognized(Role.UNARY, make(a), [a.input])

    return unary


def clip(low: float | None, high: float | None) -> nn.Module:
    """Return the module that clips to these bounds."""
    if low == 0 and high is None:
        return nn.ReLU()
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    return nn.Hardtanh(low, high) if low < high else Pointwise(torch.clamp, low, high)


def clamp(a: Arguments) -> Recognized | str:
    """Make ``torch.clamp``."""
    if any(isinstance(a[name], Tensor) for name in ("min", "max")):
        return reasons.TENSOR_BOUNDS
    return unary(lambda a: clip(a.min, a.max))(a)


def prelu(a: Arguments) -> Recognized | str:
    """Make ``F.prelu``: a leaky relu, or a slope per channel."""
    if why := a.why_varying("input"):
        return why
    if a.weight.numel() == 1:
        return Recognized(Role.UNARY, nn.LeakyReLU(float(a.weight)), [a.input])
    module = nn.PReLU(a.weight.numel(), device="cpu")
    module.weight = nn.Parameter(a.weight.detach().reshape(-1), False)
    return Recognized(Role.SLOPES, module, [a.input])


def fake(a: Arguments) -> Recognized | str:
    """torch.fake_quantize_per_tensor_affine and torch.fake_quantize_per_channel_affine."""
    if why := a.why_varying("input"):
        return why
    fake = FakeQuantize.from_affine(a.scale, a.zero_point, a.quant_min, a.quant_max, a.get("axis"))
    return Recognized(Role.FAKE, fake, [a.nodes["input"]], reason=why_not_fixed(fake))


def pool(cls: type[nn.Module]) -> Callable[[Arguments], Recognized | str]:
    """Return the maker of a pool of this class."""

    def make(a: Arguments) -> Recognized | str:
        if a.why_varying("input"):
            return reasons.AT_RUN_TIME.format(argument="window")
        if a.get("divisor_override"):
            return reasons.OPTIONS
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in a.items() if k != "input"}
        if "stride" in options:
            options["stride"] = options["stride"] or None
        return Recognized(Role.POOL, cls(**options), [a.input])

    return make


_GLOBAL = {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}


def mean(a: Arguments) -> Recognized | str:
    """Make a mean over all spatial dims."""
    rank = len(shape_of(a.nodes["input"]))
    dims = a.get("dim") or () if rank in _GLOBAL and a.dtype is None else ()
    if not dims or sorted(d % rank for d in dims) != list(range(2, rank)):
        return reasons.PARTIAL_MEAN
    return Recognized(Role.POOL, _GLOBAL[rank](1), [a.input], flatten=not a.keepdim)


# What moves elements


def move(a: Arguments) -> Recognized | str:
    """Torch's own operation on any dtype."""
    return Recognized(Role.MOVE, None, [a.nodes["input"]])


def index(a: Arguments) -> Recognized | str:
    """Make an item of a tensor, or of sizes."""
    value = a.nodes["input"].meta["value"]
    if value.shape is None and not value.is_sequence:
        return Recognized(Role.SHAPE, None, [])  # of a size
    return Recognized(Role.MOVE, None, [a.input])


def interpolate(mode: str) -> Callable[[Arguments], Recognized | str]:
    """Return the maker of a linear ``F.interpolate`` with the centers of pixels aligned."""

    def make(a: Arguments) -> Recognized | str:
        if a.align_corners:
            return reasons.ALIGNED_CORNERS
        if why := a.why_varying("input", "output_size"):
            return why
        factors = a.get("scale_factors") or ()
        if any(f != int(f) or f < 1 for f in factors):
            return reasons.FRACTIONS.format(factors=factors)
        module = nn.Upsample(None, None, mode)
        module.scale_factor = tuple(factors) or None
        if a.varies("output_size"):
            return Recognized(Role.POOL, module, [a.input], size=list(a.output_size))
        if a.output_size is not None:
            module.size = tuple(a.output_size)
        return Recognized(Role.POOL, module, [a.input])

    return make


def pad(a: Arguments) -> Recognized | str:
    """``F.pad`` with zeros."""
    rank, pad, mode = len(shape_of(a.nodes["input"])), a.pad, a.get("mode", "constant")
    if mode in ("reflect", "replicate", "circular"):
        return Recognized(Role.MOVE, None, [a.input])
    if mode != "constant" or a.value not in (None, 0, 0.0):
        return reasons.PADDING
    if a.varies("pad"):
        return Recognized(Role.PAD, None, [a.input])  # by sizes
    return Recognized(Role.PAD, None, [a.input], pad=_spatial_pad(rank, pad))


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

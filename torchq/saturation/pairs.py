# SPDX-License-Identifier: Apache-2.0
"""Sums of products whose adjacent pairs saturate to 16 bits: ops, on plain tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.functional.arguments import Ints, check_8bit, conv_geometry

LOWEST, HIGHEST = -(2**15), 2**15 - 1
U8_MAX = 255
SHIFT = 128  # what turns s8 into u8
_CHUNK = 1 << 21  # elements of the largest temporary


class Sums(NamedTuple):
    """Accumulators with and without saturation.

    Attributes:
        exact: int64, what torchq computes; of the op's shape.
        saturated: int64, what the emulated CPU computes.
        saturating: int64 ``[N]``, pairs that saturated, per output channel.
        pairs: how many pairs each output sums.
    """

    exact: Tensor
    saturated: Tensor
    saturating: Tensor
    pairs: int

    @property
    def share(self) -> float:
        """The share of pairs that saturated."""
        total = self.exact.numel() * self.pairs
        return int(self.saturating.sum()) / total if total else 0.0


def halve(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """The weight that an s8 convolution uses: ``rne(w * 0.5)``, or ``rne(w * 0.5 / scale)``.

    Args:
        weight: int8, or float32 as it was before quantization.
        scale: of a float weight; broadcasts against it.

    Raises:
        ValueError: a float weight comes without a scale, or an int8 one with one.
    """
    if weight.is_floating_point() != (scale is not None):
        raise ValueError(
            "torchq.saturation.halve: scale must be given exactly for a float weight, got "
            f"{weight.dtype} and {'no scale' if scale is None else 'a scale'}. An int8 weight is "
            "in steps already."
        )
    steps = weight.double() if scale is None else weight.double() / scale.double()
    return torch.round(steps * 0.5).clamp(-128, 127).to(torch.int8)


def emulate_linear(src: Tensor, weight: Tensor, src_zero_point: int = 0) -> Sums:
    """``(src - src_zero_point) @ weight.T``; inner product and GEMM protect nothing.

    Args:
        src: uint8 or int8 ``(*, K)``.
        weight: int8 ``(N, K)``.
        src_zero_point: subtracted by the weight sums, exactly.

    Raises:
        TypeError: a dtype other than these.
        ValueError: the shapes do not fit.
    """
    _check("emulate_linear", src, weight)
    if weight.dim() != 2 or src.dim() == 0 or src.shape[-1] != weight.shape[1]:
        raise ValueError(
            "torchq.saturation.emulate_linear: src must be (*, K) and weight (N, K), got "
            f"{list(src.shape)} and {list(weight.shape)}. Check the layer's in_features."
        )
    rows, zero = _as_unsigned(src, src_zero_point)
    rows = rows.reshape(math.prod(src.shape[:-1]), 1, src.shape[-1])
    exact, saturated, saturating = _sums(rows, weight[:, None], weight[:, None], zero)
    shape = (*src.shape[:-1], weight.shape[0])
    pairs = (weight.shape[1] + 1) // 2
    return Sums(exact.reshape(shape), saturated.reshape(shape), saturating, pairs)


def emulate_conv(
    src: Tensor,
    weight: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    src_zero_point: int = 0,
    padding_end: Ints | None = None,
    halved: Tensor | None = None,
) -> Sums:
    """A convolution in 1 to 3 dimensions; with an s8 source its weights are halved.

    Padding holds the zero point, so that the weight sums of all taps cancel it.

    Args:
        src: uint8 or int8 ``(N, C, spatial...)``.
        weight: int8 ``(OC, C/groups, kernel...)``.
        stride: as in :func:`torchq.functional.conv2d`, and so on.
        padding: before, and after unless ``padding_end`` is given.
        dilation: distance between taps; 1 is dense.
        groups: divides both channel counts.
        src_zero_point: subtracted by the weight sums, exactly.
        padding_end: after, where it differs.
        halved: for an s8 source, from :func:`halve` of the float weight; None halves ``weight``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: the shapes do not fit.
    """
    _check("emulate_conv", src, weight)
    if src.dim() != weight.dim() or src.dim() < 3 or src.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            "torchq.saturation.emulate_conv: src must be (N, C, spatial...) and weight (OC, "
            f"C/{groups}, kernel...), got {list(src.shape)} and {list(weight.shape)}. Check groups."
        )
    if src.shape[0] == 0:
        raise ValueError(
            "torchq.saturation.emulate_conv: src must have at least one image, got "
            f"{list(src.shape)}. Leave empty batches out."
        )
    geometry = conv_geometry(
        "saturation.emulate_conv", weight.shape[2:], stride, padding, padding_end, dilation
    )
    used, factor = weight, 1
    if src.dtype == torch.int8:
        used, factor = halve(weight) if halved is None else halved, 2
    by_tap = (w.flatten(2).transpose(1, 2).chunk(groups) for w in (weight, used))
    unsigned, zero = _as_unsigned(src, src_zero_point)
    exact, saturated, saturating = [], [], []
    images = [_rows(image, geometry, zero) for image in unsigned]  # (pixels, taps, C)
    for group, (w, u) in enumerate(zip(*by_tap, strict=True)):
        columns = slice(group * w.shape[2], (group + 1) * w.shape[2])
        parts = [_sums(rows[:, :, columns], w, u, zero) for rows, _ in images]
        exact.append(torch.stack([part[0] for part in parts]))
        saturated.append(torch.stack([part[1] for part in parts]))
        saturating.append(torch.stack([part[2] for part in parts]).sum(0))
    shape = (len(images), weight.shape[0], *images[0][1])
    sums = [torch.cat(part, 2).transpose(1, 2).reshape(shape) for part in (exact, saturated)]
    pairs = weight[0, 0].numel() * ((weight.shape[1] + 1) // 2)
    return Sums(sums[0], sums[1] * factor, torch.cat(saturating), pairs)


def _check(op: str, src: Tensor, weight: Tensor) -> None:
    check_8bit(f"saturation.{op}", "src", src)
    if weight.dtype != torch.int8:
        raise TypeError(
            f"torchq.saturation.{op}: weight must be torch.int8, got {weight.dtype}. Quantize it "
            "first: torchq.functional.quantize_weight."
        )


def _as_unsigned(src: Tensor, zero_point: int) -> tuple[Tensor, int]:
    """The u8 operand, as int16, and the zero point among its values."""
    shift = SHIFT if src.dtype == torch.int8 else 0
    return src.to(torch.int16) + shift, zero_point + shift


def _rows(image: Tensor, geometry: Sequence[int], fill: int) -> tuple[Tensor, list[int]]:
    """One image (C, spatial...) as (pixels, taps, C), and the output's spatial dims."""
    dims = image.dim() - 1
    kernel, stride, begin, end, dilation = (
        list(geometry[i * dims : (i + 1) * dims]) for i in range(5)
    )
    pads = [p for both in zip(reversed(begin), reversed(end), strict=True) for p in both]
    padded = F.pad(image, pads, value=fill)
    out = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(padded.shape[1:], kernel, stride, dilation, strict=True)
    ]
    taps = []
    for tap in itertools.product(*map(range, kernel)):
        window = [slice(None)]
        for t, d, s, o in zip(tap, dilation, stride, out, strict=True):
            window.append(slice(t * d, t * d + (o - 1) * s + 1, s))
        taps.append(padded[tuple(window)].flatten(1).t())
    return torch.stack(taps, 1), out


def _sums(rows: Tensor, weight: Tensor, used: Tensor, zero: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (M, taps, K) of u8 values times ``weight`` (N, taps, K), exact and, ``used``, saturated.

    Float64 holds every sum exactly. Only pairs that some u8 values could saturate are looked at.
    """
    odd = rows.shape[2] % 2
    a = F.pad(rows, (0, odd)).flatten(1).double()
    w, u = (F.pad(x.double(), (0, odd)).flatten(1) for x in (weight, used))
    exact = a @ w.t() - zero * w.sum(1)
    saturated = a @ u.t() - zero * u.sum(1)
    saturating = torch.zeros(len(u), dtype=torch.int64)
    pairs = u.reshape(len(u), u.shape[1] // 2, 2)
    positive, negative = pairs.clamp(min=0).sum(2), pairs.clamp(max=0).sum(2)
    unsafe = (U8_MAX * positive > HIGHEST) | (U8_MAX * negative < LOWEST)
    channel, pair = unsafe.nonzero(as_tuple=True)
    step = max(1, _CHUNK // max(1, len(a)))
    for c, p in zip(torch.split(channel, step), torch.split(pair, step), strict=True):
        both = a[:, 2 * p] * pairs[c, p, 0] + a[:, 2 * p + 1] * pairs[c, p, 1]
        excess = both - both.clamp(LOWEST, HIGHEST)
        saturated.index_add_(1, c, -excess)
        saturating.index_add_(0, c, (excess != 0).sum(0))
    return exact.long(), saturated.long(), saturating

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

from torchq.attributes.arguments import check_type, to_int
from torchq.functional.arguments import Ints, check_8bit, conv_geometry, spread

LOWEST, HIGHEST = -(2**15), 2**15 - 1
U8_MAX = 255
SHIFT = 128  # what turns s8 into u8
_ABSENT = -1  # instead of a u8 value: no source there
_CHUNK = 1 << 21  # elements of the largest temporary


class Sums(NamedTuple):
    """Accumulators with and without saturation.

    Attributes:
        exact: int64, what torchq computes; of the op's shape.
        saturated: int64, what the emulated CPU computes.
        saturating: int64 ``[N]``, pairs that saturated, per output channel.
        pairs: how many pairs all outputs sum; taps in the padding have none.
    """

    exact: Tensor
    saturated: Tensor
    saturating: Tensor
    pairs: int

    @property
    def share(self) -> float:
        """The share of pairs that saturated."""
        return int(self.saturating.sum()) / self.pairs if self.pairs else 0.0


def halve(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the weight that an s8 convolution uses: ``rne(w * 0.5)``, or ``rne(w * 0.5 / scale)``.

    Args:
        weight: int8, or float32 as it was before quantization.
        scale: of a float weight; broadcasts against it.

    Raises:
        TypeError: ``weight`` is neither.
        ValueError: a float weight comes without a scale, or an int8 one with one.
    """
    check_type("torchq.saturation.halve: weight", weight, Tensor, "Pass a tensor.")
    if weight.dtype != torch.int8 and not weight.is_floating_point():
        raise TypeError(
            f"torchq.saturation.halve: weight must be int8 or floating point, got {weight.dtype}. "
            "Only s8 weights are halved."
        )
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
    pairs = exact.numel() * ((weight.shape[1] + 1) // 2)
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
    """Emulate a convolution in 1 to 3 dimensions; with an s8 source its weights are halved.

    Taps in the padding contribute nothing.

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
    _check_conv("emulate_conv", src, weight, weight.shape[1] * groups)
    g = conv_geometry(
        "saturation.emulate_conv", weight.shape[2:], stride, padding, padding_end, dilation
    )
    dims = src.dim() - 2
    _, steps, begin, end, gaps = (g[i * dims : (i + 1) * dims] for i in range(5))
    unsigned, zero = _as_unsigned(src, src_zero_point)
    images = [F.pad(image, _pads(begin, end), value=_ABSENT) for image in unsigned]
    used, factor = _used(src, weight, halved)
    return _conv(images, weight, used, steps, gaps, groups, zero, factor)


def emulate_conv_transpose(
    src: Tensor,
    weight: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    src_zero_point: int = 0,
    padding_end: Ints | None = None,
    halved: Tensor | None = None,
) -> Sums:
    """Emulate a transposed convolution; taps that meet no source contribute nothing.

    Args:
        src: uint8 or int8 ``(N, C, spatial...)``.
        weight: int8 ``(C, OC/groups, kernel...)``, as torch's ConvTranspose has it.
        stride: as in :func:`torchq.functional.conv_transpose2d`, and so on.
        padding: cut from the result, before, and after unless ``padding_end`` is given.
        output_padding: added to the result, after.
        groups: divides both channel counts.
        dilation: distance between taps; 1 is dense.
        src_zero_point: as in :func:`emulate_conv`; so are ``padding_end`` and ``halved``.
        padding_end: after, where it differs.
        halved: laid out as ``weight``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: the shapes do not fit.
    """
    _check_conv("emulate_conv_transpose", src, weight, weight.shape[0])
    g = conv_geometry(
        "saturation.emulate_conv_transpose",
        weight.shape[2:],
        stride,
        padding,
        padding_end,
        dilation,
    )
    dims = src.dim() - 2
    kernel, steps, begin, end, gaps = (g[i * dims : (i + 1) * dims] for i in range(5))
    more = spread("saturation.emulate_conv_transpose", "output_padding", output_padding, dims)
    reach = [d * (k - 1) for d, k in zip(gaps, kernel, strict=True)]
    before = [r - p for r, p in zip(reach, begin, strict=True)]
    after = [r - p + m for r, p, m in zip(reach, end, more, strict=True)]
    unsigned, zero = _as_unsigned(src, src_zero_point)
    apart = [(size - 1) * s + 1 for size, s in zip(src.shape[2:], steps, strict=True)]
    images = []
    for image in unsigned:
        spaced = image.new_full((src.shape[1], *apart), _ABSENT)
        spaced[(slice(None), *(slice(None, None, s) for s in steps))] = image
        images.append(F.pad(spaced, _pads(before, after), value=_ABSENT))
    used, factor = _used(src, weight, halved)
    weight, used = (as_conv_weight(w, groups) for w in (weight, used))
    return _conv(images, weight, used, [1] * dims, gaps, groups, zero, factor)


def as_conv_weight(weight: Tensor, groups: int) -> Tensor:
    """Return a transposed convolution's weight (C, OC/groups, kernel...) as an ordinary one's.

    ``(OC, C/groups, kernel...)`` with the kernel reversed: what meets the source spread by stride.
    """
    per_group = weight.unflatten(0, (groups, weight.shape[0] // groups)).transpose(1, 2)
    result: Tensor = per_group.flatten(0, 1)
    return result.flip(tuple(range(2, weight.dim())))


def _conv(
    images: Sequence[Tensor],
    weight: Tensor,
    used: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    zero: int,
    factor: int,
) -> Sums:
    """Over padded images (C, spatial...); ``factor`` makes up for the halves in ``used``."""
    by_tap = (w.flatten(2).transpose(1, 2).chunk(groups) for w in (weight, used))
    gathered = [_rows(image, weight.shape[2:], stride, dilation) for image in images]
    exact, saturated, saturating = [], [], []
    for group, (w, u) in enumerate(zip(*by_tap, strict=True)):
        columns = slice(group * w.shape[2], (group + 1) * w.shape[2])
        parts = [_sums(rows[:, :, columns], w, u, zero) for rows, _ in gathered]
        exact.append(torch.stack([part[0] for part in parts]))
        saturated.append(torch.stack([part[1] for part in parts]))
        saturating.append(torch.stack([part[2] for part in parts]).sum(0))
    shape = (len(images), weight.shape[0], *gathered[0][1])
    sums = [torch.cat(part, 2).transpose(1, 2).reshape(shape) for part in (exact, saturated)]
    taps = sum(int((rows[:, :, 0] != _ABSENT).sum()) for rows, _ in gathered)
    pairs = taps * weight.shape[0] * ((weight.shape[1] + 1) // 2)
    return Sums(sums[0], sums[1] * factor, torch.cat(saturating), pairs)


def _used(src: Tensor, weight: Tensor, halved: Tensor | None) -> tuple[Tensor, int]:
    """Return the weights that run, halved for an s8 source, and the factor that makes up for it."""
    if src.dtype != torch.int8:
        return weight, 1
    return (halve(weight) if halved is None else halved), 2


def _check(op: str, src: Tensor, weight: Tensor) -> None:
    check_8bit(f"saturation.{op}", "src", src)
    check_type(f"torchq.saturation.{op}: weight", weight, Tensor, "Pass an int8 tensor.")
    if weight.dtype != torch.int8:
        raise TypeError(
            f"torchq.saturation.{op}: weight must be torch.int8, got {weight.dtype}. Quantize it "
            "first: torchq.functional.quantize_weight."
        )


def _check_conv(op: str, src: Tensor, weight: Tensor, channels: int) -> None:
    _check(op, src, weight)
    if src.dim() != weight.dim() or src.dim() < 3 or src.shape[1] != channels:
        raise ValueError(
            f"torchq.saturation.{op}: src must be (N, {channels}, spatial...) for weight "
            f"{list(weight.shape)} with as many dims, got {list(src.shape)}. Check groups."
        )
    if src.shape[0] == 0:
        raise ValueError(
            f"torchq.saturation.{op}: src must have at least one image, got {list(src.shape)}. "
            "Leave empty batches out."
        )


def _as_unsigned(src: Tensor, zero_point: int) -> tuple[Tensor, int]:
    """Return the u8 operand, as int16, and the zero point among its values."""
    shift = SHIFT if src.dtype == torch.int8 else 0
    where, limits = f"torchq.saturation: src_zero_point of {src.dtype}", torch.iinfo(src.dtype)
    zero_point = to_int(where, zero_point, limits.min, limits.max)
    return src.to(torch.int16) + shift, zero_point + shift


def _pads(begin: Sequence[int], end: Sequence[int]) -> list[int]:
    """In the order of F.pad: the last dimension first."""
    return [p for both in zip(reversed(begin), reversed(end), strict=True) for p in both]


def _rows(
    image: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """One image (C, spatial...) as (pixels, taps, C), and the output's spatial dims."""
    out = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(image.shape[1:], kernel, stride, dilation, strict=True)
    ]
    taps = []
    for tap in itertools.product(*map(range, kernel)):
        window = [slice(None)]
        for t, d, s, o in zip(tap, dilation, stride, out, strict=True):
            window.append(slice(t * d, t * d + (o - 1) * s + 1, s))
        taps.append(image[tuple(window)].flatten(1).t())
    return torch.stack(taps, 1), out


def _sums(rows: Tensor, weight: Tensor, used: Tensor, zero: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (M, taps, K) of u8 values times ``weight`` (N, taps, K), exact and, ``used``, saturated.

    Float64 holds every sum exactly. The zero point leaves both by the weight sums, exactly; what
    saturates is the product with the u8 values. Only pairs that some values saturate are looked at.
    """
    odd = (0, rows.shape[2] % 2)
    present = rows != _ABSENT
    a = F.pad(rows * present, odd).flatten(1).double()
    centered = F.pad((rows - zero) * present, odd).flatten(1).double()
    w, u = (F.pad(x.double(), odd).flatten(1) for x in (weight, used))
    exact, saturated = centered @ w.t(), centered @ u.t()
    saturating = torch.zeros(len(u), dtype=torch.int64, device="cpu")
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

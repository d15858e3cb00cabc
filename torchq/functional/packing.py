# SPDX-License-Identifier: Apache-2.0
"""Packed weights: plain tensors in the one layout that every ISA reads.

oneDNN's reorder of weights with compensation is ``quantize_weight``, for int8 weights and scales,
and one of the functions here. The compensation of the whole kernel is ``compensation.sum(0)``. The
shift of an s8 source by 128, and its zero point, multiply these sums in the ops. oneDNN's grouped
weights (G, OC/G, IC/G, k...) are ``weight.flatten(0, 1)`` here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.functional.placeholders import (
    check_sizes,
    placeholder,
    replaced_placeholders,
    take,
)
from torchq.functional.proofs import sums_and_bounds


class PackedWeight(NamedTuple):
    """Weight as the matmul-like ops read it; made by the functions of this module.

    Attributes:
        weight: int8 ``[ceil(N/16), rows, ceil(K/4), 16, 4]``; depthwise
            ``[ceil(C/16), quads, 16, 4]``.
        compensation: int32 ``[rows, N]``, sums of the weights per channel. A row is one tap of the
            kernel; of a convolution whose IC/groups is no multiple of 4 it may be all taps along
            one dim, as in a 3x3 stem (3, OC). A depthwise one has one row for all, (1, C).
        pair_bound: int32, one per panel: the largest sum of two adjacent weights of one sign.
        shape: of the unpacked weight; of a transposed convolution (OC, IC/groups, k...).
        groups: of the convolution; 1 for linear.
        dilation: one per spatial dimension; empty for linear.
        stride: of a transposed convolution, one per spatial dimension; empty for all others.
        dtype: of the unpacked weight; uint8 is packed as ``w - 128``, with 128 less of zero point.
    """

    weight: Tensor
    compensation: Tensor
    pair_bound: Tensor
    shape: tuple[int, ...]
    groups: int
    dilation: tuple[int, ...]
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int8

    @property
    def channels(self) -> int:
        """Output channels."""
        return self.shape[0]

    @property
    def in_channels(self) -> int:
        """Input channels, or features."""
        return self.shape[1] * self.groups

    @property
    def reduction(self) -> int:
        """The most products per output; a transposed convolution meets part of its taps."""
        if not self.stride:
            return math.prod(self.shape[1:])
        gaps = zip(self.shape[2:], self.stride, self.dilation, strict=True)
        taps = (-(-kernel // (step // math.gcd(step, gap))) for kernel, step, gap in gaps)
        return self.shape[1] * math.prod(taps)

    @property
    def geometry(self) -> list[list[int]]:
        """Shape, groups, stride and dilation, as TorchScript takes them."""
        return [list(self.shape), [self.groups], list(self.stride), list(self.dilation)]

    @property
    def logical_dims(self) -> tuple[int, ...]:
        """Dims that masks index: (OC, IC, k...), with groups (G, OC/G, IC/G, k...)."""
        if self.groups == 1:
            return self.shape
        return (self.groups, self.shape[0] // self.groups, *self.shape[1:])

    def tensors(self, suffix: str = "") -> dict[str, Tensor]:
        """Return the tensors by name, each name followed by the suffix."""
        parts = {"weight": self.weight, "compensation": self.compensation}
        parts["pair_bound"] = self.pair_bound
        return {f"{name}{suffix}": part for name, part in parts.items()}

    def unpack(self) -> Tensor:
        """Return the weight as it was before packing."""
        if self.dtype == torch.uint8:
            return (self._replace(dtype=torch.int8).unpack().short() + 128).to(torch.uint8)
        if self.stride:
            outputs, inputs, *kernel = self.shape
            shape = [inputs * self.groups, outputs // self.groups, *kernel]
            transposed: Tensor = torch.ops.torchq.unpack_conv_transpose(
                self.weight, shape, self.groups, list(self.stride), list(self.dilation)
            )
            return transposed
        if not self.dilation:
            linear: Tensor = torch.ops.torchq.unpack_linear(self.weight, *self.shape)
            return linear
        conv: Tensor = torch.ops.torchq.unpack_conv(
            self.weight, list(self.shape), self.groups, list(self.dilation)
        )
        return conv


def empty_packed(
    weight_shape: Sequence[int],
    dtype: torch.dtype = torch.int8,
    groups: int = 1,
    stride: Sequence[int] = (),
    dilation: Sequence[int] = (),
) -> PackedWeight:
    """Return memory, filled with zeros, for a weight of this shape; packs nothing.

    The shape is the one that ``pack_linear``, or with a dilation ``pack_conv``, or with a stride
    ``pack_conv_transpose`` takes.
    """
    check_sizes(weight_shape)
    with replaced_placeholders():
        take(math.prod(max(size, 1) for size in weight_shape))  # before packing allocates as much
    packed = _form(tuple(weight_shape), dtype, groups, tuple(stride), tuple(dilation))
    weight, compensation, pair_bound = (
        placeholder(*part.shape, dtype=part.dtype, value=0) for part in packed.tensors().values()
    )
    return packed._replace(weight=weight, compensation=compensation, pair_bound=pair_bound)


@lru_cache(maxsize=256)  # models have many layers of the same shape
def _form(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    groups: int,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> PackedWeight:
    """Return what packing makes of a weight of this shape: tensors on meta."""
    return _pack(torch.empty(shape, dtype=dtype, device="meta"), groups, stride, dilation)


def _pack(
    weight: Tensor, groups: int, stride: Sequence[int], dilation: Sequence[int]
) -> PackedWeight:
    if stride:
        return pack_conv_transpose(weight, groups, stride, dilation)
    return pack_conv(weight, groups, dilation) if dilation else pack_linear(weight)


def pack_linear(weight: Tensor) -> PackedWeight:
    """Pack an int8 or uint8 weight ``(out_features, in_features)``.

    Raises:
        TypeError: ``weight`` is neither.
        ValueError: it is not 2-D, or more than 65793 products could overflow int32.
    """
    _check_weight("pack_linear", weight)
    packed, compensation, pair_bound = torch.ops.torchq.pack_linear(_as_int8(weight))
    shape = tuple(weight.shape)
    return PackedWeight(packed, compensation, pair_bound, shape, 1, (), dtype=weight.dtype)


def pack_conv(weight: Tensor, groups: int = 1, dilation: int | Sequence[int] = 1) -> PackedWeight:
    """Pack an int8 or uint8 weight ``(OC, IC/groups, k...)`` with 1 to 3 kernel dimensions.

    A grouped weight of oneDNN, (G, OC/G, IC/G, k...), has one dim more: pass
    ``weight.flatten(0, 1)``.

    Raises:
        TypeError: ``weight`` is neither.
        ValueError: the shape, groups or dilation do not fit, or more than 65793 products could
            overflow int32.
    """
    _check_weight("pack_conv", weight)
    dims = max(weight.dim() - 2, 0)
    spread = (dilation,) * dims if isinstance(dilation, int) else tuple(dilation)
    int8 = _as_int8(weight)
    packed, compensation, pair_bound = torch.ops.torchq.pack_conv(int8, groups, list(spread))
    tensors = (packed, compensation, pair_bound)
    return PackedWeight(*tensors, tuple(weight.shape), groups, spread, dtype=weight.dtype)


def _check_weight(op: str, weight: object) -> None:
    check_type(f"torchq.{op}: weight", weight, Tensor, "Pass an int8 or uint8 tensor.")


def _as_int8(weight: Tensor) -> Tensor:
    if weight.dtype != torch.uint8:
        return weight
    return (weight.short() - 128).to(torch.int8)


def pack_conv_transpose(
    weight: Tensor,
    groups: int = 1,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
) -> PackedWeight:
    """Pack an int8 or uint8 weight ``(IC, OC/groups, k...)``, torch's ConvTranspose layout.

    Stride and dilation decide which taps meet the same destinations; those are packed together.

    Raises:
        TypeError: ``weight`` is neither.
        ValueError: the shape, groups, stride or dilation do not fit, or more than 65793 products
            could overflow int32.
    """
    _check_weight("pack_conv_transpose", weight)
    dims = max(weight.dim() - 2, 0)
    steps = (stride,) * dims if isinstance(stride, int) else tuple(stride)
    gaps = (dilation,) * dims if isinstance(dilation, int) else tuple(dilation)
    packed, compensation, pair_bound = torch.ops.torchq.pack_conv_transpose(
        _as_int8(weight), groups, list(steps), list(gaps)
    )
    shape = (weight.shape[1] * groups, weight.shape[0] // groups, *weight.shape[2:])
    tensors = (packed, compensation, pair_bound)
    return PackedWeight(*tensors, shape, groups, gaps, steps, weight.dtype)


def unproven(packed: PackedWeight) -> str:
    """Return the name of a tensor that does not follow from the unpacked weight; "" if all do.

    That goes for the padding of the weight, too, which meets bytes of other rows.
    """
    shape = list(packed.shape)
    if packed.stride:
        shape = [packed.in_channels, shape[0] // packed.groups, *shape[2:]]
    form = _form(tuple(shape), packed.dtype, packed.groups, packed.stride, packed.dilation)
    wanted = form.tensors()
    given = packed.tensors()
    for name, tensor in given.items():
        same = tensor.shape == wanted[name].shape and tensor.dtype == wanted[name].dtype
        if not same or tensor.device != packed.weight.device:
            return name
    shape, groups, stride, dilation = packed.geometry
    packing = sums_and_bounds(packed.weight, shape, groups[0], stride, dilation)
    wanted = dict(zip(given, packing, strict=True))
    return next((name for name in wanted if not torch.equal(given[name], wanted[name])), "")

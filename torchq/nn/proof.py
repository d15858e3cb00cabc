# SPDX-License-Identifier: Apache-2.0
"""Checks that weight sums and pair bounds, which prove kernels exact, follow from the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchq.functional.linear import linear
from torchq.functional.packing import PackedWeight, empty_packed


def unproven(packed: PackedWeight) -> str:
    """Returns the name of a tensor that does not follow from the unpacked weight; "" if all do.

    That goes for the padding of the weight, too, which meets bytes of other rows.
    """
    shape = list(packed.shape)
    if packed.stride:
        shape = [packed.in_channels, shape[0] // packed.groups, *shape[2:]]
    window = packed.groups, packed.stride, packed.dilation
    wanted = empty_packed(shape, packed.dtype, *window).tensors()
    given = packed.tensors()
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            return name
    if packed.groups == 1 and packed.weight.numel():
        wanted = _follow(packed)
    else:  # layouts of many kinds, and few weights
        wanted = packed.repacked().tensors()
    return next((name for name in wanted if not torch.equal(given[name], wanted[name])), "")


def _follow(packed: PackedWeight) -> dict[str, Tensor]:
    """The sums and bounds of ``[panels, taps, quads, 16, 4]``, and ``weight`` if its padding errs.

    A kernel takes the sums: packing anew takes a hundred times as long.
    """
    weight, outputs = packed.weight, packed.channels
    panels, taps, quads = weight.shape[:3]
    inputs = math.prod(packed.shape[1:]) // taps
    used = inputs - 4 * (quads - 1), outputs - 16 * (panels - 1)
    if bool(weight[:, :, -1, :, used[0] :].any()) or bool(weight[-1, :, :, used[1] :].any()):
        return {"weight": torch.zeros_like(weight)}
    # each tap of a panel as a panel of a linear layer, whose source is all ones
    rows = panels * taps * 16
    flat = weight.view(panels * taps, 1, quads, 16, 4)
    zeros = torch.zeros(1, rows, dtype=torch.int32, device="cpu")
    most = torch.full((panels * taps,), 256, dtype=torch.int32, device="cpu")
    ones = torch.ones(1, inputs, dtype=torch.uint8, device="cpu")
    layer = PackedWeight(flat, zeros, most, (rows, inputs), 1, ())
    sums = linear(ones, layer, dst_dtype=torch.int32).view(panels, taps, 16)
    compensation = sums.transpose(0, 1).reshape(taps, panels * 16)[:, :outputs]
    return {"compensation": compensation, "pair_bound": _pair_bounds(weight)}


def _pair_bounds(weight: Tensor) -> Tensor:
    """The largest sum of two adjacent weights of one sign, for each panel."""
    bytes_ = weight.contiguous().view(len(weight), -1)
    if bytes_.storage_offset() % 2:  # as files may have them: no address of int16
        bytes_ = bytes_.clone()
    pairs = bytes_.view(torch.int16)
    high, low = pairs >> 8, (pairs << 8) >> 8
    most = (high.clamp(min=0) + low.clamp(min=0)).amax(1)
    least = (high.clamp(max=0) + low.clamp(max=0)).amin(1)
    return torch.maximum(most, -least).to(torch.int32)

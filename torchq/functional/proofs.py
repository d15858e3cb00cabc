# SPDX-License-Identifier: Apache-2.0
"""Derives sums and bounds of packed weights, which prove kernels exact, from the weights alone.

TorchScript compiles this file, so it does not import annotations.
"""

import torch
from torch import Tensor


def sums_and_bounds(
    weight: Tensor, shape: list[int], groups: int, stride: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight as packing makes it, its sums, and its bounds.

    The padding of a weight meets bytes of other rows. Where it is not zero, the first result is
    another tensor than ``weight``.

    Args:
        weight: packed.
        shape: of the unpacked weight, as in ``PackedWeight``.
        groups: of the convolution; 1 for linear.
        stride: of a transposed convolution; empty for all others.
        dilation: one per spatial dimension; empty for linear.
    """
    if groups == 1 and weight.numel() > 0:
        # one pass over the weight: packing anew takes a hundred times as long
        panels, taps, quads = weight.size(0), weight.size(1), weight.size(2)
        inputs = shape[1]
        for size in shape[2:]:
            inputs *= size
        used = inputs // taps - 4 * (quads - 1), shape[0] - 16 * (panels - 1)
        if bool(weight[:, :, -1, :, used[0] :].any()) or bool(weight[-1, :, :, used[1] :].any()):
            weight = torch.zeros_like(weight)
        sums, bounds = torch.ops.torchq._packed_sums(weight.contiguous())
        return weight, sums[:, : shape[0]], bounds
    if len(stride) > 0:
        theirs = [shape[1] * groups, shape[0] // groups]
        theirs.extend(shape[2:])
        plain = torch.ops.torchq.unpack_conv_transpose(weight, theirs, groups, stride, dilation)
        parts = torch.ops.torchq.pack_conv_transpose(plain, groups, stride, dilation)
    elif len(dilation) > 0:
        plain = torch.ops.torchq.unpack_conv(weight, shape, groups, dilation)
        parts = torch.ops.torchq.pack_conv(plain, groups, dilation)
    else:
        plain = torch.ops.torchq.unpack_linear(weight, shape[0], shape[1])
        parts = torch.ops.torchq.pack_linear(plain)
    packed, sums, bounds = parts
    return packed, sums, bounds

# SPDX-License-Identifier: Apache-2.0
"""A factor and a shift per channel behind a convolution or linear, folded into its float weight.

Layers of a graph usually have the factors in their weight's scales, and the integers of the plain
weight: see ``_with_affines`` of :mod:`torchq.convert.quantized_layers`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", bound=nn.Module)
Affine: TypeAlias = tuple[Tensor, Tensor]
"""(scale, shift) in float64, ``[]`` or one per output channel: ``y * scale + shift``."""

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a convolution or linear."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def bias_of(module: nn.Module) -> Tensor | None:
    """Return the bias of a convolution or linear."""
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def fold_affines(module: Layer, affines: Sequence[Affine]) -> Layer:
    """Return a copy of a convolution or linear that applies these, one by one, to its result."""
    if not affines:
        return module
    folded = copy.deepcopy(module)
    with torch.no_grad():
        scale, shift = combined(affines, bias_of(module))
        factors = along_channels(module, scale)
        weight = weight_of(module).double()
        grouped = weight.reshape(factors.shape[0], -1, *weight.shape[1:]) * factors
        folded.weight = nn.Parameter(grouped.reshape(weight.shape).float(), False)
        folded.bias = nn.Parameter(shift.expand(channels(module)).float().contiguous(), False)
    return folded


def with_bias(module: Layer, bias: Tensor | None) -> Layer:
    """Return a layer of the same weight with this bias."""
    other = copy.copy(module)
    own = None if bias is None else nn.Parameter(bias.contiguous(), False)
    vars(other)["_parameters"] = {**module._parameters, "bias": own}
    return other


def combined(affines: Sequence[Affine], bias: Tensor | None = None) -> Affine:
    """All of them as one, behind the addition of a bias."""
    scale = torch.ones((), dtype=torch.float64, device="cpu")
    shift = (
        torch.zeros((), dtype=torch.float64, device="cpu")
        if bias is None
        else bias.detach().double()
    )
    for factor, more in affines:
        scale, shift = scale * factor, shift * factor + more
    return scale, shift


def channels(module: nn.Module) -> int:
    """Output channels of a convolution or linear."""
    if isinstance(module, TRANSPOSED):
        return int(module.weight.shape[1]) * int(module.groups)
    return int(weight_of(module).shape[0])


def reduction(module: nn.Module) -> int:
    """Products that each output of a convolution or linear sums at most."""
    weight = weight_of(module)
    if isinstance(module, TRANSPOSED):
        return int(weight.numel() // max(weight.shape[1], 1) // module.groups)
    return int(math.prod(weight.shape[1:]))


def along_channels(module: nn.Module, values: Tensor) -> Tensor:
    """Values per output channel, to multiply the weight ``(G, rows/G, columns, k...)`` with.

    G is 1 but for transposed convolutions, whose groups split the rows, dimension 0.
    """
    values = values.expand(channels(module))
    taps = [1] * (weight_of(module).dim() - 2)
    if isinstance(module, TRANSPOSED):
        return values.reshape(module.groups, 1, -1, *taps)
    return values.reshape(1, -1, 1, *taps)

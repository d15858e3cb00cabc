# SPDX-License-Identifier: Apache-2.0
"""4-bit weights in groups: codes from 0 to 15 around 8, with a bfloat16 scale for each group."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from torchq.attributes.options import GroupSize

GROUP_SIZES: tuple[GroupSize, ...] = get_args(GroupSize)

# Steps between 0 and the value of largest magnitude in a group. Of these, those with the smallest
# squared error are taken: 1.0 to 1.6 dB above 7 for groups of normal, Laplace and uniform weights.
_STEPS = (7.0, 7.5, 8.0, 8.5, 9.0)
_CHUNK = 1 << 20  # weights that are quantized at a time


def check_group_size(where: str, group_size: object) -> None:
    """Raise ValueError unless 4-bit weights may have groups of this size."""
    if isinstance(group_size, bool) or group_size not in GROUP_SIZES:
        raise ValueError(
            f"torchq.{where}: group_size must be 32, 64 or 128, got {group_size!r}. Take 32 for "
            "the most accurate weights, 128 for the smallest."
        )


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """Return a float32 weight ``[N, K]`` as ``[N, groups, group_size]``, zeros behind its rows."""
    n, k = weight.shape
    groups = -(-k // group_size)
    result = torch.zeros(n, groups * group_size, dtype=torch.float32, device="cpu")
    result[:, :k] = weight.detach()
    return result.view(n, groups, group_size)


def int4_scales(weight: Tensor, group_size: int) -> Tensor:
    """Return float32 scales ``[N, groups]`` of a finite weight ``[N, K]``, of either sign.

    A negative scale gives the value of largest magnitude the code 0, which is farther from 8 than
    15 is.
    """
    groups = grouped(weight, group_size)
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    return torch.cat([_scales(part) for part in torch.split(groups, rows)])


def _scales(groups: Tensor) -> Tensor:
    if groups.numel() == 0:
        return groups.sum(-1)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    extreme = torch.where(high > -low, high, low)
    least, best = torch.full_like(extreme, torch.inf), torch.ones_like(extreme)
    for steps in _STEPS:
        scale = _usable(-extreme / steps)
        codes = (groups / scale).round_().clamp_(-8, 7)
        error = (codes * scale - groups).square_().sum(-1, keepdim=True)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best.squeeze(-1)


def _usable(scale: Tensor) -> Tensor:
    """Return scales as bfloat16 numbers; 1 for those too small to divide by."""
    scale = scale.to(torch.bfloat16).float()
    return torch.where(scale.abs() < torch.finfo(torch.float32).tiny, 1.0, scale)


def int4_codes(weight: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """Return uint8 codes ``[N, K]`` of a weight with scales ``[N, groups]``."""
    codes = (grouped(weight, group_size) / scale.unsqueeze(-1)).round_().clamp_(-8, 7).add_(8)
    return codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]].contiguous()

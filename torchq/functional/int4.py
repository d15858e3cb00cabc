# SPDX-License-Identifier: Apache-2.0
"""4-bit weights of linear layers: codes in groups with a scale each, and their packed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.attributes.options import GroupSize
from torchq.functional.placeholders import placeholder
from torchq.quantization.int4 import check_group_size, int4_codes, int4_scales


@dataclass(frozen=True, eq=False)
class PackedInt4:
    """4-bit weight of a linear layer; made by :func:`torchq.packing.pack_linear_int4`.

    ``weight[n, k] = scale[n, k // group_size] * (code[n, k] - zero_point[n, k // group_size])``

    Attributes:
        weight: uint8 ``[ceil(N/16), ceil(K/8), 16, 4]``. A byte holds the codes of ``k`` in its low
            half and of ``k + 4`` in its high half.
        params: int32 ``[ceil(N/16), groups, 16]``: a zero point in the low 16 bits, a bfloat16
            scale in the high ones. Symmetric: ``[ceil(N/16), ceil(groups/2), 16]``, the scales of
            two groups.
        shape: ``(N, K)``.
        group_size: values of a row that share a scale, 32, 64 or 128; the last may be fewer.
        symmetric: whether all zero points are 8.
    """

    weight: Tensor
    params: Tensor
    shape: tuple[int, int]
    group_size: int
    symmetric: bool

    groups: ClassVar[int] = 1
    dilation: ClassVar[tuple[int, ...]] = ()
    stride: ClassVar[tuple[int, ...]] = ()
    dtype: ClassVar[torch.dtype] = torch.int8

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return uint8 codes ``[N, K]``, float32 scales and uint8 zero points ``[N, groups]``."""
        return unpack_int4(self.weight, self.params, *self.shape, self.group_size, self.symmetric)

    def dequantize(self) -> Tensor:
        """Return the float32 weight that the op computes with."""
        return dequantize_int4(
            self.weight, self.params, *self.shape, self.group_size, self.symmetric
        )


def unpack_int4(
    weight: Tensor, params: Tensor, n: int, k: int, group_size: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zero points; TorchScript compiles this."""
    groups = (k + group_size - 1) // group_size
    rows = weight.shape[0] * 16
    codes = torch.stack([weight & 15, weight >> 4], 2).permute(0, 3, 1, 2, 4)
    codes = codes.reshape(rows, weight.shape[1] * 8)
    lanes = params.permute(0, 2, 1).reshape(rows, params.shape[1]).contiguous()
    if symmetric:
        scale = lanes.view(torch.bfloat16)[:n, :groups].float()
        return codes[:n, :k].contiguous(), scale, torch.full_like(scale, 8, dtype=torch.uint8)
    scale = (lanes & -65536).view(torch.float32)[:n]
    return codes[:n, :k].contiguous(), scale, (lanes[:n] & 255).to(torch.uint8)


def dequantize_int4(
    weight: Tensor, params: Tensor, n: int, k: int, group_size: int, symmetric: bool
) -> Tensor:
    """Return the float32 weight; TorchScript compiles this."""
    codes, scale, zero = unpack_int4(weight, params, n, k, group_size, symmetric)
    zero, scale = zero.repeat_interleave(group_size, 1), scale.repeat_interleave(group_size, 1)
    return (codes.float() - zero[:, :k].float()) * scale[:, :k]


def pack_linear_int4(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, group_size: GroupSize = 32
) -> PackedInt4:
    """Pack a 4-bit weight for :func:`torchq.functional.dynamic_linear_int4`.

    Args:
        codes: uint8 ``(out_features, in_features)``, 0 to 15.
        scale: float ``[out_features, ceil(in_features / group_size)]``, finite, of any sign. Scales
            are stored as bfloat16, rounded to nearest even.
        zero_point: uint8 of the scale's shape, 0 to 15; None for 8 everywhere.
        group_size: values of a row that share a scale, 32, 64 or 128. The last group of a row may
            be smaller.

    Raises:
        TypeError: a dtype other than these.
        ValueError: other shapes or values.
    """
    check_group_size("pack_linear_int4", group_size)
    _check_codes("codes", codes)
    if codes.dim() != 2:
        raise ValueError(
            "torchq.pack_linear_int4: codes must be (out_features, in_features), got "
            f"{list(codes.shape)}. Flatten other dimensions."
        )
    n, k = codes.shape
    groups = -(-k // group_size)
    check_type("torchq.pack_linear_int4: scale", scale, Tensor, "Pass one for each group.")
    for name, given in {"scale": scale, "zero_point": zero_point}.items():
        if given is not None and list(given.shape) != [n, groups]:
            raise ValueError(
                f"torchq.pack_linear_int4: {name} must be [{n}, {groups}] for codes [{n}, {k}] in "
                f"groups of {group_size}, got {list(given.shape)}. Give one for each group."
            )
    scale = scale.detach().to(torch.bfloat16)
    if not bool(scale.isfinite().all()):
        raise ValueError(
            "torchq.pack_linear_int4: scale must be finite in bfloat16, got inf or NaN. Check what "
            "computed it."
        )
    panels = -(-n // 16)
    padded = torch.zeros(panels * 16, -(-k // 8) * 8, dtype=torch.uint8, device="cpu")
    padded[:n, :k] = codes
    halves = padded.view(panels, 16, -(-k // 8), 2, 4).permute(3, 0, 2, 1, 4)
    if zero_point is None:
        own = torch.zeros(panels * 16, -(-groups // 2) * 2, dtype=torch.bfloat16, device="cpu")
        own[:n, :groups] = scale
    else:
        _check_codes("zero_point", zero_point)
        own = torch.zeros(panels * 16, groups, 2, dtype=torch.bfloat16, device="cpu")
        own[:n, :, 0] = zero_point.to(torch.int16).view(torch.bfloat16)
        own[:n, :, 1] = scale
    count = -(-groups // 2) if zero_point is None else groups
    params = own.flatten().view(torch.int32).view(panels, 16, count).permute(0, 2, 1).contiguous()
    weight = (halves[0] | halves[1] << 4).contiguous()
    return PackedInt4(weight, params, (n, k), group_size, zero_point is None)


def _check_codes(name: str, codes: object) -> None:
    """Raise unless these are uint8 from 0 to 15."""
    check_type(f"torchq.pack_linear_int4: {name}", codes, Tensor, "Pass a uint8 tensor.")
    assert isinstance(codes, Tensor)
    if codes.dtype != torch.uint8:
        raise TypeError(
            f"torchq.pack_linear_int4: {name} must be uint8, got {codes.dtype}. Add 8 to signed "
            "values, and convert them with .to(torch.uint8)."
        )
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(
            f"torchq.pack_linear_int4: {name} must lie in [0, 15], got {int(codes.max())}. A value "
            "has 4 bits."
        )


def empty_packed_int4(shape: Sequence[int], group_size: int, symmetric: bool) -> PackedInt4:
    """Return memory, filled with zeros, for a weight of this shape."""
    n, k = shape
    panels, groups = -(-n // 16), -(-k // group_size)
    lanes = -(-groups // 2) if symmetric else groups
    weight = placeholder(panels, -(-k // 8), 16, 4, dtype=torch.uint8, value=0)
    params = placeholder(panels, lanes, 16, dtype=torch.int32, value=0)
    return PackedInt4(weight, params, (n, k), group_size, symmetric)


def quantize_weight_int4(weight: Tensor, group_size: GroupSize = 32) -> tuple[Tensor, Tensor]:
    """Quantize a float weight ``(out_features, in_features)`` to 4 bits, symmetric in each group.

    A scale may be negative: the value of largest magnitude then has code 0, the one that is farther
    from the zero point 8. Of five scales, the one with the smallest squared error is taken.

    Args:
        weight: float32, or another float dtype.
        group_size: values of a row that share a scale, 32, 64 or 128. The last group of a row may
            be smaller.

    Returns:
        uint8 codes of the weight's shape, and float32 scales ``[out_features, groups]`` that are
        bfloat16 numbers: see :func:`torchq.packing.pack_linear_int4`.

    Raises:
        TypeError: ``weight`` is not float.
        ValueError: it is not 2-D, or has NaN or inf.
    """
    check_group_size("quantize_weight_int4", group_size)
    check_type("torchq.quantize_weight_int4: weight", weight, Tensor, "Pass a float weight.")
    if not weight.is_floating_point():
        raise TypeError(
            f"torchq.quantize_weight_int4: weight must be float32, got {weight.dtype}. Pass the "
            "float weight."
        )
    if weight.dim() != 2 or not bool(weight.isfinite().all()):
        raise ValueError(
            "torchq.quantize_weight_int4: weight must be (out_features, in_features), with finite "
            f"values, got {list(weight.shape)}, or NaN or inf. Check the layer."
        )
    scale = int4_scales(weight, group_size)
    return int4_codes(weight, scale, group_size), scale

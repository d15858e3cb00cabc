# SPDX-License-Identifier: Apache-2.0
"""Layers that take and give floats, of int8 weights and scales that other tools chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchq.attributes.options import GroupSize
from torchq.attributes.post_ops import PostOps
from torchq.capture.module_kinds import MATMUL, RECURRENT
from torchq.functional.int4 import pack_linear_int4
from torchq.functional.packing import pack_linear
from torchq.nn import (
    DynamicQConv1d,
    DynamicQConv2d,
    DynamicQConv3d,
    DynamicQLinear,
    DynamicQLinearInt4,
    QuantizedLeaf,
)
from torchq.nn.from_float import Pack, matmul_from_float
from torchq.nn.leaf import without_padding
from torchq.nn.weight import packed_weight
from torchq.quantization.config import QConfig
from torchq.quantization.qparams import QParams
from torchq.report import reasons
from torchq.report.rows import Row

LAYERS = (*MATMUL, *RECURRENT)


def float_layer(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a layer of torch.nn with these float parameters in place of its own."""
    layer.weight = nn.Parameter(weight.detach().float().contiguous(), False)
    own = None if bias is None else nn.Parameter(bias.detach().float(), False)
    layer.register_parameter("bias", own)
    return layer.eval()


def dynamic_leaf(layer: nn.Module, weight: Tensor, scales: Tensor) -> QuantizedLeaf:
    """Return the dynamic leaf of a linear layer or convolution.

    Args:
        layer: of torch.nn; only its weight is not looked at.
        weight: int8.
        scales: of the weight, one or one per output channel.
    """
    weight = weight.contiguous()
    if isinstance(layer, nn.Linear):
        return QuantizedLeaf.of(layer, DynamicQLinear(pack_linear(weight), scales, layer.bias))
    forms: dict[int, Any] = {3: DynamicQConv1d, 4: DynamicQConv2d, 5: DynamicQConv3d}
    form = forms[weight.dim()]
    return QuantizedLeaf.of(layer, form.from_int8(without_padding(layer), weight, scales))


def int4_leaf(
    layer: nn.Module,
    weight: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    group_size: GroupSize,
) -> QuantizedLeaf:
    """Return the dynamic leaf of a linear layer with a 4-bit weight.

    Args:
        layer: of torch.nn; its own weight and bias are not looked at.
        weight: integers from -8 to 7.
        scales: of each group, ``[out_features, groups]``; they become bfloat16.
        zero_points: of each group, of the weight's integers; None for 0.
        bias: of the layer.
        group_size: 32, 64 or 128.
    """
    zeros = None if zero_points is None else (zero_points + 8).to(torch.uint8)
    packed = pack_linear_int4((weight + 8).to(torch.uint8), scales, zeros, group_size)
    return QuantizedLeaf.of(layer, DynamicQLinearInt4(packed, bias))


def static_leaf(
    layer: nn.Module,
    scales: Tensor,
    src: QParams,
    dtype: torch.dtype = torch.float32,
    pack: Pack = packed_weight,
) -> QuantizedLeaf:
    """Return the leaf of a layer whose source has known parameters.

    Args:
        layer: of torch.nn; its weight is int8 steps of ``scales``.
        scales: of the weight, one or one per output channel.
        src: parameters of its source.
        dtype: that the layer has in its model.
        pack: returns the quantized weight.
    """
    plain = without_padding(layer)
    made = matmul_from_float(plain, src, None, QConfig(), PostOps(), scales, pack=pack)
    return QuantizedLeaf.of(layer.to(dtype), made)


def report(model: nn.Module, kinds: Mapping[str, str], known: Mapping[str, str]) -> list[Row]:
    """Return what became of each layer, for :func:`torchq.explain`.

    Args:
        model: with the quantized layers.
        kinds: classes that these had, by their names.
        known: why others are float, by their names.
    """
    rows = []
    for name, module in model.named_modules():
        if name in kinds:
            rows.append(Row(name, kinds[name], True, "", name, True, False))
        elif isinstance(module, LAYERS):
            reason = known.get(name, reasons.FLOAT_BEFORE)
            rows.append(Row(name, type(module).__name__, False, reason, name, True, False))
    return rows

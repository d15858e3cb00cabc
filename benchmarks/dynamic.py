# SPDX-License-Identifier: Apache-2.0
"""Dynamic linear layers, convolutions and attention: float32 in and out, int8 inside.

torch computes the same layer in float32: what a dynamic layer is taken instead of. torchao has
linear layers alone, per row as torchq's. Their results differ by the rounding to 8 bits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attention import Attention
from benchmarks.competitors import Competitor, channels_last
from benchmarks.suites import Conv, Layer, Linear
from benchmarks.timing import call_blocks
from torchq.functional.arguments import conv_geometry
from torchq.functional.packing import pack_conv, pack_linear

__all__ = ["DYNAMIC", "Dynamic"]

_WEIGHT_SCALE = 0.01
_TOLERANCE = 2**-4  # of the largest result; attention of 512 positions differs by 2**-5


@dataclass(frozen=True)
class Dynamic:
    """The dynamic form of ``layer``."""

    layer: Layer | Attention
    src_dtype = "f32"

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def macs(self) -> int:
        return self.layer.macs

    def sources(self) -> list[Tensor]:
        """Source, int8 weight and bias; of attention query, key and value."""
        layer = self.layer
        if isinstance(layer, Attention):
            shape = (3, 1, layer.length, layer.heads, layer.size)
            return list(torch.randn(shape).transpose(2, 3))
        weight = torch.randint(-127, 128, layer.weight_shape, dtype=torch.int8)
        return [channels_last(torch.randn(layer.src_shape)), weight, torch.randn(len(weight))]

    def ours(self, data: list[Tensor]) -> tuple[Any, list[Any]]:
        layer, ops = self.layer, torch.ops.torchq
        if isinstance(layer, Attention):
            return ops.dynamic_attention.default, [*data, None, False, layer.size**-0.5]
        src, weight, bias = data
        scale = torch.full(bias.shape, _WEIGHT_SCALE)
        if isinstance(layer, Linear):
            packed = pack_linear(weight)
            tail: list[Any] = [packed.in_channels, True]
            op = ops.dynamic_linear.default
        else:
            packed = pack_conv(weight, layer.groups)
            window = (layer.stride, layer.padding, None, 1, layer.groups, packed.in_channels)
            tail = [conv_geometry("benchmarks", layer.weight_shape[2:], *window)]
            op = ops.dynamic_conv.default
        packs = (packed.weight, packed.compensation, packed.pair_bound)
        return op, [src, *packs, scale, bias, *tail]

    def torch(self, data: list[Tensor]) -> Competitor:
        """The float layer."""
        layer = self.layer
        if isinstance(layer, Attention):
            return self._competitor(F.scaled_dot_product_attention, data)
        src, weight, bias = data
        args: list[Any] = [src, channels_last(weight.float() * _WEIGHT_SCALE), bias]
        if isinstance(layer, Linear):
            return self._competitor(F.linear, args)
        return self._competitor(F.conv2d, [*args, layer.stride, layer.padding, 1, layer.groups])

    def torchao(self, data: list[Tensor]) -> Competitor:
        """Its linear layer of 8-bit rows and weights."""
        if not isinstance(self.layer, Linear):
            raise RuntimeError("it has dynamic linear layers alone")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        src, weight, bias = data
        linear = nn.Linear(self.layer.inputs, self.layer.outputs)
        linear.weight = nn.Parameter(weight.float() * _WEIGHT_SCALE)
        linear.bias = nn.Parameter(bias)
        model = nn.Sequential(linear)
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
        return self._competitor(model, [src])

    def _competitor(self, function: Any, args: list[Any]) -> Competitor:
        dst = function(*args)
        tolerance = _TOLERANCE * float(dst.abs().max())
        return Competitor(dst, call_blocks(function, args), real_tolerance=tolerance)


DYNAMIC = Counter(
    map(
        Dynamic,
        (
            *(Linear(1, 768, 768), Linear(16, 768, 3072)),
            *(Linear(128, 768, 768), Linear(128, 768, 3072), Linear(128, 3072, 768)),
            *(Conv(224, 3, 64, kernel=7, stride=2), Conv(56, 64, 64, kernel=3)),
            *(Conv(28, 128, 128, kernel=3), Conv(56, 64, 256), Conv(14, 1024, 256)),
            *(Attention(12, 128, 64), Attention(12, 512, 64), Attention(8, 1024, 40)),
        ),
    )
)

# SPDX-License-Identifier: Apache-2.0
"""One layer's data, and how torchq and its peers compute it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.onednn import Peer
from benchmarks.suites import Layer, Linear
from benchmarks.timing import Blocks, call_blocks
from torchq import Attr, PostOps
from torchq.functional.arguments import conv_geometry
from torchq.functional.folding import fold
from torchq.functional.packing import pack_conv, pack_linear
from torchq.runtime.library import dtype_code

__all__ = [
    "Competitor",
    "Operands",
    "channels_last",
    "onednn_competitor",
    "torch_competitor",
    "torchq_call",
]

_SRC_SCALE, _RESIDUAL_SCALE = 0.02, 0.5
_ROOT_MEAN_SQUARE = {torch.uint8: 147, torch.int8: 74}  # of all values


@dataclass(frozen=True)
class Operands:
    """The data that torchq and its peers share."""

    src: Tensor
    weight: Tensor
    bias: Tensor
    weight_scale: Tensor
    dst_scale: float
    residual: Tensor | None

    @classmethod
    def random(cls, layer: Layer, src_dtype: torch.dtype) -> Operands:
        """The destination's scale lets the results of random sums fill its range."""
        low, high = torch.iinfo(src_dtype).min, torch.iinfo(src_dtype).max + 1
        src = torch.randint(low, high, layer.src_shape, dtype=src_dtype)
        weight = torch.randint(-128, 128, layer.weight_shape, dtype=torch.int8)
        weight_scale = 0.01 + 0.01 * torch.rand(weight.shape[0])
        products = math.prod(layer.weight_shape[1:])
        steps = products**0.5 * _ROOT_MEAN_SQUARE[src_dtype] * _ROOT_MEAN_SQUARE[torch.int8]
        deviation = _SRC_SCALE * float(weight_scale.mean()) * steps
        bias = deviation * torch.randn(weight.shape[0])
        residual = None
        if layer.residual:
            residual = channels_last(torch.randint(0, 256, layer.dst_shape, dtype=torch.uint8))
        return cls(channels_last(src), weight, bias, weight_scale, 4 * deviation / 255, residual)


@dataclass(frozen=True)
class Competitor:
    """One side's result, how to time it, and how far from torchq's it may be.

    ``tolerance`` counts steps of an 8-bit dst; ``real_tolerance`` is for a float32 one.
    """

    dst: Tensor
    blocks: Blocks
    tolerance: float = 1
    real_tolerance: float = 0


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _chain(layer: Layer, data: Operands) -> str:
    """The post-ops, in the text that torchq and the peer share."""
    last = f"eltwise_clip:0:{_six(data)}" if layer.relu6 else "eltwise_relu"
    return last if data.residual is None else f"sum:{_RESIDUAL_SCALE}+{last}"


def _six(data: Operands) -> float:
    """The bound of ReLU6, which is the end of the destination's range in a calibrated network."""
    return 255 * data.dst_scale


def torchq_call(layer: Layer, data: Operands) -> tuple[Callable[..., Tensor], list[Any]]:
    """torchq's op and its arguments, packed and folded."""
    attr = Attr().set_scales("src", 0, _SRC_SCALE).set_scales("dst", 0, data.dst_scale)
    attr.set_post_ops(PostOps.parse(_chain(layer, data)))
    ops = torch.ops.torchq
    if isinstance(layer, Linear):
        op, packed = ops.linear.default, pack_linear(data.weight)
        extent: Any = packed.in_channels
    else:
        op, packed = ops.conv.default, pack_conv(data.weight, layer.groups)
        window = (layer.stride, layer.padding, None, 1, layer.groups, packed.in_channels)
        extent = conv_geometry("benchmarks", layer.weight_shape[2:], *window)
    attr.set_scales("weights", 1 if packed.groups == 1 else 3, data.weight_scale)
    folded = fold("benchmarks", attr, packed, data.bias, torch.uint8)
    return op, [
        *(data.src, packed.weight, packed.compensation, packed.pair_bound),
        *(folded.multiplier, folded.offset, folded.acc_bias, folded.src_zero_point),
        *(extent, dtype_code(torch.uint8), folded.post_ops, folded.post_op_params),
        [] if data.residual is None else [data.residual],
    ]


def onednn_competitor(layer: Layer, data: Operands, peer: Peer) -> Competitor:
    """A native primitive, created anew for each turn, outside of what it times."""
    scales = {
        "src_scale": _SRC_SCALE,
        "weight_scale": data.weight_scale,
        "dst_scale": data.dst_scale,
    }
    common: dict[str, Any] = {
        "post_ops": _chain(layer, data),
        "dst": data.residual,
        "dst_dtype": torch.uint8,
        **scales,
    }
    if isinstance(layer, Linear):
        execute = partial(peer.inner_product, data.src, data.weight, data.bias, **common)
    else:
        window: dict[str, Any] = {
            "stride": layer.stride,
            "padding": layer.padding,
            "groups": layer.groups,
        }
        execute = partial(peer.convolution, data.src, data.weight, data.bias, **window, **common)
    return Competitor(
        execute(), lambda iterations, count: execute(samples=count, iterations=iterations).seconds
    )


def torch_competitor(layer: Layer, data: Operands) -> Competitor:
    """torch's op on weights it packed for this source."""
    ops, zero_points = torch.ops.onednn, torch.zeros(data.weight.shape[0], dtype=torch.int32)
    dst = (data.dst_scale, 0, torch.uint8)
    tail: tuple[Any, ...]
    if isinstance(layer, Linear):
        packed = ops.qlinear_prepack(data.weight, list(data.src.shape))
        weight = (packed, data.weight_scale, zero_points)
        tail = (data.bias, *dst, "relu", [], "")
        return _torch_calls(
            ops.qlinear_pointwise.default, (data.src, _SRC_SCALE, 0, *weight, *tail)
        )
    window = ([layer.stride] * 2, [layer.padding] * 2, [1, 1], layer.groups)
    packed = ops.qconv_prepack(
        data.weight, data.weight_scale, _SRC_SCALE, 0, *window, list(data.src.shape)
    )
    head = (data.src, _SRC_SCALE, 0, packed, data.weight_scale, zero_points)
    if data.residual is None:
        last = ("hardtanh", [0.0, _six(data)]) if layer.relu6 else ("relu", [])
        tail = (data.bias, *window, *dst, *last, "")
        return _torch_calls(ops.qconv_pointwise.default, (*head, *tail))
    binary = ops.qconv2d_pointwise.binary
    tail = (data.bias, *window, *dst, _RESIDUAL_SCALE, 0, "sum", 1.0, "relu", [], "")
    accumulator = data.residual.clone()
    timed = call_blocks(binary, (*head, accumulator, *tail))
    return Competitor(binary(*head, data.residual.clone(), *tail), timed)


def _torch_calls(op: Callable[..., Tensor], args: tuple[Any, ...]) -> Competitor:
    return Competitor(op(*args), call_blocks(op, args))

# SPDX-License-Identifier: Apache-2.0
"""From an observed layer and its scales to the quantized module."""

from __future__ import annotations

import math

from torch import nn

from torchq.nn import binary, conv, linear, pooling, quantize
from torchq.nn.fused import Absorbed, ResidualFirst
from torchq.nn.module import QModule
from torchq.observed import ObservedLayer
from torchq.post_ops import PostOps
from torchq.qparams import QParams

_MATMUL: dict[type[nn.Module], type[linear.QLinear] | type[conv.QConv]] = {
    nn.Linear: linear.QLinear,
    nn.Conv1d: conv.QConv1d,
    nn.Conv2d: conv.QConv2d,
    nn.Conv3d: conv.QConv3d,
}
_POOLS: dict[type[nn.Module], type[QModule]] = {
    nn.MaxPool1d: pooling.QMaxPool1d,
    nn.MaxPool2d: pooling.QMaxPool2d,
    nn.MaxPool3d: pooling.QMaxPool3d,
    nn.AvgPool1d: pooling.QAvgPool1d,
    nn.AvgPool2d: pooling.QAvgPool2d,
    nn.AvgPool3d: pooling.QAvgPool3d,
    nn.AdaptiveAvgPool1d: pooling.QAdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: pooling.QAdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: pooling.QAdaptiveAvgPool3d,
}


def quantized_pool(module: nn.Module, qparams: QParams) -> QModule:
    """The pool on tensors with these parameters."""
    pool: QModule = _POOLS[type(module)].from_float(module, qparams)  # type: ignore[attr-defined]
    return pool


def quantized_layer(
    layer: ObservedLayer, srcs: list[QParams | None], dst: QParams | None
) -> QModule:
    """The quantized form of a layer.

    Args:
        layer: calibrated.
        srcs: parameters of what it reads, the residual last; None for a float residual.
        dst: parameters of the destination; None for float32.
    """
    module = layer.module
    if type(module) in _MATMUL:
        return _matmul(layer, srcs, dst)
    sources = [src for src in srcs if src is not None]
    relu = layer.clip is not None
    if isinstance(module, binary.Add):
        return binary.QAdd(sources, dst, relu)
    if isinstance(module, binary.Mul):
        return binary.QMul(sources, dst, relu)
    if isinstance(module, binary.Cat):
        return binary.QCat(sources, dst, module.dim)
    if isinstance(module, quantize.QuantStub):
        return Absorbed() if dst is None else quantize.Quantize(dst)
    if isinstance(module, quantize.DeQuantStub):
        return quantize.Dequantize(sources[0])
    return quantize.QLookup(module, sources[0], dst, type(module).__name__)


def _matmul(layer: ObservedLayer, srcs: list[QParams | None], dst: QParams | None) -> QModule:
    src = srcs[0]
    assert src is not None
    config = layer.config
    quantized: QModule = _MATMUL[type(layer.module)].from_float(
        layer.module,  # type: ignore[arg-type]
        src,
        dst,
        granularity=config.weight_granularity,
        bits=config.weight_bits,
        post_ops=_post_ops(layer, srcs),
    )
    return ResidualFirst(quantized) if layer.residual_first else quantized


def _post_ops(layer: ObservedLayer, srcs: list[QParams | None]) -> PostOps:
    """A sum for the residual, then the fused activation."""
    chain = PostOps()
    if layer.has_residual:
        residual = srcs[-1]
        if residual is None:
            chain.append_sum(1.0, 0, "f32")
        else:
            chain.append_sum(float(residual.scale), int(residual.zero_point), residual.dtype)
    if layer.clip is not None:
        low, high = layer.clip
        if low == 0 and high == math.inf:
            chain.append_eltwise("relu")
        else:
            chain.append_eltwise("clip", low, high)
    return chain

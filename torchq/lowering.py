# SPDX-License-Identifier: Apache-2.0
"""From an observed layer and its scales to the quantized module."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from torch import Tensor, nn

from torchq._post_ops import PostOps
from torchq.affine import TRANSPOSED
from torchq.config import QConfig
from torchq.nn import binary, conv, deconv, linear, pooling, quantize, resample
from torchq.nn.fused import ResidualFirst
from torchq.nn.module import QModule
from torchq.observed import ObservedLayer, ObservedPool
from torchq.qparams import QParams

_CONVS: dict[type[nn.Module], type[conv.QConv]] = {
    nn.Conv1d: conv.QConv1d,
    nn.Conv2d: conv.QConv2d,
    nn.Conv3d: conv.QConv3d,
}
_TRANSPOSED: dict[type[nn.Module], type[deconv.QConvTranspose]] = {
    nn.ConvTranspose1d: deconv.QConvTranspose1d,
    nn.ConvTranspose2d: deconv.QConvTranspose2d,
    nn.ConvTranspose3d: deconv.QConvTranspose3d,
}
_POOLS: dict[type[nn.Module], Any] = {
    nn.MaxPool1d: pooling.QMaxPool1d,
    nn.MaxPool2d: pooling.QMaxPool2d,
    nn.MaxPool3d: pooling.QMaxPool3d,
    nn.AvgPool1d: pooling.QAvgPool1d,
    nn.AvgPool2d: pooling.QAvgPool2d,
    nn.AvgPool3d: pooling.QAvgPool3d,
    nn.AdaptiveAvgPool1d: pooling.QAdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: pooling.QAdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: pooling.QAdaptiveAvgPool3d,
    nn.Upsample: resample.QResample,
}
_Class = TypeVar("_Class")


def _of_base(classes: dict[type[nn.Module], _Class], module: nn.Module) -> _Class:
    """The entry of the module's class or the nearest base class."""
    return next(classes[base] for base in type(module).__mro__ if base in classes)


def quantized_pool(pool: ObservedPool, qparams: QParams) -> QModule:
    """The pool on tensors with these parameters."""
    return pool_from_float(pool.module, qparams, pool.contiguous)


def pool_from_float(module: nn.Module, qparams: QParams, contiguous: bool = False) -> QModule:
    """A float pool on tensors with these parameters."""
    cls = _of_base(_POOLS, module)
    result: QModule = cls.from_float(module, qparams, contiguous=contiguous)
    return result


def matmul_from_float(
    module: nn.Module,
    src: QParams,
    dst: QParams | None,
    config: QConfig,
    post_ops: PostOps,
    weight_scale: Tensor | None = None,
    *,
    pad: tuple[list[int], list[int]] | None = None,
    contiguous: bool = False,
) -> QModule:
    """A float linear layer or convolution, between tensors with these parameters.

    Args:
        module: the float layer.
        src: parameters of the source.
        dst: parameters of the destination; None for float32.
        config: how to quantize the weight.
        post_ops: applied before the destination is quantized.
        weight_scale: of the weight, where it is known: one, or one per output channel.
        pad: zeros before and after each spatial dim, beside those of the convolution.
        contiguous: make the destination of a convolution contiguous instead of channels-last.
    """
    options: dict[str, Any] = {
        "granularity": config.weight_granularity,
        "bits": config.weight_bits,
        "weight_scale": weight_scale,
        "post_ops": post_ops,
    }
    if isinstance(module, nn.Linear):
        return linear.QLinear.from_float(module, src, dst, **options)
    options["contiguous"] = contiguous
    if isinstance(module, TRANSPOSED):
        return _of_base(_TRANSPOSED, module).from_float(module, src, dst, **options)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return _of_base(_CONVS, module).from_float(module, src, dst, pad=pad, **options)


def quantized_layer(
    layer: ObservedLayer, srcs: list[QParams | None], dst: QParams | None
) -> QModule:
    """The quantized form of a layer.

    Args:
        layer: calibrated.
        srcs: parameters of what it reads, the residual last; None for a float residual.
        dst: parameters of the destination; None for float32.

    Raises:
        ValueError: its weight cannot be quantized; the message names the layer.
    """
    try:
        return _quantized_layer(layer, srcs, dst)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(
            f"torchq.convert: '{layer.layer_name}' cannot be quantized: {error} To keep it float, "
            f"pass overrides={{'{layer.layer_name}': None}}."
        ) from error


def _quantized_layer(
    layer: ObservedLayer, srcs: list[QParams | None], dst: QParams | None
) -> QModule:
    module = layer.module
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return _matmul(layer, module, srcs, dst)
    sources = [src for src in srcs if src is not None]
    relu = layer.clip is not None
    if isinstance(module, binary.Add):
        return binary.QAdd(sources, dst, relu)
    if isinstance(module, binary.Mul):
        return binary.QMul(sources, dst, relu)
    if isinstance(module, binary.Cat):
        return binary.QCat(sources, dst, module.dim)
    if isinstance(module, quantize.DeQuantStub):
        return quantize.Dequantize(sources[0])
    assert dst is not None
    if isinstance(module, quantize.QuantStub):
        return quantize.Quantize(dst)
    return quantize.QLookup(module, sources[0], dst, type(module).__name__)


def _matmul(
    layer: ObservedLayer,
    module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d,
    srcs: list[QParams | None],
    dst: QParams | None,
) -> QModule:
    src = srcs[0]
    assert src is not None
    chain = _post_ops(layer, srcs)
    quantized = matmul_from_float(
        module, src, dst, layer.config, chain, contiguous=layer.contiguous
    )
    return ResidualFirst(quantized) if layer.residual_first else quantized


def _post_ops(layer: ObservedLayer, srcs: list[QParams | None]) -> PostOps:
    """A sum for the residual, then the fused activation."""
    return post_op_chain(layer.has_residual, srcs[-1], layer.clip)


def post_op_chain(
    has_residual: bool, residual: QParams | None, clip: tuple[float, float] | None
) -> PostOps:
    """A sum for the residual (of float32, if it has no parameters), then the fused activation."""
    chain = PostOps()
    if has_residual:
        if residual is None:
            chain.append_sum(1.0, 0, "f32")
        else:
            chain.append_sum(float(residual.scale), int(residual.zero_point), residual.dtype)
    return chain if clip is None else append_clip(chain, clip)


def append_clip(chain: PostOps, clip: tuple[float, float]) -> PostOps:
    """The chain, and a relu or clip; returns it."""
    if clip == (0.0, math.inf):
        chain.append_eltwise("relu")
    else:
        largest = 3.4028234663852886e38  # of float32: a clip has no infinite bounds
        low, high = (min(max(bound, -largest), largest) for bound in clip)
        chain.append_eltwise("clip", low, high)
    return chain

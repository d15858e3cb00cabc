# SPDX-License-Identifier: Apache-2.0
"""From an observed layer and its scales to the quantized module."""

from __future__ import annotations

from torch import nn

from torchq.eager.observed import ObservedLayer, ObservedPool
from torchq.kinds import AVERAGES
from torchq.lowering import matmul_from_float, pool_from_float, post_op_chain
from torchq.nn import binary, quantize
from torchq.nn.fused import ResidualFirst
from torchq.nn.module import QModule
from torchq.qparams import QParams

__all__ = ["quantized_layer", "quantized_pool"]


def quantized_pool(pool: ObservedPool, qparams: QParams) -> QModule:
    """The pool on tensors with these parameters."""
    return pool_from_float(pool.module, qparams, pool.contiguous)


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
    if isinstance(module, AVERAGES):
        return pool_from_float(module, sources[0], layer.contiguous, dst=dst or "f32")
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
    chain = post_op_chain(layer.has_residual, srcs[-1], layer.clip)
    quantized = matmul_from_float(
        module, src, dst, layer.config, chain, contiguous=layer.contiguous
    )
    return ResidualFirst(quantized) if layer.residual_first else quantized

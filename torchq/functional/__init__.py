# SPDX-License-Identifier: Apache-2.0
"""The functional API: readable scales in, folded per call.

Sources are plain uint8 or int8 tensors with ``real = scale * (q - zero_point)``; scales, zero
points and post-ops come in an :class:`~torchq.Attr`, whose masks index oneDNN's logical dimensions.
Folding costs O(channels) a call; modules in :mod:`torchq.nn` fold once.
"""

from torchq.functional.attention import attention, dynamic_attention
from torchq.functional.combine import add, concat, lookup, lookup_table, mul, pad
from torchq.functional.conv import conv1d, conv2d, conv3d
from torchq.functional.conv_transpose import (
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from torchq.functional.dynamic import dynamic_linear, requantize_dynamic
from torchq.functional.eltwise import binary, eltwise, prelu, shuffle, sum
from torchq.functional.gemm import gemm_s8s8s32, gemm_u8s8s32
from torchq.functional.linear import linear
from torchq.functional.matmul import matmul
from torchq.functional.normalization import (
    batch_norm,
    group_norm,
    layer_norm,
    log_softmax,
    softmax,
)
from torchq.functional.pooling import adaptive_avg_pool, avg_pool, max_pool
from torchq.functional.reduction import reduction, resampling
from torchq.functional.reorder import (
    dequantize,
    quantize,
    quantize_weight,
    reorder,
    requantize,
)

__all__ = [
    "adaptive_avg_pool",
    "add",
    "attention",
    "avg_pool",
    "batch_norm",
    "binary",
    "concat",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "dequantize",
    "dynamic_attention",
    "dynamic_linear",
    "eltwise",
    "gemm_s8s8s32",
    "gemm_u8s8s32",
    "group_norm",
    "layer_norm",
    "linear",
    "log_softmax",
    "lookup",
    "lookup_table",
    "matmul",
    "max_pool",
    "mul",
    "pad",
    "prelu",
    "quantize",
    "quantize_weight",
    "reduction",
    "reorder",
    "requantize",
    "requantize_dynamic",
    "resampling",
    "shuffle",
    "softmax",
    "sum",
]

# SPDX-License-Identifier: Apache-2.0
"""The functional API: readable scales in, folded per call.

Sources are plain uint8 or int8 tensors with ``real = scale * (q - zero_point)``; scales, zero
points and post-ops come in an :class:`~torchq.Attr`, whose masks index oneDNN's logical dimensions.
Folding costs O(channels) a call; modules in :mod:`torchq.nn` fold once.

Where oneDNN's primitives are:

    inner_product                linear; inner_product also takes (N, C, H, W)
    convolution                  conv1d, conv2d, conv3d; convolution takes the dims of src
    deconvolution                conv_transpose1d, 2d, 3d; deconvolution takes the dims of src.
                                 Weights are torch's (C, OC/groups, k...), masks oneDNN's
    matmul, gemm_u8s8s32, eltwise, binary, prelu, sum, concat, shuffle, softmax, reduction,
    resampling                   the same names; log_softmax too
    pooling                      max_pool, avg_pool, adaptive_avg_pool
    batch_, group_ and layer_normalization
                                 batch_norm, group_norm, layer_norm, rms_norm
    reorder                      reorder (memory_format: the destination's layout); quantize,
                                 dequantize, requantize
    reorder of weights, with compensation
                                 quantize_weight, then pack_linear, pack_conv or
                                 pack_conv_transpose of torchq.packing
    lstm, gru, lbr_gru, vanilla_rnn
                                 from_onednn of torchq.nn.QLSTM, QGRU and QRNN; see below
    primitive_attr, post_ops     torchq.Attr, torchq.PostOps
    dilates                      dilation; 1 is dense, where oneDNN has 0
    grouped weights              weight.flatten(0, 1); masks index (G, OC/G, C/G, k...)

oneDNN's lstm, whose weights are ldigo. It is a module, as packing its weights takes longer than a
call::

    attr = torchq.Attr().set_rnn_data_qparams(scale, shift).set_rnn_weights_qparams(24, scales)
    lstm = torchq.nn.QLSTM.from_onednn(weights_layer, weights_iter, bias, attr)
    dst, (dst_iter, dst_iter_c) = lstm(src, (src_iter.flatten(0, 1), src_iter_c.flatten(0, 1)))

oneDNN chains the layers of each direction by itself, where torch's networks read both.
"""

from torchq.functional.attentions import (
    attention,
    compress_rows,
    compressed_attention,
    decompress_rows,
    dynamic_attention,
)
from torchq.functional.combine import add, concat, mul, pad
from torchq.functional.conv import conv1d, conv2d, conv3d, convolution
from torchq.functional.conv_transpose import (
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    deconvolution,
)
from torchq.functional.conversions import (
    dequantize,
    quantize,
    quantize_weight,
    reorder,
    requantize,
)
from torchq.functional.elementwise import binary, eltwise, prelu, shuffle, sum
from torchq.functional.embeddings import embedding, embedding_bag, quantize_embedding
from torchq.functional.gemm import gemm_s8s8s32, gemm_u8s8s32
from torchq.functional.grouped import grouped_linear, grouped_linear_int4
from torchq.functional.int4 import quantize_weight_int4
from torchq.functional.linears import (
    dynamic_linear,
    dynamic_linear_int4,
    inner_product,
    linear,
    requantize_dynamic,
)
from torchq.functional.matmuls import matmul
from torchq.functional.normalization import (
    batch_norm,
    group_norm,
    layer_norm,
    log_softmax,
    rms_norm,
    softmax,
)
from torchq.functional.pooling import adaptive_avg_pool, avg_pool, max_pool
from torchq.functional.reductions import reduction, resampling
from torchq.functional.tables import lookup, lookup_table

__all__ = [
    "adaptive_avg_pool",
    "add",
    "attention",
    "avg_pool",
    "batch_norm",
    "binary",
    "compress_rows",
    "compressed_attention",
    "concat",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "decompress_rows",
    "deconvolution",
    "dequantize",
    "dynamic_attention",
    "dynamic_linear",
    "dynamic_linear_int4",
    "eltwise",
    "embedding",
    "embedding_bag",
    "gemm_s8s8s32",
    "gemm_u8s8s32",
    "group_norm",
    "grouped_linear",
    "grouped_linear_int4",
    "inner_product",
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
    "quantize_embedding",
    "quantize_weight",
    "quantize_weight_int4",
    "reduction",
    "reorder",
    "requantize",
    "requantize_dynamic",
    "resampling",
    "rms_norm",
    "shuffle",
    "softmax",
    "sum",
]

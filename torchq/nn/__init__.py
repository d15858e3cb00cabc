# SPDX-License-Identifier: Apache-2.0
"""Quantized modules, and float modules that become some of them."""

from torchq.nn.attention import (
    CachedAttention,
    CompressedAttention,
    DynamicQAttention,
    QAttention,
)
from torchq.nn.binary import QAdd, QCat, QMul
from torchq.nn.cached_cat import CachedCat
from torchq.nn.conv import QConv1d, QConv2d, QConv3d
from torchq.nn.conv_transpose import QConvTranspose1d, QConvTranspose2d, QConvTranspose3d
from torchq.nn.dynamic import DynamicQLinear
from torchq.nn.dynamic_conv import DynamicQConv1d, DynamicQConv2d, DynamicQConv3d
from torchq.nn.dynamic_int4 import DynamicQLinearInt4
from torchq.nn.embedding import QEmbedding, QEmbeddingBag
from torchq.nn.float_modules import Add, AttentionOptions, Cat, DeQuantStub, Mul, QuantStub
from torchq.nn.grouped import DynamicQGroupedLinear, DynamicQGroupedLinearInt4
from torchq.nn.leaf import QuantizedLeaf
from torchq.nn.linear import QLinear
from torchq.nn.matmul import QMatMul
from torchq.nn.module import QModule
from torchq.nn.normalization import QGroupNorm, QLayerNorm, QRMSNorm, QSoftmax
from torchq.nn.pad import QPad
from torchq.nn.pooling import (
    QAdaptiveAvgPool1d,
    QAdaptiveAvgPool2d,
    QAdaptiveAvgPool3d,
    QAvgPool1d,
    QAvgPool2d,
    QAvgPool3d,
    QMaxPool1d,
    QMaxPool2d,
    QMaxPool3d,
)
from torchq.nn.quantize import Dequantize, QLookup, Quantize
from torchq.nn.resample import QResample
from torchq.nn.rnn import QGRU, QLSTM, QRNN
from torchq.nn.rnn_cell import QGRUCell, QLSTMCell, QRNNCell
from torchq.nn.rnn_layer import QRecurrentLayer
from torchq.nn.rnn_observed import ObservedRNN, ObservedRNNCell
from torchq.nn.rnn_packing import RecurrentWeight

__all__ = [
    "QGRU",
    "QLSTM",
    "QRNN",
    "Add",
    "AttentionOptions",
    "CachedAttention",
    "CachedCat",
    "Cat",
    "CompressedAttention",
    "DeQuantStub",
    "Dequantize",
    "DynamicQAttention",
    "DynamicQConv1d",
    "DynamicQConv2d",
    "DynamicQConv3d",
    "DynamicQGroupedLinear",
    "DynamicQGroupedLinearInt4",
    "DynamicQLinear",
    "DynamicQLinearInt4",
    "Mul",
    "ObservedRNN",
    "ObservedRNNCell",
    "QAdaptiveAvgPool1d",
    "QAdaptiveAvgPool2d",
    "QAdaptiveAvgPool3d",
    "QAdd",
    "QAttention",
    "QAvgPool1d",
    "QAvgPool2d",
    "QAvgPool3d",
    "QCat",
    "QConv1d",
    "QConv2d",
    "QConv3d",
    "QConvTranspose1d",
    "QConvTranspose2d",
    "QConvTranspose3d",
    "QEmbedding",
    "QEmbeddingBag",
    "QGRUCell",
    "QGroupNorm",
    "QLSTMCell",
    "QLayerNorm",
    "QLinear",
    "QLookup",
    "QMatMul",
    "QMaxPool1d",
    "QMaxPool2d",
    "QMaxPool3d",
    "QModule",
    "QMul",
    "QPad",
    "QRMSNorm",
    "QRNNCell",
    "QRecurrentLayer",
    "QResample",
    "QSoftmax",
    "QuantStub",
    "Quantize",
    "QuantizedLeaf",
    "RecurrentWeight",
]

# SPDX-License-Identifier: Apache-2.0
"""The words and numbers that options take, as types; checks at run time read them from here."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

Granularity: TypeAlias = Literal["per_channel", "per_tensor"]
"""Values that share one scale of a weight."""
WEIGHT_GRANULARITIES: tuple[str, ...] = get_args(Granularity)
Bits: TypeAlias = Literal[8, 7]
"""Bits of the integers that are used."""
WeightBits: TypeAlias = Literal[8, 7, 4]
"""Bits of a weight; 4 for linear layers only."""
GroupSize: TypeAlias = Literal[32, 64, 128]
"""Values of a row of a 4-bit weight that share a scale."""
EmbeddingBits: TypeAlias = Literal[8, 4]
"""Bits of the codes of an embedding."""
CacheBits: TypeAlias = Literal[8]
"""Bits of keys and values in a cache."""
BagMode: TypeAlias = Literal["sum", "mean", "max"]
"""Results of an embedding bag."""
ObserverName: TypeAlias = Literal["minmax", "moving_average", "percentile", "histogram", "entropy"]
"""Recorders of the ranges of activations."""
RecipeName: TypeAlias = Literal["fast", "accurate", "best"]
"""What accuracy may cost."""
RECIPES: tuple[RecipeName, ...] = get_args(RecipeName)
SrcRange: TypeAlias = Literal["per_tensor", "per_row"]
"""Values that share one scale of a dynamic layer's source."""
Tier: TypeAlias = Literal[
    "reference", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "amx",
    "neon", "neon_dotprod", "neon_i8mm",
]  # fmt: skip
"""Instruction sets that kernels are written for."""
Rounding: TypeAlias = Literal["nearest", "environment", "stochastic"]
"""Modes of rounding dst to integers."""
DtypeName: TypeAlias = Literal["u8", "s8", "s32", "f32"]
"""Short names of dtypes."""
DtypeLike: TypeAlias = torch.dtype | DtypeName
EltwiseAlg: TypeAlias = Literal[
    "relu", "linear", "clip", "abs", "elu", "exp", "gelu_erf", "gelu_tanh", "hardsigmoid",
    "hardswish", "log", "logistic", "mish", "pow", "round", "soft_relu", "sqrt", "square",
    "swish", "tanh",
]  # fmt: skip
"""Functions of each element; torchq.attributes has their formulas."""
BinaryAlg: TypeAlias = Literal[
    "add", "sub", "mul", "div", "max", "min", "ge", "gt", "le", "lt", "eq", "ne", "select",
]  # fmt: skip
"""Functions of two operands, as post-ops."""
BinaryOp: TypeAlias = BinaryAlg | Literal["prelu"]
"""Functions of torchq.functional.binary."""
ReductionAlg: TypeAlias = Literal[
    "sum", "mean", "max", "min", "mul",
    "norm_lp_max", "norm_lp_sum", "norm_lp_power_p_max", "norm_lp_power_p_sum",
]  # fmt: skip
"""Results of a reduction."""
ResamplingAlg: TypeAlias = Literal["nearest", "linear"]
"""Interpolations of resampling."""
OffsetC: TypeAlias = Literal["F", "C", "R"]
"""Shapes of a gemm's offset: one value, a column, a row."""
Merge: TypeAlias = Literal["concat", "sum"]
"""Ways to join the results of two directions."""
Convention: TypeAlias = Literal["v1", "v3"]
"""oneDNN's scales: of outputs (v1), or of each argument (v3)."""
Cell: TypeAlias = Literal["lstm", "gru", "gru_vanilla", "rnn_tanh", "rnn_relu"]
"""Cells of recurrent layers."""

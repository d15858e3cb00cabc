# SPDX-License-Identifier: Apache-2.0
"""The words and numbers that options take, as types. Checks at run time read them from here."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Granularity: TypeAlias = Literal["per_channel", "per_tensor"]
"""What one scale of a weight covers."""
Bits: TypeAlias = Literal[8, 7]
"""How many bits of the integers are used."""
ObserverName: TypeAlias = Literal["minmax", "moving_average", "percentile", "histogram", "entropy"]
"""What records the ranges of activations."""
SrcRange: TypeAlias = Literal["per_tensor", "per_row"]
"""What one scale of a dynamic layer's source covers."""
Tier: TypeAlias = Literal["reference", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "amx"]
"""Instruction sets that kernels are written for."""
Rounding: TypeAlias = Literal["nearest", "environment", "stochastic"]
"""How dst is rounded to integers."""
DtypeName: TypeAlias = Literal["u8", "s8", "s32", "f32"]
"""Short names of dtypes."""
DtypeLike: TypeAlias = torch.dtype | DtypeName
EltwiseAlg: TypeAlias = Literal[
    "relu", "linear", "clip", "abs", "elu", "exp", "gelu_erf", "gelu_tanh", "hardsigmoid",
    "hardswish", "log", "logistic", "mish", "pow", "round", "soft_relu", "sqrt", "square",
    "swish", "tanh",
]  # fmt: skip
"""Functions of each element; torchq.post_ops has their formulas."""
BinaryAlg: TypeAlias = Literal[
    "add", "sub", "mul", "div", "max", "min", "ge", "gt", "le", "lt", "eq", "ne", "select",
]  # fmt: skip
"""Functions of two operands, as post-ops."""
BinaryOp: TypeAlias = BinaryAlg | Literal["prelu"]
"""Those of torchq.functional.binary."""
ReductionAlg: TypeAlias = Literal["sum", "mean", "max", "min", "mul"]
"""What a reduction computes."""
ResamplingAlg: TypeAlias = Literal["nearest", "linear"]
"""How resampling interpolates."""
OffsetC: TypeAlias = Literal["F", "C", "R"]
"""Of a gemm's offset: one value, a column, a row."""
Merge: TypeAlias = Literal["concat", "sum"]
"""Of the results of two directions."""
Convention: TypeAlias = Literal["v1", "v3"]
"""oneDNN's scales: of outputs, or of each argument."""
Cell: TypeAlias = Literal["lstm", "gru", "gru_vanilla", "rnn_tanh", "rnn_relu"]
"""Cells of recurrent layers."""

# SPDX-License-Identifier: Apache-2.0
"""Cases of tests: the shapes of shapes.py, post-op chains, and data that finds mistakes.

Data come as readable arguments for the oracle: `reference.linear(**args)`, and for convolutions
`reference.conv(**args, **shape.oracle)`. All parameters are tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from geometries import ConvShape, LinearShape, conv, depthwise
from shapes import (
    CONV,
    CONV_1D,
    CONV_3D,
    CONV_BORDERS,
    CONV_COLUMNS,
    CONV_DEPTHWISE,
    CONV_GROUPED,
    CONV_NETWORKS,
    CONV_UNITS,
    LINEAR,
    LINEAR_LIMITS,
    LINEAR_NETWORKS,
    LINEAR_OVERLAPPED,
    LINEAR_SHORT,
    LINEAR_TAILS,
    LINEAR_UNITS,
    LINEAR_WIDENED,
    MAX_TAPS_K,
    random_conv_shapes,
    random_linear_shapes,
)
from torch import Tensor

__all__ = [
    "BROADCASTS",
    "CONV",
    "CONV_1D",
    "CONV_3D",
    "CONV_BORDERS",
    "CONV_COLUMNS",
    "CONV_DEPTHWISE",
    "CONV_GROUPED",
    "CONV_NETWORKS",
    "CONV_UNITS",
    "EXTREME_PAIRS",
    "FLOAT_CHAINS",
    "FOLDED_CHAINS",
    "LINEAR",
    "LINEAR_LIMITS",
    "LINEAR_NETWORKS",
    "LINEAR_OVERLAPPED",
    "LINEAR_SHORT",
    "LINEAR_TAILS",
    "LINEAR_UNITS",
    "LINEAR_WIDENED",
    "MAX_TAPS_K",
    "ConvShape",
    "LinearShape",
    "constant",
    "conv",
    "depthwise",
    "large_sums",
    "ramp",
    "random_conv_shapes",
    "random_dst",
    "random_linear_shapes",
    "random_q",
    "random_s8",
    "random_u8",
    "sample",
    "tie_values",
    "ties",
]

RANGE = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int32: (-(2**31), 2**31 - 1)}

# Two shapes, broadcast with each other.
BROADCASTS = [
    ((), ()),
    ((), (3, 4)),
    ((3, 1), (1, 4)),
    ((2, 3, 4, 5), (5,)),
    ((2, 3, 4, 5), (1, 3, 1, 1)),
    ((1, 3, 1, 1), (2, 3, 4, 5)),
    ((2, 1, 4, 1), (1, 3, 1, 5)),
    ((2, 3, 4, 5), (2, 3, 1, 1)),
    ((1,), (7, 1, 19)),
    ((0, 4), (1, 4)),
    ((0,), (1,)),
    ((2, 0, 3), (3,)),
]


# Post-ops, in the text grammar

FOLDED_CHAINS = [
    "",
    "eltwise_relu",
    "eltwise_clip:0:6",
    "eltwise_clip:-1.5:2.5",
    "sum",
    "sum:0.03:7",
    "sum:0.05+eltwise_relu",
    "sum:0.04+eltwise_clip:0:6",
    "eltwise_linear:-0.7:0.25",
    "eltwise_linear:0.5:0.1:3+sum:0.02+eltwise_linear:1.5:-1",
    "binary_add:2",
    "binary_mul:2+binary_add:2+eltwise_relu",
    "sum:0.04:3+binary_mul:2",
    "sum:0.04:3+binary_mul:0+sum:0.02+eltwise_relu",
]
FLOAT_CHAINS = [
    "eltwise_relu:0.1",
    "eltwise_relu:0:0:0.5",
    "eltwise_relu+sum:0.03:7",
    "eltwise_relu+eltwise_linear:0.5:-1",
    "eltwise_clip:0:6+eltwise_linear:2:0.5:0.25",
    "eltwise_clip:-3:3+eltwise_clip:-1:4",
    "eltwise_clip:-1:4:2",
    "eltwise_relu+binary_mul:2+binary_add:2",
    "sum:0.03:7+eltwise_relu:0.25+sum:0.05+binary_add:0",
]


# Data


def random_q(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Full range, every value equally likely; int32 stays within +-2^27.

    Of float32 these divided by 2^20 and rounded, whose sums are exact in double in any order.
    """
    if dtype == torch.float32:
        return random_q(shape, torch.int32, seed).float() / 2**20
    low, high = (-(2**27), 2**27) if dtype == torch.int32 else RANGE[dtype]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def random_u8(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return random_q(shape, torch.uint8, seed)


def random_s8(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return random_q(shape, torch.int8, seed)


Shape = LinearShape | ConvShape


def sample(
    shape: Shape,
    src_dtype: torch.dtype = torch.uint8,
    dst_dtype: torch.dtype = torch.uint8,
    post_ops: str = "",
    bias: torch.dtype | None = torch.float32,
    per_channel_dst: bool = False,
    output_scales: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Destinations use most of their range and saturate now and then."""
    rng = torch.Generator().manual_seed(seed + 1)
    n = shape.channels

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return low + (high - low) * torch.rand(size, generator=rng)

    spread = 74.0 * 74.0 * math.sqrt(max(shape.reduction, 1))  # standard deviation of acc
    values = [
        uniform(0.5, 1.5, n if ":2" in op else 1)
        for op in post_ops.split("+")
        if op.startswith(("binary", "prelu"))
    ]
    sums = [op.split(":") for op in post_ops.split("+") if op.startswith("sum")]
    args: dict[str, Any] = {
        "src": random_q(shape.src, src_dtype, seed),
        "weight": random_s8(shape.weight, seed + 2),
        "bias": None,
        "src_zero_point": torch.tensor(
            {torch.uint8: 117, torch.int8: -13}[src_dtype], dtype=torch.int32
        ),
        "dst_dtype": dst_dtype,
        "post_ops": post_ops,
        "post_op_values": values,
        "post_op_srcs": [random_dst(shape.dst, dst_dtype, seed + i) for i in range(len(sums))],
    }
    if bias == torch.float32:
        args["bias"] = uniform(-2.0, 2.0, n)
    elif bias is not None:
        args["bias"] = torch.randint(-(2**14), 2**14, (n,), generator=rng).to(bias)
    step = {torch.uint8: 0.025, torch.int8: 0.025, torch.int32: 1e-5, torch.float32: 1.0}[dst_dtype]
    if dst_dtype != torch.float32:
        args["dst_zero_point"] = torch.tensor(
            {torch.uint8: 101, torch.int8: -7}.get(dst_dtype, 5), dtype=torch.int32
        )
    if output_scales:
        return args | {"output_scales": uniform(0.5, 1.5, n) / (spread * step)}
    args["src_scale"] = uniform(0.1, 0.2) / math.sqrt(max(shape.reduction, 1))
    args["weight_scale"] = uniform(0.002, 0.01, n)
    if dst_dtype != torch.float32:
        size = (n,) if per_channel_dst else ()
        args["dst_scale"] = uniform(0.8, 1.2, *size) * (4.0 * step)
    return args


def random_dst(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A previous destination, for sums that do not drown the accumulators."""
    if dtype == torch.float32:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    old = random_q(shape, dtype, seed)
    return old // 2**15 if dtype == torch.int32 else old


def constant(shape: Shape, src: int, weight: int) -> dict[str, Any]:
    """Exact int32 sums of src * weight. 255 * 127 and 255 * -128 saturate vpmaddubsw."""
    src_dtype = torch.uint8 if src >= 0 else torch.int8
    return {
        "src": torch.full(shape.src, src, dtype=src_dtype),
        "weight": torch.full(shape.weight, weight, dtype=torch.int8),
        "dst_dtype": torch.int32,
    }


EXTREME_PAIRS = [
    (255, 127),
    (255, -128),
    (128, 127),
    (127, -128),
    (-128, -128),
    (-128, 127),
    (-1, -128),
    (0, 127),
]


def ramp(n: int = 17) -> dict[str, Any]:
    """Every u8 value against -128 and alternately 127: row i is all i."""
    src = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 70)
    weight = torch.full((n, 70), -128, dtype=torch.int8)
    weight[1::2] = 127
    return {"src": src, "weight": weight, "dst_dtype": torch.int32}


def ties(src_dtype: torch.dtype, dst_dtype: torch.dtype, zero_point: int) -> dict[str, Any]:
    """y = acc / 2, acc / 4, ... + zero_point exactly, for every source value: many lie halfway."""
    low, high = RANGE[src_dtype]
    weight = torch.zeros(18, 5, dtype=torch.int8)
    weight[torch.arange(18), torch.arange(18) % 5] = 1
    weight[9:] *= -3
    return {
        "src": torch.arange(low, high + 1).to(src_dtype)[:, None].repeat(1, 5),
        "weight": weight,
        "src_scale": torch.tensor(0.5),
        "weight_scale": torch.tensor([1.0, 0.5, 2.0]).repeat(6),
        "dst_scale": torch.tensor(1.0),
        "dst_zero_point": torch.tensor(zero_point, dtype=torch.int32),
        "dst_dtype": dst_dtype,
    }


def tie_values(scale: float = 0.25) -> Tensor:
    """Reals halfway between two steps of a power-of-two scale."""
    return (torch.arange(-300, 300) + 0.5) * scale


def large_sums(shape: Shape, dst_dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    """|acc| > 2^24, where float(acc) rounds. Needs a reduction of 1000 or more."""
    args = sample(shape, torch.uint8, dst_dtype, bias=None)
    args["src"] = args["src"] | 192
    args["weight"] = (args["weight"].short() | 96).clamp(96, 127).to(torch.int8)
    args["weight"][::2] *= -1
    args["src_zero_point"] = torch.tensor(0, dtype=torch.int32)
    if "dst_scale" in args:
        args["dst_scale"] = args["src_scale"] * 0.006 * shape.reduction * 250
    return args

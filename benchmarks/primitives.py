# SPDX-License-Identifier: Apache-2.0
"""Ops that are no matmul, at shapes of real networks: torchq's call and oneDNN's primitive.

Sources are full-range 8-bit integers, destinations uint8 unless the name says f32. Scales are such
that both sides compute the same: oneDNN's pools, softmax and norms have none of the source here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.competitors import Competitor, channels_last
from benchmarks.onednn import Peer
from torchq.runtime.library import dtype_code

__all__ = ["ELEMENTWISE", "Primitive"]

U8 = torch.uint8
Call = tuple[Callable[..., Tensor], list[Any]]


@dataclass(frozen=True)
class Primitive:
    """``ours`` gives torchq's op and its arguments, ``theirs`` runs oneDNN's with attributes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[[list[Tensor]], Call]
    theirs: Callable[[Peer, list[Tensor], dict[str, Any]], Any]
    floating: bool = False

    @property
    def macs(self) -> int:
        """Half a value of the source, so that the table's operations are values."""
        return sum(map(math.prod, self.shapes)) // 2

    def sources(self, dtype: torch.dtype) -> list[Tensor]:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
        drawn = [torch.randint(low, high, shape).to(dtype) for shape in self.shapes]
        if self.floating:
            drawn = [src.float() * 0.02 for src in drawn]
        return [channels_last(src) for src in drawn]

    def competitor(self, data: list[Tensor], peer: Peer) -> Competitor:
        def execute(**options: Any) -> Any:
            return self.theirs(peer, data, options)

        return Competitor(
            execute(),
            lambda iterations, count: execute(samples=count, iterations=iterations).seconds,
        )


ops = torch.ops.torchq
CODE, FLOAT = dtype_code(U8), dtype_code(torch.float32)


def _scales(*values: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(values, dtype=torch.float32), torch.zeros(len(values), dtype=torch.int32)


def _pool(size: int, channels: int, kernel: int, stride: int, padding: int, alg: str) -> Primitive:
    window = [kernel] * 2 + [stride] * 2 + [padding] * 4 + [1] * 2

    def ours(data: list[Tensor]) -> Call:
        if alg == "max":
            return ops.max_pool.default, [data[0], window, False]
        zero = torch.zeros(1, dtype=torch.int32)
        return ops.avg_pool.default, [data[0], zero, window, False, True, None]

    name = {"max": "max", "avg_include_padding": "avg"}[alg]
    return Primitive(
        f"{name}_pool {kernel} s{stride} {channels}, {size}",
        ((1, channels, size, size),),
        ours,
        lambda peer, data, options: peer.pooling(
            data[0], alg, kernel, stride=stride, padding=padding, **options
        ),
    )


def _softmax(*shape: int, floating: bool = False) -> Primitive:
    return Primitive(
        f"softmax {'of f32 ' * floating}{'x'.join(map(str, shape))}",
        (shape,),
        lambda data: (ops.softmax.default, [data[0], -1, False, *_scales(1, 1 / 256), CODE, ""]),
        lambda peer, data, options: peer.softmax(
            data[0], len(shape) - 1, dst_scale=1 / 256, dst_dtype=U8, **options
        ),
        floating=floating,
    )


def _layer_norm(rows: int, width: int, floating: bool = False) -> Primitive:
    gamma, beta = 0.5 + torch.rand(width), torch.randn(width)
    return Primitive(
        f"layer_norm {'of f32 ' * floating}{rows}x{width}",
        ((rows, width),),
        lambda data: (
            ops.layer_norm.default,
            [data[0], 1, gamma, beta, 1e-5, *_scales(1, 0.03), CODE, ""],
        ),
        lambda peer, data, options: peer.layer_normalization(
            data[0], gamma, beta, dst_scale=0.03, dst_dtype=U8, **options
        ),
        floating=floating,
    )


def _group_norm(size: int, channels: int, groups: int, floating: bool = False) -> Primitive:
    gamma, beta = 0.5 + torch.rand(channels), torch.randn(channels)
    return Primitive(
        f"group_norm {'of f32 ' * floating}{channels} in {groups}, {size}",
        ((1, channels, size, size),),
        lambda data: (
            ops.group_norm.default,
            [data[0], groups, gamma, beta, 1e-5, *_scales(1, 0.03), CODE, ""],
        ),
        lambda peer, data, options: peer.group_normalization(
            data[0], groups, gamma, beta, dst_scale=0.03, dst_dtype=U8, **options
        ),
        floating=floating,
    )


def _relu(size: int, channels: int) -> Primitive:
    return Primitive(
        f"relu {channels}, {size}",
        ((1, channels, size, size),),
        lambda data: (
            ops.eltwise.default,
            [data[0], *_scales(1, 1), dtype_code(data[0].dtype), "eltwise_relu:0.1"],
        ),
        lambda peer, data, options: peer.eltwise(data[0], "relu", 0.1, **options),
    )


def _binary(alg: str, size: int, channels: int, per_channel: bool = False) -> Primitive:
    shape = (1, channels, size, size)
    other = (1, channels, 1, 1) if per_channel else shape

    def ours(data: list[Tensor]) -> Call:
        scale = _scales(0.5, 0.4, 1) if alg == "add" else _scales(0.1, 0.05, 1)
        return getattr(ops, alg).default, [*data, *scale, CODE, False]

    def theirs(peer: Peer, data: list[Tensor], options: dict[str, Any]) -> Any:
        first, second = (0.5, 0.4) if alg == "add" else (0.1, 0.05)
        scales = {"src0_scale": first, "src1_scale": second}
        return peer.binary(*data, alg, dst_dtype=U8, **scales, **options)

    return Primitive(
        f"{alg} {channels}{' by channel' * per_channel}, {size}", (shape, other), ours, theirs
    )


def _concat(size: int, *channels: int, scaled: bool = True) -> Primitive:
    scales = [0.5 + 0.1 * i if scaled else 1.0 for i in range(len(channels))]
    return Primitive(
        f"concat {'+'.join(map(str, channels))}{' scaled' * scaled}, {size}",
        tuple((1, c, size, size) for c in channels),
        lambda data: (
            ops.concat.default,
            [data, *_scales(*scales, 1), 1, CODE if scaled else dtype_code(data[0].dtype)],
        ),
        lambda peer, data, options: peer.concat(
            data,
            1,
            scales if scaled else None,
            dst_dtype=U8 if scaled else data[0].dtype,
            **options,
        ),
    )


def _resampling(alg: str, size: int, channels: int) -> Primitive:
    def ours(data: list[Tensor]) -> Call:
        code = dtype_code(data[0].dtype)
        return ops.resampling.default, [data[0], alg, [2 * size] * 2, *_scales(1, 1), code, ""]

    return Primitive(
        f"{alg} x2 {channels}, {size}",
        ((1, channels, size, size),),
        ours,
        lambda peer, data, options: peer.resampling(data[0], alg, [2 * size] * 2, **options),
    )


def _mean(size: int, channels: int) -> Primitive:
    return Primitive(
        f"mean {channels}, {size}",
        ((1, channels, size, size),),
        lambda data: (
            ops.reduction.default,
            [data[0], "mean", [2, 3], True, *_scales(1, 1), dtype_code(data[0].dtype), ""],
        ),
        lambda peer, data, options: peer.reduction(data[0], "mean", [2, 3], **options),
    )


def _convert(name: str, *shape: int) -> Primitive:
    one, scale, zero = torch.ones(1), torch.tensor([0.05]), torch.zeros(1, dtype=torch.int32)
    calls: dict[str, tuple[Callable[[Tensor], Call], dict[str, Any]]] = {
        "quantize": (
            lambda x: (ops.quantize.default, [x, scale, zero, CODE]),
            {"dst_scale": 0.05, "dst_dtype": U8},
        ),
        "dequantize to f32": (
            lambda x: (ops.dequantize.default, [x, scale, zero]),
            {"src_scale": 0.05, "dst_dtype": torch.float32},
        ),
        "requantize": (
            lambda x: (ops.requantize.default, [x, scale, zero, one, zero, CODE]),
            {"src_scale": 0.05, "dst_dtype": U8},
        ),
    }
    ours, asked = calls[name]
    return Primitive(
        f"{name} {'x'.join(map(str, shape))}",
        (shape,),
        lambda data: ours(data[0]),
        lambda peer, data, options: peer.reorder(data[0], **asked, **options),
        floating=name == "quantize",
    )


ELEMENTWISE: Counter[Primitive] = Counter(
    [
        _pool(112, 64, 3, 2, 1, "max"),
        _pool(35, 192, 3, 1, 1, "avg_include_padding"),
        _pool(56, 128, 2, 2, 0, "avg_include_padding"),
        _pool(7, 2048, 7, 7, 0, "avg_include_padding"),
        _mean(7, 1280),
        _softmax(12, 128, 128),
        _softmax(12, 128, 128, floating=True),
        _softmax(1, 1000),
        _layer_norm(128, 768),
        _layer_norm(128, 768, floating=True),
        _layer_norm(196, 384),
        _layer_norm(3136, 96),
        _group_norm(32, 320, 32),
        _group_norm(32, 320, 32, floating=True),
        _relu(56, 256),
        _binary("add", 56, 256),
        _binary("add", 7, 2048),
        _binary("mul", 56, 96, per_channel=True),
        _concat(28, 64, 128, 32, 32),
        _concat(28, 256, 32, scaled=False),
        _resampling("nearest", 26, 256),
        _resampling("linear", 28, 128),
        _convert("quantize", 1, 3, 224, 224),
        _convert("quantize", 128, 768),
        _convert("requantize", 1, 256, 56, 56),
        _convert("dequantize to f32", 128, 768),
    ]
)

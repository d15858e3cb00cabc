# SPDX-License-Identifier: Apache-2.0
"""Attention at shapes of real networks: torchq's op, oneDNN's primitives and torch's float op.

Random full-range integers; scales are such that a row's weights differ as in a network. oneDNN has
no such op: its time is that of a matmul to float32, a softmax to uint8 and a second matmul, each
run by itself, on a key that is transposed in memory; it rounds weights that are normalized, to
1 / 255, so it is some steps away. torch computes the real values in float32, and
its ratio is to torchq's call.

``cache``: one token's queries on a cache of compressed keys and values, beside torch's op on one of
float32.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.competitors import Competitor
from benchmarks.onednn import Peer
from benchmarks.timing import call_blocks
from torchq.runtime.library import dtype_code

__all__ = ["ATTENTION", "CACHE", "Attention", "CachedAttention"]

_QUERY, _KEY, _VALUE, _DST = 0.03, 0.03, 0.02, 0.016
_WEIGHT = 1 / 255  # oneDNN's softmax
_ZERO = {torch.uint8: 128, torch.int8: 0}


@dataclass(frozen=True)
class Attention:
    """Self-attention of ``heads`` heads of ``size`` values on ``length`` positions."""

    heads: int
    length: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.heads}x{self.length}x{self.size}"

    @property
    def macs(self) -> int:
        """Returns the multiply-adds of both products."""
        return 2 * self.heads * self.length**2 * self.size

    def sources(self, query_dtype: torch.dtype) -> list[Tensor]:
        """Query, key and value as networks have them: heads inside of positions."""
        shape = (1, self.length, self.heads, self.size)
        dtypes = (query_dtype, torch.int8, torch.int8)
        limits = [torch.iinfo(dtype) for dtype in dtypes]
        drawn = [torch.randint(x.min, x.max + 1, shape) for x in limits]
        return [src.to(dtype).transpose(1, 2) for src, dtype in zip(drawn, dtypes, strict=True)]

    def ours(self, data: list[Tensor]) -> tuple[Any, list[Any]]:
        scales = torch.tensor([_QUERY, _KEY, _VALUE, _DST])
        zeros = torch.tensor([_ZERO[data[0].dtype], 0, 0, 128], dtype=torch.int32)
        u8 = dtype_code(torch.uint8)
        op = torch.ops.torchq.attention.default
        return op, [*data, None, False, self.size**-0.5, scales, zeros, u8]

    def onednn(self, data: list[Tensor], peer: Peer) -> Competitor:
        query, key, value = (src[0].contiguous() for src in data)
        key = key.mT.contiguous()
        first = {
            "src_scale": _QUERY * self.size**-0.5,
            "src_zero_point": _ZERO[query.dtype],
            "weight_scale": _KEY,
            "dst_dtype": torch.float32,
        }
        second = {"dst_scale": _WEIGHT, "dst_dtype": torch.uint8}
        third = {
            "src_scale": _WEIGHT,
            "weight_scale": _VALUE,
            "dst_scale": _DST,
            "dst_zero_point": 128,
            "dst_dtype": torch.uint8,
        }
        scores = peer.matmul(query, key, **first).flatten(0, 1)
        weights = peer.softmax(scores, 1, **second).unflatten(0, (self.heads, -1))
        dst = peer.matmul(weights, value, **third)

        def blocks(iterations: int, count: int) -> list[float]:
            asked: dict[str, Any] = {"samples": count, "iterations": iterations}
            times = (
                peer.matmul(query, key, **first, **asked).seconds,
                peer.softmax(scores, 1, **second, **asked).seconds,
                peer.matmul(weights, value, **third, **asked).seconds,
            )
            return [sum(parts) for parts in zip(*times, strict=True)]

        return Competitor(dst.unsqueeze(0), blocks, tolerance=16)

    def torch(self, data: list[Tensor]) -> Competitor:
        scales, zeros = (_QUERY, _KEY, _VALUE), (_ZERO[data[0].dtype], 0, 0)
        real = [(x.float() - z) * s for x, s, z in zip(data, scales, zeros, strict=True)]
        dst = F.scaled_dot_product_attention(*real)
        blocks = call_blocks(F.scaled_dot_product_attention, real)
        return Competitor((dst / _DST).round().add(128).clamp(0, 255), blocks, tolerance=6)


@dataclass(frozen=True)
class CachedAttention:
    """One token's attention to ``length`` tokens of a cache, whose heads serve several each."""

    heads: int
    cached_heads: int
    length: int
    size: int
    src_dtype = "f32"

    @property
    def name(self) -> str:
        return f"{self.heads} on {self.cached_heads}x{self.length}x{self.size}"

    @property
    def macs(self) -> int:
        return 2 * self.heads * self.length * self.size

    def sources(self) -> list[Tensor]:
        """Query, key and value."""
        cache = torch.randn(2, 1, self.cached_heads, self.length, self.size)
        return [torch.randn(1, self.heads, 1, self.size), *cache]

    def ours(self, data: list[Tensor]) -> tuple[Any, list[Any]]:
        rows = [torch.ops.torchq.compress_rows(src) for src in data[1:]]
        op = torch.ops.torchq.compressed_attention.default
        return op, [data[0], *rows, None, self.size**-0.5]

    def torch(self, data: list[Tensor]) -> Competitor:
        attention = partial(F.scaled_dot_product_attention, enable_gqa=True)
        query, key, value = data
        dst = attention(query, key, value)
        tolerance = 2**-5 * float(dst.abs().max())
        return Competitor(dst, call_blocks(attention, data), real_tolerance=tolerance)


ATTENTION = Counter(
    [
        Attention(12, 32, 64),
        Attention(12, 128, 64),
        Attention(12, 197, 64),
        Attention(12, 512, 64),
        Attention(12, 24, 32),
        Attention(8, 1024, 40),
    ]
)
CACHE = Counter(CachedAttention(14, 2, length, 64) for length in (256, 1024, 4096))

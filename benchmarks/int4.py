# SPDX-License-Identifier: Apache-2.0
"""Linear layers with 4-bit weights at shapes of language models, beside torch's op.

``torch`` is ``aten::_weight_int4pack_mm_for_cpu``. It reads the same codes and scales, and
multiplies bfloat16 sources, where torchq quantizes each row to int8 first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.competitors import Competitor
from benchmarks.timing import call_blocks
from torchq.packing import pack_linear_int4

__all__ = ["INT4", "Int4"]


@dataclass(frozen=True)
class Int4:
    """``rows`` of ``k`` values times a weight ``(n, k)``."""

    rows: int
    k: int
    n: int
    group_size: Any = 32
    src_dtype = "f32"

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.k} to {self.n}, groups of {self.group_size}"

    @property
    def macs(self) -> int:
        return self.rows * self.k * self.n

    def sources(self) -> list[Tensor]:
        """Source, codes and scales."""
        codes = torch.randint(0, 16, (self.n, self.k), dtype=torch.uint8)
        scale = torch.rand(self.n, self.k // self.group_size) * 0.01 + 0.01
        return [torch.randn(self.rows, self.k), codes, scale.bfloat16().float()]

    def ours(self, data: list[Tensor]) -> tuple[Any, list[Any]]:
        src, codes, scale = data
        packed = pack_linear_int4(codes, scale, None, self.group_size)
        args = [src, packed.weight, packed.params, None, self.k, self.n, self.group_size, True]
        return torch.ops.torchq.dynamic_linear_int4.default, args

    def torch(self, data: list[Tensor]) -> Competitor:
        """Its scales come with the real value of code 8, here 0."""
        src, codes, scale = data
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        params = torch.stack([scale.t(), torch.zeros_like(scale.t())], -1).contiguous()
        op = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        args = [src.bfloat16(), packed, self.group_size, params.bfloat16()]
        dst = op(*args)
        return Competitor(dst, call_blocks(op, args), real_tolerance=0.05 * float(dst.abs().max()))


INT4 = Counter(
    [
        Int4(1, 2048, 2048),
        Int4(1, 4096, 4096),
        Int4(1, 4096, 14336),
        Int4(1, 4096, 4096, 128),
        Int4(4, 4096, 4096),
        Int4(16, 4096, 4096),
        Int4(128, 4096, 4096),
        Int4(128, 4096, 4096, 128),
    ]
)

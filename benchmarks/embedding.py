# SPDX-License-Identifier: Apache-2.0
"""Embeddings at shapes of recommenders and language models, beside torch.ao's ops and torchao.

Tables have random full-range codes and float scales; indices are uniform, so that large tables are
read from memory. torch.ao's ops (``quantized::embedding_bag_byte`` and the like) read the same
packed bytes. torchao has no bags: it is timed where each index is a row of its own.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.competitors import Competitor
from benchmarks.timing import call_blocks
from torchq.packing import pack_embedding

__all__ = ["EMBEDDING", "Bags"]


@dataclass(frozen=True)
class Bags:
    """``bags`` sums of ``size`` rows each; rows themselves where ``size`` is 0."""

    rows: int
    dim: int
    bags: int
    size: int
    bits: int = 8
    src_dtype = "s64"

    @property
    def name(self) -> str:
        what = f"{self.bags} bags of {self.size}" if self.size else f"{self.bags} rows"
        return f"{self.rows}x{self.dim}, {self.bits} bits, {what}"

    @property
    def macs(self) -> int:
        return self.dim * self.bags * max(self.size, 1)

    def sources(self) -> list[Tensor]:
        """Packed weight, indices, and where bags begin."""
        codes = torch.randint(0, 2**self.bits, (self.rows, self.dim), dtype=torch.uint8)
        dtype = torch.float32 if self.bits == 8 else torch.float16
        scale, offset = torch.rand(self.rows), torch.randn(self.rows)
        packed = pack_embedding(codes, scale.to(dtype), offset.to(dtype), self.bits)  # type: ignore[arg-type]
        indices = torch.randint(0, self.rows, (self.bags * max(self.size, 1),))
        return [packed.weight, indices, torch.arange(0, len(indices), max(self.size, 1))]

    def ours(self, data: list[Tensor]) -> tuple[Any, list[Any]]:
        weight, indices, offsets = data
        if not self.size:
            return torch.ops.torchq.embedding.default, [weight, indices, self.dim, self.bits]
        args = [weight, indices, offsets, None, self.dim, self.bits, "sum", False, None]
        return torch.ops.torchq.embedding_bag.default, args

    def torch(self, data: list[Tensor]) -> Competitor:
        """torch.ao's op; a row by itself is a bag of one, as its modules have it."""
        weight, indices, offsets = data
        name = f"embedding_bag_{'byte' if self.bits == 8 else '4bit'}_rowwise_offsets"
        op = getattr(torch.ops.quantized, name).default
        args = [weight, indices, offsets, False, 0, False, None, None, False]
        dst = op(*args)
        return Competitor(dst, call_blocks(op, args), real_tolerance=1e-4 * float(dst.abs().max()))

    def torchao(self, data: list[Tensor]) -> Competitor:
        """Its weight-only embedding, of a float table with about the same values."""
        if self.size or self.bits != 8:
            raise RuntimeError("it has no bags, and 4 bits only in groups")
        from torchao.quantization import IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerAxis

        weight, indices, _ = data
        every = torch.arange(self.rows)
        table = torch.ops.torchq.embedding(weight, every, self.dim, self.bits)
        module = nn.Embedding(self.rows, self.dim, _weight=table)
        config = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantize_(module, config, lambda m, _: isinstance(m, nn.Embedding))
        dst = module(indices)
        steps = call_blocks(module, [indices])
        return Competitor(dst, steps, real_tolerance=float(table.abs().max()) / 50)


EMBEDDING = Counter(
    [
        Bags(10_000, 64, 128, 20),
        Bags(1_000_000, 64, 128, 20),
        Bags(1_000_000, 128, 2048, 40),
        Bags(1_000_000, 16, 2048, 4),
        Bags(100_000, 768, 64, 10),
        Bags(10_000, 64, 128, 20, 4),
        Bags(1_000_000, 64, 128, 20, 4),
        Bags(1_000_000, 128, 2048, 40, 4),
        Bags(30_522, 384, 128, 0),
        Bags(30_522, 768, 24, 0),
        Bags(30_522, 768, 24, 0, 4),
    ]
)

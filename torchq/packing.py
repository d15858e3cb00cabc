# SPDX-License-Identifier: Apache-2.0
"""Packs weights: oneDNN's reorder of weights, with compensation."""

from torchq.functional.embeddings import PackedEmbedding, pack_embedding
from torchq.functional.int4 import PackedInt4, pack_linear_int4
from torchq.functional.packing import (
    PackedWeight,
    empty_packed,
    pack_conv,
    pack_conv_transpose,
    pack_linear,
)

__all__ = [
    "PackedEmbedding",
    "PackedInt4",
    "PackedWeight",
    "empty_packed",
    "pack_conv",
    "pack_conv_transpose",
    "pack_embedding",
    "pack_linear",
    "pack_linear_int4",
]

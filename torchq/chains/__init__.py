# SPDX-License-Identifier: Apache-2.0
"""Chains of post-ops; :mod:`torchq.post_ops` has the formulas and the text."""

from torchq.chains.chain import MAX_POST_OPS, PostOps, foldable, post_ops_of
from torchq.chains.sources import CHANNEL_MASKS, is_full, selects
from torchq.chains.types import (
    BINARY_ALGS,
    ELTWISE_ALGS,
    Binary,
    DwConv,
    Eltwise,
    PostOp,
    PReLU,
    Sum,
    read_post_ops,
)

__all__ = [
    "BINARY_ALGS",
    "CHANNEL_MASKS",
    "ELTWISE_ALGS",
    "MAX_POST_OPS",
    "Binary",
    "DwConv",
    "Eltwise",
    "PReLU",
    "PostOp",
    "PostOps",
    "Sum",
    "foldable",
    "is_full",
    "post_ops_of",
    "read_post_ops",
    "selects",
]

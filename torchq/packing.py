# SPDX-License-Identifier: Apache-2.0
"""Packs weights: oneDNN's reorder of weights, with compensation."""

from torchq.functional.packing import (
    PackedWeight,
    empty_packed,
    pack_conv,
    pack_conv_transpose,
    pack_linear,
)

__all__ = ["PackedWeight", "empty_packed", "pack_conv", "pack_conv_transpose", "pack_linear"]

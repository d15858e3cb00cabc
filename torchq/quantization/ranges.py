# SPDX-License-Identifier: Apache-2.0
"""Ranges of quantized integers, and the one formula that maps real ranges onto them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

# Scales below the smallest normal float32 would be flushed to zero under FTZ, and 1 / scale
# would overflow.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


def activation_range(dtype: torch.dtype, bits: int = 8) -> tuple[int, int]:
    """Smallest and largest activation: u8 0..255 or 0..127, s8 -128..127 or -64..63 at 7 bits.

    Raises:
        TypeError: ``dtype`` is not a ``torch.dtype``.
        ValueError: ``dtype`` is not uint8 or int8, or ``bits`` is not 8 or 7.
    """
    check_dtype("activation_range", dtype)
    check_bits("activation_range", "bits", bits)
    if dtype == torch.uint8:
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def weight_range(bits: int = 8) -> tuple[int, int]:
    """Smallest and largest s8 weight: -127..127, or -63..63 at 7 bits (symmetric around zero).

    Raises:
        ValueError: ``bits`` is not 8 or 7.
    """
    check_bits("weight_range", "bits", bits)
    largest: int = 2 ** (bits - 1) - 1
    return -largest, largest


def solve_qparams(
    low: ArrayLike, high: ArrayLike, integers: tuple[int, int], symmetric: bool
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Scale and zero point for ranges ``[low, high]``, elementwise; the formula of choose_qparams.

    The inputs must be finite with ``low <= high``; nothing is checked here, because the range
    searches call this with thousands of candidates.
    """
    smallest, largest = integers
    low64 = np.minimum(np.asarray(low, dtype=np.float64), 0.0)
    high64 = np.maximum(np.asarray(high, dtype=np.float64), 0.0)
    middle = (smallest + largest + 1) // 2
    if symmetric:
        span, steps = np.maximum(-low64, high64), largest - middle
    else:
        span, steps = high64 - low64, largest - smallest
    span = np.where(span > 0, np.maximum(span, steps * SMALLEST_SCALE), steps)
    scale = np.asarray(span / steps, dtype=np.float32)
    if symmetric:
        return scale, np.full(scale.shape, middle, dtype=np.int32)
    # low * steps / span, not low / scale: exact for [-a, a], whose tie then always goes to even.
    zero_point = np.rint(smallest - low64 * steps / span)
    return scale, np.asarray(np.clip(zero_point, smallest, largest), dtype=np.int32)


def check_bits(where: str, name: str, bits: object) -> None:
    """Raise ValueError unless ``bits`` is 8 or 7."""
    if isinstance(bits, bool) or bits not in (7, 8):
        raise ValueError(
            f"torchq.{where}: {name} must be 8 or 7, got {bits!r}. "
            "Use 8, or 7 to rule out saturation in 16-bit pair sums."
        )


def check_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        listed = " or ".join(repr(choice) for choice in choices)
        raise ValueError(
            f"torchq.{where}: {name} must be {listed}, got {value!r}. Pick one of them."
        )


def check_dtype(where: str, dtype: object, name: str = "dtype") -> None:
    """Raise TypeError or ValueError unless ``dtype`` is torch.uint8 or torch.int8."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"torchq.{where}: {name} must be torch.uint8 or torch.int8, got {dtype!r}. "
            "Pass a torch.dtype."
        )
    if dtype not in (torch.uint8, torch.int8):
        raise ValueError(
            f"torchq.{where}: {name} must be torch.uint8 or torch.int8, got {dtype}. "
            "Quantized tensors are plain uint8 or int8 tensors."
        )

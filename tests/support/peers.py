# SPDX-License-Identifier: Apache-2.0
"""oneDNN in a process of its own; tests skip where its wheels cannot be had."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.onednn import Peer, WheelsUnavailableError, downloaded, sums_are_exact

LARGE = "3.13"  # of half a gigabyte, with a runtime of SYCL


def skip_if_not_at_hand(version: str) -> None:
    """Skips a test that would download a large oneDNN, unless TORCHQ_ONEDNN_LARGE asks for it."""
    if version == LARGE and not (downloaded(version) or os.environ.get("TORCHQ_ONEDNN_LARGE")):
        pytest.skip(f"oneDNN {version} is not downloaded: `make conformance`")


def start_onednn(**options: Any) -> Peer:
    """On one thread; the caller closes it, as by `with`."""
    skip_if_not_at_hand(options.get("version", ""))
    try:
        return Peer(threads=1, **options)
    except WheelsUnavailableError as error:
        pytest.skip(str(error))


def exact_weight(weight: Tensor) -> Tensor:
    """int8 weights whose sums oneDNN computes exactly on this CPU.

    With VNNI that is any. Without it, two products of 255 and 64 still fit 16 bits, and an even
    weight survives being halved.
    """
    if sums_are_exact():
        return weight
    return weight.div(4, rounding_mode="floor").to(torch.int8) * 2

# SPDX-License-Identifier: Apache-2.0
"""A list of models in the styles of many repositories: none is written for quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = tuple[Callable[[], nn.Module], Callable[[], Any], int, int]
MODELS: dict[str, Case] = {}  # name -> model, inputs, int8 matmuls, all matmuls


def model(name: str, inputs: Callable[[], Any], int8: int, total: int | None = None) -> Any:
    def add(make: Callable[[], nn.Module]) -> Any:
        MODELS[name] = make, inputs, int8, int8 if total is None else total
        return make

    return add


def image(channels: int = 3, size: int = 32, batch: int = 2) -> Callable[[], Any]:
    return lambda: torch.randn(batch, channels, size, size)

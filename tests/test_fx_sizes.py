# SPDX-License-Identifier: Apache-2.0
"""Numbers that a model's Python code makes of sizes: right for other inputs, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq


class Resized(nn.Module):
    """To a size that Python computes."""

    def __init__(self, size: Callable[[Any], int]) -> None:
        super().__init__()
        self.a, self.size = nn.Conv2d(3, 8, 3), [size]

    def forward(self, x: Tensor) -> Tensor:
        size = self.size[0](x.shape[2])
        return F.interpolate(self.a(x), size=(size, size))


SIZES: dict[str, Callable[[Any], int]] = {
    "int": lambda n: int(n / 2),
    "float": lambda n: int(float(n / 4) * 3),
    "sqrt": lambda n: int(math.sqrt(n * n)),
    "log2": lambda n: 2 * int(math.log2(n)),
    "ceil": lambda n: int(np.ceil(n / 7)) * 7,
    "prod": lambda n: int(np.prod((n, 2))),
    "tensor": lambda n: int(torch.as_tensor(n)),
}


@pytest.mark.parametrize("name", SIZES)
def test_numbers_of_sizes(name: str) -> None:
    """A conversion to int or float in Python is a constant of the graph: no other passes."""
    model, x = Resized(SIZES[name]).eval(), torch.randn(2, 3, 16, 16)
    quantized = torchq.quantize(model, [x], x)
    assert isinstance(quantized, torch.fx.GraphModule)
    for found in (quantized, torch.jit.script(quantized)):
        for same in (x, x[:1]):
            assert found(same).shape == model(same).shape
        with pytest.raises((RuntimeError, torch.jit.Error), match="size or condition was"):
            found(torch.randn(2, 3, 24, 24))

# SPDX-License-Identifier: Apache-2.0
"""Sizes beyond what an op sums exactly: such a layer stays float, with the reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.layer(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query[:, :4], key, value)


CASES = {
    "attention": (Attends, (1, 65800, 4), "scaled_dot_product_attention", "65793 keys"),
    "pool": (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                   nn.Linear(2, 3)), (1, 1, 2900, 2900), "1", "8388608 positions"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_layer_beyond_the_limits_stays_float(name: str) -> None:
    make, shape, row, reason = CASES[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    converted = torchq.quantize(model, [x])
    with torch.no_grad():
        assert torchq.sqnr(model(x), converted(x)) > 20
    rows = {each.name: each for each in torchq.explain(converted).rows}
    assert not rows[row].quantized and reason in rows[row].reason

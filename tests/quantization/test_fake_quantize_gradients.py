# SPDX-License-Identifier: Apache-2.0
"""Gradients of FakeQuantize: those of torch, and bits that they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fake_quantize import BOUNDS, values
from torch import nn

from torchq import FakeQuantize


def test_gradient_is_that_of_torch() -> None:
    """Per tensor: 1 where a value rounds to a level, half a step beyond the range included."""
    src = torch.cat([values(-1.0, 1.0, 4001), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    scale, weights = 2 / 254, torch.arange(1.0, len(src) + 1)
    results = []
    for fake in (
        FakeQuantize.from_affine(scale, 0, -128, 127),
        lambda x: torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127),
    ):
        leaf = src.clone().requires_grad_()
        (fake(leaf) * weights).nan_to_num().sum().backward()
        results.append(leaf.grad[:-3])
        assert leaf.grad[-3:].tolist() == [0, 0, 0]
    assert torch.equal(*results)
    assert 0 < int((results[0] != 0).sum()) < len(src) - 3


def test_gradient_per_channel_is_that_of_torch() -> None:
    scale, zero_point = torch.tensor([0.01, 0.02, 0.5]), torch.tensor([0, 2, -4])
    src = torch.randn(50, 3, 7) * 3
    results = []
    for fake in (
        FakeQuantize.from_affine(scale, zero_point, -128, 127, 1),
        lambda x: torch.fake_quantize_per_channel_affine(x, scale, zero_point.int(), 1, -128, 127),
    ):
        leaf = src.clone().requires_grad_()
        (fake(leaf) * src.abs()).sum().backward()
        results.append(leaf.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_gradient_leaves_the_bits_alone(bounds: tuple[Any, ...], dtype: torch.dtype) -> None:
    fake = FakeQuantize(*bounds[:4], levels=bounds[4])
    src = values(*bounds[:2]).to(dtype)
    src = torch.cat([src, -src.abs() * 0, torch.tensor([torch.inf, torch.nan], dtype=dtype)])
    with torch.no_grad():
        expected = fake(src)
    for each in (fake, torch.jit.script(fake)):
        leaf = src.clone().requires_grad_()
        dst = each(leaf)
        assert dst.detach().numpy().tobytes() == expected.numpy().tobytes()
        dst.nan_to_num().sum().backward()
        il, ih, ol, oh, _ = bounds
        slope = (oh - ol) / (ih - il) if ih != il else 0.0
        assert set(leaf.grad.tolist()) <= {0.0, torch.tensor(slope, dtype=dtype).item()}
        assert torch.isfinite(leaf.grad).all() and (slope == 0 or leaf.grad.any())


def test_gradient_of_double_use_and_of_layers_in_front() -> None:
    fake, w = FakeQuantize(-4.0, 4.0), nn.Parameter(torch.tensor([0.1, -0.5, 1.0, 2.0]))
    (w + fake(w * 3) + fake(w)).sum().backward()
    assert w.grad.tolist() == [5, 5, 5, 2]  # 3 * 2.0 is beyond the range
    model = nn.Sequential(nn.Linear(8, 8), fake, nn.Linear(8, 1))
    before = model[0].weight.detach().clone()
    model(torch.randn(4, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(model[0].weight, before)


def test_forward_mode_and_no_grad() -> None:
    fake, src = FakeQuantize(-1.0, 1.0), torch.tensor([0.3, 2.0])
    tangent = torch.func.jvp(fake, (src,), (torch.full((2,), 3.0),))[1]
    assert tangent.tolist() == [3, 0]
    assert torch.func.vmap(torch.func.grad(lambda x: fake(x).sum()))(src).tolist() == [1, 0]
    with torch.no_grad():
        assert not fake(src.requires_grad_()).requires_grad

# SPDX-License-Identifier: Apache-2.0
"""The op rotary against torch's operations one by one, bit by bit, on every tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import assert_same
from torch import Tensor
from torch.library import opcheck

import torchq

rotary = torch.ops.torchq.rotary


def expected(src: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = src.shape[-1] // 2
    turned = torch.cat((-src[..., half:], src[..., :half]), -1)
    return src * cos + turned * sin


def assert_as_torch(src: Tensor, cos: Tensor, sin: Tensor) -> None:
    got, want = rotary(src, cos, sin), expected(src, cos, sin)
    assert_same(got, want)
    assert got.is_contiguous() or got.stride() == want.stride()


LAYOUTS: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "heads first": lambda b, h, s, d: torch.randn(b, h, s, d),
    "positions first": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "a part of a row": lambda b, h, s, d: torch.randn(b, s, h, d + 5)[..., 3 : d + 3].mT.mT,
    "a part of a product": lambda b, h, s, d: (
        torch.randn(b, s, 3 * h * d)[..., h * d : 2 * h * d].view(b, s, h, d).transpose(1, 2)
    ),
    "every second": lambda b, h, s, d: torch.randn(b, h, s, 2 * d)[..., ::2],
    "elements first": lambda b, h, s, d: torch.randn(d, b, h, s).movedim(0, -1),
    "one for all heads": lambda b, h, s, d: torch.randn(b, 1, s, d).expand(b, h, s, d),
}
SHAPES = [(1, 9, 1, 64), (2, 3, 13, 64), (3, 4, 5, 6), (1, 1, 1, 2), (5, 2, 7, 80), (2, 3, 0, 8)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits(isa: str, layout: str) -> None:
    torch.manual_seed(0)
    for b, h, s, d in SHAPES:
        src = LAYOUTS[layout](b, h, s, d)
        _, heads, steps, size = src.shape
        for shape in ((b, 1, steps, size), (1, 1, steps, size), (steps, size), (size,), (1,), ()):
            assert_as_torch(src, torch.randn(shape), torch.randn(shape))
        assert_as_torch(src, torch.randn(src.shape), torch.randn(b, heads, 1, 1))
        assert_as_torch(src, torch.randn(steps, 2 * size)[:, ::2], torch.randn(size, steps).t())
    assert torchq.last_kernel() == f"rotary:{isa}"


@pytest.mark.parametrize("shape", [(8,), (7, 4), (2, 2, 2, 3, 10), (0,), (4, 0), (3, 0, 2)])
def test_other_ranks(isa: str, shape: tuple[int, ...]) -> None:
    assert_as_torch(*(torch.randn(shape) for _ in range(3)))


def test_values_that_round(isa: str) -> None:
    """A fused multiply-add would give other bits; so do signs of zeros, and what is not finite."""
    torch.manual_seed(0)
    src, cos, sin = torch.rand(3, 64, 128)
    assert_as_torch(src, cos, sin)
    exact = (src[:, :64].double() * cos[:, :64] - src[:, 64:].double() * sin[:, :64]).float()
    assert (rotary(src, cos, sin)[:, :64] != exact).any(), "products are rounded"
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 3e38])
    special = torch.cat([special, torch.tensor([1e-38, -1e-45])])
    pairs = torch.cartesian_prod(special, special, special, special)
    a, b, c, d = pairs.unbind(1)
    assert_as_torch(torch.stack([a, b], 1), torch.stack([c, c], 1), torch.stack([d, d], 1))


def test_threads_give_the_same(isa: str) -> None:
    src = torch.randn(3, 97, 5, 64).transpose(1, 2)
    cos, sin = torch.randn(2, 97, 64)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_as_torch(src, cos, sin)
    finally:
        torch.set_num_threads(threads)


def test_bfloat16_is_rounded_once(isa: str) -> None:
    src, cos, sin = torch.randn(3, 4, 6, 8).bfloat16()
    want = expected(src.float(), cos.float(), sin.float()).bfloat16()
    assert torch.equal(rotary(src, cos, sin), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout: str) -> None:
    for shape in ((2, 3, 5, 8), (1, 3, 1, 8)):
        opcheck(rotary.default, (LAYOUTS[layout](*shape), torch.randn(8), torch.randn(1, 1, 1, 8)))


X = torch.ones(2, 3, 4, 6)
REFUSED: dict[str, tuple[type[Exception], str, tuple[Any, ...]]] = {
    "float64": (TypeError, "src must be float32, got float64. Convert", (X.double(), X, X)),
    "integers": (TypeError, "cos must be float32, got int64. Convert", (X, X.long(), X)),
    "an odd size": (ValueError, r"src must have rows of an even size, got \[2, 3\]. Rotate",
                    (torch.ones(2, 3), torch.ones(3), torch.ones(3))),
    "a number": (ValueError, r"src must have rows of an even size, got \[\]",
                 (X[0, 0, 0, 0], X, X)),
    "other positions": (ValueError, r"sin must broadcast to src \[2, 3, 4, 6\], got \[5, 6\]. Give",
                        (X, X, torch.ones(5, 6))),
    "more positions": (ValueError, r"cos must broadcast to src \[6\], got \[2, 3, 4, 6\]. Give",
                       (X[0, 0, 0], X, X)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name: str) -> None:
    error, text, args = REFUSED[name]
    with pytest.raises(error, match=rf"torchq\.rotary: {text}"):
        rotary(*args)
    with pytest.raises(error, match=rf"torchq\.rotary: {text}"):
        rotary(*(t.to("meta") for t in args))

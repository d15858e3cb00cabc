# SPDX-License-Identifier: Apache-2.0
"""Attention of a model: one function, or spelled out; static and dynamic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import found, names, sqnr
from models import Wired
from torch import Tensor, nn

import torchq

TOKENS = (3, 7, 32)


def reasons(converted: nn.Module) -> dict[str, str]:
    return {row.name: row.reason for row in torchq.explain(converted).rows}


# F.scaled_dot_product_attention


class Fused(nn.Module):
    """With separate projections, as most write it today; ``options`` go to the function."""

    def __init__(self, groups: int = 1, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32 // g) for g in (1, groups, groups))
        self.out, self.options = nn.Linear(32, 32), options | {"enable_gqa": groups > 1}

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            layer(y).unflatten(-1, (-1, 8)).transpose(1, 2)
            for layer, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        y = F.scaled_dot_product_attention(q, k, v, mask, **self.options)
        return self.out(y.transpose(1, 2).flatten(2))


class Repeated(Fused):
    """Two heads of keys and values, twice: each in turn, or both and both again."""

    def __init__(self, dim: int) -> None:
        super().__init__(2, is_causal=True)
        self.options["enable_gqa"], self.dim = False, dim

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        n, tokens, _ = x.shape
        q, k, v = (y(x).view(n, tokens, -1, 8).transpose(1, 2) for y in (self.q, self.k, self.v))
        shape = n, 2, 2, tokens, 8
        k, v = (y.unsqueeze(self.dim).expand(shape).reshape(n, 4, tokens, 8) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dim", [2, 1])
def test_heads_that_are_repeated_in_either_order(dim: int) -> None:
    """Only ``x[:, :, None]`` is what ``enable_gqa`` reads; the other had no graph."""
    model, x = Repeated(dim).eval(), torch.randn(TOKENS)
    converted = torchq.quantize(model, None, x, torchq.QConfig(dynamic=True))
    assert sqnr(converted(x), model(x)) > 30
    (attention,) = found(converted, torchq.nn.DynamicQAttention)
    assert attention.enable_gqa == (dim == 2)


def padding_mask(n: int, length: int) -> Tensor:
    seen = torch.rand(n, 1, 1, length) > 0.3
    seen[..., 0] = True
    return seen.expand(n, 1, length, length)


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, None),
        ({"is_causal": True}, None),
        ({"scale": 0.5, "dropout_p": 0}, None),
        ({"groups": 2}, padding_mask(3, 7)),
        ({}, torch.randn(7, 7)),
        ({}, padding_mask(3, 7).float().log()),
    ],
    ids=["plain", "causal", "scale", "groups", "added", "minus_inf"],
)
def test_scaled_dot_product_attention(
    options: dict[str, Any], mask: Tensor | None, tmp_path: Path
) -> None:
    """int8 from the projections to the last linear; whatever runs it gives the same bits."""
    model = Fused(**options).eval()
    inputs = (torch.randn(TOKENS),) if mask is None else (torch.randn(TOKENS), mask)
    converted = torchq.quantize(model, [inputs], inputs, strict=True)
    assert names(converted).count("QAttention") == 1 and names(converted).count("Quantize") == 1
    assert "Dequantize" not in names(converted)
    assert reasons(converted)["scaled_dot_product_attention"] == ""
    with torch.no_grad():
        want, got = model(*inputs), converted(*inputs)
    assert sqnr(want, got) > 28
    torchq.save(converted, tmp_path / "model")
    others = [
        torchq.load(tmp_path / "model"),
        torch.jit.script(converted),
        torch.export.export(converted, inputs).module(),
    ]
    for other in others:
        assert torch.equal(other(*inputs), got)
    if mask is None:
        with torch.no_grad():
            longer = torch.randn(2, 19, 32)
            assert sqnr(model(longer), converted(longer)) > 28


def test_attention_to_another_sequence_and_to_constants() -> None:
    model, x, memory = Fused().eval(), torch.randn(TOKENS), torch.randn(3, 11, 32)
    mask = torch.zeros(7, 11)
    converted = torchq.quantize(model, [(x, mask, memory)], (x, mask, memory), strict=True)
    with torch.no_grad():
        assert sqnr(model(x, mask, memory), converted(x, mask, memory)) > 28
    params = nn.ParameterDict({"q": torch.randn(1, 4, 5, 8)})

    def forward(m: Any, x: Tensor) -> Tensor:
        keys = m.a(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return m.b(F.scaled_dot_product_attention(m.p["q"], keys, keys).transpose(1, 2).flatten(2))

    learned = Wired(forward, a=nn.Linear(32, 32), b=nn.Linear(32, 4), p=params)
    converted = torchq.quantize(learned.eval(), [x], x, strict=True)
    assert names(converted).count("QAttention") == 1
    with torch.no_grad():
        assert sqnr(learned(x), converted(x)) > 28


def test_attention_that_stays_float() -> None:
    """With its reason; what comes with each call is the function's business."""
    x = torch.randn(TOKENS)
    for options, reason in (
        ({"dropout_p": 0.5}, "it drops at random"),
        ({"scale": -1.0}, "its scale -1.0 is not above 0"),
    ):
        converted = torchq.quantize(Fused(**options).eval(), [x], x)
        assert reasons(converted)["scaled_dot_product_attention"] == reason
    kept = torchq.quantize(Fused().eval(), [x], x, overrides={"scaled_dot_product_attention": None})
    assert "QAttention" not in names(kept)


@pytest.mark.parametrize("groups", [1, 2])
def test_dynamic_attention(groups: int, tmp_path: Path) -> None:
    """Between dynamic linears, from the ranges of each call; with a mask that comes with it."""
    model, x, mask = Fused(groups).eval(), torch.randn(TOKENS), padding_mask(3, 7)
    config = torchq.QConfig(dynamic=True)
    converted = torchq.quantize(model, None, (x, mask), config)
    assert names(converted).count("DynamicQLinear") == 4
    assert names(converted).count("DynamicQAttention") == 1
    assert all(row.quantized for row in torchq.explain(converted).rows if row.is_matmul)
    assert reasons(converted)["scaled_dot_product_attention"] == ""
    with torch.no_grad():
        got = converted(x, mask)
        assert sqnr(model(x, mask), got) > 30
        longer = 3 * torch.randn(2, 19, 32), padding_mask(2, 19)
        assert sqnr(model(*longer), converted(*longer)) > 30
    torchq.save(converted, tmp_path / "model")
    for other in (torchq.load(tmp_path / "model"), torch.jit.script(converted)):
        assert torch.equal(other(x, mask), got)
    kept = {"scaled_dot_product_attention": None}
    left = torchq.quantize(model, None, (x, mask), config, kept)
    assert "DynamicQAttention" not in names(left)


# Attention that a model spells out


class Spelled(Fused):
    """``weigh(module, q, k, mask)`` gives the weights of the values."""

    def __init__(self, weigh: Any) -> None:
        super().__init__()
        self.weigh, self.norm, self.drop = weigh, nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.register_buffer("tri", torch.ones(32, 32).tril().bool())
        self.register_buffer("slopes", torch.randn(4, 32))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.out((self.weigh(self, q, k, mask) @ v).transpose(1, 2).flatten(2))


def causal(m: Any, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """As small GPTs have it."""
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    hidden = m.tri[: q.size(2), : q.size(2)] == 0
    return m.drop(F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1))


def of_transformers(m: Any, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5 + mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)


SPELLED = {
    "plain": lambda m, q, k, mask: F.softmax(q @ k.transpose(-2, -1) / math.sqrt(8), dim=-1),
    "module": lambda m, q, k, mask: m.norm(torch.matmul(q, k.mT).div(3) + mask),
    "causal": causal,
    "transformers": of_transformers,
    "fill": lambda m, q, k, mask: (q @ k.mT * 0.3).masked_fill(mask < -1, -1e9).softmax(-1),
    "where": lambda m, q, k, mask: torch.where(mask < -1, -1e9, q @ k.mT * 0.3).softmax(-1),
    "seen": lambda m, q, k, mask: torch.where(mask > -1, q @ k.mT, torch.tensor(-1e4)).softmax(-1),
    "two_biases": lambda m, q, k, mask: (
        q.matmul(k.permute(0, 1, 3, 2)).mul_(0.3) + mask + 2 * mask
    ).softmax(3),
    "float": lambda m, q, k, mask: ((q @ k.mT).float() / 3 + mask.float()).softmax(-1).type_as(q),
    "einsum": lambda m, q, k, mask: torch.einsum("bhid,bhjd->bhij", q, k).mul(0.3).softmax(-1),
    "scaled_mask": lambda m, q, k, mask: ((q @ k.mT + mask) * 0.3).softmax(-1),
    "fill_and_bias": lambda m, q, k, mask: ((q @ k.mT).masked_fill(mask < -1, -1e9) + mask).softmax(
        -1
    ),
    "subtracted": lambda m, q, k, mask: (q @ k.mT * 0.3 - mask.abs()).softmax(-1),
    "bias_first": lambda m, q, k, mask: (mask.clamp(-1, 1) * 2 + q @ k.mT / 3).softmax(-1),
    "sliced": lambda m, q, k, mask: (
        q @ k.mT / 3 + m.slopes[:, : q.size(2), None] * m.slopes[:, None, : k.size(2)]
    ).softmax(-1),
    "flat_heads": lambda m, q, k, mask: (
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*q.shape[:3], -1) * 0.3 + mask
    ).softmax(-1),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SPELLED)
def test_spelled_out_attention(name: str, dynamic: bool, tmp_path: Path) -> None:
    model, x = Spelled(SPELLED[name]).eval(), torch.randn(TOKENS)
    mask = torch.randn(3, 1, 1, 7)
    mask[1] = -5  # all hidden: a mean of all values
    inputs, longer = (x, mask), (torch.randn(2, 19, 32), torch.randn(2, 1, 1, 19))
    config = torchq.QConfig(dynamic=dynamic)
    converted = torchq.quantize(model, [inputs, longer], inputs, config)
    found = [n for n in names(converted) if "Attention" in n or "MatMul" in n]
    assert found == ["DynamicQAttention" if dynamic else "QAttention"]
    why = reasons(converted)
    fused = [n for n, reason in why.items() if reason == "fused into " + why_whole(why)]
    assert len(fused) >= 2
    with torch.no_grad():
        got = converted(*inputs)
        assert sqnr(model(*inputs), got) > 30
        assert sqnr(model(*longer), converted(*longer)) > 28
    torchq.save(converted, tmp_path / "model")
    for other in (torchq.load(tmp_path / "model"), torch.jit.script(converted)):
        assert torch.equal(other(*inputs), got)


def why_whole(why: dict[str, str]) -> str:
    return next(r for r in why.values() if r.startswith("fused into")).removeprefix("fused into ")


UNLIKE = {
    "other_dim": lambda m, q, k, mask: (q @ k.mT * 0.3).softmax(-2),
    "negative": lambda m, q, k, mask: (q @ k.mT * -0.3).softmax(-1),
    "small_fill": lambda m, q, k, mask: (q @ k.mT).masked_fill(mask < 0, -2.0).softmax(-1),
    "function_between": lambda m, q, k, mask: torch.tanh(q @ k.mT).softmax(-1),
    "rounded": lambda m, q, k, mask: torch.div(q @ k.mT, q.size(2), rounding_mode="trunc").softmax(
        -1
    ),
    "doubled": lambda m, q, k, mask: (lambda s: s + s)(q @ k.mT).softmax(-1),
    "squared": lambda m, q, k, mask: (lambda w: w @ w)((q @ k.mT).softmax(-1)),
    "scores_kept": lambda m, q, k, mask: (lambda s: s.softmax(-1) * s.sum())(q @ k.mT),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_no_attention(name: str) -> None:
    model, x, mask = Spelled(UNLIKE[name]).eval(), torch.randn(TOKENS), torch.randn(3, 1, 1, 7)
    converted = torchq.quantize(model, [(x, mask)], (x, mask))
    assert "QAttention" not in names(converted)
    with torch.no_grad():
        assert sqnr(model(x, mask), converted(x, mask)) > 25


def test_masks_that_are_constants() -> None:
    """Minus infinity in one is what hides a score; other sums with it stay float."""
    hides = torch.full((7, 7), -math.inf).triu(1)
    model = Spelled(lambda m, q, k, mask: (q @ k.mT + hides).softmax(-1)).eval()
    x = torch.randn(TOKENS)
    converted = torchq.quantize(model, [x], x)
    assert "QAttention" in names(converted)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 30
    other = Wired(lambda m, x: m.a(x) + hides[0], a=nn.Linear(32, 7)).eval()
    assert "its constant is not finite" in reasons(torchq.quantize(other, [x], x)).values()


def test_scales_computed_from_sizes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.a(x).chunk(3, -1)
        return m.b(F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(x.size(1))))

    model, x = Wired(forward, a=nn.Linear(32, 96), b=nn.Linear(32, 8)).eval(), torch.randn(TOKENS)
    for dynamic in (False, True):
        converted = torchq.quantize(model, [x], x, torchq.QConfig(dynamic=dynamic))
        assert reasons(converted)["scaled_dot_product_attention"] == ""
        longer = torch.randn(2, 19, 32)
        with torch.no_grad():
            assert sqnr(model(longer), converted(longer)) > 28


def test_an_override_keeps_a_part_float() -> None:
    for kept in ("matmul", "softmax"):
        model, x = Spelled(SPELLED["plain"]).eval(), torch.randn(TOKENS)
        converted = torchq.quantize(model, [x], x, overrides={kept: None})
        assert "QAttention" not in names(converted)


def test_an_override_makes_the_whole_dynamic() -> None:
    """Its parts are none of their own, though they would be static."""
    model, x = Spelled(SPELLED["plain"]).eval(), torch.randn(TOKENS)
    dynamic = {"matmul_1": torchq.QConfig(dynamic=True)}
    converted = torchq.quantize(model, [x], x, overrides=dynamic)
    found = [n for n in names(converted) if "Attention" in n or "MatMul" in n]
    assert found == ["DynamicQAttention"]
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 28

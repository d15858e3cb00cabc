# SPDX-License-Identifier: Apache-2.0
"""Functions behind convolutions that accuracy recipes compute before the result is rounded."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from flows import graph_of, sqnr
from models import Wired, conv
from torch import Tensor, nn

import torchq

FUNCTIONS = {
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "logistic": torch.sigmoid,
    "mish": F.mish,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def data(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def quantized(model: nn.Module, recipe: str, **options: object) -> nn.Module:
    config = torchq.QConfig(recipe=recipe)  # type: ignore[arg-type]
    return torchq.quantize(model.eval(), data(8, 8, 9, 9), config=config, **options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_a_post_op_and_rounds_once(name: str) -> None:
    model = Wired(lambda m, x: m.b(FUNCTIONS[name](m.a(x))), a=conv(), b=conv())
    nn.init.normal_(model.a.weight, std=0.3)
    fast, accurate = (quantized(model, recipe) for recipe in ("fast", "accurate"))
    rows = {row.name: row.reason for row in torchq.explain(accurate).rows}
    assert "fused into a" in rows.values()
    first, x = graph_of(accurate).a, data(8, 8, 9, 9)[0]
    assert first.post_ops.startswith(f"eltwise_{name}") and first.lookup is None
    with torch.no_grad():
        assert sqnr(model(x), accurate(x)) > sqnr(model(x), fast(x))


def test_overrides_choose_the_layers() -> None:
    model = Wired(
        lambda m, x: m.c(F.silu(m.b(F.silu(m.a(x))))), a=conv(), b=conv(), c=conv()
    )  # fmt: skip
    found = graph_of(quantized(model, "fast", overrides={"b": torchq.QConfig(recipe="best")}))
    assert found.a.lookup is not None and found.a.post_ops == ""
    assert found.b.lookup is None and found.b.post_ops == "eltwise_swish:1"
    kept = quantized(model, "accurate", overrides={"silu": None})
    assert graph_of(kept).a.post_ops == "" and graph_of(kept).b.post_ops != ""


def test_a_result_behind_a_function_keeps_one_scale() -> None:
    """Equalization would give these channels scales, and zero points, of their own."""
    model = Wired(
        lambda m, x: m.b(F.hardswish(m.a(x))), a=conv(), b=nn.Conv2d(8, 8, 3, groups=8)
    )  # fmt: skip
    factors = 3 ** torch.linspace(-1, 1, 8)
    model.a.weight.data.mul_(factors.view(-1, 1, 1, 1))
    model.a.bias.data.copy_(2 * factors)
    model.b.weight.data.div_(factors.view(-1, 1, 1, 1))
    found, x = quantized(model, "accurate"), data(8, 8, 9, 9)[0]
    assert graph_of(found).a.dst_scale.numel() == 1
    with torch.no_grad():
        assert sqnr(model(x), found(x)) > 30


def test_a_saved_model_computes_the_same() -> None:
    model = nn.Sequential(conv(), nn.Hardswish(), conv()).eval().requires_grad_(False)
    found, x = quantized(model, "best"), data(8, 8, 9, 9)[0]
    stored = io.BytesIO()
    torch.save(found, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=False)(x), found(x))
    assert torch.equal(torch.jit.trace(found, x)(x), found(x))

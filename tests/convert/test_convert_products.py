# SPDX-License-Identifier: Apache-2.0
"""Matrix products that are no modules, and loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import names, sqnr
from models import Wired
from torch import Tensor, nn

import torchq
import torchq.eager

PRODUCTS: dict[str, Any] = {
    "mm": lambda m, y: torch.mm(y, m.w),
    "mm_method": lambda m, y: y.mm(m.w),
    "at": lambda m, y: y @ m.w,
    "matmul": lambda m, y: torch.linalg.matmul(y, m.w),
    "addmm": lambda m, y: torch.addmm(m.w[0], y, m.w),
    "addmm_of_a_row": lambda m, y: torch.addmm(m.w[:1], y, m.w),
    "inner": lambda m, y: torch.inner(y, m.w),
    "aten": lambda m, y: torch.ops.aten.linear(y, m.w),
    "tensordot": lambda m, y: torch.tensordot(y, m.w, dims=([1], [1])),
    "einsum": lambda m, y: torch.einsum("bi,io->bo", y, m.w),
    "einsum_transposed": lambda m, y: torch.einsum("...i, oi -> ...o", y, m.w),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_constant_counts_as_a_linear(name: str) -> None:
    torch.manual_seed(0)
    model = Wired(lambda m, x: PRODUCTS[name](m, m.a(x)), a=nn.Linear(8, 8)).eval()
    model.w = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(16, 8)
    converted = torchq.quantize(model, [x], x, strict=True)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 30
    assert "2 of 2 convolutions and linears run in int8" in str(torchq.explain(converted))


FLOAT_PRODUCTS: dict[str, tuple[Any, str]] = {
    "bilinear": (lambda m, y: F.bilinear(y, y, m.b), "its weight multiplies two tensors"),
    "addmm": (lambda m, y: torch.addmm(y, y, m.w), "its input is computed at run time"),
    "mm": (lambda m, y: torch.mm(m.w, y), ""),
    "einsum": (lambda m, y: torch.einsum("bi,ib->bi", y, m.w), "an einsum that is no product"),
    "multi_dot": (lambda m, y: torch.linalg.multi_dot((y, m.w, m.w)), "a product of several"),
    "vector": (lambda m, y: F.linear(y, m.w[0]), "its weight is a vector"),
    "inner": (lambda m, y: torch.inner(y, y), "an inner product without a constant matrix"),
}


@pytest.mark.parametrize("name", FLOAT_PRODUCTS)
def test_other_products_say_why_they_are_none(name: str) -> None:
    torch.manual_seed(0)
    forward, reason = FLOAT_PRODUCTS[name]
    model = Wired(lambda m, x: forward(m, m.a(x)), a=nn.Linear(8, 8)).eval()
    model.w, model.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8, 8))
    x = torch.randn(8, 8)
    converted = torchq.quantize(model, [x], x)
    row = torchq.explain(converted).rows[-1]
    assert row.reason.startswith(reason) and (row.quantized or reason)
    counted = "1 of 1" if name in ("mm", "einsum", "inner") else "1 of 2"
    assert f"{counted} convolutions and linears" in str(torchq.explain(converted))
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 25


def test_calls_in_a_loop_are_one_line() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = m.act(m.a(x)) + torch.sigmoid(x)
        return torch.sigmoid(m.b(x))

    x = torch.randn(4, 8)
    model = Wired(forward, a=nn.Linear(8, 8), act=nn.GELU(), b=nn.Linear(8, 8)).eval()
    explanation = torchq.explain(torchq.quantize(model, [x], x))
    lines = [line.split("  ") for line in str(explanation).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()][:3] for line in lines[1:]]
    assert ["a", "Linear x3", "int8"] in cells and ["act", "GELU x3", "int8"] in cells
    assert ["sigmoid .. sigmoid_2", "sigmoid x3", "int8"] in cells
    assert [row.calls for row in explanation.rows if row.name == "a"] == [3]
    named = [cell[0] for cell in cells]
    assert "sigmoid_3" in named and "sigmoid_1" not in named
    rows = torchq.explain(torchq.eager.quantize(model, [x], x)).rows
    assert {row.name: row.calls for row in rows if row.is_matmul} == {"a": 3, "b": 1}


# Linear layers that are no modules, quantized by the range of each call


@pytest.mark.parametrize(
    "product",
    [
        lambda m, x: F.linear(x, m.w, m.c),
        lambda m, x: x @ m.w.t(),
        lambda m, x: torch.addmm(m.c, x, m.w.t()),
        lambda m, x: torch.einsum("bi,oi->bo", x, m.w),
        lambda m, x: m.p(x),
    ],
    ids=["linear", "matmul", "addmm", "einsum", "parametrized"],
)
def test_a_dynamic_product_with_a_constant(product: Any, tmp_path: Path) -> None:
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(16, 12))
    model = Wired(lambda m, x: m.a(torch.relu(product(m, x))), a=nn.Linear(12, 4), p=parametrized)
    model.w, model.c = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(12))
    x = torch.randn(5, 16)
    converted = torchq.quantize(model.eval(), None, x, torchq.QConfig(dynamic=True))
    assert names(converted) == ["DynamicQLinear"] * 2
    assert sum(row.quantized and row.is_matmul for row in torchq.explain(converted).rows) == 2
    with torch.no_grad():
        for given in (x, 100 * torch.randn(3, 16)):
            assert sqnr(model(given), converted(given)) > 35
    torchq.save(converted, tmp_path / "model")
    for other in (torchq.load(tmp_path / "model"), torch.jit.script(converted)):
        assert torch.equal(other(x), converted(x))


def test_an_override_keeps_a_dynamic_product_float() -> None:
    model = Wired(lambda m, x: F.linear(F.linear(x, m.w), m.w)).eval()
    model.w = nn.Parameter(torch.randn(16, 16))
    config, x = torchq.QConfig(dynamic=True), torch.randn(5, 16)
    converted = torchq.quantize(model, None, x, config, {"linear_1": None})
    assert names(converted) == ["DynamicQLinear"]
    mixed = torchq.quantize(model, [x], x, overrides={"linear_1": config})
    assert names(mixed) == ["QLinear", "DynamicQLinear"]

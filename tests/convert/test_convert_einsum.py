# SPDX-License-Identifier: Apache-2.0
"""torch.einsum: a matrix product where it is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchq.capture.aten import plain_graph
from torchq.capture.exported import export
from torchq.graphs.module import QuantizedGraph

PRODUCTS = {
    "bhid,bhjd->bhij": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "blhe,bshe->bhls": ((2, 4, 3, 5), (2, 6, 3, 5)),
    "bhls,bshd->blhd": ((2, 3, 4, 6), (2, 6, 3, 5)),
    "...ij,...jk->...ik": ((2, 3, 4, 5), (2, 3, 5, 6)),
    "...i,oi->...o": ((2, 3, 4), (5, 4)),
    "i d, j d -> i j": ((3, 4), (5, 4)),
    "bi,bi->b": ((3, 4), (3, 4)),
    "i,i->": ((3,), (3,)),
    "bn,bnd->bd": ((2, 3), (2, 3, 4)),
    "nkctv,kvw->nctw": ((2, 3, 4, 5, 6), (3, 6, 6)),
    "bxyi,xyj->bij": ((2, 3, 4, 5), (3, 4, 6)),
    "bhwc,hkc->bhwk": ((2, 3, 4, 5), (3, 6, 5)),
    "b i h d, h d e f -> f b e i": ((2, 3, 4, 5), (4, 5, 6, 7)),
}
OTHERS = {
    "ab,cd->abcd": ((2, 3), (4, 5)),
    "bhi,bhj->bhij": ((1, 2, 3), (1, 2, 4)),
    "ii,ij->j": ((3, 3), (3, 4)),
    "ab,bc->c": ((2, 3), (3, 4)),
    "ab,bc": ((2, 3), (3, 4)),
    "...a,...ab->...b": ((4, 3), (2, 4, 3, 5)),
    "bnd,d->bn": ((2, 3, 8), (1,)),
}


class Einsum(nn.Module):
    def __init__(self, equation: str, weight: Tensor | None, first: bool) -> None:
        super().__init__()
        self.equation, self.first = equation, first
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        operands = [x, other if self.weight is None else self.weight]
        return torch.einsum(self.equation, operands[::-1] if self.first else operands)


CONSTANT = ["bhid,bhjd->bhij", "...i,oi->...o", "b i h d, h d e f -> f b e i", "bnd,d->bn"]


@pytest.mark.parametrize(
    ("equation", "constant"),
    [
        *((equation, "none") for equation in [*PRODUCTS, *OTHERS]),
        *((equation, which) for equation in CONSTANT for which in ("first", "second")),
    ],
)
def test_einsum(equation: str, constant: str) -> None:
    x, y = map(torch.randn, (PRODUCTS | OTHERS)[equation])
    model, inputs = Einsum(equation, None, False), (x, y)
    if constant == "first":
        model, inputs = Einsum(equation, x, True), (y,)
    if constant == "second":
        model, inputs = Einsum(equation, y, False), (x,)
    captured = plain_graph(export(model.eval(), inputs, {}), model)
    targets = {node.target for node in captured.graph.nodes}
    assert (torch.matmul in targets) == (equation in PRODUCTS)
    assert (torch.ops.aten.einsum.default in targets) == (equation in OTHERS)
    traced = torch.jit.script(QuantizedGraph(captured.model, captured.graph))
    if constant == "none" and equation[0] == "b":  # sizes are not those of the example
        inputs = tuple(t.repeat(3, *[1] * (t.dim() - 1)) if "b" in s else t for s, t in zip(
            equation.split("->")[0].split(","), inputs, strict=True))  # fmt: skip
    torch.testing.assert_close(traced(*inputs), model(*inputs))

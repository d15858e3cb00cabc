# SPDX-License-Identifier: Apache-2.0
"""Parameters that products read are counted: the report lists float ones, strict=True refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq


class Code(nn.Module):
    """Any code on parameters of its own."""

    def __init__(self, code: Callable[..., Tensor]) -> None:
        super().__init__()
        self.code, self.weight = code, nn.Parameter(torch.randn(8, 8))
        self.stack, self.layer = nn.Parameter(torch.randn(4, 8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, self.layer(x))


def mixture(m: Any, x: Tensor) -> Tensor:
    """Experts whose weights are chosen by the data, in code that is not captured."""
    shares, result = x.softmax(-1), torch.zeros_like(x)
    for i in range(4):
        if bool(shares[:, i].sum() > 0):
            result = result + shares[:, i : i + 1] * (x @ m.stack[i])
    return result


FLOAT: dict[str, tuple[Callable[..., Tensor], str, int, int]] = {
    # what stays float, its size and multiplications for 6 rows
    "mixture": (mixture, "stack", 256, 6 * 256),
    "chain": (lambda m, x: torch.linalg.multi_dot([x, m.weight, m.weight]), "weight", 64, 2 * 384),
    "bilinear": (lambda m, x: F.bilinear(x, x, m.stack), "stack", 256, 6 * 256),
    "vector": (lambda m, x: x @ m.weight[0], "weight", 64, 48),
    "tensordot": (lambda m, x: torch.tensordot(x, m.stack, ([1], [1])), "stack", 256, 6 * 256),
    "code": (lambda m, x: x @ m.weight if bool(x.sum() < 1e9) else x, "weight", 64, 384),
}


@pytest.mark.parametrize("name", FLOAT)
def test_what_stays_float_is_told(name: str, tmp_path: Path) -> None:
    code, weight, size, macs = FLOAT[name]
    torch.manual_seed(0)
    model, x = Code(code).eval(), torch.randn(6, 8)
    qmodel = torchq.quantize(model, [x])
    told = torchq.explain(qmodel)
    (left,) = told.float_weights
    assert (left.name, left.size, left.macs) == (weight, size, macs)
    by_size, by_macs = (100 * 64 / (64 + size), 100 * 384 / (384 + macs))
    assert f"int8: {by_size:.3g} % of the weights" in str(told) and f"{by_macs:.3g} %" in str(told)
    with pytest.raises(RuntimeError, match=f"but 1 .*({weight}|bilinear|linalg_multi_dot)[:,]"):
        torchq.quantize(model, [x], strict=True)
    overrides = {weight: None, "bilinear": None, "linalg_multi_dot": None}
    known = {row.name for row in told.rows}
    given = {key: None for key in overrides if key in known or key == weight}
    assert torchq.explain(torchq.quantize(model, [x], overrides=given)).float_weights == ()
    torchq.save(qmodel, tmp_path / "q")
    assert torchq.explain(torchq.load(tmp_path / "q", model)).weights == told.weights


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.rnn = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 9)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.rnn(x)[0])


class Pooled(nn.Module):
    """Attention by a learned query, whose projection is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = nn.Parameter(torch.randn(1, 1, 16)), nn.Linear(16, 4)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.query.expand(len(x), -1, -1), x, x)[0][:, 0])


ALL: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "sequence": (Whole, torch.tensor([[1, 2, 3, 8, 0]])),
    "convolutions": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(3, 4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
        ),
        torch.randn(2, 3, 6, 6),
    ),
    "low rank": (
        lambda: Code(lambda m, x: F.linear(x, m.weight + m.stack[0] @ m.stack[1])),
        torch.randn(6, 8),
    ),
    "pooled": (Pooled, torch.randn(2, 5, 16)),
    "constants": (lambda: Code(lambda m, x: x + m.weight[0] @ m.weight), torch.randn(6, 8)),
}


@pytest.mark.parametrize("flow", [torchq, torchq.eager], ids=["graph", "layers"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_model_in_int8_has_none_left(name: str, dynamic: bool, flow: Any) -> None:
    make, x = ALL[name]
    if flow is torchq.eager and name in ("low rank", "constants"):
        pytest.skip("their parameters are in no layer")
    if dynamic and name == "convolutions":
        pytest.skip("they have no dynamic form")
    torch.manual_seed(0)
    config = torchq.QConfig(dynamic=dynamic)
    told = torchq.explain(flow.quantize(make().eval(), [x], x, config, strict=True))
    assert told.weights and told.float_weights == ()
    assert "int8: 100 % of the weights, 100 %" in str(told)


def test_layers_alone() -> None:
    torch.manual_seed(0)
    model, x = Code(lambda m, x: x @ m.weight).eval(), torch.randn(6, 8)
    with pytest.raises(RuntimeError, match=r"weight, a parameter that data is multiplied by"):
        torchq.eager.quantize(model, [x], x, strict=True)
    told = torchq.explain(torchq.eager.quantize(model, [x], x))
    assert [weight.name for weight in told.float_weights] == ["weight"]
    assert "float, in no layer: weight (64 weights)" in str(told)

# SPDX-License-Identifier: Apache-2.0
"""Matrix products of activations, and attention of torch's modules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import graph_of, names, sqnr, tensors
from models import Wired
from torch import Tensor, nn

import torchq
import torchq.nn as tnn

TOKENS = (3, 7, 32)


def convert(model: nn.Module, *inputs: Tensor, bound: float = 30) -> nn.Module:
    """Its result is near the float one's, for other batches too."""
    converted = torchq.quantize(model.eval(), [inputs], inputs, strict=True)
    with torch.no_grad():
        for given in (inputs, [x[:2] for x in inputs]):
            want, got = tensors(model(*given)), tensors(converted(*given))
            assert len(want) == len(got)
            for a, b in zip(want, got, strict=True):
                assert sqnr(a, b) > bound
    return converted


def reasons(converted: nn.Module) -> dict[str, str]:
    return {row.name: row.reason for row in torchq.explain(converted).rows}


class Attention(nn.Module):
    """As vision transformers write it."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.qkv, self.proj, self.spelling = nn.Linear(32, 96), nn.Linear(32, 32), spelling

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        if self.spelling == "bmm":
            return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
        return {"@": lambda: a @ b, "matmul": lambda: a.matmul(b)}[self.spelling]()

    def forward(self, x: Tensor) -> Tensor:
        n, length, c = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.product(q, k.transpose(-2, -1)) * 8**-0.5
        return self.proj(self.product(scores.softmax(-1), v).transpose(1, 2).reshape(n, length, c))


@pytest.mark.parametrize("spelling", ["@", "matmul", "bmm"])
def test_products_are_int8(spelling: str) -> None:
    """Attention gives averages over positions, whose range depends on their number."""
    converted = convert(Attention(spelling), torch.randn(TOKENS))
    assert names(converted) == ["QLinear", "QAttention", "DynamicQLinear"]


def test_product_with_relu_and_constants() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.relu(torch.matmul(m.p["mix"], m.a(x)) / 2 + 1)
        return m.b(y @ m.p["w"])

    params = nn.ParameterDict({"mix": torch.randn(5, 7), "w": torch.randn(32, 16) / 6})
    model = Wired(forward, a=nn.Linear(32, 32), b=nn.Linear(16, 4), p=params)
    converted = convert(model, torch.randn(TOKENS))
    assert names(converted) == ["QLinear", "QMatMul", "QLinear", "QLinear"]
    product = next(m for m in graph_of(converted).modules() if isinstance(m, tnn.QMatMul))
    assert product.post_ops == "eltwise_linear:0.5:1+eltwise_relu"


def test_addmm_is_a_linear() -> None:
    """As GPT-2 writes it: a matrix (in, out) and a bias."""
    params = nn.ParameterDict({"w": torch.randn(32, 16) / 6, "b": torch.randn(16)})
    model = Wired(lambda m, x: m.a(F.gelu(torch.addmm(m.p["b"], x.view(-1, 32), m.p["w"]))),
                  p=params, a=nn.Linear(16, 4))  # fmt: skip
    converted = convert(model, torch.randn(TOKENS))
    assert names(converted) == ["Quantize", "QLinear", "QLinear"]
    torch.testing.assert_close(graph_of(converted).addmm.bias, params["b"].data)


def test_a_product_that_is_added_to() -> None:
    model = Wired(lambda m, x: torch.baddbmm(m.p["c"], m.a(x), m.a(x).mT), a=nn.Linear(32, 32),
                  p=nn.ParameterDict({"c": torch.randn(7, 7)}))  # fmt: skip
    converted = convert(model, torch.randn(TOKENS))
    assert names(converted) == ["Quantize", "QLinear", "QLinear", "QMatMul"]


def test_what_is_no_product_of_matrices() -> None:
    model = Wired(lambda m, x: m.a(x) @ m.b(x)[0, 0], a=nn.Linear(32, 32), b=nn.Linear(32, 32))
    assert reasons(convert(model, torch.randn(TOKENS)))["matmul"] == "an operand is a vector"


# torch's modules


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        lambda: nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, activation="gelu"),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
    ],
)
def test_transformers(make: Any) -> None:
    model = make()
    layers = 2 if isinstance(model, nn.TransformerEncoder) else 1
    found = names(convert(model, torch.randn(TOKENS)))
    assert found.count("QLinear") == 3 * layers and found.count("DynamicQLinear") == layers


def test_decoder() -> None:
    model = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    inputs = torch.randn(TOKENS), torch.randn(3, 5, 32)
    found = names(convert(model, *inputs))
    assert found.count("QLinear") == 5 and found.count("DynamicQLinear") == 2


OPTIONS: dict[str, dict[str, Any]] = {
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "added_keys": {"add_bias_kv": True},
    "other_sizes": {"kdim": 32, "vdim": 32, "batch_first": True},
}


@pytest.mark.parametrize(
    ("options", "weights", "masks"),
    [
        ("batch_first", True, "none"), ("batch_first", False, "both"),
        ("batch_first", True, "both"), ("no_bias", True, "causal"), ("no_bias", False, "bool"),
        ("added_keys", False, "none"), ("other_sizes", False, "none"),
        ("other_sizes", True, "padding"),
    ],
)  # fmt: skip
def test_multihead_attention(options: str, weights: bool, masks: str, tmp_path: Path) -> None:
    """Linears are int8; masks, with -inf in them, are added in float32."""
    chosen = OPTIONS[options]
    length = TOKENS[1 if chosen.get("batch_first") else 0]
    padding = torch.zeros(TOKENS[0] if chosen.get("batch_first") else TOKENS[1], length).bool()
    padding[:, -1] = True
    given = {"attn_mask": torch.full((length, length), -math.inf).triu(1)}
    if masks == "bool":
        given["attn_mask"] = given["attn_mask"] != 0
    if masks in ("none", "padding"):
        given.clear()
    if masks in ("padding", "both"):
        given["key_padding_mask"] = padding

    def forward(m: Any, x: Tensor) -> Any:
        return m.a(x, x, x, need_weights=weights, **given)[: 2 if weights else 1]

    model, x = Wired(forward, a=nn.MultiheadAttention(32, 4, **chosen)).eval(), torch.randn(TOKENS)
    if chosen.get("kdim"):
        model.a._qkv_same_embed_dim = False
        for name in ("q", "k", "v"):
            setattr(model.a, f"{name}_proj_weight", nn.Parameter(torch.randn(32, 32) / 6))
    with torch.no_grad():
        want = tensors(model(x))
    converted = torchq.quantize(model, [x], x, strict=True)
    for a, b in zip(want, tensors(converted(x)), strict=True):
        assert sqnr(a, b) > 25
    layers = ("QLinear", "DynamicQLinear")
    assert sum(name in layers for name in names(converted)) in (2, 4)
    torchq.save(converted, tmp_path / "model")
    again = torchq.load(tmp_path / "model")
    assert all(map(torch.equal, tensors(again(x)), tensors(converted(x))))


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_of_no_batch_at_all(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(32, 4, batch_first=batch_first)
    model = Wired(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=attention).eval()
    converted = torchq.quantize(model, [torch.randn(TOKENS)])
    empty = (0, 5, 32) if batch_first else (5, 0, 32)
    assert converted(torch.zeros(empty)).shape == empty

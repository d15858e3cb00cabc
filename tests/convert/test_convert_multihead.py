# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention in models whose leaves are quantized: int8 projections."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QConfig, eager
from torchq.nn.multihead import SplitMultiheadAttention


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(16, 4, **options)
        for name, parameter in self.a.named_parameters():
            if "bias" in name:
                nn.init.normal_(parameter)

    def forward(self, x: Tensor, y: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = self.a(x, y, y, **more)
        return result


MASK = torch.ones(5, 7, dtype=torch.bool).triu(3)
PADDING = torch.arange(7) > torch.tensor([[4], [5]])
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "batch_first": ({"batch_first": True}, {"need_weights": False}),
    "no bias": ({"bias": False, "batch_first": True}, {"average_attn_weights": False}),
    "bias_kv": ({"add_bias_kv": True}, {"attn_mask": MASK}),
    "zero_attn": ({"add_zero_attn": True}, {"key_padding_mask": PADDING, "need_weights": False}),
    "everything": (
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
        {"attn_mask": torch.randn(8, 5, 7), "key_padding_mask": PADDING},
    ),
    "causal": ({"batch_first": True}, {"attn_mask": MASK, "is_causal": True}),
}


def inputs(options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    return (x, y) if options.get("batch_first") else (x.transpose(0, 1), y.transpose(0, 1))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_keys_without_values_are_refused(batch_first: bool, need_weights: bool) -> None:
    """torch reads as many keys as there are values."""
    attention = SplitMultiheadAttention.of(nn.MultiheadAttention(16, 4, batch_first=batch_first))
    x, y = inputs({"batch_first": batch_first})
    long, wide = (
        torch.cat([y, y], 1 if batch_first else 0),
        torch.cat([y, y], 0 if batch_first else 1),
    )
    for call in ((x, y, long), (x, long, y), (x, y, wide), (x, wide, wide)):
        with pytest.raises(ValueError, match="key and value must have one length, and query"):
            attention(*call, need_weights=need_weights)


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_splitting_changes_nothing(name: str, unbatched: bool) -> None:
    options, more = CASES[name]
    x, y = inputs(options)
    if unbatched:
        batch = 0 if options.get("batch_first") else 1
        x, y = x.select(batch, 0), y.select(batch, 0)
        more = {k: v[0] if k == "key_padding_mask" else v for k, v in more.items()}
        more = {k: v[:4] if k == "attn_mask" and v.dim() == 3 else v for k, v in more.items()}
    module = Net(**options).eval().a
    with torch.no_grad():
        want, got = (m(x, y, y, **more) for m in (module, SplitMultiheadAttention.of(module)))
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    assert (got[1] is None) == (want[1] is None)
    if want[1] is not None:
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [QConfig(), QConfig(dynamic=True)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_projections_are_int8(name: str, config: QConfig, tmp_path: Path) -> None:
    options, more = CASES[name]
    x, y = inputs(options)
    model, example = Net(**options).eval(), {"x": x, "y": y, **more}
    q: Any = eager.quantize(model, [example], example, config, strict=True)
    rows = [row for row in torchq.explain(q).rows if row.is_matmul]
    assert [row.name for row in rows] == [f"a.{n}_proj" for n in ("out", "q", "k", "v")]
    assert isinstance(q.a, nn.MultiheadAttention) and type(model.a) is nn.MultiheadAttention
    with torch.no_grad():
        want = q(**example)
        assert torchq.sqnr(model(**example)[0], want[0]) > 28
        torchq.save(q, tmp_path / "model")
        for other in (pickle.loads(pickle.dumps(q)), torchq.load(tmp_path / "model", model)):
            assert torch.equal(other(**example)[0], want[0])


def test_overrides_and_code_that_reads_weights() -> None:
    class Reads(Net):
        def forward(self, x: Tensor, y: Tensor, **more: Any) -> Any:
            return super().forward(x, y)[0] * self.a.in_proj_weight.mean()

    x, y = inputs({})
    for model, overrides in ((Net(), {"a": None}), (Reads(), None)):
        q: Any = eager.quantize(model.eval(), [(x, y)], (x, y), overrides=overrides)
        assert type(q.a) is nn.MultiheadAttention
    q = eager.quantize(Net().eval(), [(x, y)], (x, y), overrides={"a.k_proj": None}, strict=True)
    assert type(q.a.k_proj) is nn.Linear and type(q.a.q_proj) is torchq.nn.QuantizedLeaf


@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 16)
    q = eager.quantize(model, [x], x, strict=True)
    assert sum(row.quantized for row in torchq.explain(q).rows) == 12
    with torch.no_grad():
        assert torchq.sqnr(model(x), q(x)) > 25
        traced = torch.export.export(q, (x,)).module()
        torch.testing.assert_close(traced(x), q(x))
        compiled = torch.compile(q, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), q(x))


class ActsOnValues(nn.TransformerEncoderLayer):
    """A layer that has no graph as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) < 1e9 else x


def test_attention_has_a_graph_where_its_encoder_layer_has_none() -> None:
    """The layer of torch would run as one fused kernel, which calls no attention."""
    layer, x = ActsOnValues(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    converted = torchq.quantize(layer, [x])
    assert [graph.module for graph in torchq.explain(converted).graphs] == ["self_attn"]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x, x, x)[0]


@pytest.mark.parametrize("overrides", [None, {"a.q_proj": None}], ids=["all", "float queries"])
@pytest.mark.parametrize("recipe", ["fast", "accurate", "best"])
def test_files_of_attention_whose_projections_stay_float(
    recipe: Any, overrides: Any, tmp_path: Path
) -> None:
    """The graph quantizes them at once in self-attention; the recipes leave those of the leaves."""
    model, data = SelfAttention().eval(), [torch.randn(2, 5, 32) for _ in range(3)]
    config = QConfig(recipe=recipe)
    flow = torchq.quantize if overrides is None else eager.quantize
    q = flow(model, data, data[0], config, overrides)
    assert isinstance(q.a, SplitMultiheadAttention)
    torchq.save(q, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model)
    assert torch.equal(loaded(data[0]), q(data[0]))
    assert torch.equal(SelfAttention.forward(loaded, data[0]), SelfAttention.forward(q, data[0]))


def test_a_file_of_attention_alone(tmp_path: Path) -> None:
    model, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 5, 32)
    q = torchq.quantize(model, [(x, x, x)])
    torchq.save(q, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", model)(x, x, x)[0], q(x, x, x)[0])

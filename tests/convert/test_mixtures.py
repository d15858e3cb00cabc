# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of transformers: all of their experts are int8, in graphs and outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.convert.dispatch import dispatches
from torchq.nn.experts import QExperts
from torchq.nn.grouped import DynamicQGroupedLinear, DynamicQGroupedLinearInt4

tf = pytest.importorskip("transformers", minversion="5.24")

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip
MORE = {"num_experts": 4, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**MORE, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {**MORE, "head_dim": 8},
    "Olmoe": MORE,
    "GraniteMoe": {"num_local_experts": 4},
}
CONFIGS = {
    "static": torchq.QConfig(),
    "int8": torchq.QConfig(dynamic=True),
    "int4": torchq.QConfig(dynamic=True, weight_bits=4),
}
SLOW = [(f, c) for f in FAMILIES for c in CONFIGS if (f, c) not in {("Mixtral", "static"),
        ("Qwen3Moe", "int4")}]  # fmt: skip


def model(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**SIZES, **FAMILIES[family])
    made: nn.Module = getattr(tf, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
    return made


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(5, 90, (rows, length))


@pytest.mark.parametrize(
    ("family", "config"),
    [pytest.param(f, c, marks=[pytest.mark.slow] * ((f, c) in SLOW))
     for f in FAMILIES for c in CONFIGS],
)  # fmt: skip
@torch.no_grad()
def test_experts_are_int8_in_every_call(family: str, config: str, tmp_path: Path) -> None:
    float_model = model(family)
    data = [(tokens(2, length),) for length in (6, 10)]
    qmodel = torchq.quantize(float_model, data, config=CONFIGS[config])
    told = torchq.explain(qmodel)
    assert not [w.name for w in told.float_weights if "experts" in w.name]
    rows = [row for row in told.rows if "experts" in row.name and row.is_matmul]
    assert rows and all(row.quantized for row in rows)

    (dispatch,) = dispatches(qmodel)
    kind = DynamicQGroupedLinearInt4 if config == "int4" else DynamicQGroupedLinear
    grouped = [m for m in dispatch.graph.modules() if isinstance(m, kind)]
    experts = [m for m in qmodel.modules() if isinstance(m, QExperts)]
    assert len(grouped) == 4 and len(experts) == 2
    own = {layer.weight.data_ptr() for m in experts for layer in (m.up, m.down)}
    assert {m.weight.data_ptr() for m in grouped} == own  # the graph and the code share them

    ids = tokens(3, 8)
    expected = qmodel(ids).logits
    assert dispatch.own_calls == 0
    limit = 5 if config == "int4" else 12  # where rounding moves a token to another expert
    assert torchq.sqnr(float_model(ids).logits, expected) > limit
    of_code = type(qmodel).forward(qmodel, ids).logits
    assert torchq.sqnr(of_code, expected) > limit

    torchq.save(qmodel, tmp_path / "file")
    loaded = torchq.load(tmp_path / "file", float_model)
    assert torch.equal(loaded(ids).logits, expected)
    assert torch.equal(type(loaded).forward(loaded, ids).logits, of_code)
    loaded.load_state_dict(qmodel.state_dict())
    assert torch.equal(loaded(ids).logits, expected)
    step = loaded(ids[:, :1], past_key_values=loaded(ids).past_key_values)
    again = qmodel(ids[:, :1], past_key_values=qmodel(ids).past_key_values)
    assert torch.equal(step.logits, again.logits)


@torch.no_grad()
def test_overrides_keep_experts_float() -> None:
    float_model, ids = model("Mixtral"), tokens(2, 9)
    overrides = {"model.layers.0.mlp.experts": None}
    qmodel = torchq.quantize(float_model, None, (ids,), CONFIGS["int8"], overrides)
    rows = [row for row in torchq.explain(qmodel).rows if "layers.0.mlp.experts" in row.name]
    assert rows and not any(row.quantized for row in rows if row.is_matmul)
    (dispatch,) = dispatches(qmodel)
    assert sum(isinstance(m, DynamicQGroupedLinear) for m in dispatch.graph.modules()) == 2
    assert torchq.sqnr(float_model(ids).logits, qmodel(ids).logits) > 18


@torch.no_grad()
def test_a_mixture_in_bfloat16() -> None:
    float_model, ids = model("Mixtral").bfloat16(), tokens(2, 9)
    qmodel = torchq.quantize(float_model, None, (ids,), CONFIGS["int8"])
    assert not [w.name for w in torchq.explain(qmodel).float_weights if "experts" in w.name]
    got = qmodel(ids).logits
    assert got.dtype == torch.bfloat16
    assert torchq.sqnr(float_model(ids).logits.float(), got.float()) > 15

# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture: the bits of a dynamic layer for each, and those that none asks for rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.nn.experts import QExperts
from torchq.nn.grouped import grouped_from_float
from torchq.nn.packed_weights import PackedWeights
from torchq.report import reasons

EXPERTS, FEATURES, INNER, ROWS, CHOSEN = 5, 40, 24, 7, 2


class Experts(nn.Module):
    """Weights and settings as transformers has them."""

    def __init__(self, has_gate: bool, has_bias: bool, is_transposed: bool) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.act_fn = nn.SiLU()
        wide = 2 * INNER if has_gate else INNER
        sizes = {"gate_up_proj" if has_gate else "up_proj": (wide, FEATURES)}
        for name, size in {**sizes, "down_proj": (FEATURES, INNER)}.items():
            shape = size[::-1] if is_transposed else size
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *shape) * 0.2))
            if has_bias:
                bias = nn.Parameter(torch.randn(EXPERTS, size[0]))
                self.register_parameter(f"{name}_bias", bias)
        self.up: Any = next(iter(sizes))

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate) * up

    def layer(self, name: str, expert: int) -> nn.Linear:
        weight = getattr(self, name)[expert]
        weight = weight.t() if self.is_transposed else weight
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=self.has_bias)
        made.weight.data = weight.detach().contiguous()
        if self.has_bias:
            made.bias.data = getattr(self, f"{name}_bias")[expert].detach()
        return made

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.of_layers(hidden_states, top_k_index, top_k_weights, lambda layer: layer)

    def of_layers(self, x: Tensor, index: Tensor, weights: Tensor, form: Any) -> Tensor:
        """Run one layer after the other, each in the form that ``form`` makes of it."""
        dst = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, place = torch.where(index == expert)
            if len(rows):
                inner = form(self.layer(self.up, expert))(x[rows])
                inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
                outer = form(self.layer("down_proj", expert))(inner)
                dst.index_add_(0, rows, (outer * weights[rows, place, None]).to(dst.dtype))
        return dst


def call(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, the experts that they ask for, and weights; one row asks for no expert."""
    index = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(ROWS)])
    index[3], index[5, 0] = torch.tensor([-1, EXPERTS]), EXPERTS + 7
    x, weights = torch.randn(ROWS, FEATURES), torch.rand(ROWS, CHOSEN)
    return x.to(dtype), index, weights.to(dtype)


CONFIGS = {
    "int8": torchq.QConfig(dynamic=True),
    "int4": torchq.QConfig(dynamic=True, weight_bits=4),
}


def quantized(model: Experts, bits: str = "int8") -> Any:
    weights = PackedWeights()
    return QExperts.from_float(
        model, lambda *args: grouped_from_float(*args, CONFIGS[bits], weights)
    )


@pytest.mark.parametrize("bits", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("has_gate", "has_bias", "is_transposed"),
    [(True, False, False), (False, False, False), (True, True, True), (False, True, False)],
)
@torch.no_grad()
def test_bits_are_those_of_dynamic_layers(
    isa: str, has_gate: bool, has_bias: bool, is_transposed: bool, dtype: torch.dtype, bits: str
) -> None:
    torch.manual_seed(0)
    model, given = Experts(has_gate, has_bias, is_transposed).to(dtype).eval(), call(dtype)
    made = quantized(model, bits)
    kind = torchq.nn.DynamicQLinear if bits == "int8" else torchq.nn.DynamicQLinearInt4
    expected = model.of_layers(*given, kind.from_float)
    got = made(*given)
    assert got.dtype == dtype and torch.equal(got, expected)
    assert got[3].count_nonzero() == 0
    assert torchq.sqnr(model(*given).float(), got.float()) > (10 if bits == "int4" else 25)


@torch.no_grad()
def test_experts_that_no_row_asks_for_are_not_read() -> None:
    torch.manual_seed(0)
    model, given = Experts(True, False, False).eval(), call()
    made = quantized(model)
    expected = made(*given)
    for layer in (made.up, made.down):
        panels = len(layer.weight) // EXPERTS
        layer.weight_scale[-16 * panels :] = torch.nan  # of the last expert, which no row asks for
    assert torch.equal(made(*given), expected)


@torch.no_grad()
def test_a_call_is_captured_whole() -> None:
    torch.manual_seed(0)
    made, given = quantized(Experts(True, False, False).eval()), call()
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(made, given, dynamic_shapes=({0: rows},) * 3, strict=False)
    x, index, weights = call()
    for count in (ROWS, 3):
        part = x[:count], index[:count], weights[:count]
        assert torch.equal(program.module()(*part), made(*part))


class Learned(Experts):
    """The slope of its activation is a parameter."""

    def __init__(self) -> None:
        super().__init__(True, False, False)
        self.act_fn: nn.Module = nn.PReLU()


class Mixture(nn.Module):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(FEATURES, EXPERTS), Learned()
        nn.init.constant_(self.experts.act_fn.weight, slope)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(CHOSEN)
        result: Tensor = self.experts(x, index, weights)
        return result


@torch.no_grad()
def test_an_activation_with_parameters_stays_float(tmp_path: Path) -> None:
    """A file did not hold them: it was loaded with those of another model."""
    torch.manual_seed(0)
    model, x = Mixture(0.9).eval(), torch.randn(ROWS, FEATURES)
    made = torchq.quantize(model, None, x, CONFIGS["int8"])
    rows = {row.name: row.reason for row in vars(made)["torchq_report"]}
    assert rows["experts"] == reasons.OWN_EXPERTS
    torchq.save(made, tmp_path / "m")
    loaded = torchq.load(tmp_path / "m", Mixture(0.1).eval())
    assert torch.equal(loaded(x), made(x))
    with pytest.raises(ValueError, match=r"experts only, got 'act_fn\.weight'\. Keep it float"):
        quantized(model.experts)


def test_without_an_activation() -> None:
    experts = QExperts.from_spec({})
    with pytest.raises(RuntimeError, match=r"got none\. A file has none: pass torchq\.load"):
        experts(*[torch.ones(1, 1)] * 3)

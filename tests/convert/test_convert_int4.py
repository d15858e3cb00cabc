# SPDX-License-Identifier: Apache-2.0
"""QConfig(weight_bits=4): the layers that take 4-bit weights, their accuracy and deployment."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import assert_same, assert_same_deployed
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq import QConfig
from torchq.quantization.recipes.linear import linear_recipe
from torchq.quantization.recipes.sample import SourceSample

FOUR = QConfig(dynamic=True, weight_bits=4)


def names(model: nn.Module) -> list[str]:
    computing = torchq.models.attached.computing_modules(model).values()
    return [type(m).__name__ for m in computing if "Linear" in type(m).__name__]


class Block(nn.Module):
    """Linear layers around what post-ops and other layers take."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 160), nn.Linear(160, 96)
        self.norm = nn.LayerNorm(96)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(nn.functional.silu(self.up(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("group_size", (None, 32, 64, 128))
def test_linear_layers_take_groups(group_size: Any, tmp_path: Path) -> None:
    model, x = Block().eval(), torch.randn(5, 96)
    config = QConfig(dynamic=True, weight_bits=4, group_size=group_size)
    converted = torchq.quantize(model, None, x, config)
    assert names(converted) == ["DynamicQLinearInt4"] * 2
    assert f"4-bit weights in groups of {group_size or 32}" in str(torchq.explain(converted))
    with torch.no_grad():
        for given in (x, 100 * torch.randn(2, 3, 96)):
            assert torchq.sqnr(model(given), converted(given)) > 20
    expected = converted(x)
    torchq.save(converted, tmp_path / "model")
    others = torchq.load(tmp_path / "model"), pickle.loads(pickle.dumps(converted))
    for other in (*others, copy.deepcopy(converted), torch.jit.script(converted)):
        assert_same(other(x), expected)
    fresh = torchq.quantize(Block().eval(), None, x, config)
    fresh.load_state_dict(converted.state_dict())
    assert_same(fresh(x), expected)


def test_other_layers_keep_8_bits() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(24, 40, batch_first=True), nn.Linear(40, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])  # type: ignore[no-any-return]

    model, x = Net().eval(), torch.randn(2, 9, 24)
    converted = torchq.quantize(model, None, x, FOUR)
    assert type(converted.lstm) is tnn.QLSTM
    assert names(converted) == ["DynamicQLinearInt4"]
    assert torchq.sqnr(model(x), converted(x)) > 18


def test_quantize_dynamic_takes_a_configuration() -> None:
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(),
        torch.randn(3, 64),
    )
    converted = torchq.quantize_dynamic(model, {"0": FOUR, "2": QConfig(dynamic=True)})
    layers = [converted[0].layer, converted[2].layer]
    assert [type(layer) for layer in layers] == [tnn.DynamicQLinearInt4, tnn.DynamicQLinear]
    assert torch.equal(converted[0].weight + 0, layers[0].packed().dequantize())
    assert converted[0].weight.shape == (64, 64)
    assert_same(converted[0](x), layers[0](x))
    assert_same(torch.jit.script(converted)(x), converted(x))


def test_overrides_choose_by_name() -> None:
    model, x = Block().eval(), torch.randn(5, 96)
    converted = torchq.quantize(model, None, x, QConfig(dynamic=True), {"down": FOUR})
    assert names(converted) == ["DynamicQLinear", "DynamicQLinearInt4"]


@pytest.mark.parametrize("recipe", ("accurate", "best"))
def test_recipes_round_to_groups(recipe: Any) -> None:
    torch.manual_seed(3)
    model, batches = Block().eval(), [torch.randn(64, 96) @ torch.randn(96, 96) for _ in range(4)]
    config = QConfig(recipe=recipe, weight_bits=4)
    converted = torchq.quantize(model, batches, config=config)
    assert names(converted) == ["DynamicQLinearInt4"] * 2
    assert "smoothing" in str(torchq.explain(converted))
    x = batches[0]
    plain = torchq.quantize(model, None, x, FOUR)
    with torch.no_grad():
        expected = model(x)
        assert torchq.sqnr(expected, converted(x)) > torchq.sqnr(expected, plain(x))


def test_gptq_is_nearer_than_rounding() -> None:
    """On rows that the sample has not seen, whose channels are correlated."""
    torch.manual_seed(5)
    mix = torch.randn(80, 80) * torch.linspace(0.02, 1, 80)
    sample, layer = SourceSample(80), nn.Linear(80, 60)
    sample(torch.randn(1000, 80) @ mix)
    rows = torch.randn(500, 80) @ mix
    with torch.no_grad():
        weight, bias = layer.weight, layer.bias
        recipe = linear_recipe(weight, bias, sample, "per_channel", 8, True, 32)
        better = tnn.DynamicQLinearInt4.from_float(layer, recipe=recipe)
        plain = tnn.DynamicQLinearInt4.from_float(layer)
        gain = torchq.sqnr(layer(rows), better(rows)) - torchq.sqnr(layer(rows), plain(rows))
    assert gain > 1


@pytest.mark.parametrize("affine", (False, True))
def test_module(affine: bool) -> None:
    codes = torch.randint(0, 16, (20, 70), dtype=torch.uint8)
    scale, zero = torch.rand(20, 3) * 0.1, torch.randint(0, 16, (20, 3), dtype=torch.uint8)
    packed = torchq.packing.pack_linear_int4(codes, scale, zero if affine else None)
    module = tnn.DynamicQLinearInt4(packed, torch.randn(20)).eval()
    src = torch.randn(4, 70)
    expected = torchq.functional.dynamic_linear_int4(src, packed, module.bias)
    assert_same(module(src), expected)
    assert_same_deployed(module, (src,), expected)
    restored = tnn.DynamicQLinearInt4.from_spec(module.read_spec())
    restored.load_state_dict(module.state_dict())
    assert_same(restored(src), expected)
    assert repr(restored) == repr(module)
    assert ("affine" in repr(module)) is affine
    assert torch.equal(module(src.bfloat16()), module(src.bfloat16().float()).bfloat16())


def test_a_state_of_other_groups_is_refused() -> None:
    layer = nn.Linear(128, 20)
    first = tnn.DynamicQLinearInt4.from_float(layer)
    other = tnn.DynamicQLinearInt4.from_float(layer, group_size=64)
    with pytest.raises(RuntimeError, match="has spec"):
        other.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_bits": 4}, r"weight_bits must be 8 or 7 for static layers, got 4\. Add dynamic"),
        ({"weight_bits": 5}, "weight_bits must be 8, 7 or 4, got 5"),
        ({"weight_bits": 4, "dynamic": True, "group_size": 16}, "group_size must be 32, 64 or 128"),
        ({"dynamic": True, "group_size": 32}, "group_size must be None with weight_bits=8, got 32"),
    ],
)
def test_configurations_that_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"torchq.QConfig: {message}"):
        QConfig(**fields)


def test_text() -> None:
    assert str(FOUR) == "activations u8 affine dynamic, weights s4 in groups of 32"

# SPDX-License-Identifier: Apache-2.0
"""QConfig(weight_bits=4, min_sqnr=...): layers whose results 4 bits would cost more keep 8."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import assert_same
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq import QConfig
from torchq.convert.dispatch import dispatches

FOUR = QConfig(dynamic=True, weight_bits=4)
MIXED = replace(FOUR, min_sqnr=19.0)


class Block(nn.Module):
    """Each group of the second layer's rows has one large weight, which few sources reach."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 160), nn.Linear(160, 96)
        with torch.no_grad():
            self.down.weight[:, ::32] *= 60
            self.up.weight[::32] /= 60
            self.up.bias[::32] /= 60

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def model_and_data() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).eval(), [torch.randn(40, 96) for _ in range(4)]


def forms(model: nn.Module) -> dict[str, type]:
    """Return the classes of linear layers in graphs, and check that leaves are alike."""
    leaves = {
        name: leaf.layer
        for name, leaf in model.named_modules()
        if isinstance(leaf, torchq.nn.QuantizedLeaf)
    }
    (dispatch,) = dispatches(model)
    graph: Any = dispatch.graph
    own = {name: module for name, module in graph.named_modules() if name in leaves}
    assert own.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert type(leaf) is type(own[name])
        assert leaf.weight.data_ptr() == own[name].weight.data_ptr()  # type: ignore[union-attr]
    return {name: type(module) for name, module in own.items()}


def reasons(model: nn.Module) -> dict[str, str]:
    rows = torchq.explain(model).rows
    return {row.name: row.reason for row in rows if row.is_matmul}


EXPECTED = {
    "0.up": tnn.DynamicQLinearInt4,
    "0.down": tnn.DynamicQLinear,
    "1.up": tnn.DynamicQLinearInt4,
    "1.down": tnn.DynamicQLinear,
}


def test_layers_that_lose_too_much_keep_8_bits() -> None:
    model, data = model_and_data()
    mixed, four = (torchq.quantize(model, data, config=config) for config in (MIXED, FOUR))
    assert forms(mixed) == EXPECTED
    assert set(forms(four).values()) == {tnn.DynamicQLinearInt4}
    x = torch.randn(50, 96)
    expected = model(x)
    assert torchq.sqnr(expected, mixed(x)) > torchq.sqnr(expected, four(x)) + 3
    for name, reason in reasons(mixed).items():
        told = re.fullmatch(
            r"8 bits: its result would have ([\d.]+) dB with 4, below min_sqnr=19", reason
        )
        assert (told is not None) == (EXPECTED[name] is tnn.DynamicQLinear)
        assert told is None or float(told[1]) < 19


@pytest.mark.parametrize("config", (FOUR, QConfig(recipe="accurate", weight_bits=4)))
def test_the_limit_is_of_the_layers_own_result(config: QConfig) -> None:
    """Measured on all rows, which a sample of 160 has: the layer alone, with its recipe."""
    torch.manual_seed(1)
    model, data = nn.Sequential(nn.Linear(96, 64)).eval(), [torch.randn(160, 96).exp()]
    alone = torchq.quantize(model, data, config=config)
    with torch.no_grad():
        limit = torchq.sqnr(model(data[0]), alone(data[0]))
    kinds = []
    for more in (-0.01, 0.01):
        mixed = torchq.quantize(model, data, config=replace(config, min_sqnr=limit + more))
        kinds += forms(mixed).values()
        told = reasons(mixed)["0"]
    assert kinds == [tnn.DynamicQLinearInt4, tnn.DynamicQLinear]
    assert f"would have {limit:.1f} dB with 4" in told


def test_where_all_suffices_nothing_changes() -> None:
    model, data = model_and_data()
    mixed = torchq.quantize(model, data, config=replace(FOUR, min_sqnr=-100))
    four = torchq.quantize(model, data, config=FOUR)
    assert_same(mixed(data[0]), four(data[0]))
    assert reasons(mixed) == reasons(four)


def test_where_nothing_suffices_all_have_8_bits() -> None:
    model, data = model_and_data()
    for config in (FOUR, QConfig(recipe="accurate", weight_bits=4)):
        mixed = torchq.quantize(model, data, config=replace(config, min_sqnr=500))
        eight = torchq.quantize(model, data, config=replace(config, weight_bits=8))
        assert_same(mixed(data[0]), eight(data[0]))


def test_files_pickles_and_copies_keep_the_bits(tmp_path: Path) -> None:
    model, data = model_and_data()
    prepared = torchq.calibrate(torchq.prepare(model, data[0], MIXED), data)
    mixed = torchq.convert(prepared)
    torchq.save(mixed, tmp_path / "model")
    torchq.save_calibration(prepared, tmp_path / "calibration")
    again = torchq.prepare(model, data[0], MIXED)
    others = [
        torchq.load(tmp_path / "model"),
        torchq.load(tmp_path / "model", model_and_data()[0]),
        torchq.convert(pickle.loads(pickle.dumps(prepared))),
        torchq.convert(torchq.load_calibration(again, tmp_path / "calibration")),
        pickle.loads(pickle.dumps(mixed)),
        copy.deepcopy(mixed),
    ]
    for other in others:
        assert reasons(other) == reasons(mixed)
        assert_same(other(data[0]), mixed(data[0]))
    assert_same(torch.jit.script(mixed)(data[0]), mixed(data[0]))


def test_overrides_limit_single_layers() -> None:
    model, data = model_and_data()
    mixed = torchq.quantize(model, data, config=FOUR, overrides={"1": MIXED})
    assert forms(mixed) == EXPECTED | {"0.down": tnn.DynamicQLinearInt4}
    limited = torchq.quantize(model, data, config=MIXED, overrides={"0.down": FOUR})
    assert forms(limited) == forms(mixed)


def test_layers_without_data_keep_8_bits() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.other = nn.Linear(96, 96), nn.Linear(96, 96)

        def forward(self, x: Tensor) -> Tensor:
            x = self.head(x)
            return self.other(x) if x.abs().max() > 50 else x  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(40, 96)
    prepared = torchq.prepare(model, 1000 * x, replace(FOUR, min_sqnr=5))
    mixed = torchq.convert(torchq.calibrate(prepared, [x]))
    assert "8 bits: no calibration data reached it" in reasons(mixed)["other"]
    assert isinstance(mixed.other.layer, tnn.DynamicQLinear)
    assert isinstance(mixed.head.layer, tnn.DynamicQLinearInt4)


def test_names_are_no_patterns() -> None:
    """``a[1]`` as a pattern would mean a1."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in ("a[1]", "a1"):
        model.add_module(name, nn.Linear(96, 96))
    mixed = torchq.quantize(
        model.eval(), [torch.randn(40, 96)], config=FOUR,
        overrides={"a[[]1]": replace(FOUR, min_sqnr=500)},
    )  # fmt: skip
    assert forms(mixed) == {"a[1]": tnn.DynamicQLinear, "a1": tnn.DynamicQLinearInt4}


def test_functions_keep_8_bits() -> None:
    """They have no leaf: the graph alone decides, and says so."""

    class Function(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 96))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(torch.cos(x), self.weight).cumsum(1)

    torch.manual_seed(0)
    data = [torch.randn(40, 96)]
    for limit, kind in ((5, tnn.DynamicQLinearInt4), (500, tnn.DynamicQLinear)):
        mixed = torchq.quantize(Function().eval(), data, config=replace(FOUR, min_sqnr=limit))
        (dispatch,) = dispatches(mixed)
        graph: Any = dispatch.graph
        assert kind in map(type, graph.modules())
        told = [row.reason for row in torchq.explain(mixed).rows if row.kind == "linear"]
        assert [bool(re.search("8 bits", reason)) for reason in told] == [limit == 500]


def test_sensitivity_takes_the_limit() -> None:
    model, data = model_and_data()
    ranking = torchq.sensitivity(model, data, config=MIXED)
    assert {"0.up", "0.down", "1.up", "1.down"} <= {entry.name for entry in ranking}


def test_the_limit_needs_data() -> None:
    model, data = model_and_data()
    with pytest.raises(TypeError, match=r"got None, .* a recipe or min_sqnr"):
        torchq.quantize(model, None, data[0], MIXED)
    with pytest.raises(RuntimeError, match="got a model that has seen no data"):
        torchq.convert(torchq.prepare(model, data[0], MIXED))
    with pytest.raises(ValueError, match=r"qconfig_spec\[Linear\] must have no min_sqnr, got 19"):
        torchq.quantize_dynamic(model, {nn.Linear: MIXED})
    with pytest.raises(ValueError, match=r"prepare_qat: min_sqnr must be None .*, got 19 for"):
        torchq.prepare_qat(model.train(), data[0], MIXED)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"min_sqnr": 20.0}, ValueError, "min_sqnr must be None with weight_bits=8, got 20.0"),
        ({"weight_bits": 4, "min_sqnr": "20"}, TypeError, "a number of decibels or None, got str"),
        ({"weight_bits": 4, "min_sqnr": True}, TypeError, "a number of decibels or None, got bool"),
        ({"weight_bits": 4, "min_sqnr": float("inf")}, ValueError, "must be finite, got inf"),
    ],
)
def test_limits_that_are_refused(fields: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"torchq.QConfig: .*{message}"):
        QConfig(dynamic=True, **fields)


def test_text() -> None:
    assert str(MIXED).endswith("weights s4 in groups of 32, or s8 below 19 dB")

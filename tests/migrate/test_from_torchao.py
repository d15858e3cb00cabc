# SPDX-License-Identifier: Apache-2.0
"""Models with int8 tensors of torchao: the same integers and scales."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import assert_same
from torch import nn

import torchq

tao = pytest.importorskip("torchao.quantization")

SRC = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10, bias=False)).eval()


def quantized(config: Any, float_model: nn.Module | None = None) -> nn.Module:
    result = copy.deepcopy(float_model or model())
    tao.quantize_(result, config)
    return result


CONFIGS = {
    "dynamic": lambda: tao.Int8DynamicActivationInt8WeightConfig(),
    "weights": lambda: tao.Int8WeightOnlyConfig(),
    "one scale": lambda: tao.Int8WeightOnlyConfig(granularity=tao.PerTensor()),
    "4 bits, one scale a row": lambda: tao.IntxWeightOnlyConfig(weight_dtype=torch.int4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_integers(name: str, tmp_path: Path):
    old = quantized(CONFIGS[name]())
    new = torchq.from_torchao(old)
    with torch.no_grad():
        assert torchq.sqnr(old(SRC), new(SRC)) > 38
    for i in (0, 2):
        theirs, ours = old[i].weight, new[i].layer
        assert_same(ours.packed().unpack(), theirs.qdata)
        assert_same(ours.weight_scale, theirs.scale.reshape(-1).expand(len(theirs.qdata)).clone())
    assert [row.quantized for row in torchq.explain(new).rows] == [True, True]
    torchq.save(new, tmp_path / "model")
    assert_same(torchq.load(tmp_path / "model", model())(SRC), new(SRC))


GROUPS = {
    "symmetric": (torch.int4, "SYMMETRIC"),
    "zero points": (torch.int4, "ASYMMETRIC"),
    "3 bits": (torch.int3, "SYMMETRIC"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_4_bits(name: str, tmp_path: Path):
    dtype, mapping = GROUPS[name]
    config = tao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtype,
        weight_granularity=tao.PerGroup(32),
        weight_mapping_type=tao.MappingType[mapping],
    )
    old = quantized(config)
    new = torchq.from_torchao(old)
    for i in (0, 2):
        theirs, ours = old[i].weight, new[i].layer
        codes, scale, zero = ours.packed().unpack()
        assert_same(codes, (theirs.qdata + 8).to(torch.uint8))
        assert_same(scale, theirs.scale.bfloat16().float())
        assert_same(zero, (theirs.zero_point + 8).to(torch.uint8))
        assert ours.symmetric == (not theirs.zero_point.any())
    with torch.no_grad():
        assert torchq.sqnr(old(SRC), new(SRC)) > 33
    torchq.save(new, tmp_path / "model")
    assert_same(torchq.load(tmp_path / "model", model())(SRC), new(SRC))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_models_in_half_dtypes(half: torch.dtype):
    static = tao.Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.tensor([[0.03]]), granularity=tao.PerTensor()
    )
    for config in (CONFIGS["dynamic"](), CONFIGS["weights"](), static):
        old = quantized(config, model().to(half))
        new = torchq.from_torchao(old)
        with torch.no_grad():
            got = new(SRC.to(half))
        assert got.dtype == new[0].weight.dtype == half
        assert torchq.sqnr(old(SRC.to(half)).float(), got.float()) > 30


def test_fixed_scales_of_sources():
    config = tao.Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.tensor([[0.03]]), granularity=tao.PerTensor()
    )
    old = quantized(config)
    new = torchq.from_torchao(old)
    torch.testing.assert_close(new(SRC), old(SRC), rtol=0, atol=1e-5)


def test_float_layers_stay():
    old = model()
    tao.quantize_(old, tao.Int8WeightOnlyConfig(), lambda module, name: name == "0")
    new = torchq.from_torchao(old)
    assert type(new[2]) is nn.Linear
    assert [row.quantized for row in torchq.explain(new).rows] == [True, False]
    assert new[2].weight.data_ptr() != old[2].weight.data_ptr()


def test_a_layer_alone():
    old = quantized(tao.Int8WeightOnlyConfig(), nn.Linear(64, 8))
    # quantize_ looks for layers in a model, and at the model itself
    assert torchq.sqnr(old(SRC), torchq.from_torchao(old)(SRC)) > 38


def test_not_taken():
    for config in (
        tao.Int8DynamicActivationIntxWeightConfig(),
        tao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=tao.PerGroup(16)),
    ):
        old = quantized(config)
        with pytest.raises(ValueError, match=r"'0\.weight': it has \d scales.*'2\.weight': it has"):
            torchq.from_torchao(old)
    with pytest.raises(ValueError, match="without such tensors"):
        torchq.from_torchao(model())
    with pytest.raises(TypeError, match=r"nn\.Module"):
        torchq.from_torchao(SRC)  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""State of quantized modules: specs, dtypes, buffers, copies."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator

import pytest
import torch
from cases import random_q
from torch import nn

import torchq
import torchq.functional as TF
import torchq.nn as tnn
from torchq import PostOps, QParams
from torchq.graphs.loading import load_each

U8 = QParams.per_tensor(0.021, 117)
S8 = QParams.per_tensor(0.034, -9, torch.int8)


def every_module() -> dict[str, tnn.QModule]:
    """One of each class, with the less usual arguments."""
    seven = QParams(U8.scale, torch.tensor(50, dtype=torch.int32), torch.uint8, None, 7)
    made: list[tnn.QModule] = [
        tnn.QLinear.from_float(nn.Linear(5, 3, bias=False), seven, seven),
        tnn.QConv1d.from_float(nn.Conv1d(4, 6, 3, padding="same", dilation=2), U8, S8),
        tnn.QConv2d.from_float(nn.Conv2d(8, 8, 3, groups=8), U8, None, granularity="per_tensor"),
        tnn.QConv3d.from_float(nn.Conv3d(2, 2, 1), S8, U8, bits=7),
        tnn.QConvTranspose1d.from_float(nn.ConvTranspose1d(4, 6, 3, 2, 1, 1), U8, seven),
        tnn.QConvTranspose2d.from_float(nn.ConvTranspose2d(8, 6, 3, 2, groups=2), U8, None),
        tnn.QConvTranspose3d.from_float(nn.ConvTranspose3d(2, 2, 2, dilation=2), S8, U8, bits=7),
        tnn.DynamicQLinear.from_float(nn.Linear(5, 3), src_range="per_tensor", bits=7),
        tnn.DynamicQLinearInt4.from_float(nn.Linear(70, 3, bias=False), group_size=64),
        tnn.DynamicQConv1d.from_float(nn.Conv1d(4, 6, 3, padding="same", dilation=2), bits=7),
        tnn.DynamicQConv2d.from_float(nn.Conv2d(8, 8, 3, groups=8), granularity="per_tensor"),
        tnn.DynamicQConv3d.from_float(nn.Conv3d(2, 2, 1, bias=False)),
        tnn.QMatMul([U8, seven], S8, PostOps.parse("eltwise_linear:0.25:0")),
        tnn.QAttention([U8, seven, S8], seven, tnn.AttentionOptions(True, 0.25, True, True)),
        tnn.DynamicQAttention(tnn.AttentionOptions(True, None, True)),
        tnn.CachedAttention(0.25, True),
        tnn.CompressedAttention(0.25, True),
        tnn.CachedCat(-2),
        tnn.QSoftmax(U8, seven, 1, True, PostOps.parse("eltwise_linear:0.5:1")),
        tnn.QLayerNorm.from_float(nn.LayerNorm((3, 2)), U8, S8),
        tnn.QRMSNorm.from_float(nn.RMSNorm((3, 2), 1e-3), U8, S8),
        tnn.QGroupNorm.from_float(nn.GroupNorm(2, 4, 1e-3), seven, None),
        tnn.QAdd([U8, seven], seven, True),
        tnn.QMul([U8, S8], None),
        tnn.QCat([U8, S8, U8], U8, -1),
        tnn.QMaxPool1d(seven, 3, 2, 1, 1, True),
        tnn.QMaxPool2d(U8, (2, 3)),
        tnn.QMaxPool3d(U8, 2),
        tnn.QAvgPool1d(S8, 2, dst="f32"),
        tnn.QAvgPool2d(U8, 3, 1, 1, False, False),
        tnn.QAvgPool3d(U8, 2),
        tnn.QAdaptiveAvgPool1d(U8, 2),
        tnn.QResample(U8, size=[4, 6]),
        tnn.QPad(seven),
        tnn.QAdaptiveAvgPool2d(U8, (None, 3)),
        tnn.QAdaptiveAvgPool3d(U8, 1, dst=seven),
        tnn.QLookup(torch.tanh, seven, S8),
        tnn.Quantize(seven),
        tnn.Dequantize(U8),
    ]
    made += [tnn.QEmbedding.from_float(nn.Embedding(9, 6, padding_idx=2))]
    made += [tnn.QEmbeddingBag.from_float(nn.EmbeddingBag(9, 6, mode="max").bfloat16(), bits=4)]
    made.append(tnn.QuantizedLeaf.of(nn.Linear(4, 8), copy.deepcopy(made[0])))
    made.append(tnn.DynamicQGroupedLinear.from_float(torch.randn(3, 5, 8), torch.randn(3, 5)))
    made.append(tnn.DynamicQGroupedLinearInt4.from_float(torch.randn(3, 5, 40)))
    up = nn.ConvTranspose2d(4, 6, 3, 2)
    made.append(tnn.QuantizedLeaf.of(up, tnn.QConvTranspose2d.from_float(up, U8)))
    return {type(module).__name__: module for module in made}


MODULES = every_module()


def test_every_class_is_tried() -> None:
    bases = {
        "QLayer",
        "_QNorm",
        "_QAffineNorm",
        "QConv",
        "DynamicQConv",
        "RowQuantizedLinear",
        "GroupedLinearBase",
        "_Embedding",
        "QConvTranspose",
        "_QPool",
        "QMaxPool",
        "QAvgPool",
        "QAdaptiveAvgPool",
        "_QCombine",
        "_QBinary",
    }
    recurrent = {name for name in tnn.QModule.registry if "LSTM" in name or "GRU" in name}
    bases |= {"QExperts"}  # has no spec without the float module
    recurrent |= {"QRNN", "QRNNCell", "QRecurrentLayer", "_QCell", "_QRecurrent"}  # test_nn_rnn.py
    assert set(MODULES) == set(tnn.QModule.registry) - bases - recurrent


@pytest.mark.parametrize("name", MODULES)
def test_repr_shows_scales(name: str) -> None:
    """Layers with an Attr show which there are, all others the values, too."""
    module = MODULES[name]
    text = repr(module)
    if hasattr(module, "attr"):
        assert str(module.attr) in text
    elif module._buffers.get("scales") is not None:
        assert f"scales=[{module.scales[0]:.4g}, " in text
        assert f"zero_points=[{module.zero_points[0]}, " in text
    else:
        for key in [key for key in module._buffers if key.endswith(("_scale", "_zero_point"))]:
            assert f"{key}=" in text
    on_meta = copy.deepcopy(module).to("meta")
    assert repr(on_meta).partition("(")[0] == text.partition("(")[0]


def test_repr_of_several_values() -> None:
    scale, zero = torch.linspace(0.5, 2.5, 5), torch.arange(5, dtype=torch.int32)
    per_channel = QParams(scale, zero, torch.uint8, 1)
    expected = "f32 -> u8, src_scale=5 of 0.5 to 2.5, src_zero_point=5 of 0 to 4"
    assert tnn.Quantize(per_channel).extra_repr() == expected
    assert tnn.Dequantize(U8).extra_repr() == "u8 -> f32, src_scale=0.021, src_zero_point=117"


@pytest.mark.parametrize("name", MODULES)
def test_spec_rebuilds_the_module(name: str) -> None:
    module = MODULES[name]
    again = tnn.QModule.registry[name].from_spec(module.read_spec())
    if isinstance(again, tnn.QuantizedLeaf):
        again.layer = type(module.layer).from_spec(module.layer.read_spec())
    again.load_state_dict(module.state_dict())
    for key, value in module.named_buffers():
        assert torch.equal(value, again.get_buffer(key)), key
    assert repr(again) == repr(module) and module.extra_repr() == again.extra_repr()
    plain = {k: v for k, v in module.__dict__.items() if not k.startswith("_")}
    assert plain == {k: v for k, v in again.__dict__.items() if not k.startswith("_")}


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", MODULES)
def test_the_default_dtype_changes_no_state(name: str, float64_by_default: None) -> None:
    module = MODULES[name]
    again = tnn.QModule.registry[name].from_spec(module.read_spec())
    if isinstance(again, tnn.QuantizedLeaf):
        again.layer = type(module.layer).from_spec(module.layer.read_spec())
    again.load_state_dict(module.state_dict())
    for key, value in module.named_buffers():
        assert value.dtype == again.get_buffer(key).dtype, key


def test_the_default_dtype_changes_no_function(float64_by_default: None) -> None:
    src, weight = random_q((3, 4), torch.uint8), random_q((6, 4), torch.int8)
    assert TF.linear(src, weight, None, None, torch.int32).dtype == torch.int32
    assert TF.matmul(src, weight.mT, None, None, torch.int32).dtype == torch.int32
    assert torch.equal(TF.sum([src]), src) and torch.equal(TF.reorder(src, src.dtype), src)
    added = torchq.Attr.parse("post_ops:sum:0.5")
    assert TF.reorder(src, torch.uint8, added, src).dtype == torch.uint8
    assert torch.equal(TF.prelu(src, torch.ones(4, dtype=torch.float32)), src)


@pytest.mark.parametrize("name", MODULES)
def test_buffers_that_are_none_come_last(name: str) -> None:
    """Else torch.export, which counts them, looks for the others in the wrong place."""
    absent = [value is None for value in MODULES[name]._buffers.values()]
    assert absent == sorted(absent)


@pytest.mark.parametrize("name", MODULES)
def test_float16_is_refused(name: str) -> None:
    module = copy.deepcopy(MODULES[name])
    if not any(value.is_floating_point() for value in module.buffers()):
        module.half()
        return
    before = {key: value.clone() for key, value in module.state_dict().items()}
    for convert in (module.half, module.double, module.bfloat16):
        with pytest.raises(TypeError, match=r"must stay torch.float32, got a conversion to"):
            convert()
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    module.to("cpu").share_memory()


@pytest.mark.parametrize("assign", [False, True])
def test_half_state_is_refused(assign: bool) -> None:
    module = tnn.QLinear.from_float(nn.Linear(5, 3), U8)
    state = {k: v.half() if v.is_floating_point() else v for k, v in module.state_dict().items()}
    model = nn.Sequential(module)
    state = {f"0.{key}": value for key, value in state.items()}
    told = r"'0.src_scale' of the state must be a dense tensor of torch.float32, got torch.float16"
    with pytest.raises(RuntimeError, match=told):
        model.load_state_dict(state, assign=assign)


def test_other_spec_is_refused() -> None:
    state = tnn.QLinear.from_float(nn.Linear(5, 3), U8).state_dict()
    other = nn.ModuleDict({"fc": tnn.QLinear.from_float(nn.Linear(5, 3), S8)})
    with pytest.raises(RuntimeError, match=r"'fc' has spec .*\"src\":\"u8\".*this module is"):
        other.load_state_dict({f"fc.{key}": value for key, value in state.items()})


def test_scales_that_were_trained() -> None:
    scale = nn.Parameter(torch.tensor(0.1))
    trained = QParams(scale, torch.tensor(0, dtype=torch.int32), torch.uint8)
    x = torch.rand(3)
    for module in (
        tnn.Quantize(trained),
        tnn.Dequantize(trained),
        tnn.QLookup(torch.tanh, trained, U8),
    ):
        assert not copy.deepcopy(module)(x).requires_grad
    assert not tnn.QAdd([trained, U8], trained)(x, x).requires_grad
    assert not tnn.QSoftmax(trained, None)(x).requires_grad


def test_copies_of_a_layer_with_a_table() -> None:
    x = torch.randint(0, 256, (2, 8), dtype=torch.uint8)
    table = tnn.QLookup(torch.sigmoid, QParams.per_tensor(0.1), QParams.per_tensor(0.01))
    layer = tnn.QLinear.from_float(
        nn.Linear(8, 4), QParams.per_tensor(0.1, 3), QParams.per_tensor(0.1)
    ).with_lookup(table)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))


class Scaled(nn.Module):
    """Converts the weight of its layer when a state is loaded, under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_load_state_dict_pre_hook(self._scale)

    @staticmethod
    def _scale(module, state, prefix, *others):
        state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"] * 2


def test_values_that_a_hook_converts_are_loaded():
    state = Scaled().state_dict()
    given, expected = nn.Sequential(Scaled()), nn.Sequential(Scaled())
    state = {f"0.{name}": value for name, value in state.items()}
    expected.load_state_dict(state)
    assert load_each(given, state, assign=False) == ([], [])
    assert torch.equal(given[0].layer.weight, expected[0].layer.weight)
    assert torch.equal(given[0].layer.weight, state["0.layer.weight"] * 2)


class Renamed(nn.Module):
    """Its states have another name for a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state, prefix, *others):
        for name in ("weight", "bias"):
            state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}old.{name}")


def test_hooks_rename_what_is_within_their_module():
    """Names of neighbours begin alike, and sort in front of and behind it."""
    given, expected = (
        nn.ModuleDict({name: nn.ModuleDict({"a": Renamed(), "b": Renamed()}) if name == "a"
                       else nn.Linear(4, 4) for name in ("a", "a-b", "a0", "b")})
        for _ in range(2)
    )  # fmt: skip
    state = {
        k.replace(".layer.", ".old."): torch.rand_like(v) for k, v in given.state_dict().items()
    }
    expected.load_state_dict(state)
    assert load_each(given, state, assign=False) == ([], [])
    for name, value in expected.state_dict().items():
        assert torch.equal(given.state_dict()[name], value), name


def test_hooks_look_at_no_names_of_other_modules():
    """Each looked at all: 900 graphs beside 42,000 names in one file took 9 s."""
    model = nn.ModuleList(Scaled() for _ in range(400))
    state = dict(model.state_dict()) | {f"399.z.{i}.w": torch.zeros(0) for i in range(20_000)}
    began = time.process_time()
    missing, unexpected = load_each(model, state)
    assert time.process_time() - began < 1
    assert not missing and len(unexpected) == 20_000

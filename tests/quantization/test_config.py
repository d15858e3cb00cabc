# SPDX-License-Identifier: Apache-2.0
import dataclasses
import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.quantization.config import OBSERVERS, QConfig, resolve, unmatched_patterns
from torchq.quantization.observers import HistogramObserver, MinMaxObserver, PercentileObserver


def test_defaults():
    config = QConfig()
    assert config.activation_dtype == torch.uint8
    assert config.weight_granularity == "per_channel"
    assert not config.symmetric
    assert type(config.make_observer()) is HistogramObserver
    assert QConfig(activation_dtype=torch.int8).symmetric
    assert not QConfig(activation_dtype=torch.int8, activation_symmetric=False).symmetric
    assert dataclasses.replace(config, activation_dtype=torch.int8).symmetric


def test_is_a_value():
    config = QConfig("entropy", weight_bits=7)
    assert config == QConfig("entropy", weight_bits=7)
    assert hash(config) == hash(QConfig("entropy", weight_bits=7))
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.weight_bits = 8


@pytest.mark.parametrize("name", OBSERVERS)
def test_named_observers(name):
    observer = QConfig(name).make_observer("encoder.fc")
    assert type(observer) is OBSERVERS[name]
    assert observer.name == "encoder.fc"
    assert QConfig(name).make_observer() is not observer


def test_observer_factories():
    assert type(QConfig(MinMaxObserver).make_observer()) is MinMaxObserver
    assert QConfig(partial(PercentileObserver, 99.0)).make_observer().percentile == 99.0
    with pytest.raises(TypeError, match="activation_observer must make an Observer, got ReLU"):
        QConfig(nn.ReLU).make_observer()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"activation_observer": "mse"}, ValueError, "'minmax' or .* or 'entropy', got 'mse'"),
        ({"activation_observer": 3}, TypeError, "a callable that makes an Observer, got int"),
        ({"activation_observer": MinMaxObserver()}, TypeError, "all modules would share"),
        ({"activation_dtype": torch.quint8}, ValueError, "activation_dtype must be torch.uint8 or"),
        ({"activation_dtype": "uint8"}, TypeError, "activation_dtype must be torch.uint8 or"),
        ({"activation_bits": 4}, ValueError, "activation_bits must be 8 or 7, got 4"),
        ({"weight_bits": 8.5}, ValueError, "weight_bits must be 8, 7 or 4, got 8.5"),
        ({"weight_granularity": "channel"}, ValueError, "must be 'per_channel' or 'per_tensor'"),
        ({"activation_symmetric": 1}, TypeError, "activation_symmetric must be a bool, got int"),
        ({"dynamic": None}, TypeError, "dynamic must be a bool, got NoneType"),
    ],
)
def test_validation(fields, error, message):
    with pytest.raises(error, match=f"torchq.QConfig: .*{message}"):
        QConfig(**fields)


def test_str():
    assert str(QConfig()) == "activations u8 affine histogram, weights s8 per_channel"
    config = QConfig(
        partial(PercentileObserver, 99.0),
        torch.int8,
        activation_bits=7,
        weight_bits=7,
        weight_granularity="per_tensor",
    )
    expected = "activations s8/7 symmetric PercentileObserver, weights s8/7 per_tensor"
    assert str(config) == expected
    assert str(QConfig(dynamic=True)) == "activations u8 affine dynamic, weights s8 per_channel"


def test_resolve():
    default, seven = QConfig(), QConfig(weight_bits=7)
    overrides = {"encoder.*": seven, "encoder.head": None, "*.fc?": None}
    assert resolve(None, "conv", default) is default
    assert resolve(overrides, "conv", default) is default
    assert resolve(overrides, "encoder.0.conv", default) is seven
    assert resolve(overrides, "encoder.head", default) is None
    assert resolve(overrides, "encoder.fc1", default) is None
    assert resolve(overrides, "Encoder.0", default) is default
    # Later patterns win, whatever their length.
    assert resolve({"encoder.head": None, "encoder.*": seven}, "encoder.head", default) is seven
    assert resolve({"encoder": seven}, "conv", None) is None


def test_resolve_what_is_in_a_module():
    default, seven = QConfig(), QConfig(weight_bits=7)
    overrides = {"encoder": None, "encoder.mlp": seven, "?ecoder.1.dst": None}
    assert resolve(overrides, "encoder.0.conv", default) is None
    assert resolve(overrides, "encoder.0.conv.dst", default) is None
    assert resolve(overrides, "encoder.mlp.fc1", default) is seven
    assert resolve(overrides, "encoder.mlp", default) is seven
    assert resolve(overrides, "encoder2.0", default) is default
    assert resolve(overrides, "decoder.1.fc", default) is default
    assert resolve(overrides, "decoder.1.fc.dst", default) is None
    assert resolve(overrides, "decoder.10.fc.dst", default) is default
    assert resolve({"fc": None}, "fc.dst", default) is default
    assert resolve({"a": None, "": seven}, "a.b.c", default) is seven
    assert resolve({"a.dst": None}, "b.dst", default) is default


def test_unmatched_patterns():
    overrides = {"conv*": None, "head": None, "encoder.?": None}
    names = ["conv1", "encoder.0", "encoder"]
    assert unmatched_patterns(overrides, iter(names)) == ["head"]
    patterns = {"a": None, "a.dst": None, "a.b": None, "b": None, "b.dst": None, "a.b.c.dst": None}
    assert unmatched_patterns(patterns, ["a.b.c.dst"]) == ["b", "b.dst"]
    assert unmatched_patterns(None, names) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["conv"], "overrides must be a mapping from name pattern to QConfig or None, got list"),
        ({1: None}, "patterns in overrides must be str, got int"),
        ({"conv": "float"}, r"overrides\['conv'\] must be a QConfig or None, got str"),
        ({"conv": {"weight_bits": 7}}, r"overrides\['conv'\] must be a QConfig or None, got dict"),
    ],
)
def test_override_errors(overrides, message):
    with pytest.raises(TypeError, match=message):
        resolve(overrides, "conv", QConfig())


def holding(model: nn.Module, value: Any) -> nn.Module:
    model[0].held = value
    return model


X = torch.randn(2, 4)
MISTAKES: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "model": (lambda m: torchq.prepare(len, X), TypeError,
              "prepare: model must be an nn.Module, got builtin_function_or_method"),
    "config": (lambda m: torchq.prepare(m, X, {"bits": 7}), TypeError,
               "prepare: config must be a QConfig or None, got dict"),
    "dtype": (lambda m: torchq.prepare(nn.Linear(4, 4).double().eval(), X), TypeError,
              "prepare: model must be float32, bfloat16 or float16, got torch.float64 in the"),
    "copy": (lambda m: torchq.prepare(holding(m, Lock()), X), TypeError,
             "prepare: model must allow copy.deepcopy, got lock in '0.held': cannot pickle"),
    "data": (lambda m: torchq.quantize(m, 5), TypeError,
             "quantize: data must be batches, got one int"),
    "nothing": (lambda m: torchq.quantize(m), TypeError,
                "quantize: data must be batches to calibrate with, got None"),
    "none": (lambda m: torchq.calibrate(torchq.prepare(m, X), None), TypeError,
             "calibrate: data must be batches, got one NoneType"),
    "calibrate": (lambda m: torchq.calibrate(m, [X]), ValueError,
                  "calibrate: prepared must come from torchq.prepare, got Sequential"),
    "path": (lambda m: torchq.save(torchq.quantize(m, [X]), io.BytesIO()), TypeError,
             "save: path must be a str or a Path, got BytesIO"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_said_in_a_sentence(name: str) -> None:
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=f"^torchq.{re.escape(message)}.*[.] [A-Z].*[.]$"):
        call(nn.Sequential(nn.Linear(4, 4)).eval())

# SPDX-License-Identifier: Apache-2.0
"""Forged states and calibrations are refused by name, at no more cost than their files'."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.attributes.json_text import read_json
from torchq.integrations import compressed_files
from torchq.serialization.tensor_file import read_tensors, write_tensors

X = torch.linspace(-1, 1, 40 * 64).reshape(40, 64).sin()
State = dict[str, Any]


def converted(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Conv1d(64, 16, 1) if kind == "conv" else nn.Linear(64, 16)
    config = torchq.QConfig(dynamic=kind == "dynamic")
    x = X[:, :, None] if kind == "conv" else X
    return torchq.quantize(nn.Sequential(layer).eval(), None if config.dynamic else [x], x, config)


@pytest.mark.parametrize("name", ["weight", "compensation", "pair_bound"])
@pytest.mark.parametrize("kind", ["static", "dynamic", "conv"])
def test_parameters_in_place_of_buffers(kind: str, name: str) -> None:
    """With assign=True, torch registers them as they are."""
    qmodel = converted(kind)
    x = X[:, :, None] if kind == "conv" else X
    expected = qmodel(x)
    state = {key: nn.Parameter(value, False) for key, value in qmodel.state_dict().items()}
    qmodel.load_state_dict(state, assign=True)
    assert torch.equal(qmodel(x), expected)
    forged = {
        key: nn.Parameter(value * 0, False) if key.endswith(f"layer.{name}") else value
        for key, value in state.items()
    }
    assert sum(not torch.equal(forged[key], state[key]) for key in state) == 1
    with pytest.raises(ValueError, match="must follow from its weight"):
        qmodel.load_state_dict(forged, assign=True)


@pytest.mark.parametrize("kind", ["lstm", "embedding"])
def test_parameters_of_other_modules(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(64, 16) if kind == "lstm" else nn.Embedding(40, 16)
    x = X[:, None] if kind == "lstm" else torch.arange(40)
    config = torchq.QConfig(embedding_bits=8)
    qmodel = torchq.quantize(nn.Sequential(layer).eval(), [x], x, config)
    expected = torch.utils._pytree.tree_leaves(qmodel(x))
    state = {key: nn.Parameter(value, False) for key, value in qmodel.state_dict().items()}
    qmodel.load_state_dict(state, assign=True)
    results = torch.utils._pytree.tree_leaves(qmodel(x))
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(
    "value", [3, torch.zeros(16).to_sparse(), torch.zeros(16, dtype=torch.float64)]
)
def test_what_is_no_dense_tensor(value: object) -> None:
    qmodel = converted("static")
    state = {**qmodel.state_dict(), "0.layer.weight_scale": value}
    with pytest.raises(RuntimeError, match=r"must be a dense tensor of torch\.float32, got "):
        qmodel.load_state_dict(state)


def test_bounds_of_fake_quantizers() -> None:
    fake = torchq.FakeQuantize(-1.0, 1.0, -1.0, 1.0)
    for name, own in fake.state_dict().items():
        state = {**fake.state_dict(), name: torch.full_like(own, torch.nan)}
        with pytest.raises(ValueError, match=f"'{name}' of the state must be finite, got nan"):
            fake.load_state_dict(state)


def test_a_character_that_makes_a_text_four_times_as_large() -> None:
    assert read_json('["\U0001f600", 1]'.encode()) == ["\U0001f600", 1]
    with pytest.raises(ValueError, match="long, and has characters beyond ASCII"):
        read_json(b'"' + b" " * (1 << 20) + '\U0001f600"'.encode())


def test_shapes_that_are_no_lists(tmp_path: Path) -> None:
    write_tensors("test", tmp_path / "file", {"a": torch.tensor(1.0)}, {})
    data = (tmp_path / "file").read_bytes()
    assert b'"shape":[],' in data
    (tmp_path / "file").write_bytes(data.replace(b'"shape":[],', b'"shape":{},'))
    with pytest.raises(ValueError, match="its header is not one of safetensors"):
        torchq.load(tmp_path / "file")


# Calibrations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.first(self.norm(x)))
        out: Tensor = x + self.second(h)
        return out


def forged(tmp_path: Path, change: Callable[[State, State], None]) -> tuple[nn.Module, Path]:
    """Return a prepared model, and a calibration of it that was changed."""
    torch.manual_seed(0)
    prepared = torchq.prepare(nn.Sequential(Block(), Block()).eval(), X)
    calibrated = torchq.calibrate(copy.deepcopy(prepared), [X] * 8)
    torchq.save_calibration(calibrated, tmp_path / "file")
    tensors, metadata = read_tensors(tmp_path / "file")
    change(tensors, metadata)
    write_tensors("test", tmp_path / "file", tensors, metadata)
    return prepared, tmp_path / "file"


def keys_of(metadata: State, kind: str) -> list[str]:
    observers = enumerate(json.loads(metadata["observers"]))
    return [str(i) for i, (_, text) in observers if text.startswith(kind)]


@pytest.mark.parametrize("channels", [1, 2, 63, 200])
def test_channels_of_another_number(channels: int, tmp_path: Path) -> None:
    def change(tensors: State, metadata: State) -> None:
        for key in keys_of(metadata, "PerChannel"):
            largest = torch.full((channels,), 0.01)
            largest[-1] = 300.0
            tensors[f"{key}.min_value"], tensors[f"{key}.max_value"] = -largest, largest

    prepared, path = forged(tmp_path, change)
    torchq.load_calibration(prepared, path)
    told = rf"must have been calibrated with \d+ channels, got {channels}. Was its file changed"
    with pytest.raises(ValueError, match=told):
        torchq.convert(prepared)


def test_dtypes_and_what_is_said_to_be_elsewhere(tmp_path: Path) -> None:
    def other_dtype(tensors: State, metadata: State) -> None:
        key = f"{keys_of(metadata, 'PerChannel')[0]}.min_value"
        tensors[key] = torch.zeros(1 << 20, dtype=torch.uint8)

    def nothing(tensors: State, metadata: State) -> None:
        key = keys_of(metadata, "PerChannel")[0]
        tensors[f"{key}.min_value"] = tensors[f"{key}.max_value"] = torch.zeros(0)
        metadata["elsewhere"] = json.dumps([json.loads(metadata["observers"])[int(key)][0]])

    for change, told in {
        other_dtype: "'min_value' must be torch.float32, got torch.uint8",
        nothing: "it has recorded nothing, and says that it has",
    }.items():
        prepared, path = forged(tmp_path, change)
        with pytest.raises(ValueError, match=told):
            torchq.load_calibration(prepared, path)


def test_counts_that_overflow_together(tmp_path: Path) -> None:
    def many(tensors: State, metadata: State) -> None:
        for key in keys_of(metadata, "Histogram"):
            some = (tensors[f"{key}.counts"] > 0).long()
            tensors[f"{key}.counts"] = some * ((2**62 - 2**20) // max(int(some.sum()), 1))

    prepared, path = forged(tmp_path, many)
    torchq.load_calibration(prepared, path)
    with pytest.raises(ValueError, match="counts must be one that it has recorded"):
        torchq.load_calibration(prepared, path, merge=True)


def test_many_4_bit_layers_open_their_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4,
    )  # fmt: skip
    int4 = torchq.QConfig(dynamic=True, weight_bits=4)
    ids = torch.ones(1, 4, dtype=torch.long)
    model = transformers.LlamaForCausalLM(config).eval()
    torchq.to_compressed_tensors(torchq.quantize(model, None, {"input_ids": ids}, int4), tmp_path)
    opened, own = [], compressed_files.opened

    def count(folder: Path, path: Path) -> Any:
        opened.append(path)
        return own(folder, path)

    monkeypatch.setattr(compressed_files, "opened", count)
    monkeypatch.setattr("torchq.integrations.compressed_quantizer.opened", count)
    torchq.from_compressed_tensors(tmp_path)
    assert len(opened) == 2  # to look at, and to read


def test_a_4_bit_layer_without_its_bias(tmp_path: Path) -> None:
    """It was loaded without, and nobody was told."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    safetensors = pytest.importorskip("safetensors.torch")
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    int4 = torchq.QConfig(dynamic=True, weight_bits=4)
    model = transformers.Qwen2ForCausalLM(config).eval()
    ids = torch.ones(1, 4, dtype=torch.long)
    torchq.to_compressed_tensors(torchq.quantize(model, None, {"input_ids": ids}, int4), tmp_path)
    torchq.from_compressed_tensors(tmp_path)
    file, layer = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj"
    tensors = safetensors.load_file(file)
    del tensors[f"{layer}.bias"]
    safetensors.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"'{layer}' has no bias"):
        torchq.from_compressed_tensors(tmp_path)

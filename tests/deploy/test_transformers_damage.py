# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged folders that ``save_pretrained`` wrote with a ``TorchqConfig``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torchq
from torchq.integrations.checkpoint import refusing

transformers = pytest.importorskip("transformers", minversion="5.24")
safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.tensor([[5, 7, 11, 42, 90, 3]])
KEY = "pooler.dense.layer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path)
    made = torchq.TorchqConfig()
    transformers.BertModel.from_pretrained(tmp_path, quantization_config=made).save_pretrained(
        tmp_path
    )
    return tmp_path


def load(folder: Path) -> Any:
    return transformers.BertModel.from_pretrained(folder)


def test_a_changed_bit_at_either_end_of_a_tensor_is_found(folder: Path) -> None:
    """Their digest is in the metadata of the file; loaders of transformers have none."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    names = [f"{KEY}.{key}" for key in ("weight_scale", "bias", "spec")]
    for key in ["pooler.dense.weight", *names]:
        begin, end = header[key]["data_offsets"]
        for place in (begin, end - 1):
            damaged = bytearray(content)
            damaged[start + place] ^= 16 if not key.endswith("spec") else 1
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"torchq.TorchqConfig: .*model.safetensors"):
                load(folder)
    path.write_bytes(content.replace(f"{KEY}.spec".encode(), f"{KEY}.spac".encode()))
    with pytest.raises(ValueError, match=r"torchq.TorchqConfig: .*model.safetensors"):
        load(folder)
    path.write_bytes(content)
    assert load(folder)(IDS).last_hidden_state.isfinite().all()


def test_folders_of_earlier_releases_load(folder: Path) -> None:
    """They have no digest."""
    path = folder / "model.safetensors"
    expected = load(folder)(IDS).last_hidden_state
    safetensors.save_file(safetensors.load_file(path), path, metadata={"format": "pt"})
    assert torch.equal(load(folder)(IDS).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"src_range":', '"src_ranges":'),
        ('"weight":[32,32]', '"weight":[32]'),
        ('"weight":[32,32]', '"weight":[32,-32]'),
        ('"weight":[32,32]', '"weight":7'),
        ('"class":"DynamicQLinear"', '"class":"QLinear"'),
    ],
)
def test_forged_specs_raise_one_error(old: str, new: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    state = safetensors.load_file(path)
    text = bytes(state[f"{KEY}.spec"].tolist()).decode()
    assert old in text
    changed = list(text.replace(old, new).encode())
    state[f"{KEY}.spec"] = torch.tensor(changed, dtype=torch.uint8)
    safetensors.save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"torchq.TorchqConfig: .*model.safetensors.*save it anew"):
        load(folder)


def test_a_file_of_many_names_counts_once(folder: Path) -> None:
    """1.1 MB took 13 s and 0.9 GB: each name of an index gave the limits of the whole file."""
    path = folder / "model.safetensors"
    state = safetensors.load_file(path)
    spec = list(
        b'{"class":"DynamicQLinear","version":1,"weight":[4096,4096],"bias":false,'
        b'"src_range":"per_row"}'
    )
    state |= {"x.spec": torch.tensor(spec, dtype=torch.uint8), "y": torch.zeros(1 << 18)}
    safetensors.save_file(state, folder / "a.safetensors", metadata={"format": "pt"})
    path.unlink()
    names = dict.fromkeys(state, "a.safetensors")
    names |= {f"z{i}": f"{'./' * i}a.safetensors" for i in range(20)}
    index = json.dumps({"metadata": {}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="ask for no more bytes of memory than its tensors allow"):
        load(folder)


@pytest.mark.parametrize("kind", [MemoryError, ImportError])
def test_errors_of_the_machine_are_not_blamed_on_files(kind: type[Exception]) -> None:
    with pytest.raises(kind), refusing(["model.safetensors"]):
        raise kind

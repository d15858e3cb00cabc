# SPDX-License-Identifier: Apache-2.0
"""Who tells transformers about folders of torchq, and what happens where nobody did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import python

import torchq
from tests.support.slow import rest_slow

transformers = pytest.importorskip("transformers", minversion="5.24")
safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.tensor([[5, 7, 11, 42, 90, 3]])


@pytest.fixture(params=[None, 8], ids=["linear layers", "embeddings too"])
def folder(tmp_path: Path, request: Any) -> Path:
    """A folder of a quantized model, and what it computes in ``expected.pt``."""
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    made = torchq.TorchqConfig(embedding_bits=request.param)
    model = load(tmp_path / "float", quantization_config=made)
    model.save_pretrained(tmp_path)
    torch.save(model(IDS).logits, tmp_path / "expected.pt")
    return tmp_path


def load(folder: Path, **options: Any) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, **options)


def loaded_by(imports: str, folder: Path) -> Any:
    """Load it in a program of its own, with as many threads: the float parts round by them."""
    return python(
        f"import torch, {imports}\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"expected = torch.load({str(folder / 'expected.pt')!r})\n"
        f"assert torch.equal(model(torch.{IDS}).logits, expected)"
    )


@pytest.mark.parametrize(
    "imports",
    rest_slow(
        [
            "transformers, torchq",
            "transformers.modeling_utils, torchq",
            "torchq, transformers",
            "torchq, transformers.quantizers.auto, transformers",
        ],
        "torchq, transformers",
    ),
)
def test_torchq_registers_itself_in_either_order(imports: str, folder: Path) -> None:
    result = loaded_by(imports, folder)
    assert result.returncode == 0, result.stderr


def test_without_torchq_the_shapes_are_an_error(folder: Path) -> None:
    """Random weights in the places of layers that are left over would be worse."""
    result = loaded_by("transformers", folder)
    assert result.returncode != 0 and "AssertionError" not in result.stderr
    assert "Unknown quantization type, got torchq" in result.stderr
    assert "size mismatch" in result.stderr


def test_the_names_of_files_are_those_of_the_float_model(folder: Path) -> None:
    state = safetensors.load_file(folder / "model.safetensors")
    names = safetensors.load_file(folder / "float" / "model.safetensors").keys()
    assert names - state.keys() == set()
    model = load(folder)
    model.save_pretrained(folder / "copy")
    copied = safetensors.load_file(folder / "copy" / "model.safetensors")
    assert copied.keys() == state.keys()
    assert all(torch.equal(copied[name], value) for name, value in state.items())


def test_folders_with_the_names_of_earlier_releases_load(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = safetensors.load_file(path)
    for name in [name for name in state if f"{name.removesuffix('weight')}spec" in state]:
        base = name.removesuffix(".weight")
        own = "layer.weight" if f"{base}.layer.spec" in state else "rows"
        state[f"{base}.{own}"] = state.pop(name)
    assert not [name for name in state if name.endswith("q_proj.weight")]
    safetensors.save_file(state, path, metadata={"format": "pt"})
    assert torch.equal(load(folder)(IDS).logits, torch.load(folder / "expected.pt"))


def test_import_of_torchq_does_not_import_transformers() -> None:
    code = (
        "import sys, torchq; assert 'transformers' not in sys.modules; "
        "assert not hasattr(torchq, 'Other'); assert 'transformers' not in sys.modules; "
        "torchq.TorchqConfig(); assert 'transformers' in sys.modules"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_without_transformers_the_error_names_the_package() -> None:
    """An import of torchq that finds a transformers which does not fit is none of its errors."""
    for first, then in (("torchq", "None"), ("types", "types.ModuleType('transformers')")):
        code = (
            f"import sys, {first}\n"
            f"sys.modules['transformers'] = {then}\n"
            "import torchq\n"
            "try: torchq.TorchqConfig\n"
            "except ImportError as error: print(error)"
        )
        assert "pip install 'torchq-cpu[transformers]'" in python(code).stdout

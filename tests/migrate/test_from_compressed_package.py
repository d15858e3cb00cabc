# SPDX-License-Identifier: Apache-2.0
"""``from_compressed_tensors``: folders that the package compressed-tensors writes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchq
from torchq.nn.leaf import QuantizedLeaf

transformers = pytest.importorskip("transformers", minversion="5.24")
safetensors = pytest.importorskip("safetensors.torch")
quantization = pytest.importorskip("compressed_tensors.quantization")
compressors = pytest.importorskip("compressed_tensors.compressors")
fake_quantize = pytest.importorskip("compressed_tensors.quantization.lifecycle").fake_quantize

IDS = torch.tensor([[5, 7, 11, 42, 90, 3], [1, 80, 4, 9, 10, 6]])
WIDTH = 192


def scheme(weights: dict[str, Any], tokens: bool = True) -> dict[str, Any]:
    """Return config_groups of 4-bit weights, with int8 sources per token or float ones."""
    made = quantization.QuantizationArgs(num_bits=4, type="int", **weights)
    rows = quantization.QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
    sources = {"input_activations": rows} if tokens else {}
    return {"g": quantization.QuantizationScheme(targets=["Linear"], weights=made, **sources)}


GROUPS = {"strategy": "group", "group_size": 64}
AFFINE = {**GROUPS, "symmetric": False}
ROWS = {"strategy": "channel"}
SCHEMES: dict[str, tuple[Any, str, int | None]] = {
    "W8A8": ({"W8A8": ["Linear"]}, "int-quantized", None),
    "W4A8": (scheme(GROUPS), "int-quantized", 64),
    "W4A8, affine": (scheme(AFFINE), "int-quantized", 64),
    "W4A8, rows": (scheme(ROWS), "int-quantized", 128),
    "W4A8, rows, affine": (scheme({**ROWS, "symmetric": False}), "int-quantized", 128),
    "W4A8, tensor": (scheme({"strategy": "tensor"}), "int-quantized", 128),
    "W4A16": (scheme(GROUPS, False), "pack-quantized", 64),
    "W4A16, affine": (scheme(AFFINE, False), "pack-quantized", 64),
    "W4A16, rows": (scheme(ROWS, False), "pack-quantized", 128),
    "W4A16, rows, affine": (scheme({**ROWS, "symmetric": False}, False), "pack-quantized", 128),
}
"""config_groups, the format that the package chooses, and our size of groups of 4-bit weights."""


def written(folder: Path, groups: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Write a folder; return the package's logits, and its weights in float."""
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=4, attention_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    config = quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    weights = {}
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.bias.normal_()
        for name, module in model.named_modules():
            if (scale := getattr(module, "weight_scale", None)) is None:
                continue
            args, zeros = module.quantization_scheme.weights, None
            parts = module.weight.reshape(scale.numel(), -1)
            largest = parts.abs().amax(1).reshape(scale.shape)
            scale.copy_((largest * 2 / (2**args.num_bits - 1)).bfloat16())
            if not args.symmetric:
                zeros = module.weight_zero_point
                zeros.copy_(torch.arange(scale.numel()).reshape(scale.shape) % 5 - 2)
            weights[name] = fake_quantize(module.weight, scale, zeros, args)
        expected = model(IDS).logits
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return expected, weights


@pytest.mark.parametrize("name", SCHEMES)
def test_folders_of_the_package(name: str, tmp_path: Path) -> None:
    groups, form, size = SCHEMES[name]
    expected, weights = written(tmp_path / "theirs", groups)
    facts = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert facts["quantization_config"]["format"] == form
    got: Any = torchq.from_compressed_tensors(tmp_path / "theirs")
    assert torchq.sqnr(expected, got(IDS).logits) > 28  # sources are rounded
    found = {n: m.layer for n, m in got.named_modules() if isinstance(m, QuantizedLeaf)}
    assert list(found) == list(weights) and len(found) == 7
    for key, layer in found.items():
        if size is None:
            assert torch.equal(layer.packed().unpack() * layer.weight_scale[:, None], weights[key])
        else:
            assert (layer.group_size, layer.symmetric) == (size, not name.endswith("affine"))
            assert torch.equal(layer.weight_values(), weights[key])
    got.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(IDS).logits, got(IDS).logits)


def test_integers_that_are_none_of_4_bits(tmp_path: Path) -> None:
    written(tmp_path, SCHEMES["W4A8"][0])
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    for value, message in {
        torch.full_like(tensors[key], 8): "'.*up_proj' has integers from 8 to 8, not 4-bit",
        tensors[key][:, :32].clone(): "'.*up_proj.weight' does not fit its shape and scales",
    }.items():
        safetensors.save_file({**tensors, key: value}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            torchq.from_compressed_tensors(tmp_path)


@pytest.mark.parametrize("name", SCHEMES)
def test_such_a_folder_written_again(name: str, tmp_path: Path) -> None:
    groups, _, size = SCHEMES[name]
    written(tmp_path / "theirs", groups)
    model = torchq.from_compressed_tensors(tmp_path / "theirs")
    if size == 128:  # all groups of a row have one scale, and the last one is not full
        with pytest.raises(ValueError, match="has 192 inputs in groups of 128"):
            torchq.to_compressed_tensors(model, tmp_path / "ours")
        return
    for scheme in ("W4A16", "W4A8"):
        torchq.to_compressed_tensors(model, tmp_path / "ours", scheme)
        again = torchq.from_compressed_tensors(tmp_path / "ours")
        assert torch.equal(again(IDS).logits, model(IDS).logits)

# SPDX-License-Identifier: Apache-2.0
"""``to_compressed_tensors``: what it writes is read by torchq in the same bits, and by others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.support.slow import rest_slow
from torchq.nn.leaf import QuantizedLeaf

transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("compressed_tensors")

IDS = torch.tensor([[5, 7, 11, 42, 90, 3], [1, 80, 4, 9, 10, 6]])
DYNAMIC = torchq.QConfig(dynamic=True)
INT4 = torchq.QConfig(dynamic=True, weight_bits=4, group_size=32)


def llama(tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attention_bias=True, pad_token_id=0,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def own_weights(qmodel: nn.Module, model: nn.Module) -> nn.Module:
    """Return the float model with the weights that int8 layers have, but those of embeddings."""
    result = copy.deepcopy(model)
    for name, leaf in qmodel.named_modules():
        tied = name == "lm_head" and model.config.tie_word_embeddings
        if isinstance(leaf, QuantizedLeaf) and "torchq_graph" not in name and not tied:
            layer = leaf.layer
            values = layer.packed().dequantize() if hasattr(layer, "group_size") else None
            if values is None:
                values = layer.packed().unpack() * layer.weight_scale.unsqueeze(1)
            result.get_submodule(name).weight = nn.Parameter(values)
    return result


def same_layers(a: nn.Module, b: nn.Module, count: int) -> bool:
    """Return whether the int8 layers have the same bits, those of embeddings aside."""
    layers = [
        {n: m.layer for n, m in model.named_modules() if isinstance(m, QuantizedLeaf)}
        for model in (a, b)
    ]
    names = [name for name in layers[0] if name in layers[1]]
    return len(names) == len(layers[1]) == count and all(
        torch.equal(value, layers[1][name].state_dict()[key])
        for name in names
        for key, value in layers[0][name].state_dict().items()
    )


@pytest.mark.parametrize("tied", rest_slow([False, True], False))
@pytest.mark.parametrize(
    ("config", "scheme", "form"),
    [
        (DYNAMIC, "W4A16", "int-quantized"),
        (INT4, "W4A16", "pack-quantized"),
        (INT4, "W4A8", "int-quantized"),
    ],
)
@torch.no_grad()
def test_others_read_it(
    config: torchq.QConfig, scheme: Any, form: str, tied: bool, tmp_path: Path
) -> None:
    model = llama(tied)
    qmodel = torchq.quantize(model, None, {"input_ids": IDS}, config)
    expected = qmodel(IDS).logits
    torchq.to_compressed_tensors(qmodel, tmp_path, scheme)
    facts = json.loads((tmp_path / "config.json").read_text())
    assert facts["quantization_config"]["format"] == form
    again = torchq.from_compressed_tensors(tmp_path)
    assert same_layers(qmodel, again, 14 if tied else 15)
    # a graph and the model's own code may differ in the last bits of float
    assert tied or torchq.sqnr(expected, again(IDS).logits) > 100
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    in_float = own_weights(qmodel, model)(IDS).logits
    # sources of int8 rows lose 38 dB here, float ones none
    assert torchq.sqnr(in_float, theirs(IDS).logits) > (100 if form == "pack-quantized" else 33)
    assert torch.equal(qmodel(IDS).logits, expected)  # as it was


@torch.no_grad()
def test_layers_of_both_kinds_and_of_none(tmp_path: Path) -> None:
    kept = {"lm_head": None, "model.layers.1.mlp.*": DYNAMIC}
    qmodel = torchq.quantize(llama(), None, {"input_ids": IDS}, INT4, kept)
    torchq.to_compressed_tensors(qmodel, tmp_path)
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert scheme["format"] == "mixed-precision" and scheme["ignore"] == ["lm_head"]
    assert [len(group["targets"]) for group in scheme["config_groups"].values()] == [11, 3]
    assert same_layers(qmodel, torchq.from_compressed_tensors(tmp_path), 14)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torchq.sqnr(own_weights(qmodel, llama())(IDS).logits, theirs(IDS).logits) > 33


@torch.no_grad()
def test_a_model_of_torchq_config(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    load = transformers.AutoModelForCausalLM.from_pretrained
    qmodel = load(tmp_path / "float", quantization_config=torchq.TorchqConfig())
    torchq.to_compressed_tensors(qmodel, tmp_path / "int8")
    result = torchq.from_compressed_tensors(tmp_path / "int8")
    assert torch.equal(result(IDS).logits, qmodel(IDS).logits)
    qmodel.save_pretrained(tmp_path / "again")  # goes on working
    assert torch.equal(load(tmp_path / "again")(IDS).logits, qmodel(IDS).logits)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (torchq.QConfig(), r"got 'model.layers.0.self_attn.q_proj' is a QLinear; "),
        (torchq.QConfig(recipe="best"), "' has factors for the channels of its source"),
        (
            torchq.QConfig(dynamic=True, weight_bits=4, group_size=128),
            "'model.layers.0.self_attn.q_proj' has 64 inputs in groups of 128",
        ),
        (
            torchq.QConfig(dynamic=True, embedding_bits=8),
            "'model.embed_tokens' is a ",
        ),
    ],
)
@pytest.mark.parametrize("tied", rest_slow([False, True], False))
def test_layers_without_a_form(
    config: torchq.QConfig, told: str, tied: bool, tmp_path: Path
) -> None:
    data = [{"input_ids": IDS.roll(i, 1)} for i in range(4)]
    qmodel = torchq.quantize(llama(tied), None if config.dynamic else data, data[0], config)
    with pytest.raises(ValueError, match=told) as error:
        torchq.to_compressed_tensors(qmodel, tmp_path)
    assert str(error.value).startswith("torchq.to_compressed_tensors: model must have dynamic")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_one_group_beside_int8(tmp_path: Path) -> None:
    """A scale for each row, as int8 weights have."""
    kept = {"*": DYNAMIC, "model.layers.*.self_attn.*": torchq.QConfig(
        dynamic=True, weight_bits=4, group_size=64
    )}  # fmt: skip
    qmodel = torchq.quantize(llama(), None, {"input_ids": IDS}, DYNAMIC, kept)
    torchq.to_compressed_tensors(qmodel, tmp_path, "W4A8")
    again = torchq.from_compressed_tensors(tmp_path)
    layers = [m.model.layers[1].self_attn.k_proj.layer for m in (qmodel, again)]
    values = [layer.weight_values() for layer in layers]
    assert torch.equal(*values)


@torch.no_grad()
@pytest.mark.slow
def test_names_that_transformers_changes(tmp_path: Path) -> None:
    """Layers that stay float are ignored by the names of the model and by those of the files."""
    text = llama().config
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        image_size=32, patch_size=8,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=95, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    qmodel = torchq.quantize(model, None, {"input_ids": IDS}, DYNAMIC)  # no image is seen
    torchq.to_compressed_tensors(qmodel, tmp_path)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"} <= {*ignored}
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    projector = theirs.model.multi_modal_projector.linear_1.weight
    assert torch.equal(projector, model.model.multi_modal_projector.linear_1.weight)
    again = torchq.from_compressed_tensors(tmp_path)
    assert same_layers(qmodel, again, 15)


@pytest.mark.slow
def test_mixtures(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    for overrides in (None, {"*.experts": None}):
        qmodel = torchq.quantize(model, None, {"input_ids": IDS}, DYNAMIC, overrides)
        with pytest.raises(ValueError, match=r"mlp.experts' (is a QExperts|has experts)\."):
            torchq.to_compressed_tensors(qmodel, tmp_path)


@pytest.mark.slow
def test_paths(tmp_path: Path) -> None:
    qmodel = torchq.quantize(llama(), None, {"input_ids": IDS}, DYNAMIC)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="path must be a folder, got the file"):
        torchq.to_compressed_tensors(qmodel, tmp_path / "file")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "old"}}')
    torchq.to_compressed_tensors(qmodel, tmp_path)
    torchq.from_compressed_tensors(tmp_path)


def test_layers_that_hold_the_transpose(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    qmodel = torchq.quantize(model, None, {"input_ids": IDS}, DYNAMIC)
    with pytest.raises(ValueError, match=r"got 'transformer.h.0.attn.c_attn' is a Conv1D; "):
        torchq.to_compressed_tensors(qmodel, tmp_path)


def test_other_models(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be one of transformers, got Sequential"):
        torchq.to_compressed_tensors(nn.Sequential(), tmp_path)
    with pytest.raises(ValueError, match="other quantized ones, got none"):
        torchq.to_compressed_tensors(llama(), tmp_path)
    with pytest.raises(ValueError, match="scheme_4bit must be 'W4A16' or 'W4A8', got 'W8A8'"):
        torchq.to_compressed_tensors(llama(), tmp_path, "W8A8")  # type: ignore[arg-type]

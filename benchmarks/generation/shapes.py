# SPDX-License-Identifier: Apache-2.0
"""Shapes of small models with random weights, and the files that the contenders read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.models.data import Spectrograms

__all__ = [
    "SHAPES", "Prompt", "Shape", "Speech", "interleaved", "prompt", "words", "write_folder",
    "write_gguf",
]  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """The source of a generated text.

    Attributes:
        ids: its tokens.
        features: the audio in front of them, (1, bins, frames), where the model hears.
    """

    ids: list[int]
    features: Tensor | None = None


@dataclass(frozen=True)
class Shape:
    """A decoder of transformers.

    Attributes:
        kind: its ``model_type``; also the name that GGUF has for it.
        config: what its configuration gets.
        about: for the page.
        count: of tokens to generate.
    """

    kind: str
    about: str
    config: dict[str, Any]
    count: int = 32
    special: ClassVar[tuple[str, ...]] = ()
    """The last names of the vocabulary, with a meaning of their own."""

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def words(self) -> int:
        """The tokens in front of the special ones."""
        return self.vocabulary - len(self.special)

    @property
    def auto(self) -> Any:
        """The class of transformers that makes such models."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def make_config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.kind, tie_word_embeddings=True, max_position_embeddings=2048, rms_norm_eps=1e-6,
            bos_token_id=None, eos_token_id=None, pad_token_id=None, **self.config,
        )  # fmt: skip


@dataclass(frozen=True)
class Speech(Shape):
    """Whisper: an encoder of 30 seconds of audio, and a decoder that begins with four tokens."""

    count: int = 100
    special = (
        "<|endoftext|>", "<|nospeech|>",
        "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>",
    )  # fmt: skip

    @property
    def start(self) -> list[int]:
        return [*range(self.vocabulary - 4, self.vocabulary)]

    @property
    def auto(self) -> Any:
        from transformers import AutoModelForSpeechSeq2Seq

        return AutoModelForSpeechSeq2Seq

    def make_config(self) -> Any:
        from transformers import AutoConfig

        end = self.words
        return AutoConfig.for_model(
            self.kind, bos_token_id=end, eos_token_id=end, pad_token_id=end,
            decoder_start_token_id=self.start[0], suppress_tokens=[], begin_suppress_tokens=[],
            **self.config,
        )  # fmt: skip


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", "The shape of Qwen2.5-0.5B", {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    }),
    "smollm2-135m": Shape("llama", "The shape of SmolLM2-135M", {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    }),
    "tiny": Shape("llama", "Only to try the command", {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    }),
    "whisper-base": Speech("whisper", "The shape of Whisper base", {
        "vocab_size": 51_865, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
        "encoder_attention_heads": 8, "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
    }),
    "tiny-whisper": Speech("whisper", "Only to try the command", {
        "vocab_size": 512, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    }),
}  # fmt: skip


def prompt(shape: Shape, length: int, seed: int = 0) -> Prompt:
    """Return random tokens behind the 256 of the single bytes; for speech, random audio.

    Another seed for each call, since some contenders keep what they know of a prompt.
    """
    generator = torch.Generator().manual_seed(1000 * seed + length)
    if isinstance(shape, Speech):
        return Prompt(shape.start, Spectrograms(bins=80, frames=3000)(1, generator))
    return Prompt(torch.randint(256, shape.words, (length,), generator=generator).tolist())


def write_folder(shape: Shape, folder: Path) -> None:
    """Write a model of transformers with random bfloat16 weights, and a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = shape.auto.from_config(shape.make_config())
    model.bfloat16().save_pretrained(folder)
    (folder / "vocabulary.json").write_text(json.dumps(_tokenizer(shape.words)))
    first = words(256)[0]  # for each role that a converter asks for
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "vocabulary.json"),
        **{f"{role}_token": first for role in ("bos", "eos", "unk", "pad")},
        additional_special_tokens=[*shape.special],
    ).save_pretrained(folder)


def words(count: int) -> list[str]:
    """Return the 256 bytes as GPT-2 writes them, then made words of them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    bytes_ = [chr(byte if byte in kept else next(others)) for byte in range(256)]
    pairs = (a + b for a in bytes_ for b in bytes_)
    threes = (a + b + c for a in bytes_[97:123] for b in bytes_ for c in bytes_)
    made = chain(pairs, threes)
    return [*bytes_, *(next(made) for _ in range(count - 256))]


def _merges(names: list[str]) -> list[tuple[str, str]]:
    return [(name[:-1], name[-1]) for name in names[256:]]


def _tokenizer(count: int) -> dict[str, Any]:
    names = words(count)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocabulary = {name: i for i, name in enumerate(names)}
    return {
        **{"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None},
        **{"pre_tokenizer": level, "decoder": level, "truncation": None, "padding": None},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [*map(list, _merges(names))]},
    }


def write_gguf(shape: Shape, folder: Path, path: Path, bits: int) -> None:
    """Write the folder's weights for llama.cpp: matrices as Q8_0 or Q4_0, the others as float32.

    The table of embeddings, which is the last layer, too, has 8 bits in both.
    """
    import gguf

    c = shape.config
    writer = gguf.GGUFWriter(str(path), shape.kind)
    head = c["hidden_size"] // c["num_attention_heads"]
    writer.add_context_length(2048)
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(c["vocab_size"])
    writer.add_file_type(7 if bits == 8 else 2)
    names = words(c["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(names))
    writer.add_token_merges([" ".join(merge) for merge in _merges(names)])
    writer.add_add_bos_token(False)
    for name, weight in _gguf_tensors(shape, folder):
        if weight.ndim < 2:
            writer.add_tensor(name, weight)
            continue
        own = bits if name != "token_embd.weight" else 8
        form = gguf.GGMLQuantizationType.Q8_0 if own == 8 else gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(weight, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def _gguf_tensors(shape: Shape, folder: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    from safetensors.torch import load_file

    heads = {"q": shape.config["num_attention_heads"], "k": shape.config["num_key_value_heads"]}
    for key, weight in load_file(folder / "model.safetensors").items():
        if key in _ENDS:
            yield _ENDS[key], weight.float().numpy()
        elif key.startswith("model.layers."):
            _, _, layer, rest = key.split(".", 3)
            old, new = next(pair for pair in _LAYER.items() if rest.startswith(pair[0]))
            kind = rest.split(".")[1][0]
            if shape.kind == "llama" and "self_attn" in rest and kind in heads:
                weight = interleaved(weight, heads[kind])
            yield f"blk.{layer}.{rest.replace(old, new)}", weight.float().numpy()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return rows of a llama's query or key in the order of llama.cpp: pairs that rotate adjoin."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)

# SPDX-License-Identifier: Apache-2.0
"""Networks over time: a causal audio network, an LSTM tagger, and models of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalBlock(nn.Module):
    """A gated, dilated filter over the past, added to what came in."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.filter = nn.Conv1d(channels, 2 * channels, 3, dilation=dilation)
        self.mix = nn.Conv1d(channels, channels, 1)
        self.past = 2 * dilation

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.filter(F.pad(x, (self.past, 0))).chunk(2, dim=1)
        return x + self.mix(torch.tanh(signal) * torch.sigmoid(gate))


class AudioNet(nn.Module):
    """Labels each moment of a waveform from what came before it."""

    def __init__(self, width: int = 64, blocks: int = 8, classes: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 8, stride=4)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.Sequential(*(CausalBlock(width, 1 << (i % 8)) for i in range(blocks)))
        self.hidden, self.head = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(2 * width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(F.pad(x, (4, 0)))))
        x = F.leaky_relu(self.hidden(self.blocks(x)), 0.1)
        return self.head(x)


class Tagger(nn.Module):
    """A label for each word, from both directions."""

    def __init__(self, words: int = 5000, width: int = 128, tags: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, 2 * width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4 * width, tags)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        return self.head(states)


class Field(nn.Module):
    """One tensor of the several results of a model of transformers."""

    def __init__(self, model: nn.Module, field: str) -> None:
        super().__init__()
        self.model, self.field = model, field

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self.model(x), self.field)
        return result


class Masked(Field):
    """A model of transformers that gets a mask: 0 for the words that are 0."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0).long()
        if x.is_meta:  # it has no values, which transformers asks of a mask of two dimensions
            mask = mask.bool()[:, None, None].expand(-1, 1, x.shape[1], -1)
        result: Tensor = getattr(self.model(x, attention_mask=mask), self.field)
        return result


def bert_base(field: type[Field] = Field, **sizes: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    return field(BertModel(BertConfig(**sizes)), "last_hidden_state")


def smollm(**sizes: Any) -> nn.Module:
    """The shape of SmolLM-135M, for a prompt: its keys and values are not kept."""
    from transformers import LlamaConfig, LlamaModel

    shape = {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    }  # fmt: skip
    config = LlamaConfig(use_cache=False, **{**shape, **sizes})
    return Masked(LlamaModel(config), "last_hidden_state")


def whisper_encoder(**sizes: Any) -> nn.Module:
    """The shape of Whisper's tiny."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    shape = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6}
    config = WhisperConfig(**{**shape, "encoder_ffn_dim": 1536, **sizes})
    return Field(WhisperEncoder(config), "last_hidden_state")


def vit_b_16(**sizes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes.setdefault("num_labels", 1000)
    return Field(ViTForImageClassification(ViTConfig(**sizes)), "logits")

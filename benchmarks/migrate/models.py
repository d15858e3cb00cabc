# SPDX-License-Identifier: Apache-2.0
"""The models that torch.ao's users have: three of the zoo, and three more."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import NETWORKS, Network
from benchmarks.models.data import Words
from benchmarks.models.sequences import Field

__all__ = ["MODELS"]


class Speech(nn.Module):
    """The encoder of a text-to-speech model: convolutions over phonemes, an LSTM, mel frames."""

    def __init__(self, phonemes: int = 200, width: int = 256, mels: int = 80) -> None:
        super().__init__()
        self.embedding = nn.Embedding(phonemes, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3))
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, mels)

    def forward(self, phonemes: Tensor) -> Tensor:
        x = self.embedding(phonemes).transpose(1, 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        states, _ = self.lstm(x.transpose(1, 2))
        return self.head(states)


class Recommender(nn.Module):
    """Eight bags of sixteen ids from one table, and a network on top."""

    def __init__(self, ids: int = 100_000, width: int = 64, bags: int = 8) -> None:
        super().__init__()
        self.bags = bags
        self.table = nn.EmbeddingBag(ids, width, mode="sum")
        self.network = nn.Sequential(
            *(nn.Linear(bags * width, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU()),
            nn.Linear(64, 1),
        )

    def forward(self, ids: Tensor) -> Tensor:
        features = self.table(ids.reshape(len(ids) * self.bags, -1))
        return self.network(features.reshape(len(ids), -1))


def qwen3(layers: int = 4, **sizes: Any) -> nn.Module:
    """Layers with the shapes of Qwen3-0.6B; its table of 151 936 words would be float in all."""
    from transformers import Qwen3Config, Qwen3Model

    shapes = {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1000,
    }  # fmt: skip
    config = Qwen3Config(num_hidden_layers=layers, use_cache=False, **{**shapes, **sizes})
    return Field(Qwen3Model(config), "last_hidden_state")


_TINY_QWEN3 = {
    "layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100,
}  # fmt: skip

MODELS = {
    "LSTM tagger": NETWORKS["lstm_tagger"],
    "text to speech": Network(
        Speech, Words(64, 200), {"phonemes": 50, "width": 8}, Words(12, 50), dynamic=True
    ),
    "BERT base, 128 tokens": NETWORKS["bert_base"],
    "Qwen3-0.6B, 4 of 28 layers, 64 tokens": Network(
        qwen3, Words(64, 1000), _TINY_QWEN3, Words(12, 100),
        keep_weights=True, requires="transformers", dynamic=True,
    ),
    "recommender": Network(
        Recommender, Words(128, 100_000), {"ids": 100, "width": 8}, Words(128, 100), dynamic=True
    ),
    "ResNet-18": NETWORKS["resnet18"],
}  # fmt: skip
"""Title -> model; ``dynamic`` ones are quantized dynamically by everyone, others statically."""

# SPDX-License-Identifier: Apache-2.0
"""Networks over time: a causal audio network, an LSTM tagger, and transformers' BERT and ViT."""

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


def bert_base(**sizes: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    return Field(BertModel(BertConfig(**sizes)), "last_hidden_state")


def vit_b_16(**sizes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes.setdefault("num_labels", 1000)
    return Field(ViTForImageClassification(ViTConfig(**sizes)), "logits")

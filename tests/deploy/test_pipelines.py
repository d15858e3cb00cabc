# SPDX-License-Identifier: Apache-2.0
"""Converted models in pipelines of transformers, and in sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import calls
from torch import nn

import torchq

transformers = pytest.importorskip("transformers", minversion="5.24")
pytestmark = pytest.mark.slow  # each converts a model

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64
}  # fmt: skip
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "runs", "sleeps", "far"]
TEXTS = ["a cat [MASK] far", "[MASK] dog sleeps", "cat dog [MASK] a runs far"]
Task = tuple[Any, dict[str, Any], list[Any]]
"""The float model, what a pipeline takes beside it, and inputs."""


def bert(cls: str, folder: Path) -> Task:
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    words = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    config = transformers.BertConfig(vocab_size=len(WORDS), **SIZES)
    return getattr(transformers, cls)(config), {"tokenizer": words}, TEXTS


def vit(folder: Path) -> Task:
    pillow = pytest.importorskip("PIL.Image")
    config = transformers.ViTConfig(image_size=32, patch_size=16, num_labels=5, **SIZES)
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    pixels = torch.randint(0, 256, (4, 40, 50, 3), dtype=torch.uint8).numpy()
    model = transformers.ViTForImageClassification(config)
    return model, {"image_processor": processor}, [pillow.fromarray(p) for p in pixels]


def wav2vec2(folder: Path) -> Task:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
    config = transformers.Wav2Vec2Config(
        vocab_size=len(letters), conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, **SIZES,
    )  # fmt: skip
    parts = {
        "tokenizer": transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")),
        "feature_extractor": transformers.Wav2Vec2FeatureExtractor(),
    }
    model = transformers.Wav2Vec2ForCTC(config)
    return model, parts, [torch.randn(n).numpy() for n in (1600, 2400)]


TASKS: dict[str, Callable[[Path], Task]] = {
    "token-classification": lambda folder: bert("BertForTokenClassification", folder),
    "text-classification": lambda folder: bert("BertForSequenceClassification", folder),
    "feature-extraction": lambda folder: bert("BertModel", folder),
    "fill-mask": lambda folder: bert("BertForMaskedLM", folder),
    "image-classification": vit,
    "automatic-speech-recognition": wav2vec2,
}


def randomized(model: Any) -> Any:
    """The model with weights of one size, so that every layer matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
    return model.eval()


def calls_of(model: nn.Module, run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The keyword arguments of the calls of a model meanwhile."""
    seen: list[dict[str, Any]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(dict(kwargs)), with_kwargs=True
    )
    run()
    handle.remove()
    return seen


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", TASKS)
def test_pipelines(name: str, dynamic: bool, tmp_path: Path) -> None:
    model, parts, inputs = TASKS[name](tmp_path)
    randomized(model)
    run = transformers.pipeline(name, model=model, device="cpu", **parts)
    expected: list[Any] = []
    data = calls_of(model, lambda: expected.extend(run(inputs)))
    results = [model(**batch)[0] for batch in data]
    converted = torchq.quantize(model, data, config=torchq.QConfig(dynamic=dynamic))
    run = transformers.pipeline(name, model=converted, device="cpu", **parts)
    assert type(run.model) is type(model)
    again = calls_of(run.model, lambda: compare(expected, run(inputs)))
    assert len(again) == len(data)
    for batch, result in zip(data, results, strict=True):
        assert torchq.sqnr(result, converted(**batch)[0]) > 20
    assert calls(converted) == (2 * len(data), 0)


def compare(expected: Any, found: Any) -> None:
    """Assert that results have the same parts, and scores that are near."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        expected, found = list(expected.values()), list(found.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(expected, found, strict=True):
            compare(a, b)


def test_transformers_recipe() -> None:
    """The graph runs, as docs/tutorials/bert.md converts a BertModel."""
    config = transformers.BertConfig(vocab_size=len(WORDS), **SIZES)
    model = randomized(transformers.BertModel(config, add_pooling_layer=False))
    ids = torch.randint(len(WORDS), (4, 7))
    mask = (torch.arange(7) < torch.tensor([7, 5, 3, 6])[:, None]).long()
    given = {"input_ids": ids, "attention_mask": mask}
    dynamic = torchq.QConfig(dynamic=True)
    converted = torchq.quantize(model, example_inputs=given, config=dynamic, strict=True)
    expected, found = model(**given), converted(**given)
    assert type(found) is type(expected) and type(converted) is type(model)
    assert torchq.sqnr(expected.last_hidden_state, found.last_hidden_state) > 20
    assert calls(converted) == (1, 0)


@pytest.mark.parametrize("kind", [lambda features: features, dict], ids=["features", "dict"])
def test_sentence_transformers_recipe(kind: Callable[[Any], Any], tmp_path: Path) -> None:
    """The graph runs, as docs/howto/transformers.md has it: modules write to a BatchEncoding."""
    sentences = pytest.importorskip("sentence_transformers")
    model, parts, texts = bert("BertModel", tmp_path)
    randomized(model).save_pretrained(tmp_path)
    parts["tokenizer"].save_pretrained(tmp_path)
    encoder = sentences.SentenceTransformer(str(tmp_path), device="cpu").eval()
    expected = encoder.encode(texts, convert_to_tensor=True)
    data = [(kind(encoder.preprocess([text])),) for text in texts]
    converted = torchq.quantize(encoder, data)
    assert type(converted) is type(encoder)
    assert any(row.quantized for row in torchq.explain(converted).rows)
    found = converted.encode(texts, convert_to_tensor=True)
    assert not torch.equal(expected, found)
    graphs = torchq.explain(converted).graphs
    assert graphs and all((graph.graph_calls, graph.own_calls) == (1, 0) for graph in graphs)
    assert torchq.sqnr(expected, found) > 20

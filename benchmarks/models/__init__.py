# SPDX-License-Identifier: Apache-2.0
"""The zoo: well-known architectures as plain modules, with random weights and synthetic inputs.

    network = NETWORKS["resnet50"]
    model = network.build()
    batches = network.calibration()

The same weights, statistics and inputs come out in every run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.models import branched, convnext, mobile, pixels, resnet, sequences
from benchmarks.models.data import (
    Clips,
    Images,
    Padded,
    Source,
    Spectrograms,
    Waveforms,
    Words,
)
from benchmarks.models.weights import randomize

__all__ = ["NETWORKS", "Network"]

_WEIGHTS, _STATISTICS, _CALIBRATION, _EVALUATION = range(4)  # seeds


@dataclass(frozen=True)
class Network:
    """A network and its inputs.

    Attributes:
        make: constructor; it draws weights from torch's global generator.
        source: what inputs look like.
        small: arguments of a narrow variant with few layers.
        small_source: its inputs.
        parameters: the published number, None for the zoo's own architectures.
        macs: published multiply-adds of convolutions and linears for one input of ``source``, in
            units of 10^9.
        keep_weights: whether the constructor's weights are used, as for transformers.
        requires: package that must be installed.
        dynamic: whether torch.ao can only quantize it dynamically: it cannot trace the code, or
            has no static form of its layers.
        batch: inputs of a call that is compared or timed; ``macs`` are still those of one input.
    """

    make: Callable[..., nn.Module]
    source: Source
    small: Mapping[str, Any]
    small_source: Source
    parameters: int | None = None
    macs: float | None = None
    keep_weights: bool = False
    requires: str = "torch"
    dynamic: bool = False
    batch: int = 1

    @property
    def available(self) -> bool:
        return importlib.util.find_spec(self.requires) is not None

    def build(self, small: bool = False) -> nn.Module:
        """The float model in eval mode."""
        with torch.random.fork_rng(devices=[]), _one_thread():  # sums depend on the threads
            torch.manual_seed(_WEIGHTS)
            model = self.make(**(self.small if small else {}))
            if self.keep_weights:
                return model.eval()
            return randomize(model, self.inputs(16, _STATISTICS, small))

    def inputs(self, count: int, seed: int = _EVALUATION, small: bool = False) -> Tensor:
        """A batch of inputs; the default seed is that of the evaluation."""
        source = self.small_source if small else self.source
        with _one_thread():
            return source(count, Generator().manual_seed(seed))

    def calibration(self, small: bool = False) -> list[Tensor]:
        """Sixteen inputs, in batches of 4."""
        return list(self.inputs(16, _CALIBRATION, small).split(4))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_PHOTO, _THUMBNAIL = Images(224), Images(64)


def _images(make: Callable[..., nn.Module], parameters: int, macs: float, **small: Any) -> Network:
    """A classifier of 224 x 224 images."""
    return Network(make, _PHOTO, {"classes": 10, **small}, _THUMBNAIL, parameters, macs)


_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TINY_VIT, _TINY_BERT = {**_TINY, "image_size": 64, "num_labels": 10}, {**_TINY, "vocab_size": 100}
_TINY_WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "max_source_positions": 50,
}
_HUGGING_FACE: dict[str, Any] = {"requires": "transformers", "keep_weights": True, "dynamic": True}

NETWORKS = {
    "resnet18": _images(resnet.resnet18, 11_689_512, 1.814, width=8),
    "resnet50": _images(resnet.resnet50, 25_557_032, 4.089, width=8, depths=(1, 1, 2, 1)),
    "mobilenet_v2": _images(mobile.mobilenet_v2, 3_504_872, 0.301, scale=0.25, rows=4),
    "mobilenet_v3": _images(mobile.mobilenet_v3, 5_483_032, 0.217, scale=0.25, rows=8),
    "efficientnet_b0": _images(mobile.efficientnet_b0, 5_288_548, 0.386, scale=0.25, rows=4),
    "squeezenet": _images(mobile.SqueezeNet, 1_235_496, 0.349, width=4),
    "densenet121": _images(branched.DenseNet, 7_978_856, 2.834, depths=(2, 2, 2), growth=8),
    "inception_v3": Network(
        branched.inception_v3,
        Images(299),
        {"classes": 10, "width": 2},
        Images(107),
        parameters=23_834_568,
        macs=5.713,
    ),
    "shufflenet_v2": _images(
        mobile.shufflenet_v2, 2_278_604, 0.145, channels=(8, 16, 32, 64, 64), depths=(2, 2, 1)
    ),
    "regnet_x_400mf": _images(
        resnet.regnet_x_400mf, 5_495_976, 0.414, depths=(1, 1, 2), widths=(8, 16, 32), group_width=8
    ),
    "convnext_t": _images(
        convnext.ConvNext, 28_589_128, 4.456, depths=(1, 1, 2, 1), widths=(8, 16, 32, 64)
    ),
    "unet": Network(pixels.UNet, Images(128), {"width": 4}, Images(32), parameters=31_037_698),
    "detector": Network(
        pixels.Detector,
        Images(320),
        {"width": 4, "classes": 3},
        _THUMBNAIL,
        parameters=1_872_157,
        macs=0.56,
    ),
    "audio": Network(
        sequences.AudioNet, Waveforms(16_000), {"width": 8, "blocks": 3}, Waveforms(500)
    ),
    "video": Network(
        resnet.r3d18,
        Clips(8, 112),
        {"width": 4, "classes": 10},
        Clips(4, 32),
        parameters=33_371_472,
    ),
    "lstm_tagger": Network(
        sequences.Tagger, Words(64, 5000), {"words": 100, "width": 8}, Words(12, 100), dynamic=True
    ),
    "vit_b_16": Network(
        sequences.vit_b_16,
        _PHOTO,
        _TINY_VIT,
        _THUMBNAIL,
        parameters=86_567_656,
        macs=16.848,
        **_HUGGING_FACE,
    ),
    "bert_base": Network(
        sequences.bert_base,
        Words(128, 30_522),
        _TINY_BERT,
        Words(12, 100),
        parameters=109_482_240,
        macs=10.873,
        **_HUGGING_FACE,
    ),
    "bert_base_padded": Network(
        functools.partial(sequences.bert_base, sequences.Masked),
        Padded(128, 30_522),
        _TINY_BERT,
        Padded(16, 100),
        parameters=109_482_240,
        macs=10.873,
        batch=4,
        **_HUGGING_FACE,
    ),
    "whisper_encoder": Network(
        sequences.whisper_encoder,
        Spectrograms(80, 3000),
        _TINY_WHISPER,
        Spectrograms(80, 100),
        **_HUGGING_FACE,
    ),
    "smollm_prompt": Network(
        sequences.smollm,
        Padded(128, 49_152, left=True),
        {**_TINY_BERT, "num_key_value_heads": 1},
        Padded(16, 100, left=True),
        parameters=134_515_008,
        batch=4,
        **_HUGGING_FACE,
    ),
}

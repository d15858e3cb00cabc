# SPDX-License-Identifier: Apache-2.0
"""PaddleOCR's classifier of text upside down, a MobileNetV3 of 0.35, from rapidocr-onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchq
from benchmarks.accuracy.sentences import sentences
from benchmarks.accuracy.task import Task, changed, package, seeded

_FILE = "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
_HEIGHT, _WIDTH = 48, 192
_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSansMono")
# Of each block: kernel, stride of rows, squeeze and excitation, hardswish.
_BLOCKS = (
    (3, 2, True, False), (3, 2, False, False), (3, 1, False, False), (5, 2, True, True),
    (5, 1, True, True), (5, 1, True, True), (5, 1, True, True), (5, 1, True, True),
    (5, 2, True, True), (5, 1, True, True), (5, 1, True, True),
)  # fmt: skip


class _ConvNorm(nn.Sequential):
    """A convolution without bias and its batch norm, from the file's tensors."""

    def __init__(self, weights: dict[str, Tensor], name: str, *window: Any) -> None:
        weight = weights[f"{name}_weights"]
        channels, kernel = len(weight), weight.shape[-1]
        groups = channels if weight.shape[1] == 1 and channels > 1 else 1
        conv = nn.Conv2d(
            weight.shape[1] * groups, channels, kernel, *window, kernel // 2, groups=groups,
            bias=False,
        )  # fmt: skip
        conv.weight.data = weight
        norm = nn.BatchNorm2d(channels)
        parts = {"weight": "scale", "bias": "offset", "running_mean": "mean",
                 "running_var": "variance"}  # fmt: skip
        norm.load_state_dict({k: weights[f"{name}_bn_{v}"] for k, v in parts.items()}, strict=False)
        super().__init__(conv, norm)


class _Excite(nn.Module):
    """Squeeze and excitation; Paddle's hard sigmoid has a slope of 1/5."""

    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        super().__init__()
        for part in (1, 2):
            weight = weights[f"{name}_{part}_weights"]
            conv = nn.Conv2d(weight.shape[1], len(weight), 1)
            conv.weight.data, conv.bias.data = weight, weights[f"{name}_{part}_offset"]
            self.add_module(f"conv{part}", conv)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.conv2(F.relu(self.conv1(F.adaptive_avg_pool2d(x, 1))))
        return x * (0.2 * factor + 0.5).clamp(0, 1)


class _Block(nn.Module):
    """An inverted residual block."""

    def __init__(self, weights: dict[str, Tensor], index: int, stride: int, excite: bool,
                 hard: bool) -> None:  # fmt: skip
        super().__init__()
        name = f"conv{index}"
        self.expand = _ConvNorm(weights, f"{name}_expand", 1)
        self.depthwise = _ConvNorm(weights, f"{name}_depthwise", (stride, 1))
        self.excite = _Excite(weights, f"{name}_se") if excite else nn.Identity()
        self.linear = _ConvNorm(weights, f"{name}_linear", 1)
        self.act = nn.Hardswish() if hard else nn.ReLU()
        ends = self.linear[0].out_channels, self.expand[0].in_channels
        self.has_skip = stride == 1 and ends[0] == ends[1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.excite(self.act(self.depthwise(self.act(self.expand(x))))))
        return x + y if self.has_skip else y


class Orientation(nn.Module):
    """Images of lines of text to two logits: upright, or turned by 180 degrees."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.first = _ConvNorm(weights, "conv1", 2)
        self.blocks = nn.Sequential(
            *(_Block(weights, i, *block[1:]) for i, block in enumerate(_BLOCKS, 2))
        )
        self.last = _ConvNorm(weights, "conv_last", 1)
        self.head = nn.Linear(weights["fc_0.w_0"].shape[0], 2)
        self.head.weight.data, self.head.bias.data = weights["fc_0.w_0"].t(), weights["fc_0.b_0"]

    def forward(self, images: Tensor) -> Tensor:
        x = F.hardswish(self.last(self.blocks(F.hardswish(self.first(images)))))
        return self.head(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1))


def load() -> Task:
    path = package("rapidocr_onnxruntime", "rapidocr-onnxruntime") / _FILE
    model = Orientation(_weights(path)).eval().requires_grad_(False)
    calibration, test = images(64, 1), images(1200, 2)
    _check(model, test[:50], path)
    return Task(
        name="rapidocr, orientation of text",
        about=f"{len(calibration)} rendered lines of text calibrate, {len(test)} measure: half are "
        "upside down, turned a little, with noise and low contrast. SQNR is that of the logits.",
        metric="decisions that changed",
        model=model,
        calibration=calibration,
        test=test,
        score=lambda expected, found: changed(expected.argmax(1), found.argmax(1)),
        timed=test[0],
    )


def _weights(path: Path) -> dict[str, Tensor]:
    import onnx
    from onnx import numpy_helper

    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "Constant"]
    arrays = {node.output[0]: numpy_helper.to_array(node.attribute[0].t) for node in nodes}
    return {name: torch.tensor(array) for name, array in arrays.items() if array.dtype == "float32"}


def images(count: int, seed: int) -> list[Tensor]:
    """Return lines of text as the classifier takes them, float32 ``[1, 3, 48, 192]``."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), 30) for name in _FONTS]
    generator = seeded(seed)
    found = []
    for i, text in enumerate(sentences(count, seed)):
        length, angle, contrast, noise, light = torch.rand(5, generator=generator).tolist()
        picture = Image.new("L", (_WIDTH, _HEIGHT), 0)
        words = text[: 2 + int(12 * length)]
        ImageDraw.Draw(picture).text((4, 6), words, 255, fonts[i % len(fonts)])
        picture = picture.rotate(12 * angle - 6 + 180 * (i % 2), Image.Resampling.BILINEAR)
        ink = torch.tensor(list(picture.getdata()), dtype=torch.float32) / 255
        pixels = light + (0.05 + 0.6 * contrast) * (1 if light < 0.5 else -1) * ink
        pixels = pixels + 0.15 * noise * torch.randn(ink.numel(), generator=generator)
        shaped = pixels.clamp(0, 1).mul(255).round().div(255).view(1, 1, _HEIGHT, _WIDTH)
        found.append((2 * shaped - 1).expand(1, 3, -1, -1).contiguous())
    return found


@torch.inference_mode()
def _check(model: nn.Module, inputs: list[Tensor], path: Path) -> None:
    """Raise RuntimeError where ONNX Runtime computes something else from the published file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes())
    theirs = torch.cat([torch.from_numpy(session.run(None, {"x": x.numpy()})[0]) for x in inputs])
    ours = torch.cat([model(x) for x in inputs]).softmax(1)
    if (sqnr := torchq.sqnr(theirs, ours)) < 80:
        raise RuntimeError(f"the classifier is {sqnr:.0f} dB from the published one")

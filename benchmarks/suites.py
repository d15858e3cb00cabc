# SPDX-License-Identifier: Apache-2.0
"""The layers that are timed: named shapes, each with its number of occurrences in its network.

Networks are at 224 x 224 and batch 1, BERT-base at 128 tokens. Every layer has a ReLU, or the ReLU6
of MobileNet-V2, and a uint8 destination, also where its network has neither, so that layers of one
suite compare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["SUITES", "Conv", "Layer", "Linear", "Suite", "total_macs"]


@dataclass(frozen=True)
class Linear:
    """A fully connected layer on ``rows`` rows."""

    rows: int
    inputs: int
    outputs: int
    residual = False
    relu6 = False

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.inputs}->{self.outputs}"

    @property
    def src_shape(self) -> tuple[int, ...]:
        return (self.rows, self.inputs)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.outputs, self.inputs)

    @property
    def dst_shape(self) -> tuple[int, ...]:
        return (self.rows, self.outputs)

    @property
    def macs(self) -> int:
        return math.prod(self.dst_shape) * self.inputs


@dataclass(frozen=True)
class Conv:
    """A square 2-d convolution whose padding keeps the size at stride 1.

    With ``residual`` it adds a uint8 tensor of the destination's shape before the ReLU.
    """

    size: int  # of the source
    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    residual: bool = False
    relu6: bool = False  # in place of the ReLU

    @property
    def depthwise(self) -> bool:
        return self.groups == self.inputs == self.outputs

    @property
    def name(self) -> str:
        words = [
            "dw" if self.depthwise else "",
            f"{self.kernel}x{self.kernel}",
            f"s{self.stride}" if self.stride > 1 else "",
            f"g{self.groups}" if self.groups > 1 and not self.depthwise else "",
            str(self.inputs) if self.groups > 1 else f"{self.inputs}->{self.outputs}",
            "+ sum" if self.residual else "",
        ]
        return " ".join(word for word in words if word) + f", {self.size}"

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def src_shape(self) -> tuple[int, ...]:
        return (1, self.inputs, self.size, self.size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.outputs, self.inputs // self.groups, self.kernel, self.kernel)

    @property
    def dst_shape(self) -> tuple[int, ...]:
        size = (self.size + 2 * self.padding - self.kernel) // self.stride + 1
        return (1, self.outputs, size, size)

    @property
    def macs(self) -> int:
        """Nominal: taps in the padding count."""
        return math.prod(self.dst_shape) * math.prod(self.weight_shape[1:])


Layer = Linear | Conv
Suite = Counter[Layer]


def total_macs(suite: Suite) -> int:
    return sum(count * layer.macs for layer, count in suite.items())


def _depthwise(size: int, channels: int, kernel: int, stride: int) -> Conv:
    return Conv(size, channels, channels, kernel, stride, groups=channels)


def _resnet50() -> Iterator[Layer]:
    """v1.5: the 3x3 of a stage's first block has the stride. The last 1x1 adds the shortcut."""
    yield Conv(224, 3, 64, kernel=7, stride=2)
    size, channels = 56, 64
    for width, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            yield Conv(size, channels, width)
            yield Conv(size, width, width, kernel=3, stride=stride)
            if block == 0:
                yield Conv(size, channels, 4 * width, stride=stride)
            size, channels = size // stride, 4 * width
            yield Conv(size, width, channels, residual=True)


def _mobilenet_v2() -> Iterator[Conv]:
    """The convolutions; the shortcuts' additions are left out."""
    yield Conv(224, 3, 32, kernel=3, stride=2)
    size, channels = 112, 32
    stages = (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    )
    for expansion, outputs, blocks, first_stride in stages:
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            width = expansion * channels
            if expansion > 1:
                yield Conv(size, channels, width)
            yield _depthwise(size, width, 3, stride)
            size, channels = size // stride, outputs
            yield Conv(size, width, channels)
    yield Conv(size, channels, 1280)


def _efficientnet_b0_depthwise() -> Iterator[Conv]:
    size, channels = 112, 32
    stages = (
        *((1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2)),
        *((6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1)),
    )
    for expansion, outputs, blocks, kernel, first_stride in stages:
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            yield _depthwise(size, expansion * channels, kernel, stride)
            size, channels = size // stride, outputs


def _depthwise_suite() -> Suite:
    """The depthwise layers of MobileNet-V2 and EfficientNet-B0, by kernel and stride, with ReLU."""
    layers = [*_mobilenet_v2(), *_efficientnet_b0_depthwise()]
    depthwise = [layer for layer in layers if layer.depthwise]
    depthwise.sort(key=lambda layer: (layer.kernel, layer.stride))
    return Counter[Layer](depthwise)


def _linear() -> Iterator[Layer]:
    for inputs, outputs in ((768, 768), (2048, 1000), (4096, 4096)):
        for rows in (1, 2, 4, 8, 16, 128):
            yield Linear(rows, inputs, outputs)
    yield Linear(1024, 1024, 1024)
    yield Linear(2048, 2048, 2048)


def _grouped() -> Iterator[Layer]:
    """The 3x3 of ResNeXt: 32 groups of 4, 8, 16 and 32 channels."""
    for channels in (4, 8, 16, 32):
        for size in (56, 28, 14):
            yield Conv(size, 32 * channels, 32 * channels, kernel=3, groups=32)


def _small() -> Iterator[Layer]:
    """Yields layers whose call costs as much as their work."""
    yield Linear(4, 64, 64)
    yield Linear(1, 768, 768)
    yield Linear(16, 256, 256)
    yield Conv(7, 16, 16)
    yield Conv(7, 16, 16, kernel=3)
    yield _depthwise(7, 16, 3, 1)


SUITES: dict[str, Suite] = {
    "resnet50": Counter(_resnet50()),
    "mobilenet_v2": Counter(replace(layer, relu6=True) for layer in _mobilenet_v2()),
    "bert_base": Counter(
        {Linear(128, 768, 768): 48, Linear(128, 768, 3072): 12, Linear(128, 3072, 768): 12}
    ),
    "linear": Counter(_linear()),
    "depthwise": _depthwise_suite(),
    "grouped": Counter(_grouped()),
    "stem": Counter([Conv(224, 3, 64, kernel=7, stride=2), Conv(224, 3, 32, kernel=3, stride=2)]),
    "small": Counter(_small()),
}

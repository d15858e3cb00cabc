# SPDX-License-Identifier: Apache-2.0
"""Layers from the lines that ``TORCHQ_VERBOSE=1`` prints, with random full-range data.

A line tells shapes, dtypes, geometry and attributes, not values: scales and bias are such that the
results fill dst's range, zero points lie off the middle.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.competitors import Competitor
from benchmarks.onednn import Peer, RefusedError
from torchq import Attr
from torchq.attributes.post_op import CHANNEL_MASKS
from torchq.functional.folding import fold
from torchq.functional.packing import pack_conv, pack_linear
from torchq.runtime.library import dtype_code

__all__ = ["LoggedCall", "LoggedLayer", "read_lines"]

_SRC_SCALE = 0.02
_DTYPES = {"uint8": torch.uint8, "int8": torch.int8, "int32": torch.int32, "float32": torch.float32}
_NAMES = {"uint8": "u8", "int8": "s8", "int32": "s32", "float32": "f32"}
_LINE = re.compile(r"torchq,exec,(?P<op>\w+),(?P<tensors>.*? -> \w+\[[\d, ]*\]) ?(?P<rest>.*)")
_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")
_REST = re.compile(
    r"(?:geometry:\[(?P<geometry>[\d, ]+)\] ?)?(?:table:(?P<table>\w+) ?)?"
    r"(?P<attr>[^,]*),\w+:\w+,[\d.e+-]+"
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


@dataclass(frozen=True)
class LoggedLayer:
    """A linear layer or convolution as a line describes it; ``tensors`` are sources, then dst."""

    op: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    geometry: tuple[int, ...]
    attr: str
    table: str = ""  # dtype of the values that dst's are replaced by

    @classmethod
    def parse(cls, line: str) -> LoggedLayer:
        """The layer of one line.

        Raises:
            RuntimeError: it is no such line, or of another op.
        """
        found = _LINE.fullmatch(line.strip())
        rest = found and _REST.fullmatch(found["rest"])
        if not found or not rest:
            raise RuntimeError(
                f"--line must be a line that TORCHQ_VERBOSE=1 prints, or a file of them, got "
                f"{line!r}."
            )
        if found["op"] not in ("linear", "conv"):
            raise RuntimeError(
                f"--line can repeat linear and conv, got {found['op']}. Time the call itself with "
                "torchq.profile."
            )
        tensors = tuple((dtype, _numbers(n)) for dtype, n in _TENSOR.findall(found["tensors"]))
        geometry = _numbers(rest["geometry"] or "")
        layer = cls(found["op"], tensors, geometry, rest["attr"].strip(), rest["table"] or "")
        if not layer._fits():
            raise RuntimeError(f"--line: shapes, dtypes or geometry do not fit in {line!r}.")
        try:
            Attr.parse(layer.attr)
        except ValueError as error:
            raise RuntimeError(f"--line: {error}") from error
        return layer

    def _fits(self) -> bool:
        """Returns True for a layer; the op checks the rest."""
        if len(self.tensors) < 2 or any(dtype not in _DTYPES for dtype, _ in self.tensors):
            return False
        if self.table not in ("", "uint8", "int8"):
            return False
        (_, src), (_, dst) = self._ends
        if self.op == "linear":
            return not self.geometry and len(src) == len(dst) >= 1
        dims = len(src) - 2
        lengths = dims in (1, 2, 3) and len(dst) == len(src) and len(self.geometry) == 5 * dims + 2
        return lengths and self.groups >= 1 and src[1] % self.groups == 0

    @property
    def name(self) -> str:
        src, dst = (f"{_NAMES[d]}[{','.join(map(str, s))}]" for d, s in self._ends)
        kernel = f" {'x'.join(map(str, self._window[0]))}" if self.geometry else ""
        return f"{self.op}{kernel} {src}->{dst}"

    @property
    def _ends(self) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        return self.tensors[0], self.tensors[-1]

    @property
    def _window(self) -> list[tuple[int, ...]]:
        """Kernel, stride, padding before and after, dilation."""
        dims = len(self.geometry) // 5
        return [self.geometry[i * dims : (i + 1) * dims] for i in range(5)]

    @property
    def src_dtype(self) -> str:
        return _NAMES[self._ends[0][0]]

    @property
    def groups(self) -> int:
        return self.geometry[-2] if self.geometry else 1

    @property
    def weight_shape(self) -> tuple[int, ...]:
        (_, src), (_, dst) = self._ends
        if not self.geometry:
            return (dst[-1], src[-1])
        return (dst[1], src[1] // self.groups, *self._window[0])

    @property
    def macs(self) -> int:
        """Nominal: taps in the padding count."""
        return math.prod(self._ends[1][1]) * math.prod(self.weight_shape[1:])


class LoggedCall:
    """A layer with data."""

    def __init__(self, layer: LoggedLayer) -> None:
        self.layer = layer
        (src_dtype, src_shape), (dst_dtype, _) = layer._ends
        self.dst_dtype, channels = _DTYPES[dst_dtype], layer.weight_shape[0]
        self.src = self._random(_DTYPES[src_dtype], src_shape)
        self.weight = torch.randint(-128, 128, layer.weight_shape, dtype=torch.int8)
        self.weight_scale = 0.01 + 0.01 * torch.rand(channels)
        steps = 147 * 74 * math.prod(layer.weight_shape[1:]) ** 0.5
        self.deviation = _SRC_SCALE * 0.015 * max(steps, 1.0)
        declared = Attr.parse(layer.attr)
        self.scales = {"src": _SRC_SCALE, "weights": self.weight_scale}
        if declared.mask("dst") is not None:
            self.scales["dst"] = 4 * self.deviation / 255
        self.raw = declared.mask("src") is None
        self.bias = None if self.raw else self.deviation * torch.randn(channels)
        self.zero_points: dict[str, Any] = {}
        if declared.mask("src", "zero_points") is not None:
            self.zero_points["src"] = 119 if self.src.dtype == torch.uint8 else -9
        if declared.mask("weights", "zero_points") is not None:
            self.zero_points["weights"] = torch.randint(-128, 128, (channels,), dtype=torch.int32)
        self.post_op_srcs = [self._random(_DTYPES[d], shape) for d, shape in layer.tensors[1:-1]]
        values = [
            0.5 + torch.rand(channels if op.mask else 1)
            for op in declared.post_ops
            if getattr(op, "mask", None) in CHANNEL_MASKS
        ]
        self.values = values
        entries = self._random(_DTYPES[layer.table or "uint8"], (1, 256)).reshape(256)
        self.table = entries if layer.table else None
        chain = declared.post_ops.with_channel_values(values)
        self.attr = declared.set_post_ops(chain).with_values(
            scales={} if self.raw else self.scales, zero_points=self.zero_points
        )

    def _random(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        if dtype == torch.float32:
            x = torch.randn(tuple(shape))
        else:
            info = torch.iinfo(torch.int16 if dtype == torch.int32 else dtype)
            x = torch.randint(info.min, info.max + 1, tuple(shape), dtype=dtype)
        return x.movedim(1, -1).contiguous().movedim(-1, 1) if self.layer.geometry else x

    def _rows(self, t: Tensor) -> Tensor:
        """Returns t as a matrix for inner_product, which would sum over more dimensions."""
        return t if self.layer.geometry else t.reshape(-1, t.shape[-1])

    @cached_property
    def torchq(self) -> tuple[Callable[..., Tensor], list[Any]]:
        """The op and its arguments, packed and folded."""
        layer, ops = self.layer, torch.ops.torchq
        if layer.geometry:
            op = ops.conv.default
            packed = pack_conv(self.weight, layer.groups, layer._window[4])
            extent: Any = list(layer.geometry)
        else:
            op, packed = ops.linear.default, pack_linear(self.weight)
            extent = packed.in_channels
        folded = fold("benchmarks", self.attr, packed, self.bias, self.dst_dtype)
        return op, [
            *(self.src, packed.weight, packed.compensation, packed.pair_bound),
            *(folded.multiplier, folded.offset, folded.acc_bias, folded.src_zero_point),
            *(extent, dtype_code(self.dst_dtype), folded.post_ops, folded.post_op_params),
            *(self.post_op_srcs, folded.weight_zero_point),
            *(None, self.table),
        ]

    def onednn(self, peer: Peer) -> Competitor:
        """The native primitive; a sum is in place there."""
        layer, text = self.layer, str(self.attr.post_ops)
        if layer.table:
            raise RefusedError("a table of 256 values")
        sums = [op for op in self.attr.post_ops if op.name == "sum"]
        if len(sums) > 1 or len(self.post_op_srcs) > len(sums):
            raise RefusedError("more than a sum among the post-ops' sources")
        named = {"src": "src", "weights": "weight", "dst": "dst"}
        common: dict[str, Any] = {
            **({} if self.raw else {f"{named[k]}_scale": v for k, v in self.scales.items()}),
            **{f"{named[k]}_zero_point": v for k, v in self.zero_points.items()},
            "post_ops": text,
            "post_op_tensors": self.values,
            "dst": self._rows(self.post_op_srcs[0]) if sums else None,
            "dst_dtype": self.dst_dtype,
        }
        if layer.geometry:
            _, stride, begin, end, dilation = layer._window
            common |= {"stride": stride, "padding": begin, "padding_end": end}
            common |= {"dilation": dilation, "groups": layer.groups}
        primitive = peer.convolution if layer.geometry else peer.inner_product

        def execute(**more: Any) -> Any:
            try:
                return primitive(self._rows(self.src), self.weight, self.bias, **common, **more)
            except ValueError as error:  # a sum of another dtype than dst's
                raise RefusedError(str(error)) from error

        return Competitor(
            execute().reshape(layer.tensors[-1][1]),
            lambda iterations, count: execute(samples=count, iterations=iterations).seconds,
        )


def read_lines(line_or_file: str) -> Counter[LoggedLayer]:
    """The layers of a line or of a file, and how often each was called.

    What else is in a file is passed over; ops that cannot be repeated are named on stderr.

    Raises:
        RuntimeError: there is none.
    """
    if not Path(line_or_file).is_file():
        return Counter([LoggedLayer.parse(line_or_file)])
    layers, left = Counter[LoggedLayer](), Counter[str]()
    for line in Path(line_or_file).read_text().splitlines():
        if line.startswith("torchq,exec,") and ",,," not in line:  # without a result: nothing ran
            if line.split(",", 3)[2] in ("linear", "conv"):
                layers[LoggedLayer.parse(line)] += 1
            else:
                left[line.split(",", 3)[2]] += 1
    if left:
        names = ", ".join(f"{count} x {op}" for op, count in left.items())
        print(f"benchmarks: {line_or_file}: not repeated: {names}", file=sys.stderr)
    if not layers:
        raise RuntimeError(f"{line_or_file} has no line of linear or conv that torchq printed.")
    return layers

# SPDX-License-Identifier: Apache-2.0
"""Effects of a conversion on a model: multiply-adds in int8, precision, size."""

from __future__ import annotations

import copy
import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq

__all__ = ["FloatLayer", "float_bytes", "float_layers", "int8_bytes", "macs", "run"]

FloatLayer = tuple[str, str, int, str]
"""Qualified name, class, multiply-adds, and why it is float."""


def _conv(module: Any, src: Tensor, dst: Tensor) -> int:
    return dst.numel() * math.prod(module.weight.shape[1:])


def _transposed(module: Any, src: Tensor, dst: Tensor) -> int:
    return src.numel() * math.prod(module.weight.shape[1:])


def _recurrent(module: nn.RNNBase, src: Tensor, dst: Tensor) -> int:
    steps = src.numel() // src.shape[-1]
    return steps * sum(p.numel() for p in module.parameters() if p.dim() == 2)


_COUNTERS: tuple[tuple[Any, Callable[..., int]], ...] = (
    (nn.modules.conv._ConvTransposeNd, _transposed),
    ((nn.modules.conv._ConvNd, nn.Linear), _conv),
    (nn.RNNBase, _recurrent),
)


def macs(model: nn.Module, example: Tensor) -> dict[str, int]:
    """Multiply-adds of every convolution, linear and recurrent module, in the order of calls.

    Products of two activations, as in attention, are not counted. Nothing is computed: a copy of
    the model runs on the meta device.
    """
    counts: dict[str, int] = {}

    def count(name: str, counter: Callable[..., int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
            dst = result if isinstance(result, Tensor) else result[0]
            counts[name] = counts.get(name, 0) + counter(module, args[0], dst)

        return hook

    model = copy.deepcopy(model).to("meta")
    for name, module in model.named_modules():
        for types, counter in _COUNTERS:
            if isinstance(module, types):
                module.register_forward_hook(count(name, counter))
                break
    with torch.no_grad():
        model(example.to("meta"))
    return counts


def float_layers(converted: nn.Module, counts: dict[str, int]) -> list[FloatLayer]:
    """Returns the layers that torchq left in float, most multiply-adds first."""
    rows = torchq.explain(converted).rows
    left = [(r.name, r.kind, counts.get(r.name, 0), r.reason) for r in rows if not r.quantized]
    unknown = set(counts) - {row.name for row in rows}
    left += [(name, "?", counts[name], "not in the report") for name in unknown]
    return sorted(left, key=lambda layer: -layer[2])


def run(model: Callable[..., Any], inputs: Tensor, batch: int = 1) -> list[Tensor]:
    """The model's float results, of so many inputs at a time."""
    with torch.inference_mode():
        results = [model(x) for x in inputs.split(batch)]
    tuples = [r if isinstance(r, tuple | list) else (r,) for r in results]
    return [torch.cat([t.flatten().float() for t in result]) for result in tuples]


def float_bytes(model: nn.Module) -> int:
    """Size of the saved state."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def int8_bytes(converted: nn.Module) -> int:
    """Size of what ``torchq.save`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        torchq.save(converted, str(path))
        return path.stat().st_size

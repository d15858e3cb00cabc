# SPDX-License-Identifier: Apache-2.0
"""Comparing a float model with its int8 form: accuracy, signal to noise per layer, time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from torchq.nn import Absorbed, FusedClip, QModule

Model = Callable[[Tensor], Tensor]


@torch.inference_mode()
def predictions(model: Model, images: Tensor) -> Tensor:
    return torch.cat([model(batch).argmax(1) for batch in images.split(256)])


def real(module: nn.Module, dst: Tensor) -> Tensor:
    """What the destination of a converted module stands for: ``scale * (q - zero_point)``."""
    if dst.is_floating_point():
        return dst
    module = getattr(module, "layer", module)  # ResidualFirst holds the layer
    if hasattr(module, "scales"):  # QAdd, QMul, QCat: the sources', then the destination's
        scale, zero_point = module.scales[-1], module.zero_points[-1]
    elif hasattr(module, "dst_scale"):
        scale, zero_point = module.dst_scale, module.dst_zero_point
    else:  # a pool passes its source's on
        scale, zero_point = module.src_scale, module.src_zero_point
    shape = [1, -1] + [1] * (dst.dim() - 2)
    return scale.view(shape) * (dst.float() - zero_point.view(shape))


def decibels(expected: Tensor, got: Tensor) -> float:
    """The signal-to-quantization-noise ratio; 6 dB are one bit."""
    noise = (expected - got).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@torch.inference_mode()
def sqnr_per_layer(prepared: nn.Module, qmodel: nn.Module, images: Tensor) -> dict[str, float]:
    """Layer name -> SQNR of its destination, the errors of all layers before it included.

    The prepared model computes in float, but its layers are fused as those of the converted one and
    have the same names, so that a forward hook on both sees the same tensor.
    """
    kept: dict[str, Tensor] = {}
    result: dict[str, float] = {}

    def keep(name: str, module: nn.Module, args: object, dst: Tensor) -> None:
        kept[name] = dst

    def compare(name: str, module: nn.Module, args: object, dst: Tensor) -> None:
        result[name] = decibels(kept.pop(name), real(module, dst))

    floats = dict(prepared.named_modules())
    handles = []
    for name, module in qmodel.named_modules():
        computes = isinstance(module, QModule) and not isinstance(module, (Absorbed, FusedClip))
        if computes and name in floats:
            handles.append(floats[name].register_forward_hook(partial(keep, name)))
            handles.append(module.register_forward_hook(partial(compare, name)))
    prepared(images)
    qmodel(images)
    for handle in handles:
        handle.remove()
    return result


@torch.inference_mode()
def milliseconds(
    models: Mapping[str, Model], images: Tensor, rounds: int, calls: int
) -> dict[str, float]:
    """Median time of one call. The models take turns, so that a busy machine slows all alike."""
    for model in models.values():
        for _ in range(5):
            model(images)
    samples: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = time.perf_counter()
            for _ in range(calls):
                model(images)
            samples[name].append((time.perf_counter() - start) * 1e3 / calls)
    return {name: statistics.median(times) for name, times in samples.items()}

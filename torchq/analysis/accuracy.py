# SPDX-License-Identifier: Apache-2.0
"""How far a quantized model is from its float original, layer by layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchq.convert.prepared import Prepared
from torchq.convert.swap.checks import check_prepared
from torchq.models.attached import computing_modules, graphs_of
from torchq.models.hooks import watching
from torchq.models.inputs import Inputs, batches, call, decibels, float_tensors
from torchq.models.state import as_before
from torchq.nn.module import QModule
from torchq.quantization.observers import Observer
from torchq.report.tables import html_table


@dataclass(frozen=True)
class Noise:
    """Running sums of a comparison."""

    signal: float = 0.0
    noise: float = 0.0
    worst: float = 0.0
    values: int = 0
    clipped: int = 0

    def add(self, expected: Tensor, got: Tensor, clipped: int = 0) -> Noise:
        """Return the sums with two more tensors of one shape; ``clipped``: how many values were."""
        expected, got = expected.detach().double(), got.detach().double()
        difference = (expected - got).abs()
        return Noise(
            self.signal + float(expected.square().sum()),
            self.noise + float(difference.square().sum()),
            max(self.worst, float(difference.max()) if difference.numel() else 0.0),
            self.values + expected.numel(),
            self.clipped + clipped,
        )

    @property
    def decibels(self) -> float:
        """The signal-to-quantization-noise ratio; NaN without values."""
        return decibels(self.signal, self.noise) if self.values else math.nan


def sqnr(expected: object, got: object) -> float:
    """Signal-to-quantization-noise ratio: ``10 log10(sum(expected^2) / sum((expected - got)^2))``.

    Args:
        expected: float tensors: one, or nested lists, tuples, dicts and dataclasses of them.
        got: of the same structure. Six dB are about one bit; equal values give infinity, and no
            float values NaN.

    Raises:
        TypeError: they hold numbers or arrays of numpy instead of tensors.
        ValueError: the structures or shapes differ.

    Example:
        >>> torchq.sqnr(torch.tensor([10.0, 10.0]), torch.tensor([11.0, 9.0]))
        20.0
    """
    pairs = pairs_of(expected, got)
    leaves = [] if pairs else tree_leaves((expected, got))
    numbers = [n for n in leaves if isinstance(n, int | float | np.ndarray | np.generic)]
    if numbers and not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(
            f"torchq.sqnr: expected and got must hold tensors, got {type(numbers[0]).__name__}. "
            "Convert it: torch.as_tensor(x).float()."
        )
    return noise_of(pairs).decibels


def noise_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> Noise:
    """Return the sums of several comparisons."""
    noise = Noise()
    for one, other in pairs:
        noise = noise.add(one, other)
    return noise


def pairs_of(expected: object, got: object) -> list[tuple[Tensor, Tensor]]:
    """Return the float tensors of two results of one structure."""
    ones, others = float_tensors(expected), float_tensors(got)
    shapes = [tuple(x.shape) for x in ones], [tuple(x.shape) for x in others]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"torchq.sqnr: got must have the float tensors of expected, {shapes[0]}, got "
            f"{shapes[1]}. Compare results of the same input."
        )
    return list(zip(ones, others, strict=True))


@dataclass(frozen=True)
class LayerAccuracy:
    """One quantized layer's destination against its float form, errors before it included.

    Attributes:
        name: of the module.
        sqnr: dB.
        worst: largest absolute error, in real units.
        clipped: share of float values beyond the range of the 8-bit destination.
    """

    name: str
    sqnr: float
    worst: float
    clipped: float


@dataclass(frozen=True, repr=False)
class Accuracy:
    """``output`` is the SQNR of the whole model's result; ``layers`` are in order of execution."""

    output: float
    layers: tuple[LayerAccuracy, ...]

    def __str__(self) -> str:
        """One line per layer, worst SQNR first."""
        lines = [f"output {self.output:.1f} dB"]
        lines += [
            f"{layer.sqnr:6.1f} dB  worst {layer.worst:.3g}  clipped {layer.clipped:.2%}  "
            f"{layer.name}"
            for layer in sorted(self.layers, key=lambda layer: layer.sqnr)
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same as a table, for notebooks."""
        rows = [
            (x.name, f"{x.sqnr:.1f}", f"{x.worst:.3g}", f"{x.clipped:.2%}")
            for x in sorted(self.layers, key=lambda x: x.sqnr)
        ]
        heads = ("layer", "SQNR dB", "worst error", "clipped")
        return html_table(heads, rows, [f"output {self.output:.1f} dB"])


def compare(prepared: nn.Module, qmodel: nn.Module, data: Iterable[Inputs]) -> Accuracy:
    """Run both on the same batches, and compare the destination of every quantized layer.

    Args:
        prepared: from :func:`torchq.prepare`: float, with its layers fused as in ``qmodel``.
        qmodel: what :func:`torchq.convert` made of it.
        data: batches as for :func:`torchq.calibrate`.

    Raises:
        ValueError: ``data`` is empty, ``prepared`` is no prepared model, or the two models have no
            layer in common.

    Example:
        >>> data = [torch.randn(8, 16) for _ in range(3)]
        >>> prepared = torchq.prepare(nn.Sequential(nn.Linear(16, 4), nn.ReLU()).eval(), data[0])
        >>> qmodel = torchq.convert(torchq.calibrate(prepared, data))
        >>> [layer.name for layer in torchq.compare(prepared, qmodel, data).layers]
        ['0']
    """
    check_prepared("compare", prepared)
    original = without_observers(prepared)
    floats = float_layers(original)
    kept: dict[str, list[object]] = {}  # of each call
    noises: dict[str, Noise] = {}

    def keep(name: str, module: nn.Module, args: object, dst: object) -> None:
        kept.setdefault(name, []).append(_first(dst))

    def against(name: str, module: nn.Module, args: object, dst: object) -> None:
        expected, dst = kept[name].pop(0) if kept.get(name) else None, _first(dst)
        if isinstance(dst, Tensor) and isinstance(expected, Tensor):
            noise = noises.get(name, Noise())
            noises[name] = noise.add(expected, real(module, dst), _clipped(module, expected))

    handles = []
    for name, module in computing_modules(qmodel).items():
        if isinstance(module, QModule) and name in floats:
            handles.append(floats[name].register_forward_hook(partial(keep, name)))
            handles.append(module.register_forward_hook(partial(against, name)))
    if not handles:
        raise ValueError(
            "torchq.compare: qmodel must be what torchq.convert made of prepared, got models "
            "without a quantized layer in common."
        )
    output = Noise()
    with watching(handles), as_before(qmodel), torch.inference_mode():
        for batch in batches("compare", data):
            for pair in pairs_of(call(original, batch), call(qmodel, batch)):
                output = output.add(*pair)
    layers = [
        LayerAccuracy(name, n.decibels, n.worst, n.clipped / max(n.values, 1))
        for name, n in noises.items()
    ]
    return Accuracy(output.decibels, tuple(layers))


def _first(dst: object) -> object:
    """Return the first of several results: of a recurrent module, its output."""
    while isinstance(dst, tuple):
        dst = dst[0]
    return dst


def float_layers(prepared: nn.Module) -> dict[str, nn.Module]:
    """Name of a module of the converted model -> a module that returns its float destination."""
    found = dict(prepared.named_modules())
    for name, graph in graphs_of(prepared):
        if isinstance(graph, Prepared):
            prefix = f"{name}." if name else ""
            found |= {f"{prefix}{own}": result for own, result in graph.results().items()}
    return found


def without_observers(prepared: nn.Module) -> nn.Module:
    """Return a copy that computes the same and records nothing."""
    copied = copy.deepcopy(prepared)
    graphs = [graph for _, graph in graphs_of(copied)]
    for module in (*copied.modules(), *(m for graph in graphs for m in graph.modules())):
        for name, child in module.named_children():
            if isinstance(child, Observer):
                setattr(module, name, nn.Identity())
    return copied


def _last_step(module: nn.Module) -> nn.Module:
    """Return the module whose destination it is."""
    lookup = getattr(module, "lookup", None)
    return module if lookup is None else lookup


def real(module: nn.Module, dst: Tensor) -> Tensor:
    """Return the real values of a quantized module's destination: ``scale * (q - zero_point)``."""
    if dst.is_floating_point():
        return dst
    state: Any = _last_step(module)
    if getattr(state, "scales", None) is not None:  # of the sources, then of the destination
        scale, zero_point = state.scales[-1:], state.zero_points[-1:]
    elif hasattr(state, "dst_scale"):
        scale, zero_point = state.dst_scale, state.dst_zero_point
    else:  # a pool passes its source's on
        scale, zero_point = state.src_scale, state.src_zero_point
    shape = [1, -1] + [1] * (dst.dim() - 2) if scale.numel() > 1 else [1] * dst.dim()
    values: Tensor = scale.view(shape) * (dst.float() - zero_point.view(-1)[:1])
    return values


def covered(module: nn.Module) -> tuple[float, float] | None:
    """Return the real values of the smallest and the largest destination; None for float32."""
    dtype = getattr(_last_step(module), "dst_dtype", None)
    if dtype not in (torch.uint8, torch.int8):
        return None
    limits = torch.iinfo(dtype)
    ends = real(
        module, torch.tensor([limits.min, limits.max], dtype=dtype, device="cpu").view(1, 1, 2)
    )
    return float(ends.min()), float(ends.max())


def _clipped(module: nn.Module, expected: Tensor) -> int:
    """Values beyond the range of the destination by more than half a step."""
    ends = covered(module)
    if ends is None:
        return 0
    margin = (ends[1] - ends[0]) / 510
    return int(((expected < ends[0] - margin) | (expected > ends[1] + margin)).sum())

# SPDX-License-Identifier: Apache-2.0
"""Emulation of quantized modules and whole models, and the report of what it found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.models.attached import computing_modules
from torchq.models.hooks import watching
from torchq.models.inputs import Inputs, batches, call, decibels, float_tensors
from torchq.models.state import as_before, twin
from torchq.nn.conv import QConv
from torchq.nn.conv_transpose import QConvTranspose
from torchq.nn.layer import QLayer, sources_of
from torchq.nn.linear import QLinear
from torchq.nn.module import QModule
from torchq.nn.rnn_layer import QRecurrentLayer
from torchq.onednn.saturation.pairs import (
    Sums,
    emulate_conv,
    emulate_conv_transpose,
    emulate_linear,
    halve,
)
from torchq.onednn.saturation.proof import EMULATED, Proof, prove_module, whole_proof
from torchq.onednn.saturation.recurrent import Result, Tally, emulate_recurrent, recurrent_layers
from torchq.onednn.saturation.results import dequantized, real_result, stored
from torchq.report.tables import html_table, text_table

PAIRING = (
    "Pairs are consecutive k within a tap, (0, 1), (2, 3), ...; a layout that pairs otherwise "
    "saturates elsewhere."
)


@dataclass
class LayerReport:
    """Effects of saturation on one layer, given exact inputs.

    Attributes:
        name: qualified name.
        src: "u8" or "s8".
        proof: what its weights alone prove.
        pairs: pairs that were summed.
        saturating: how many of them saturated.
        outputs: values that the layer returned.
        changed: how many of them differ from the exact ones.
        signal: sum of squares of the exact real results.
        noise: sum of squares of their differences.
        worst: largest difference of one result, in real units.
    """

    name: str
    src: str
    proof: Proof
    pairs: int = 0
    saturating: int = 0
    outputs: int = 0
    changed: int = 0
    signal: float = 0.0
    noise: float = 0.0
    worst: float = 0.0

    @property
    def sqnr(self) -> float:
        """Signal to noise in dB; infinite without noise."""
        return decibels(self.signal, self.noise)

    def add(self, sums: Sums, exact: Tensor, changed: Tensor, differs: int) -> None:
        """Count one call: its sums, real results exact and changed, and how many differ."""
        self.pairs += sums.pairs
        self.saturating += int(sums.saturating.sum())
        self.outputs += exact.numel()
        self.changed += differs
        error = changed - exact
        self.signal += float(exact.square().sum())
        self.noise += float(error.square().sum())
        self.worst = max(self.worst, float(error.abs().max()) if error.numel() else 0.0)


_HEADS = ("layer", "source", "pairs saturating", "outputs changed", "SQNR dB", "worst", "proof")


@dataclass(repr=False)
class Report:
    """Layers in the order they first ran, and the model's own outputs.

    Attributes:
        layers: what saturation does to each, given exact inputs.
        signal: sum of squares of the model's exact floating-point outputs.
        noise: sum of squares of their differences when all layers saturate, errors carried on.
        not_emulated: quantized modules with weights that this package does not emulate.
    """

    layers: list[LayerReport] = field(default_factory=list)
    signal: float = 0.0
    noise: float = 0.0
    not_emulated: list[str] = field(default_factory=list)

    @property
    def sqnr(self) -> float:
        """Return the SQNR of the model's outputs, in dB; infinite without noise."""
        return decibels(self.signal, self.noise)

    def __str__(self) -> str:
        """Return a table, and how pairs are formed."""
        return text_table([_HEADS, *map(_cells, self.layers)], self._notes())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table, for notebooks."""
        return html_table(_HEADS, map(_cells, self.layers), self._notes())

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        lines = [f"the model's outputs: SQNR {_text(self.sqnr)} dB"]
        if self.not_emulated:
            lines.append(f"not emulated: {', '.join(self.not_emulated)}")
        return [*lines, PAIRING]


def emulate(
    model: nn.Module, data: Iterable[Inputs], float_weights: Mapping[str, Tensor] | None = None
) -> Report:
    """Run a converted model as it is and as a CPU without VNNI would have under oneDNN's rules.

    Each layer is compared on the exact inputs it gets, and the model's outputs with all layers
    saturating, errors carried on. The model itself is not changed.

    Args:
        model: from :func:`torchq.convert`.
        data: batches; a tensor is the model's one input, a tuple or list its inputs, a dict its
            keywords.
        float_weights: by module name, the weights as they were before quantization: convolutions
            with an s8 source then halve these, ``rne(w * 0.5 / scale)``, instead of the int8 ones.

    Raises:
        ValueError: ``model`` has no quantized linear, convolution or recurrent layer, or ``data``
            no batch.
    """
    modules = _emulated(model)
    if not modules:
        raise ValueError(
            "torchq.saturation.emulate: model must have quantized linears, convolutions or "
            f"recurrent layers, got none in {type(model).__name__}. Convert it first: "
            "torchq.quantize."
        )
    report = Report(not_emulated=_not_emulated(model))
    weights = dict(float_weights or {})
    second = twin(model)  # what a model keeps between calls is of one way to run it
    copies = _emulated(second)
    with as_before(model), torch.no_grad():
        for batch in batches("saturation.emulate", data, progress=False):
            with _hooked(modules, weights, report, replace=False):
                exact = float_tensors(call(model, batch))
            with _hooked(copies, weights, report, replace=True):
                changed = float_tensors(call(second, batch))
            for one, other in zip(exact, changed, strict=True):
                report.signal += float(one.double().square().sum())
                report.noise += float((other.double() - one.double()).square().sum())
    return report


def emulate_module(
    module: QLayer,
    src: Tensor,
    residual: Tensor | None = None,
    float_weight: Tensor | None = None,
    report: LayerReport | None = None,
    post_op_srcs: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return what a quantized linear or convolution would have returned.

    Args:
        module: QLinear, or a QConv or QConvTranspose in 1 to 3 dimensions.
        src: quantized, or float32, which is quantized first.
        residual: the source of a ``sum`` post-op.
        float_weight: see :func:`emulate`.
        report: counts what was found, if given.
        post_op_srcs: what else the post-ops read, as the module's forward takes it.

    Raises:
        TypeError: the module is of another class.
        ValueError: fewer sources than the post-ops read.
        NotImplementedError: a convolution with ``dw``.
    """
    if not isinstance(module, EMULATED):
        raise TypeError(
            "torchq.saturation.emulate_module: module must be a QLinear, QConv or "
            f"QConvTranspose, got {type(module).__name__}. Emulate the accumulators: "
            "emulate_linear, emulate_conv; or a layer of a recurrent one: emulate_recurrent."
        )
    if getattr(module, "dw", None) is not None:
        raise NotImplementedError(
            f"torchq.saturation.emulate_module: module must have no dw, got "
            f"{type(module).__name__}({module.extra_repr()}). Emulate it and its dw one after the "
            "other: build both without dw."
        )
    axis = -1 if isinstance(module, QLinear) else 1
    sums = _module_sums(module, src, float_weight)
    srcs = sources_of(residual, None if post_op_srcs is None else list(post_op_srcs)) or []
    exact = stored(module, real_result(module, sums.exact, axis, srcs), axis)
    changed = stored(module, real_result(module, sums.saturated, axis, srcs), axis)
    if report is not None:
        real = [dequantized(module, dst, axis) for dst in (exact, changed)]
        report.add(sums, real[0], real[1], int((exact != changed).sum()))
    return changed


def _module_sums(
    module: QConv | QConvTranspose | QLinear, src: Tensor, float_weight: Tensor | None
) -> Sums:
    src = module._quantized_src(src)
    packed, zero = module.packed(), int(module.src_zero_point)
    weight, groups = packed.unpack(), packed.groups
    if isinstance(module, QLinear):
        return emulate_linear(src, weight, zero)
    g, dims = module.geometry, module.dims
    _, stride, begin, end, dilation, *rest = (g[i : i + dims] for i in range(0, 6 * dims, dims))
    transposed = isinstance(module, QConvTranspose)
    halved = None
    if float_weight is not None:
        halved = halve(float_weight, _broadcast(module.weight_scale, weight, groups, transposed))
    if transposed:
        return emulate_conv_transpose(
            src, weight, stride, begin, rest[0], groups, dilation, zero, end, halved
        )
    return emulate_conv(src, weight, stride, begin, dilation, groups, zero, end, halved)


def _broadcast(scale: Tensor, weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """Scales per output channel in a shape that broadcasts against the weight."""
    ones = [1] * (weight.dim() - 2)
    if scale.numel() == 1 or not transposed:
        return scale.reshape(-1, 1, *ones)
    by_group = scale.reshape(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)
    return by_group.reshape(weight.shape[0], -1, *ones)


@contextmanager
def _hooked(
    modules: Mapping[str, nn.Module], weights: Mapping[str, Tensor], report: Report, replace: bool
) -> Iterator[None]:
    """Let every module report, or return what it would have returned."""
    layers = {layer.name: layer for layer in report.layers}

    def hook(name: str) -> Callable[..., object]:
        def run(module: QLayer | QRecurrentLayer, args: Any, kwargs: Any, dst: Any) -> object:
            layer = None
            if not replace:
                if name not in layers:
                    layers[name] = _new_report(name, module)
                    report.layers.append(layers[name])
                layer = layers[name]
            if isinstance(module, QRecurrentLayer):
                run_it = partial(emulate_recurrent, module, *args, **kwargs)
                if layer is None:
                    return tuple(run_it())
                _add_recurrent(layer, module, run_it)
                return dst
            changed = _call(module, weights.get(name), layer, *args, **kwargs)
            return changed.to(memory_format=_layout(dst)) if replace else dst

        return run

    handles = [m.register_forward_hook(hook(n), with_kwargs=True) for n, m in modules.items()]
    with watching(handles):
        yield


def _emulated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose sums this package knows, in the order of the model."""
    found: dict[str, nn.Module] = {
        n: m for n, m in computing_modules(model).items() if isinstance(m, EMULATED)
    }
    return found | recurrent_layers(model)


def _new_report(name: str, module: QLayer | QRecurrentLayer) -> LayerReport:
    proof = whole_proof(module) if isinstance(module, QRecurrentLayer) else prove_module(module)
    return LayerReport(name, "u8" if proof.src_dtype == torch.uint8 else "s8", proof)


def _add_recurrent(report: LayerReport, layer: QRecurrentLayer, run: Callable[..., Result]) -> None:
    """Count the states that the layer emits; pairs are those of its exact states."""
    tally = Tally()
    exact, changed = run(saturates=False, tally=tally), run()
    real = [
        dst.double()
        if dst.is_floating_point()
        else (dst.double() - layer.state_zero_point) * layer.state_scale.double()
        for dst in (exact.dst, changed.dst)
    ]
    differs = int((exact.dst != changed.dst).sum())
    counted = torch.tensor([tally.saturating], device="cpu")
    report.add(Sums(counted, counted, counted, tally.pairs), real[0], real[1], differs)


def _call(
    module: QLayer,
    weight: Tensor | None,
    layer: LayerReport | None,
    src: Tensor,
    residual: Tensor | None = None,
    post_op_srcs: Sequence[Tensor] | None = None,
) -> Tensor:
    return emulate_module(module, src, residual, weight, layer, post_op_srcs)


def _layout(dst: Tensor) -> torch.memory_format:
    """Return the memory format of an exact result of four dims, so that a later view works."""
    if dst.dim() == 4 and not dst.is_contiguous():
        return torch.channels_last
    return torch.preserve_format


def _not_emulated(model: nn.Module) -> list[str]:
    return [
        f"{name} ({type(module).__name__})"
        for name, module in computing_modules(model).items()
        if isinstance(module, QModule)
        and not isinstance(module, (*EMULATED, QRecurrentLayer))
        and any(key.startswith("weight") for key, _ in module.named_buffers(recurse=False))
    ]


def _cells(layer: LayerReport) -> tuple[str, ...]:
    """Return the line of a layer in the table."""
    return (
        layer.name,
        layer.src,
        _percent(layer.saturating, layer.pairs),
        _percent(layer.changed, layer.outputs),
        _text(layer.sqnr),
        f"{layer.worst:.4g}",
        str(layer.proof),
    )


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total:.4g} %" if total else "-"


def _text(decibels: float) -> str:
    return "exact" if math.isinf(decibels) and decibels > 0 else f"{decibels:.1f}"

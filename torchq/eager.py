# SPDX-License-Identifier: Apache-2.0
"""The eager flow: swap modules, leave the model's own Python code as it is.

:func:`prepare` runs the model once and records who consumes what. A module will emit int8 only if every reader of its
result is a quantized module too (through views, pools and dropout), else float32; plain torch operations in between
therefore see float tensors and mean what they always meant. A reader takes the scale of the layer it reads from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.config import Overrides, QConfig
from torchq.explain import Row, report_rows
from torchq.fuse import find_layers
from torchq.lowering import quantized_layer, quantized_pool
from torchq.observed import ObservedLayer, ObservedPool
from torchq.planning import Plan
from torchq.qparams import QParams
from torchq.recording import record

__all__ = ["calibrate", "convert", "prepare", "quantize"]


def prepare(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any],
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> nn.Module:
    """A copy of ``model`` with batch norms folded, layers fused and observers in place.

    Args:
        model: in eval mode.
        example_inputs: one input, or a tuple of them; the model is run on them once.
        config: how to quantize; the default is QConfig().
        overrides: ``fnmatch`` patterns on qualified module names -> a QConfig, or None to keep float. With
            ``.dst`` appended, a pattern means only the module's destination. Later patterns win.

    Raises:
        ValueError: the model is in training mode, or a pattern matches nothing.
        NotImplementedError: ``config.dynamic``.
    """
    config = QConfig() if config is None else config
    _check_model(model, config)
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    prepared = copy.deepcopy(model)
    recording = record(prepared, inputs)
    plan = Plan(recording, find_layers(recording), config, overrides)
    plan.check_patterns(model)
    plan.apply(prepared)
    prepared.torchq_report = report_rows(model, plan)  # type: ignore[assignment]
    return prepared


def calibrate(prepared: nn.Module, data: Iterable[Any], progress: bool | None = None) -> nn.Module:
    """Runs the prepared model on data; its observers record.

    Args:
        prepared: from :func:`prepare`; returned for chaining.
        data: batches; a tensor is the model's one input, a tuple or list its inputs, a dict its keywords.
        progress: show a progress bar (needs tqdm); None shows one where tqdm is installed and the output is a
            terminal.

    Raises:
        ValueError: ``data`` has no batches, or a batch contains NaN or inf (the message names the module).
    """
    batches = 0
    with torch.inference_mode():
        for batch in _with_progress(data, progress):
            if isinstance(batch, Tensor):
                prepared(batch)
            elif isinstance(batch, dict):
                prepared(**batch)
            else:
                prepared(*batch)
            batches += 1
    if batches == 0:
        raise ValueError(
            "torchq.calibrate: data must have at least one batch, got none. A generator "
            "that was used up already yields nothing."
        )
    return prepared


def _with_progress(data: Iterable[Any], progress: bool | None) -> Iterable[Any]:
    if progress is False:
        return data
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if progress:
            raise ImportError(
                "torchq.calibrate: progress=True needs tqdm. Run `pip install tqdm`."
            ) from None
        return data
    # disable=None means: only on a terminal
    bar: Iterable[Any] = tqdm(data, desc="calibrate", disable=None if progress is None else False)
    return bar


def convert(prepared: nn.Module, strict: bool = False) -> nn.Module:
    """The quantized model; the prepared one stays as it is.

    Args:
        prepared: calibrated.
        strict: raise if a convolution or linear stays float without an override that says so.

    Raises:
        RuntimeError: a module was never calibrated (the message names it), or ``strict`` and something stays
            float.
    """
    layers = {n: m for n, m in prepared.named_modules() if isinstance(m, ObservedLayer)}
    pools = {n: m for n, m in prepared.named_modules() if isinstance(m, ObservedPool)}
    if not layers and not hasattr(prepared, "torchq_report"):
        raise ValueError(
            f"torchq.convert: prepared must come from torchq.prepare, got {type(prepared).__name__} without "
            "observers. Call torchq.prepare and torchq.calibrate first."
        )
    dst = {site: layer.dst_qparams() for site, layer in layers.items() if layer.emits_int8}
    replacements: dict[str, nn.Module] = {
        site: quantized_layer(layer, _srcs(layer, dst), dst.get(site))
        for site, layer in layers.items()
    }
    for name, pool in pools.items():
        replacements[name] = quantized_pool(pool.module, dst[pool.src_from])
    rows: list[Row] = list(prepared.torchq_report)  # type: ignore[arg-type]
    if strict:
        _check_strict(rows)
    # Observers and float weights are left behind: only what stays is copied.
    memo = {id(prepared.get_submodule(site)): module for site, module in replacements.items()}
    if "" in replacements:
        converted = replacements[""]
    else:
        converted = copy.deepcopy(prepared, memo)
    converted.torchq_report = rows  # type: ignore[assignment]
    return converted.eval()


def quantize(
    model: nn.Module,
    data: Iterable[Any],
    example_inputs: Tensor | Sequence[Any],
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    strict: bool = False,
) -> nn.Module:
    """:func:`prepare`, :func:`calibrate` and :func:`convert` in one call."""
    prepared = prepare(model, example_inputs, config, overrides)
    return convert(calibrate(prepared, data), strict)


def _srcs(layer: ObservedLayer, dst: dict[str, QParams]) -> list[QParams | None]:
    """Parameters of what a layer reads; None for a float residual."""
    result: list[QParams | None] = []
    for i, site in enumerate(layer.src_from):
        if site is not None:
            result.append(dst[site])
        else:
            observed = str(i) in layer.src_observers
            result.append(layer.src_qparams(i) if observed else None)
    return result


def _check_strict(rows: list[Row]) -> None:
    left = [r for r in rows if r.is_matmul and not r.quantized and not r.requested]
    if left:
        lines = "; ".join(f"{row.name}: {row.reason}" for row in left)
        raise RuntimeError(
            f"torchq.convert: strict=True, but {len(left)} convolution or linear modules stay float: {lines}. "
            "Change the model, or name them in overrides with None."
        )


def _check_model(model: nn.Module, config: QConfig) -> None:
    training = [name or "the model" for name, m in model.named_modules() if m.training]
    if training:
        raise ValueError(
            f"torchq.prepare: model must be in eval mode, got training mode in {training[0]} "
            f"({len(training)} modules). Call model.eval() first."
        )
    if config.dynamic:
        raise NotImplementedError(
            "torchq.prepare: dynamic=True is not supported yet. The nearest is static quantization: "
            "calibrate with representative data."
        )

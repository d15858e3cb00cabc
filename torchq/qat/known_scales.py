# SPDX-License-Identifier: Apache-2.0
"""Float models with fake quantizers of known scales become int8 ones without calibration."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from torchq.convert.dispatch import dispatches
from torchq.convert.pipeline import converted_model, prepared_model
from torchq.models.inputs import Inputs
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.packed_weights import PackedWeights
from torchq.quantization.config import Overrides, QConfig
from torchq.report.rows import Row


def with_known_scales(
    model: nn.Module,
    example_inputs: Inputs,
    floats: Iterable[str] = (),
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    reason: str = "",
    weights: PackedWeights | None = None,
) -> nn.Module:
    """Return the int8 model; values without a fake quantizer stay float.

    Args:
        model: float, with fake quantizers.
        example_inputs: of its forward.
        floats: names of modules that stay float.
        config: how to quantize.
        overrides: exceptions, by name.
        reason: why values without a fake quantizer stay float; "" takes this for a request.
        weights: that other layers have, which will be put into the result.
    """
    added = set(floats)
    chosen: dict[str, QConfig | None] = {**(overrides or {}), **dict.fromkeys(added)}
    while True:
        prepared = prepared_model(model, example_inputs, config, chosen, share=False)
        graphs: list[Any] = [dispatch.graph for dispatch in dispatches(prepared)]
        names = {observer.name for graph in graphs for observer in graph.observers}
        if names <= added:
            break
        added |= names  # they would have to be calibrated
        chosen |= dict.fromkeys(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model without a graph: its layers come later
        result = converted_model(prepared, False, weights=weights)
    rows: list[Row] = vars(result)["torchq_report"]
    rows = [replace(row, kind=row.kind.removeprefix("Parametrized")) for row in rows]
    if reason:
        told = [row.requested and row.name in added for row in rows]
        rows = [
            replace(row, reason=reason, requested=False) if tell else row
            for row, tell in zip(rows, told, strict=True)
        ]
    vars(result)["torchq_report"] = rows
    return result


def put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put modules in the places of a model, under all names that each place has."""
    places = {id(model.get_submodule(name)): new for name, new in modules.items()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in places:
            model.set_submodule(name, places[id(module)])


def rounding(model: nn.Module) -> dict[str, nn.Module]:
    """Return what rounds activations as its fake quantizers do, on int8 tensors."""
    return {
        name: module.to_quantized()
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantize) and ".parametrizations." not in f".{name}"
    }

# SPDX-License-Identifier: Apache-2.0
"""Float models with fake quantizers of known scales: what other tools' int8 models mean."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from torchq.convert.api import convert, prepare
from torchq.convert.dispatch import dispatches
from torchq.convert.rows import Row
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.inputs import Inputs
from torchq.quantization.config import QConfig


def with_known_scales(
    model: nn.Module, example_inputs: Inputs, floats: Iterable[str] = ()
) -> nn.Module:
    """Return the int8 model; values without a fake quantizer stay float.

    Args:
        model: float, with fake quantizers.
        example_inputs: of its forward.
        floats: names of modules that stay float.
    """
    overrides: dict[str, QConfig | None] = dict.fromkeys(floats)
    while True:
        prepared = prepare(model, example_inputs, QConfig(), overrides)
        graphs: list[Any] = [dispatch.graph for dispatch in dispatches(prepared)]
        names = {observer.name for graph in graphs for observer in graph.observers}
        if names <= overrides.keys():
            break
        overrides |= dict.fromkeys(names)  # they would have to be calibrated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model without a graph: its layers come later
        result = convert(prepared)
    rows: list[Row] = vars(result)["torchq_report"]
    vars(result)["torchq_report"] = [
        replace(row, kind=row.kind.removeprefix("Parametrized")) for row in rows
    ]
    return result


def rounding(model: nn.Module) -> dict[str, nn.Module]:
    """Return what rounds activations as its fake quantizers do, on int8 tensors."""
    return {
        name: module.to_quantized()
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantize) and ".parametrizations." not in f".{name}"
    }

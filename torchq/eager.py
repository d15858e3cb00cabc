# SPDX-License-Identifier: Apache-2.0
"""The eager flow: quantized leaves, float32 between them, the model's own code around them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from torchq.convert.api import calibrate, converted_model, prepared_model
from torchq.nn.inputs import Inputs
from torchq.quantization.config import Overrides, QConfig

__all__ = ["calibrate", "convert", "prepare", "quantize"]


def prepare(
    model: nn.Module,
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> nn.Module:
    """Return a copy of ``model`` with observers in place, as :func:`torchq.prepare`.

    What ``example_inputs`` do not reach stays float. Patterns of ``overrides`` name modules.
    """
    return prepared_model(model, example_inputs, config, overrides, share=False, graphs=False)


def convert(prepared: nn.Module, strict: bool = False) -> nn.Module:
    """Return the quantized model, as :func:`torchq.convert`; the prepared one stays as it is.

    Raises:
        RuntimeError: a layer was never calibrated (the message names it), or ``strict`` and
            something stays float.
        ValueError: ``prepared`` has no observers, or a weight cannot be quantized.
    """
    return converted_model(prepared, strict, every_leaf=True)


def quantize(
    model: nn.Module,
    data: Iterable[Any],
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    strict: bool = False,
) -> nn.Module:
    """Call :func:`prepare`, :func:`calibrate` and :func:`convert`."""
    prepared = prepare(model, example_inputs, config, overrides)
    return convert(calibrate(prepared, data), strict)

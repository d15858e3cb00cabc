# SPDX-License-Identifier: Apache-2.0
"""The eager flow: replaces single layers, and captures no graph; values between are float32."""

from __future__ import annotations

from collections.abc import Iterable

from torchq.convert.api import calibrate
from torchq.convert.calibrated import check_has_data
from torchq.convert.pipeline import converted_model, prepared_model
from torchq.convert.swap.checks import check_prepared
from torchq.convert.unseen import warn_of_data
from torchq.models.inputs import Inputs, Model
from torchq.quantization.config import Overrides, QConfig

__all__ = ["calibrate", "convert", "prepare", "quantize"]


def prepare(
    model: Model,
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> Model:
    """Return a copy of ``model`` with observers in place, as :func:`torchq.prepare`.

    Args:
        model: float32, bfloat16 or float16, in eval mode; it stays as it is.
        example_inputs: one call's inputs: a tensor, a tuple, or a dict of keyword arguments. Layers
            that the call does not reach stay float.
        config: how to quantize; the default is QConfig().
        overrides: patterns on names of modules -> a QConfig, or None to keep them float.

    Raises:
        TypeError, ValueError: as :func:`torchq.prepare`.
    """
    return prepared_model(model, example_inputs, config, overrides, share=False, graphs=False)


def convert(prepared: Model, strict: bool = False) -> Model:
    """Return the quantized model, as :func:`torchq.convert`; the prepared one stays as it is.

    Args:
        prepared: from :func:`prepare`, calibrated unless its layers are dynamic.
        strict: raise if a layer stays float without an override that says so.

    Raises:
        RuntimeError: a layer was never calibrated (the message names it), or ``strict`` and
            something stays float.
        ValueError: ``prepared`` has no observers, or a weight cannot be quantized.
    """
    check_prepared("eager.convert", prepared)
    check_has_data(prepared, "eager.convert")
    result = converted_model(prepared, strict, every_leaf=True)
    warn_of_data("eager.convert", prepared)
    return result


def quantize(
    model: Model,
    data: Iterable[Inputs],
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    strict: bool = False,
) -> Model:
    """Call :func:`prepare`, :func:`calibrate` and :func:`convert`.

    Args:
        model: float32, bfloat16 or float16, in eval mode.
        data: batches to calibrate with: tensors, tuples, or dicts of keyword arguments.
        example_inputs: one call's inputs.
        config: how to quantize; the default is QConfig().
        overrides: patterns on names of modules -> a QConfig, or None to keep them float.
        strict: raise if a layer stays float without an override that says so.
    """
    prepared = prepare(model, example_inputs, config, overrides)
    return convert(calibrate(prepared, data), strict)

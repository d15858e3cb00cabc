# SPDX-License-Identifier: Apache-2.0
"""The three verbs and the one-liner: on a traced graph, or by swapping modules where that fails."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchq import eager
from torchq.config import Overrides, QConfig
from torchq.eager import calibrate
from torchq.explain import Row
from torchq.fx import flow as graph
from torchq.fx.prepared import Prepared
from torchq.fx.tracing.capture import CaptureError
from torchq.running import Inputs, batches, check_fit, split_inputs
from torchq.standalone import stands_alone

eager.flow.graphs = graph


def prepare(
    model: nn.Module,
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> nn.Module:
    """A copy of ``model`` that computes the same and records what quantization needs.

    The model is traced (:mod:`torchq.fx`), so that functions and operators are quantized as modules
    are. Where its forward cannot be traced, its modules are swapped instead
    (:mod:`torchq.eager`), with a warning that says why.

    Args:
        model: float32, in eval mode.
        example_inputs: one input, a tuple of them, or a dict of keyword arguments; a copy of the
            model is run on them. They must take the way through the model that later inputs take;
            the batch size may be another one.
        config: how to quantize; the default is QConfig().
        overrides: ``fnmatch`` patterns on qualified names of modules, or of functions as the report
            names them -> a QConfig, or None to keep float. One that matches a module holds for all
            that is in it. With ``.dst`` appended, a pattern means only the destinations. Later
            patterns win.

    Raises:
        ValueError: the model is in training mode or prepared already, a weight has NaN or inf, or a
            pattern matches nothing.
        TypeError: the model is no nn.Module or not float32, ``example_inputs`` are not those of its
            forward, or ``config`` is no QConfig.
    """
    if config is not None and not isinstance(config, QConfig):
        raise TypeError(
            f"torchq.prepare: config must be a QConfig or None, got {type(config).__name__}. "
            "Write torchq.QConfig(activation_bits=7), say."
        )
    eager.check_model(model)
    args, kwargs = split_inputs(example_inputs)
    try:
        with torch.autocast("cpu", enabled=False):
            return _prepared(model, args, kwargs, config, overrides)
    except TypeError:
        check_fit(model, args, kwargs)
        raise


def _prepared(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: QConfig | None,
    overrides: Overrides | None,
) -> nn.Module:
    if stands_alone(model, config):  # a graph would look into it
        return eager.prepare(model, kwargs or args, config, overrides)
    try:
        return graph.prepare(model, kwargs or args, config, overrides)
    except CaptureError as error:
        reason = f"{type(model).__name__} cannot be traced: {error}"
    # where the model itself fails on these inputs, this raises what it says
    prepared = eager.prepare_call(model, args, kwargs, config or QConfig(), overrides)
    warnings.warn(
        f"torchq.prepare: {reason}. Its modules are swapped instead; functions and operators stay "
        "float.",
        stacklevel=3,
    )
    prepared.torchq_note = f"modules were swapped: {reason}"  # type: ignore[assignment]
    return prepared


def convert(prepared: nn.Module, strict: bool = False) -> nn.Module:
    """The quantized model; the prepared one stays as it is.

    It has no gradients: its float parameters do not require grad any more, and inputs that require
    grad raise.

    Args:
        prepared: calibrated.
        strict: raise if a convolution, linear or recurrent module stays float without an override
            that says so.

    Raises:
        ValueError: ``prepared`` has no observers, or a weight cannot be quantized.
        RuntimeError: a module was never calibrated (the message names it), or ``strict`` and
            something stays float.
    """
    return _converted(prepared, strict)


def _converted(prepared: nn.Module, strict: bool) -> nn.Module:
    """:func:`convert`, for a function that the user calls."""
    if isinstance(prepared, Prepared):
        result: nn.Module = graph.convert(prepared, strict)
    else:
        result = eager.convert(prepared, strict)
    rows: list[Row] = list(result.torchq_report)  # type: ignore[arg-type]
    left = [row for row in rows if row.is_matmul and not row.requested]
    if left and not any(row.quantized for row in rows):
        warnings.warn(
            f"torchq.convert: nothing runs in int8; '{left[0].name}' is float: {left[0].reason}. "
            "torchq.explain tells the others.",
            stacklevel=3,
        )
    return result


def quantize(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    example_inputs: Inputs | None = None,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    strict: bool = False,
) -> nn.Module:
    """:func:`prepare`, :func:`calibrate` and :func:`convert` in one call.

    ``example_inputs`` are the first batch of ``data`` unless given; without ``data`` nothing is
    calibrated, as QConfig(dynamic=True) and fake quantizers in the model do not need it.
    """
    if data is None:
        if example_inputs is None:
            raise TypeError(
                "torchq.quantize: data must be batches to calibrate with, got None. Where nothing "
                "needs calibration, as with QConfig(dynamic=True), pass example_inputs alone."
            )
        return _converted(prepare(model, example_inputs, config, overrides), strict)
    if example_inputs is None:
        rest = iter(batches("quantize", data, progress=False))
        args, kwargs = split_inputs(next(rest))
        example_inputs = kwargs or args
        data = itertools.chain([example_inputs], rest)
    prepared = prepare(model, example_inputs, config, overrides)
    return _converted(calibrate(prepared, data), strict)

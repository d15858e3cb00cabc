# SPDX-License-Identifier: Apache-2.0
"""The three verbs and the one-liner."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from torchq.convert.calibrated import check_has_data
from torchq.convert.pipeline import converted_model, prepared_model
from torchq.convert.swap.checks import check_prepared
from torchq.convert.swap.flow import calibrate
from torchq.convert.unseen import warn_of_data
from torchq.graphs.code import takes_programs
from torchq.models.inputs import Inputs, Model, batches, split_inputs
from torchq.quantization.config import Overrides, QConfig

__all__ = ["calibrate", "convert", "prepare", "quantize"]


@takes_programs
def prepare(
    model: Model,
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> Model:
    """Return a copy of ``model`` that computes the same and records what quantization needs.

    The copy has the model's class. Its layers are observed, and so is the graph that torch.export
    captures of the call; where the whole is not captured, its largest parts are.

    Args:
        model: float32, bfloat16 or float16, in eval mode; also an ExportedProgram or a GraphModule.
        example_inputs: one input, a tuple of them, or a dict of keyword arguments. Copies of the
            model are run on them. Later calls take the graph if they are like this one: the same
            dtypes and ranks of tensors, the same other arguments, and sizes that the model's code
            treats alike.
        config: how to quantize; the default is QConfig().
        overrides: ``fnmatch`` patterns on qualified names of modules, or of functions as the report
            names them -> a QConfig, or None to keep float. A pattern that matches a module holds
            for everything in it. With ``.dst`` appended, a pattern means only the destinations.
            Later patterns win.

    Raises:
        ValueError: the model is in training mode, prepared or quantized already, a weight has NaN
            or inf, or a pattern matches nothing.
        TypeError: the model is no nn.Module or of another dtype, ``example_inputs`` do not fit its
            forward, or ``config`` is no QConfig.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
        >>> images = [torch.randn(4, 3, 8, 8) for _ in range(3)]
        >>> prepared = torchq.prepare(model.eval(), images[0], overrides={"3": None})
        >>> qmodel = torchq.convert(torchq.calibrate(prepared, images))
        >>> [(row.name, row.quantized) for row in torchq.explain(qmodel).rows if row.is_matmul]
        [('0', True), ('3', False)]
    """
    return prepared_model(model, example_inputs, config, overrides, share=False)


def convert(prepared: Model, strict: bool = False) -> Model:
    """Return the quantized model; the prepared one stays as it is.

    The result is a copy of the model's class, with quantized layers and int8 graphs. It has no
    gradients: its float parameters do not require grad, and inputs that require grad raise.

    Args:
        prepared: calibrated, or from :func:`torchq.prepare_qat` and in eval mode.
        strict: raise if a convolution, linear or recurrent module, or another parameter that data
            is multiplied by, stays float without an override that asks for it. Later calls that do
            not meet a graph's guards raise, too.

    Raises:
        ValueError: ``prepared`` has no observers, or a weight cannot be quantized.
        RuntimeError: calibration was forgotten, or did not reach a graph or a module (the message
            names it); or ``strict`` and something stays float.

    Example:
        >>> x = torch.randn(8, 16)
        >>> prepared = torchq.prepare(nn.Sequential(nn.Linear(16, 4)).eval(), x)
        >>> qmodel = torchq.convert(torchq.calibrate(prepared, [x]), strict=True)
        >>> qmodel(x).shape
        torch.Size([8, 4])
    """
    qat = getattr(prepared, "__dict__", {}).get("torchq_qat")  # of torchq.prepare_qat
    if qat is not None:
        return qat.convert(prepared, strict)  # type: ignore[no-any-return]
    check_prepared("convert", prepared)
    check_has_data(prepared)
    result = converted_model(prepared, strict)
    warn_of_data("convert", prepared)
    return result


@takes_programs
def quantize(
    model: Model,
    data: Iterable[Inputs] | None = None,
    example_inputs: Inputs | None = None,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    strict: bool = False,
) -> Model:
    """Return an int8 copy of a float model, of the same class.

    In short for :func:`prepare`, :func:`calibrate` and :func:`convert`, whose pages say more.

    Args:
        model: float32, bfloat16 or float16, in eval mode; it stays as it is.
        data: batches as the model is called with them: tensors, tuples, or dicts of keyword
            arguments. A few hundred rows of real data suffice. None where nothing needs
            calibration, as with QConfig(dynamic=True).
        example_inputs: one such batch, for the capture; the default is the first of ``data``.
        config: how to quantize; the default is QConfig().
        overrides: patterns on names of modules -> a QConfig, or None to keep them float, as
            ``{"head": None, "layers.*.down": torchq.QConfig(dynamic=True)}``.
        strict: raise, instead of saying so in :func:`explain`, where a layer stays float or a later
            call does not fit the graph.

    Returns:
        The quantized model. :func:`explain` tells what runs in int8.

    Raises:
        TypeError, ValueError, RuntimeError: as the three functions.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
        >>> qmodel = torchq.quantize(model, [torch.randn(8, 16) for _ in range(4)])
        >>> x = torch.randn(8, 16)
        >>> torchq.sqnr(model(x), qmodel(x)) > 20
        True
    """
    if strict:
        config = replace(config or QConfig(), strict=True)
    if data is None:
        if example_inputs is None:
            raise TypeError(
                "torchq.quantize: data must be batches to calibrate with, got None. Where nothing "
                "needs calibration, as with QConfig(dynamic=True), pass example_inputs alone."
            )
        prepared = prepared_model(model, example_inputs, config, overrides, share=True)
        check_has_data(prepared, "quantize")
        return converted_model(prepared, strict)
    if example_inputs is None:
        rest = iter(batches("quantize", data, progress=False))
        args, kwargs = split_inputs(next(rest))
        example_inputs = kwargs or args
        data = itertools.chain([example_inputs], rest)
    prepared = prepared_model(model, example_inputs, config, overrides, share=True)
    result = converted_model(calibrate(prepared, data), strict)
    warn_of_data("quantize", prepared)
    return result

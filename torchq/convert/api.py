# SPDX-License-Identifier: Apache-2.0
"""The three verbs and the one-liner."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from torchq.capture.guards import Example
from torchq.capture.limits import limits
from torchq.capture.one_call import without_observers
from torchq.convert.calibrated import check_calibrated, check_has_data, observed_graphs
from torchq.convert.checks import add_checks
from torchq.convert.converted_leaves import Source, converted_leaf
from torchq.convert.dispatch import Dispatch, attach, dispatches
from torchq.convert.lower import Lowering
from torchq.convert.parts import Part, Parts, find_parts
from torchq.convert.prepared import Prepared
from torchq.convert.recipes import settle, watches
from torchq.convert.report import merged, report_rows, with_coarse
from torchq.convert.self_contained import SELF_CONTAINED, converted
from torchq.convert.settled import Seen
from torchq.convert.sources import CHECKS, name_sources
from torchq.convert.swap.checks import check_model, check_prepared
from torchq.convert.swap.flow import calibrate, plain_copy, prepare_settled
from torchq.convert.swap.observed import ObservedLeaf
from torchq.convert.swap.pretrained import refuse_save_pretrained
from torchq.convert.tables import share_rows, with_rows, with_tables
from torchq.convert.unseen import keep_options, warn_of_data, warn_of_floats
from torchq.convert.weights import ParameterWritten, first_names, with_names
from torchq.graphs.code import as_module, takes_programs
from torchq.models.conversions import refusing_conversions
from torchq.models.inputs import Inputs, Model, batches, check_fit, split_inputs, without_gradients
from torchq.nn.leaf import take_hooks
from torchq.nn.packed_weights import PackedWeights
from torchq.planning.passes import decided
from torchq.quantization.config import Overrides, QConfig
from torchq.report.rows import Row, Weight, check_patterns, check_strict

__all__ = ["calibrate", "convert", "converted_model", "prepare", "prepared_model", "quantize"]

_ONE_AT_A_TIME = threading.RLock()
"""torch.export patches what all threads share while it captures."""


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
        model: float32 or bfloat16, in eval mode; also an ExportedProgram or a GraphModule.
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


def prepared_model(
    model: Model,
    example_inputs: Inputs,
    config: QConfig | None,
    overrides: Overrides | None,
    share: bool,
    graphs: bool = True,
) -> Model:
    """Prepare; with ``share`` the result has the parameters of the model itself, where it can.

    Without ``graphs`` the model's own code runs in every call.
    """
    if config is not None and not isinstance(config, QConfig):
        raise TypeError(
            f"torchq.prepare: config must be a QConfig or None, got {type(config).__name__}. "
            "Write config=torchq.QConfig(activation_bits=7), say."
        )
    model = as_module(model)
    check_model(model)
    args, kwargs = split_inputs(example_inputs)
    try:
        with _ONE_AT_A_TIME, torch.autocast("cpu", enabled=False):
            shared, config = _stand_ins(model) if share else {}, config or QConfig()
            try:
                return _prepared(model, args, kwargs, config, overrides, shared, graphs)
            except ParameterWritten:
                return _prepared(model, args, kwargs, config, overrides, {}, graphs)
    except TypeError:
        check_fit(model, args, kwargs)
        raise


@torch.inference_mode(False)
def _stand_ins(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return parameters with the memory of the model's own, by their ids."""
    found: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.is_leaf and not parameter.is_inference():
            other = found[id(parameter)] = nn.Parameter(parameter.data, parameter.requires_grad)
            vars(other).update(vars(parameter))
    return found


@torch.inference_mode(False)
@torch.no_grad()
def _prepared(
    model: Model,
    args: Any,
    kwargs: Any,
    config: QConfig,
    overrides: Overrides | None,
    shared: Mapping[int, Any],
    capture: bool,
) -> Model:
    float_model = without_observers(plain_copy(model, shared))
    float_model, tables = with_tables(float_model, config, overrides)
    # patterns may name functions of a graph, too
    prepared = prepare_settled(float_model, args, kwargs, config, overrides, bool(shared))
    parts = find_parts(float_model, args, kwargs) if capture else Parts()
    graphs: list[tuple[str, list[Row]]] = []
    rows: list[Row] = []
    unused: list[Row] = []
    for part in parts.found:
        graph = _graph(part, prepared, config, overrides)
        rows += graph.torchq_report
        if graph.plan.multiplies:
            owner = prepared.get_submodule(part.name)
            example = Example.of(
                owner, part.exported, limits(part.captured.graph, graph.plan.ops.values())
            )
            dispatch = Dispatch(owner, graph, example, part.name, config.strict)
            dispatch.runs_both = _has_other_leaves(owner, dispatch)
            attach(dispatch)
            graphs.append((part.name, graph.torchq_report))
        else:
            unused += [row for row in graph.torchq_report if row.is_matmul or row.weights]
    leaves: list[Row] = prepared.torchq_report  # type: ignore[assignment]
    weights: list[Weight] = prepared.torchq_weights  # type: ignore[assignment]
    check_patterns(float_model, [*leaves, *rows], weights, overrides)
    names = {name for name, _ in float_model.named_modules()}
    merged_rows = with_names(merged(leaves, graphs, unused, names), first_names(float_model))
    vars(prepared)["torchq_report"] = with_rows(merged_rows, tables)
    refuse_save_pretrained(prepared)
    if config.check_inputs:
        vars(prepared)[CHECKS] = True
    if "" in parts.reasons:
        vars(prepared)["torchq_note"] = f"the whole is not captured: {parts.reasons['']}"
    return cast(Model, prepared)


def _graph(
    part: Part, prepared: nn.Module, config: QConfig, overrides: Overrides | None
) -> Prepared:
    """Return the observed graph of a part."""
    share_rows(part.captured.model, prepared.get_submodule(part.name))
    plan = decided(part.captured, config, overrides)
    opaque = {name: prepared.get_submodule(f"{plan.prefix}{name}") for name in plan.self_contained}
    leaves = {n: leaf for n, leaf in prepared.named_modules() if isinstance(leaf, ObservedLeaf)}
    samples = {name: leaf.sample for name, leaf in leaves.items() if leaf.sample is not None}
    for name in plan.dynamic_names & leaves.keys():
        leaves[name].be_dynamic()
    graph = Prepared(plan, opaque, report_rows(plan))
    graph.watch(watches(plan), samples)
    return graph.eval()


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
    qat: Any = getattr(prepared, "__dict__", {}).get("torchq_qat")  # of torchq.prepare_qat
    if qat is not None:
        return qat.convert(prepared, strict)  # type: ignore[no-any-return]
    check_prepared("convert", prepared)
    check_has_data(prepared)
    result = converted_model(prepared, strict)
    warn_of_data("convert", prepared)
    return result


@torch.inference_mode(False)
@torch.no_grad()
def converted_model(
    prepared: Model, strict: bool, every_leaf: bool = False, weights: PackedWeights | None = None
) -> Model:
    """Convert; ``every_leaf`` must be calibrated, also those that no call of the data reached.

    ``weights`` are packed for other layers, too, that will be put into the result.
    """
    with _ONE_AT_A_TIME, torch.autocast("cpu", enabled=False):
        return _lowered(prepared, strict, every_leaf, weights or PackedWeights())


def _lowered(prepared: Model, strict: bool, every_leaf: bool, weights: PackedWeights) -> Model:
    check_prepared("convert", prepared)
    rows: list[Row] = list(prepared.torchq_report)  # type: ignore[arg-type]
    graphs = observed_graphs(prepared)
    for dispatch, graph in graphs.items():
        check_calibrated(dispatch, graph)
    settled = [settle(Seen(graph.recorder, graph.plan)) for graph in graphs.values()]
    rows, coarse = with_coarse(rows, prepared, settled)
    if strict:
        check_strict(rows, prepared.torchq_weights)  # type: ignore[arg-type]
    memo = dict[int, Any]()
    for name, module in prepared.named_modules():
        if isinstance(module, SELF_CONTAINED):
            memo[id(module)] = take_hooks(converted(module, name), module)
    sources: dict[str, list[Source]] = {}
    for (dispatch, graph), one in zip(graphs.items(), settled, strict=True):
        opaque = {
            name: memo[id(graph.graph_module.get_submodule(name))] for name in graph.opaque_names
        }
        lowering = Lowering(one, opaque, weights)
        memo[id(graph)] = lowered = lowering.run()
        add_checks(lowered, dispatch.example)
        for layer in one.plan.active:
            if layer.op.owner is not None:
                name = f"{one.plan.prefix}{layer.op.base}"
                sources.setdefault(name, []).append(lowering.source(layer))
    for name, module in prepared.named_modules():
        if isinstance(module, ObservedLeaf):
            leaf = converted_leaf(
                module, sources.get(name, []), every_leaf, weights, name in coarse
            )
            if leaf is module.module:  # the prepared model keeps its own
                leaf = copy.deepcopy(leaf, memo)
            memo[id(module)] = take_hooks(leaf, module)
    result = copy.deepcopy(prepared, memo)
    for dispatch in dispatches(result):
        _take_tensors(dispatch.graph, memo)
        dispatch.begin(strict)
    rows = [_with_copies(row, weights) for row in rows]
    refuse_save_pretrained(result)
    vars(result).update(torchq_report=rows, torchq_weights=prepared.torchq_weights)
    keep_options(prepared, result)
    name_sources(result)
    warn_of_floats(rows)
    return refusing_conversions(without_gradients(result.eval()))


def _with_copies(row: Row, weights: PackedWeights) -> Row:
    """Return the row of a layer, which says so where its weight is packed several times."""
    reasons = (row.reason, weights.copies(row.name) if row.is_matmul and row.quantized else "")
    return replace(row, reason="; ".join(filter(None, reasons)))


def _take_tensors(graph: nn.Module, memo: dict[int, Any]) -> None:
    """Give a graph the result's own parameters, and rows of embeddings: one copy of each."""
    for module in graph.modules():
        for key, parameter in module._parameters.items():
            module._parameters[key] = copy.deepcopy(parameter, memo)
        for key, buffer in module._buffers.items():
            module._buffers[key] = memo.get(id(buffer), buffer)


def _has_other_leaves(owner: nn.Module, dispatch: Dispatch) -> bool:
    """Return whether a module has observed leaves that its graph does not call."""
    graph: Any = dispatch.graph
    prefix = f"{dispatch.name}." if dispatch.name else ""
    known = graph.plan.layer_names | {f"{prefix}{name}" for name in graph.opaque_names}
    return any(
        f"{prefix}{name}" not in known
        for name, leaf in owner.named_modules()
        if (isinstance(leaf, ObservedLeaf) and leaf.observer is not None)
        or isinstance(leaf, SELF_CONTAINED)
    )


@takes_programs
def quantize(
    model: Model,
    data: Iterable[Any] | None = None,
    example_inputs: Inputs | None = None,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    strict: bool = False,
) -> Model:
    """Return an int8 copy of a float model, of the same class.

    In short for :func:`prepare`, :func:`calibrate` and :func:`convert`, whose pages say more.

    Args:
        model: float32 or bfloat16, in eval mode; it stays as it is.
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

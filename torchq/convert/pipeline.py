# SPDX-License-Identifier: Apache-2.0
"""From a float model to an int8 one: the stages of preparing and converting, in order.

Between them ``prepared.py`` has the observers of a graph, and ``settled.py`` makes scales of them.
``nn/packed_weights.py`` packs each weight once, for its graph and its leaf. In the result
``dispatch.py`` chooses for each call: the graph, or the module's own code.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from torchq.capture.cached import CachedExample
from torchq.capture.guards import Example
from torchq.capture.limits import limits
from torchq.capture.one_call import without_observers
from torchq.convert.calibrated import check_calibrated, observed_graphs
from torchq.convert.checks import add_checks
from torchq.convert.converted_leaves import converted_leaf
from torchq.convert.dispatch import Dispatch, attach, dispatches
from torchq.convert.lower import Lowering
from torchq.convert.parts import Part, Parts, find_parts
from torchq.convert.prepared import Prepared
from torchq.convert.recipes import settle, watches
from torchq.convert.report import check_patterns, coarse_names, merged, report_rows, with_coarse
from torchq.convert.self_contained import SELF_CONTAINED, converted
from torchq.convert.settled import Seen, Settled, Source
from torchq.convert.sources import CHECKS, name_sources
from torchq.convert.swap.checks import check_model, check_prepared
from torchq.convert.swap.flow import plain_copy, prepare_settled
from torchq.convert.swap.leaf_plans import plan_of
from torchq.convert.swap.observed import ObservedLeaf
from torchq.convert.swap.pretrained import refuse_save_pretrained
from torchq.convert.tables import share_rows, with_rows, with_tables
from torchq.convert.unseen import keep_options, warn_of_floats
from torchq.convert.weights import ParameterWritten, first_names, with_names
from torchq.graphs.code import as_module
from torchq.models.conversions import refusing_conversions
from torchq.models.inputs import Inputs, Model, check_fit, split_inputs, without_gradients
from torchq.nn.leaf import take_hooks
from torchq.nn.packed_weights import PackedWeights
from torchq.planning.cached import compressed_inputs
from torchq.planning.passes import decided
from torchq.planning.plan import Plan
from torchq.quantization.config import Overrides, QConfig
from torchq.report import reasons
from torchq.report.rows import Row, Weight, check_strict

_ONE_AT_A_TIME = threading.RLock()
"""torch.export patches what all threads share while it captures."""


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
    args: Sequence[object],
    kwargs: Mapping[str, object],
    config: QConfig,
    overrides: Overrides | None,
    shared: Mapping[int, object],
    capture: bool,
) -> Model:
    float_model = without_observers(plain_copy(model, shared))
    float_model, tables = with_tables(float_model, config, overrides)
    prepared = prepare_settled(float_model, args, kwargs, config, overrides, bool(shared))
    parts = find_parts(float_model, args, kwargs) if capture else Parts()
    plans = {part: _plan(part, prepared, config, overrides) for part in parts.found}
    _watch_leaves(prepared, plans.values())
    graphs = {part: _graph(plan, prepared) for part, plan in plans.items()}
    for part, graph in graphs.items():
        if graph.plan.multiplies:
            _attach(graph, part, prepared, config)
    rows = _rows(float_model, prepared, graphs, overrides)
    vars(prepared)["torchq_report"] = with_rows(rows, tables)
    refuse_save_pretrained(prepared)
    if config.check_inputs:
        vars(prepared)[CHECKS] = True
    if notes := list(_notes(parts, config)):
        vars(prepared)["torchq_note"] = "; ".join(notes)
    return cast(Model, prepared)


def _notes(parts: Parts, config: QConfig) -> Iterator[str]:
    """Yield what the report says of the whole model."""
    cached = [part.name for part in parts.found if part.has_cache]
    if "" in parts.why:
        steps = cached[0] if cached else ""
        text = f" (but one graph takes each call of '{steps}' with a cache)" if steps else ""
        yield f"the whole is not captured{text}: {parts.why['']}"
    if config.cache_bits is not None and not cached:
        yield reasons.NO_CACHE


def _plan(part: Part, prepared: nn.Module, config: QConfig, overrides: Overrides | None) -> Plan:
    """Return what is decided of the graph of a part."""
    share_rows(part.captured.model, prepared.get_submodule(part.name))
    return decided(part.captured, config, overrides)


def _watch_leaves(prepared: nn.Module, plans: Iterable[Plan]) -> None:
    """Let leaves record what their own plans want; the graphs say which of them are dynamic."""
    static, dynamic = set[str](), set[str]()
    for plan in plans:
        static |= plan.layer_names
        dynamic |= plan.dynamic_names if plan.multiplies else set()
    for name, leaf in prepared.named_modules():
        if isinstance(leaf, ObservedLeaf):
            if name in dynamic:
                leaf.why_dynamic = reasons.DYNAMIC
            elif name in static:
                leaf.why_dynamic = ""
            leaf.watch(watches(plan_of(leaf)))


def _graph(plan: Plan, prepared: nn.Module) -> Prepared:
    """Return the observed graph of a plan."""
    opaque = {name: prepared.get_submodule(f"{plan.prefix}{name}") for name in plan.self_contained}
    leaves = {n: leaf for n, leaf in prepared.named_modules() if isinstance(leaf, ObservedLeaf)}
    samples = {name: leaf.sample for name, leaf in leaves.items() if leaf.sample is not None}
    graph = Prepared(plan, opaque, report_rows(plan))
    graph.watch(watches(plan), samples)
    return graph.eval()


def _attach(graph: Prepared, part: Part, prepared: nn.Module, config: QConfig) -> None:
    """Let calls of a module take its graph."""
    owner = prepared.get_submodule(part.name)
    sizes = limits(part.captured.graph, graph.plan.ops.values())
    kind = CachedExample if part.has_cache else Example
    example = kind.of(owner, part.exported, sizes)
    dispatch = Dispatch(owner, graph, example, part.name, config.strict)
    dispatch.runs_both = _has_other_leaves(owner, graph)
    attach(dispatch)


def _has_other_leaves(owner: nn.Module, graph: Prepared) -> bool:
    """Return whether a module has observed leaves that its graph does not call."""
    prefix = graph.plan.prefix
    known = graph.plan.layer_names | {f"{prefix}{name}" for name in graph.opaque_names}
    return any(
        f"{prefix}{name}" not in known
        for name, leaf in owner.named_modules()
        if (isinstance(leaf, ObservedLeaf) and leaf.observer is not None)
        or isinstance(leaf, SELF_CONTAINED)
    )


def _rows(
    model: nn.Module,
    prepared: nn.Module,
    graphs: Mapping[Part, Prepared],
    overrides: Overrides | None,
) -> list[Row]:
    """Return the report, once all patterns of overrides are known to match something."""
    leaves: list[Row] = prepared.torchq_report  # type: ignore[assignment]
    weights: list[Weight] = prepared.torchq_weights  # type: ignore[assignment]
    found = [row for graph in graphs.values() for row in graph.torchq_report]
    check_patterns(model, [*leaves, *found], weights, overrides)
    taken, unused = [], list[Row]()
    for part, graph in graphs.items():
        if graph.plan.multiplies:
            taken.append((part.name, graph.torchq_report))
        else:
            unused += [row for row in graph.torchq_report if row.is_matmul or row.weights]
    names = {name for name, _ in model.named_modules()}
    return with_names(merged(leaves, taken, unused, names), first_names(model))


@torch.inference_mode(False)
@torch.no_grad()
def converted_model(
    prepared: Model, strict: bool, every_leaf: bool = False, weights: PackedWeights | None = None
) -> Model:
    """Convert; ``every_leaf`` must be calibrated, also those that no call of the data reached.

    ``weights`` are packed for other layers, too, that will be put into the result.
    """
    with _ONE_AT_A_TIME, torch.autocast("cpu", enabled=False):
        return _converted(prepared, strict, every_leaf, weights or PackedWeights())


def _converted(prepared: Model, strict: bool, every_leaf: bool, weights: PackedWeights) -> Model:
    check_prepared("convert", prepared)
    graphs = observed_graphs(prepared)
    for dispatch, graph in graphs.items():
        check_calibrated(dispatch, graph)
    settled = [settle(Seen(graph.recorder, graph.plan)) for graph in graphs.values()]
    found: list[Row] = prepared.torchq_report  # type: ignore[assignment]
    leaves = {n: leaf for n, leaf in prepared.named_modules() if isinstance(leaf, ObservedLeaf)}
    coarse = coarse_names(settled)
    plans = {name: plan_of(leaf, coarse.get(name)) for name, leaf in leaves.items()}
    alone = {name: settle(Seen(leaf.recorder, plans[name])) for name, leaf in leaves.items()}
    rows = with_coarse(found, prepared, [*settled, *alone.values()])
    if strict:
        check_strict(rows, prepared.torchq_weights)  # type: ignore[arg-type]
    memo = _units(prepared, weights)
    sources = _lower(graphs, settled, weights, memo)
    for name, leaf in leaves.items():
        made = converted_leaf(leaf, sources[name], alone[name], weights, every_leaf)
        if made is leaf.module:  # the prepared model keeps its own
            made = copy.deepcopy(made, memo)
        memo[id(leaf)] = take_hooks(made, leaf)
    result = copy.deepcopy(prepared, memo)
    for dispatch in dispatches(result):
        _take_tensors(dispatch.graph, memo)
        dispatch.begin(strict)
        if isinstance(dispatch.example, CachedExample):  # another one than the prepared model's
            vars(dispatch.module)["forward"] = dispatch.forward
    rows = [_with_copies(row, weights) for row in rows]
    refuse_save_pretrained(result)
    vars(result).update(torchq_report=rows, torchq_weights=prepared.torchq_weights)
    keep_options(prepared, result)
    name_sources(result)
    warn_of_floats(rows)
    return refusing_conversions(without_gradients(result.eval()))


def _units(prepared: nn.Module, weights: PackedWeights) -> dict[int, nn.Module]:
    """Return by id of each module that is quantized as one unit: what it becomes."""
    modules = dict(prepared.named_modules())
    units = {name: module for name, module in modules.items() if isinstance(module, SELF_CONTAINED)}
    return {
        id(unit): take_hooks(converted(unit, name, weights), unit) for name, unit in units.items()
    }


def _lower(
    graphs: Mapping[Dispatch, Prepared],
    settled: Iterable[Settled],
    weights: PackedWeights,
    memo: dict[int, Any],
) -> dict[str, list[Source]]:
    """Put the int8 graphs into ``memo``; return by name of a layer how its calls read sources."""
    sources = defaultdict[str, list[Source]](list)
    for (dispatch, graph), one in zip(graphs.items(), settled, strict=True):
        units = {name: graph.graph_module.get_submodule(name) for name in graph.opaque_names}
        lowering = Lowering(one, {name: memo[id(unit)] for name, unit in units.items()}, weights)
        memo[id(graph)] = lowered = lowering.run()
        example = dispatch.example
        if places := compressed_inputs(one.plan):
            assert isinstance(example, CachedExample)
            memo[id(dispatch.example)] = example = example.compressed(places)
        add_checks(lowered, example)
        for layer in one.plan.active:
            if layer.op.owner is not None:
                sources[f"{one.plan.prefix}{layer.op.base}"].append(one.source(layer))
    return sources


def _with_copies(row: Row, weights: PackedWeights) -> Row:
    """Return the row of a layer, which says so where its weight is packed several times."""
    copies = weights.copies(row.name) if row.is_matmul and row.quantized else ""
    return replace(row, reason="; ".join(filter(None, (row.reason, copies))))


def _take_tensors(graph: nn.Module, memo: dict[int, Any]) -> None:
    """Give a graph the result's own parameters, and rows of embeddings: one copy of each."""
    for module in graph.modules():
        for key, parameter in module._parameters.items():
            module._parameters[key] = copy.deepcopy(parameter, memo)
        for key, buffer in module._buffers.items():
            module._buffers[key] = memo.get(id(buffer), buffer)

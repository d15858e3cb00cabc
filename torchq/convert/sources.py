# SPDX-License-Identifier: Apache-2.0
"""Names the float values that a converted model makes int8, for warnings, errors and reports."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from torchq.convert.dispatch import Dispatch, dispatches
from torchq.graphs.module import QuantizedGraph
from torchq.models.inputs import Model
from torchq.nn.clip_counter import SHARE, Told
from torchq.nn.module import QModule
from torchq.nn.quantize import QLookup, Quantize

CHECKS = "torchq_check_inputs"
"""Name of the attribute of a model whose quantized inputs must be finite."""
CLIPS = "torchq_clips"
"""Name of the attribute that holds which share of values may be clipped, if more than usual."""


def name_sources(model: Model) -> Model:
    """Return the model; counters of its quantized inputs know their names, and share a warning."""
    told, checks = Told(vars(model).get(CLIPS, SHARE)), bool(vars(model).get(CHECKS, False))
    named: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, QModule):
            _name(module, source_name(name), checks, told, named)
    graphs: list[tuple[nn.Module, Dispatch | None]] = [(d.graph, d) for d in dispatches(model)]
    if isinstance(model, QuantizedGraph):
        graphs.append((model, None))
    for graph, dispatch in graphs:
        last = {module: (name, warns) for module, name, warns in _graph_sources(graph, dispatch)}
        named = set()
        for module, (name, warns) in reversed(last.items()):
            _name(module, name, checks, told if warns else None, named)
    return model


def source_name(reader: str) -> str:
    """Return how to call what a module reads; the module "" is the model."""
    return f"the source of '{reader}'" if reader else "the input of the model"


def input_names(graph: fx.Graph, dispatch: Dispatch | None) -> dict[str, str]:
    """Return how to call the inputs of a graph, by the names of their nodes."""
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    labels = names if dispatch is None else dispatch.example._labels()
    where = f" of '{dispatch.name}'" if dispatch is not None and dispatch.name else ""
    return {name: f"input '{label}'{where}" for name, label in zip(names, labels, strict=True)}


def _graph_sources(
    graph: nn.Module, dispatch: Dispatch | None
) -> Iterator[tuple[nn.Module, str, bool]]:
    """Yield the modules of a graph, how to call what they read as float, and whether to warn.

    A module comes once for each of its calls.
    """
    assert isinstance(graph, fx.GraphModule)
    inputs = input_names(graph.graph, dispatch)
    prefix = f"{dispatch.name}." if dispatch is not None and dispatch.name else ""
    calls = graph.graph.find_nodes(op="call_module")
    modules = {name: graph.get_submodule(name) for name in {str(node.target) for node in calls}}
    # functions by table: where these are flat, ranges need not reach
    tables = {node for node in calls if isinstance(modules[str(node.target)], QLookup)}
    for node in calls:
        module = modules[str(node.target)]
        given = [inputs[src.name] for src in node.all_input_nodes if src.name in inputs]
        readers = list(node.users) if isinstance(module, Quantize) and node.users else [node]
        place = readers[0].target if readers[0].op == "call_module" else readers[0].name
        name = given[0] if given else source_name(f"{prefix}{place}")
        yield module, name, not tables.issuperset(readers)


def _name(
    module: nn.Module, name: str, checks: bool, told: Told | None, named: set[nn.Module]
) -> None:
    """Name what a module and its parts read, but for parts that are named; add these."""
    for _, part in module.named_modules(named):
        if isinstance(part, QModule):
            part.name_source(name, checks, told)

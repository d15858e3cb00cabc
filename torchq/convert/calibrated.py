# SPDX-License-Identifier: Apache-2.0
"""The observed graphs of a prepared model; refuses to convert those that saw no data."""

from __future__ import annotations

from torch import nn

from torchq.attributes.arguments import place_of
from torchq.convert.dispatch import Dispatch, dispatches
from torchq.convert.prepared import Prepared
from torchq.convert.swap.observed import ObservedLeaf
from torchq.models.observed import observers
from torchq.report.rows import joined


def observed_graphs(prepared: nn.Module) -> dict[Dispatch, Prepared]:
    """Return what lets calls take a graph, and the observed graph, of each module that has one."""
    found = {each: each.graph for each in dispatches(prepared)}
    return {each: graph for each, graph in found.items() if isinstance(graph, Prepared)}


def check_has_data(prepared: nn.Module, op: str = "convert") -> None:
    """Raise RuntimeError where nothing was recorded, and something has to be.

    ``quantize`` without data raises TypeError.
    """
    graphs = observed_graphs(prepared)
    leaves = [leaf for leaf in prepared.modules() if isinstance(leaf, ObservedLeaf)]
    samples = [sample for graph in graphs.values() for sample in graph.samples]
    samples += [leaf.sample for leaf in leaves if leaf.sample is not None]
    # a leaf may do without what it has seen
    owners: list[nn.Module] = [*graphs.values()] or [prepared]
    found = [*(one for owner in owners for one in observers(owner).values()), *samples]
    called = any(each.graph_calls or each.own_calls for each in graphs)
    if found and not called and not any(one.calibrated for one in found):
        if op == "quantize":
            raise TypeError(
                "torchq.quantize: data must be batches to calibrate with, got None, and a model "
                "that has static layers, a recipe or min_sqnr. Pass a list of batches, or "
                "QConfig(dynamic=True) without min_sqnr."
            )
        raise RuntimeError(
            f"torchq.{op}: prepared must be calibrated, got a model that has seen no data. Call "
            "torchq.calibrate(prepared, batches) first, with batches as the model is called with."
        )


def check_calibrated(dispatch: Dispatch, graph: Prepared) -> None:
    """Raise RuntimeError where every call of calibration ran the module's own code."""
    observers = [*graph.observers, *graph.samples]
    seen = dispatch.graph_calls or any(observer.calibrated for observer in observers)
    if observers and not seen:
        raise RuntimeError(
            f"torchq.convert: calibration must reach the graph of {place_of(dispatch.name)}, got "
            f"no call that meets its guards: {joined(dispatch.conditions())}. Give torchq.prepare "
            "example_inputs that are like the data, or torchq.calibrate more data."
        )

# SPDX-License-Identifier: Apache-2.0
"""Quantized forms of one model that differ in what stays float: one capture, one calibration.

Every trial is planned before the calibration. The graph then has an observer for each value that
any of the plans makes int8, so that one run of the data serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from torchq.capture.ops import Role
from torchq.convert.api import calibrate, converted_model, prepared_model
from torchq.convert.coarse import coarse_layers, without_coarse
from torchq.convert.dispatch import dispatches
from torchq.convert.lower import Lowering
from torchq.convert.plan import Plan
from torchq.convert.prepared import Prepared
from torchq.convert.rows import Row
from torchq.convert.self_contained import SELF_CONTAINED
from torchq.convert.swap.observed import ObservedLeaf
from torchq.nn.inputs import Inputs
from torchq.nn.leaf import take_hooks
from torchq.quantization.config import Overrides, QConfig, resolve


@dataclass(frozen=True)
class Trial:
    """A choice of what stays float, and the graphs with a plan for it.

    Attributes:
        overrides: by name, of the whole model.
        graphs: in the order of the modules that have one.
        as_whole: follow the row rule where the whole model does, whatever the overrides name.
    """

    overrides: Overrides
    graphs: list[Prepared]
    as_whole: bool


class Trials:
    """Plans trials of a model, calibrates all of them, and makes one after the other.

    Attributes:
        prepared: has the observers of all trials.
        whole: the quantized model, once calibrated, with nothing but ``overrides`` in float.
    """

    def __init__(
        self, model: nn.Module, example_inputs: Inputs, config: QConfig, overrides: Overrides
    ) -> None:
        """Capture a model; arguments are those of :func:`torchq.prepare`."""
        self.config = config
        self.prepared = prepared_model(model, example_inputs, config, overrides, share=True)
        self.whole: nn.Module = self.prepared
        self._graphs: list[Any] = [each.graph for each in dispatches(self.prepared)]
        self._coarse: list[dict[fx.Node, str]] = []
        self._searches: list[dict[Any, Any]] = [{} for _ in self._graphs]

    def computing(self) -> list[Row]:
        """Return the rows of the layers and functions that compute in int8.

        What moves values computes nothing. Functions that are fused into a layer round nothing,
        but for additions, whose other source is rounded.
        """
        found = {name for graph in self._graphs for name in _computing(graph.plan)}
        rows: list[Row] = self.prepared.torchq_report  # type: ignore[assignment]
        return [row for row in rows if row.quantized and (row.is_matmul or row.name in found)]

    def plan(self, overrides: Overrides, as_whole: bool = False) -> Trial:
        """Plan a trial, before the calibration."""
        graphs = [graph.sharing(_planned(graph, overrides)) for graph in self._graphs]
        return Trial(overrides, graphs, as_whole)

    def has(self, trial: Trial, row: Row) -> bool:
        """Return whether a trial has a layer or function in int8."""
        names = (name for graph in trial.graphs for name in _computing(graph.plan))
        return row.is_matmul or row.name in names

    def calibrate(self, data: Iterable[Any]) -> None:
        """Calibrate all trials, and convert the whole."""
        for graph in self._graphs:
            graph.graph_module.recompile()
        calibrate(self.prepared, data, progress=False)
        self.whole = converted_model(self.prepared, strict=False)
        pairs = zip(self._graphs, self._searches, strict=True)
        self._coarse = [coarse_layers(g.with_plan(g.plan, known)) for g, known in pairs]

    @contextmanager
    def in_place(self, trial: Trial) -> Iterator[nn.Module]:
        """Let the whole model compute as a trial does."""
        owners = dispatches(self.whole)
        graphs = [owner.graph for owner in owners]
        leaves = dict(self._leaves_in_float(trial))
        with torch.no_grad():
            lowered = [self._lowered(i, graph, trial) for i, graph in enumerate(trial.graphs)]
        try:
            for owner, graph in zip(owners, lowered, strict=True):
                owner.graph = graph
            _exchange(self.whole, leaves)
            yield self.whole
        finally:
            for owner, graph in zip(owners, graphs, strict=True):
                owner.graph = graph
            _exchange(self.whole, {new: old for old, new in leaves.items()})

    def _lowered(self, number: int, graph: Prepared, trial: Trial) -> nn.Module:
        settled = graph.with_plan(graph.plan, self._searches[number])
        of_whole = self._coarse[number]
        if trial.as_whole:
            left = {layer.op.node for layer in graph.plan.layer_at.values()}
            reasons = {node: why for node, why in of_whole.items() if node in left}
        else:
            reasons = coarse_layers(settled)
        prefix = graph.plan.prefix
        names = [name for name in graph.plan.self_contained if name in graph.opaque_names]
        opaque = {name: self.whole.get_submodule(f"{prefix}{name}") for name in names}
        return Lowering(without_coarse(settled, reasons), opaque).run()

    def _leaves_in_float(self, trial: Trial) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield leaves of the whole model that a trial has in float, and the float layers."""
        for name, leaf in self.prepared.named_modules():
            known = isinstance(leaf, (ObservedLeaf, *SELF_CONTAINED))
            if name and known and resolve(trial.overrides, name, self.config) is None:
                module: Any = leaf.module
                if (made := self.whole.get_submodule(name)) is not module:
                    yield made, take_hooks(module, leaf)


def _computing(plan: Plan) -> Iterator[str]:
    """Yield the names of what computes in int8 by a plan."""
    layers = plan.layer_at.values()
    residual = [p for layer in layers for p in layer.parts if p.role is Role.COMBINE]
    ops = [*(layer.op for layer in layers), *residual, *plan.dynamic_at.values()]
    names = [op.base if op.owner is not None else op.name for op in ops]
    for name in (*names, *plan.self_contained):
        yield f"{plan.prefix}{name}"


def _planned(graph: Prepared, overrides: Overrides) -> Plan:
    return Plan(graph.plan.captured, graph.plan._config, overrides)


def _exchange(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Put other modules in the places of some."""
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child in new:
                module._modules[key] = new[child]

# SPDX-License-Identifier: Apache-2.0
"""Cost of each layer and function in accuracy: with it alone in int8, and alone in float."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape

import torch
from torch import fx, nn

from torchq.analysis.accuracy import Noise, noise_of, pairs_of
from torchq.capture.ops import Role
from torchq.convert.calibrated import observed_graphs
from torchq.convert.dispatch import dispatches
from torchq.convert.lower import Lowering
from torchq.convert.pipeline import converted_model, prepared_model
from torchq.convert.recipes import settle, watches
from torchq.convert.recipes.rows import coarse, without_coarse
from torchq.convert.self_contained import SELF_CONTAINED
from torchq.convert.settled import Seen
from torchq.convert.swap.flow import calibrate, plain_copy
from torchq.convert.swap.observed import ObservedLeaf
from torchq.convert.tables import with_tables
from torchq.models.inputs import Inputs, batches, call, with_progress
from torchq.models.state import as_before
from torchq.nn.leaf import take_hooks
from torchq.nn.packed_weights import PackedWeights
from torchq.planning.passes import decided
from torchq.planning.plan import Plan
from torchq.quantization.config import Overrides, QConfig, check_overrides, resolve
from torchq.report.rows import Row
from torchq.report.tables import html_table

_CALLS = 6
"""Calls of all trials together, for each batch. Calibrating one takes as long as three calls."""
_FEWEST = 3  # batches that a trial is measured on


@dataclass(frozen=True)
class Sensitivity:
    """Cost of one layer or function in accuracy, as SQNR of the model's output in dB.

    Attributes:
        name: qualified name in the float model.
        alone: with only this one quantized; the lower, the more this layer hurts.
        kept: with only this one kept float; the higher above ``all_quantized``, the more it helps.
        all_quantized: with everything quantized.
    """

    name: str
    alone: float
    kept: float
    all_quantized: float


class NothingInt8(ValueError):
    """Nothing of a model runs in int8."""


class Sensitivities(list[Sensitivity]):
    """The entries, and a table of them as ``str``."""

    def __str__(self) -> str:
        """One line per layer, the most harmful first."""
        if not self:
            return "no layers"
        together = self[0].all_quantized
        lines = [f"output with all of these in int8 {together:.1f} dB"]
        lines += [
            f"{entry.alone:6.1f} dB alone in int8  {entry.kept:6.1f} dB alone in float "
            f"({entry.kept - together:+.1f})  {entry.name}"
            for entry in self
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same as a table, for notebooks."""
        rows = [(x.name, f"{x.alone:.1f}", f"{x.kept:.1f}") for x in self]
        heads = ("layer", "dB, alone in int8", "dB, alone in float")
        return html_table(heads, rows, str(self).splitlines()[:1])


def sensitivity(
    model: nn.Module,
    data: Sequence[Inputs],
    example_inputs: Inputs | None = None,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    progress: bool | None = None,
) -> Sensitivities:
    """Measure the model with each layer and function alone in int8, and alone in float.

    The model is calibrated once, on all batches. Each layer is then measured on as many of them as
    keep the time of all within about ten calibrations: on the one where the int8 model is furthest
    off, and on others between the first and the last.

    Many functions are int8 only between int8 layers. Their ``alone`` is computed from the noise
    that goes when they are kept float. Embeddings are float in the trials of others, and their
    noise is added to that of ``kept`` and ``all_quantized``.

    Args:
        model: float32, bfloat16 or float16, in eval mode.
        data: batches, used for calibration and for measuring.
        example_inputs: one call's inputs; the default is the first batch.
        config: how to quantize; the default is QConfig().
        overrides: exceptions, by name, in every trial; layers that they keep float are left out.
        progress: show a bar over the layers.

    Returns:
        One entry per layer and function that runs in int8, and per embedding with quantized rows,
        the most harmful first; a list that prints as a table.

    Raises:
        ValueError: nothing of the model runs in int8; and as :func:`torchq.quantize`.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
        >>> data = [torch.randn(8, 16)]
        >>> found = torchq.sensitivity(model, data, progress=False)
        >>> sorted(entry.name for entry in found)
        ['0', '2']
    """
    config, overrides = config or QConfig(), dict(check_overrides(overrides))
    data = list(batches("sensitivity", data, progress=False))
    example = data[0] if example_inputs is None else example_inputs
    return _Measure(model, data, example, config, overrides).run(progress)


def _without_tables(config: QConfig) -> QConfig:
    return replace(config, embedding_bits=None)


class _Measure:
    """Plans the trials of a model and measures them."""

    def __init__(
        self,
        model: nn.Module,
        data: list[Inputs],
        example_inputs: Inputs,
        config: QConfig,
        overrides: Overrides,
    ) -> None:
        """Capture the model; arguments as for :func:`sensitivity`."""
        self.model, self.data = model, data
        self.tables = _tables(model, config, overrides)
        self.config = _without_tables(config)
        self.overrides = {name: own and _without_tables(own) for name, own in overrides.items()}
        self.trials = Trials(model, example_inputs, self.config, self.overrides)
        self.rows = self.trials.computing()
        self.chosen: list[tuple[Inputs, object]] = []  # batches, and results of the float model

    def run(self, progress: bool | None) -> Sensitivities:
        """Return the entries."""
        planned = [self._planned(row) for row in self.rows]
        self.trials.calibrate(self.data)
        told: list[Row] = self.trials.whole.torchq_report  # type: ignore[assignment]
        in_int8 = {row.name for row in told if row.quantized}
        found = [(row, t) for row, t in zip(self.rows, planned, strict=True) if row.name in in_int8]
        if not found and not self.tables:
            raise NothingInt8(
                "torchq.sensitivity: model must have a convolution or linear that runs in int8, "
                "got none. torchq.explain(torchq.quantize(...)) says why each stays float."
            )
        self.chosen = self._choose(sum(len(trials) for _, trials in found) + len(self.tables))
        layers, noises = self._noise(self.trials.whole), dict[str, tuple[Noise, Noise]]()
        tables = {name: self._noise(quantized) for name, quantized in self.tables.items()}
        together = _with(layers, tables.values())
        for row, trials in with_progress("sensitivity", found, progress):
            *first, kept = [self._of_trial(trial) for trial in trials]
            alone = first[0] if first else _without(layers, kept)
            noises[row.name] = alone, _with(kept, tables.values())
        noises |= {name: (alone, _without(together, alone)) for name, alone in tables.items()}
        entries = [
            Sensitivity(name, alone.decibels, kept.decibels, together.decibels)
            for name, (alone, kept) in noises.items()
        ]
        return Sensitivities(sorted(entries, key=lambda entry: entry.alone))

    def _planned(self, row: Row) -> list[Choice]:
        """Return the trials alone in int8, where there is one, and in float."""
        name, own = escape(row.name), resolve(self.overrides, row.name, self.config)
        alone = self.trials.plan({"*": None, name: own}, as_whole=True)
        kept = self.trials.plan({**self.overrides, name: None})
        return [alone, kept] if self.trials.has(alone, row) else [kept]

    def _of_trial(self, trial: Choice) -> Noise:
        with self.trials.in_place(trial) as quantized:
            return self._noise(quantized)

    def _noise(self, quantized: nn.Module) -> Noise:
        with as_before(quantized), torch.inference_mode():
            results = [(expected, call(quantized, batch)) for batch, expected in self.chosen]
        return noise_of(pair for pair in pairs_of(*map(list, zip(*results, strict=True))))

    def _choose(self, trials: int) -> list[tuple[Inputs, object]]:
        """Return the batches to measure on, with what the float model gives of them."""
        count = max(_CALLS * len(self.data) // max(trials, 1), _FEWEST)
        with as_before(self.model), torch.inference_mode():
            known = [(batch, call(self.model, batch)) for batch in self.data]
        if count >= len(known):
            return known
        with as_before(self.trials.whole), torch.inference_mode():
            got = [call(self.trials.whole, batch) for batch, _ in known]
        noises = [noise_of(pairs_of(e, g)) for (_, e), g in zip(known, got, strict=True)]
        worst = max(range(len(known)), key=lambda i: noises[i].noise / (noises[i].signal or 1))
        others = [round(i * (len(known) - 1) / (count - 2)) for i in range(count - 1)]
        return [known[i] for i in sorted({worst, *others})]


def _without(noise: Noise, part: Noise) -> Noise:
    return Noise(noise.signal, max(noise.noise - part.noise, 0.0), 0.0, noise.values)


def _with(noise: Noise, parts: Iterable[Noise]) -> Noise:
    return replace(noise, noise=noise.noise + sum(part.noise for part in parts))


def _tables(model: nn.Module, config: QConfig, overrides: Overrides) -> dict[str, nn.Module]:
    """Return by name of each embedding whose rows are quantized: the model with it alone so."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    found: dict[str, nn.Module] = {}
    for name in with_tables(plain_copy(model, shared), config, overrides)[1]:
        alone = {"*": None, escape(name): resolve(overrides, name, config)}
        found[name] = with_tables(plain_copy(model, shared), config, alone)[0]
    return found


# Trials: one capture and one calibration for all. Each is planned before the calibration. A graph
# then has an observer for each value that any of the plans makes int8.


@dataclass(frozen=True)
class Choice:
    """A choice of what stays float, and plans for it.

    Attributes:
        overrides: by name, of the whole model.
        plans: in the order of the modules that have a graph.
        as_whole: follow the row rule where the whole model does, whatever the overrides name.
    """

    overrides: Overrides
    plans: list[Plan]
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
        self._graphs = list(observed_graphs(self.prepared).values())
        self._coarse: list[dict[fx.Node, str]] = []
        self._searches: list[dict[Hashable, object]] = [{} for _ in self._graphs]
        self._weights = PackedWeights()

    def computing(self) -> list[Row]:
        """Return the rows of the layers and functions that compute in int8.

        What moves values computes nothing. Functions that are fused into a layer round nothing,
        but for additions, whose other source is rounded.
        """
        found = {name for graph in self._graphs for name in _computing(graph.plan)}
        rows: list[Row] = self.prepared.torchq_report  # type: ignore[assignment]
        return [row for row in rows if row.quantized and (row.is_matmul or row.name in found)]

    def plan(self, overrides: Overrides, as_whole: bool = False) -> Choice:
        """Plan a trial, before the calibration."""
        plans = []
        for graph in self._graphs:
            plans.append(decided(graph.plan.captured, graph.plan.default, overrides))
            graph.watch(watches(plans[-1]))
        return Choice(overrides, plans, as_whole)

    def has(self, trial: Choice, row: Row) -> bool:
        """Return whether a trial has a layer or function in int8."""
        names = (name for plan in trial.plans for name in _computing(plan))
        return row.is_matmul or row.name in names

    def calibrate(self, data: Iterable[Inputs]) -> None:
        """Calibrate all trials, and convert the whole."""
        calibrate(self.prepared, data, progress=False)
        self.whole = converted_model(self.prepared, strict=False, weights=self._weights)
        plans = [graph.plan for graph in self._graphs]
        self._coarse = [coarse(self._seen(i, plan)) for i, plan in enumerate(plans)]

    def _seen(self, number: int, plan: Plan) -> Seen:
        """Return what was recorded for a plan; searches are those of all plans of the graph."""
        return Seen(self._graphs[number].recorder, plan, self._searches[number])

    @contextmanager
    def in_place(self, trial: Choice) -> Iterator[nn.Module]:
        """Let the whole model compute as a trial does."""
        owners = dispatches(self.whole)
        graphs = [owner.graph for owner in owners]
        leaves = dict(self._leaves_in_float(trial))
        with torch.no_grad():
            lowered = [self._lowered(i, plan, trial) for i, plan in enumerate(trial.plans)]
        try:
            for owner, graph in zip(owners, lowered, strict=True):
                owner.graph = graph
            _exchange(self.whole, leaves)
            yield self.whole
        finally:
            for owner, graph in zip(owners, graphs, strict=True):
                owner.graph = graph
            _exchange(self.whole, {new: old for old, new in leaves.items()})

    def _lowered(self, number: int, plan: Plan, trial: Choice) -> nn.Module:
        seen, known = self._seen(number, plan), self._graphs[number].opaque_names
        if trial.as_whole:
            left = {layer.op.node for layer in plan.active}
            of_whole = self._coarse[number].items()
            found = {node: why for node, why in of_whole if node in left}
            seen = seen.with_plan(without_coarse(plan, found))
        names = [name for name in plan.self_contained if name in known]
        opaque = {name: self.whole.get_submodule(f"{plan.prefix}{name}") for name in names}
        return Lowering(settle(seen), opaque, self._weights).run()

    def _leaves_in_float(self, trial: Choice) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield leaves of the whole model that a trial has in float, and the float layers."""
        for name, leaf in self.prepared.named_modules():
            known = isinstance(leaf, (ObservedLeaf, *SELF_CONTAINED))
            if name and known and resolve(trial.overrides, name, self.config) is None:
                module = leaf.module
                if (made := self.whole.get_submodule(name)) is not module:
                    yield made, take_hooks(module, leaf)


def _computing(plan: Plan) -> Iterator[str]:
    """Yield the names of what computes in int8 by a plan."""
    layers = plan.active
    residual = [p for layer in layers for p in layer.parts if p.role is Role.COMBINE]
    ops = [*(layer.op for layer in layers), *residual, *plan.dynamic_at.values()]
    names = [op.base if op.owner is not None else op.name for op in ops]
    for name in (*names, *plan.self_contained):
        yield f"{plan.prefix}{name}"


def _exchange(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Put other modules in the places of some."""
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child in new:
                module._modules[key] = new[child]

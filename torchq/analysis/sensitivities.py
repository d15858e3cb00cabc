# SPDX-License-Identifier: Apache-2.0
"""Cost of each layer and function in accuracy: with it alone in int8, and alone in float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import escape
from typing import Any

import torch
from torch import nn

from torchq.analysis.accuracy import Noise, noise_of, pairs_of
from torchq.analysis.trials import Trial, Trials
from torchq.convert.rows import Row
from torchq.nn.inputs import Inputs, batches, call, with_progress
from torchq.nn.model_state import as_before
from torchq.nn.notebook import html_table
from torchq.quantization.config import Overrides, QConfig, check_overrides, resolve

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
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    progress: bool | None = None,
) -> Sensitivities:
    """Measure the model with each layer and function alone in int8, and alone in float.

    The model is calibrated once, on all batches. Each layer is then measured on as many of them as
    keep the time of all within about ten calibrations: on the one where the int8 model is furthest
    off, and on others between the first and the last.

    Many functions are int8 only between int8 layers. Their ``alone`` is computed from the noise
    that goes when they are kept float. Embeddings are float in all trials.

    Args:
        model: float32 or bfloat16, in eval mode.
        data: batches, used for calibration and for measuring.
        example_inputs: one call's inputs: a tensor, a tuple, or a dict of keyword arguments.
        config: how to quantize; the default is QConfig().
        overrides: exceptions, by name, in every trial; layers that they keep float are left out.
        progress: show a bar over the layers.

    Returns:
        One entry per layer and function that runs in int8, the most harmful first; a list that
        prints as a table.

    Raises:
        ValueError: nothing of the model runs in int8; and as :func:`torchq.quantize`.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
        >>> data = [torch.randn(8, 16)]
        >>> found = torchq.sensitivity(model, data, data[0], progress=False)
        >>> sorted(entry.name for entry in found)
        ['0', '2']
    """
    config, overrides = _without_tables(config), dict(check_overrides(overrides))
    overrides = {name: own and _without_tables(own) for name, own in overrides.items()}
    data = list(batches("sensitivity", data, progress=False))
    return _Measure(model, data, example_inputs, config, overrides).run(progress)


def _without_tables(config: QConfig | None) -> QConfig:
    return QConfig() if config is None else replace(config, embedding_bits=None)


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
        self.model, self.data, self.example = model, data, example_inputs
        self.config, self.overrides = config, overrides
        self.trials = Trials(model, example_inputs, config, overrides)
        self.rows = self.trials.computing()
        self.chosen: list[tuple[Inputs, Any]] = []  # batches, and results of the float model

    def run(self, progress: bool | None) -> Sensitivities:
        """Return the entries."""
        planned = [self._planned(row) for row in self.rows]
        self.trials.calibrate(self.data)
        told: list[Row] = self.trials.whole.torchq_report  # type: ignore[assignment]
        in_int8 = {row.name for row in told if row.quantized}
        found = [(row, t) for row, t in zip(self.rows, planned, strict=True) if row.name in in_int8]
        if not found:
            raise NothingInt8(
                "torchq.sensitivity: model must have a convolution or linear that runs in int8, "
                "got none. torchq.explain(torchq.quantize(...)) says why each stays float."
            )
        self.chosen = self._choose(sum(len(trials) for _, trials in found))
        together, entries = self._noise(self.trials.whole), []
        for row, trials in with_progress("sensitivity", found, progress):
            *first, kept = [self._of_trial(trial) for trial in trials]
            alone = first[0] if first else _without(together, kept)
            noises = (alone, kept, together)
            entries.append(Sensitivity(row.name, *(noise.decibels for noise in noises)))
        return Sensitivities(sorted(entries, key=lambda entry: entry.alone))

    def _planned(self, row: Row) -> list[Trial]:
        """Return the trials alone in int8, where there is one, and in float."""
        name, own = escape(row.name), resolve(self.overrides, row.name, self.config)
        alone = self.trials.plan({"*": None, name: own}, as_whole=True)
        kept = self.trials.plan({**self.overrides, name: None})
        return [alone, kept] if self.trials.has(alone, row) else [kept]

    def _of_trial(self, trial: Trial) -> Noise:
        with self.trials.in_place(trial) as quantized:
            return self._noise(quantized)

    def _noise(self, quantized: nn.Module) -> Noise:
        with as_before(quantized), torch.inference_mode():
            results = [(expected, call(quantized, batch)) for batch, expected in self.chosen]
        return noise_of(pair for pair in pairs_of(*map(list, zip(*results, strict=True))))

    def _choose(self, trials: int) -> list[tuple[Inputs, Any]]:
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

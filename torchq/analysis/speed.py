# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a model by layer, in float and in int8."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from torchq.analysis import timing
from torchq.analysis.explanation import explain
from torchq.analysis.timing import UNSTEADY, Speedup, Times, crowded, measure
from torchq.models.attached import computing_modules
from torchq.models.hooks import watching
from torchq.models.inputs import Inputs, split_inputs
from torchq.models.state import as_before
from torchq.models.trees import copied
from torchq.nn.module import QModule
from torchq.report.tables import html_table


@dataclass(frozen=True)
class LayerTime:
    """Medians over calls of the whole model, in milliseconds.

    Attributes:
        name: of the module that computes in the quantized model.
        modules: what it replaces in the float model.
        float_ms: of all of these together; NaN for functions, as in ``a + b``, which have no module
            to be timed at.
        int8_ms: of the quantized module.
        speedup: float by int8; None where there is no float time.
        share: of the time of the same calls of the whole quantized model.
    """

    name: str
    modules: tuple[str, ...]
    float_ms: float
    int8_ms: float
    speedup: Speedup | None = None
    share: float = math.nan

    @property
    def loses(self) -> bool:
        """Return whether int8 is slower than float here, by more than the spread."""
        return self.speedup is not None and self.speedup.high < 1


@dataclass(frozen=True, repr=False)
class Profile:
    """Whole-model times, measured without hooks, and the layers in order of execution.

    Attributes:
        float_times, int8_times: of each round.
        layers: the quantized ones.
        note: why the times say little, if they do.
    """

    float_times: Times
    int8_times: Times
    layers: tuple[LayerTime, ...]
    note: str = ""

    @property
    def float_ms(self) -> float:
        """Median time of the float model."""
        return self.float_times.median

    @property
    def int8_ms(self) -> float:
        """Median time of the quantized model."""
        return self.int8_times.median

    @property
    def speedup(self) -> Speedup:
        """Return the speedup of the whole model."""
        return Speedup.of(self.float_times, self.int8_times)

    @property
    def is_steady(self) -> bool:
        """Return whether the times bear out one figure for the whole model."""
        return self.speedup.is_steady and not self.note

    @property
    def losing(self) -> tuple[LayerTime, ...]:
        """Layers where int8 is slower than float: candidates for an override with None."""
        return tuple(layer for layer in self.layers if layer.loses)

    def __str__(self) -> str:
        """One line per layer, then the whole, then what loses; a function has no float time."""
        lines = [
            f"{layer.float_ms:9.3f} ms float  {layer.int8_ms:9.3f} ms int8  ".replace("nan", "  -")
            + f"{layer.speedup or '-'!s:>14}  {layer.name}"
            for layer in self.layers
        ]
        lines.append(f"{self.float_times} float  {self.int8_times} int8")
        lines.append(f"float by int8: {self.speedup}")
        if not self.is_steady:
            lines.append(self.note or UNSTEADY)
        if self.losing:
            lines.append("int8 is slower in: " + ", ".join(layer.name for layer in self.losing))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same as a table, for notebooks."""
        rows = [
            (x.name, f"{x.float_ms:.3f}", f"{x.int8_ms:.3f}", x.speedup or "-", f"{x.share:.0%}")
            for x in self.layers
        ]
        heads = ("layer", "float ms", "int8 ms", "float by int8", "of the int8 time")
        return html_table(heads, rows, str(self).splitlines()[len(rows) :])


def profile(
    model: nn.Module, qmodel: nn.Module, example_inputs: Inputs, rounds: int = 11
) -> Profile:
    """Time every quantized layer beside the float modules that it replaces.

    Args:
        model: the float model.
        qmodel: what :func:`torchq.convert` made of it.
        example_inputs: one call's inputs.
        rounds: calls of each model; the two take turns, and each figure is a median.

    Raises:
        ValueError: ``model`` is not the float model, ``qmodel`` was not converted, or ``rounds`` is
            not positive.
    """
    if rounds < 1:
        raise ValueError(f"torchq.profile: rounds must be positive, got {rounds}. Use 11.")
    if hasattr(model, "torchq_report") or not hasattr(qmodel, "torchq_report"):
        raise ValueError(
            "torchq.profile: model must be the float model and qmodel what torchq.convert made of "
            f"it, got {type(model).__name__} and {type(qmodel).__name__}, of which the first comes "
            "from torchq or the second does not. Write torchq.profile(model, qmodel, inputs)."
        )
    parts: dict[str, list[str]] = defaultdict(list)
    for row in explain(qmodel).rows:
        if row.quantized:
            parts[row.site].append(row.name)
    floats, int8s = dict(model.named_modules()), computing_modules(qmodel)
    sites = [s for s in parts if isinstance(int8s.get(s), QModule)]
    with as_before(model), as_before(qmodel), torch.inference_mode():
        whole = measure({"float": model, "int8": qmodel}, example_inputs, rounds)
        watched = {name: floats[name] for site in sites for name in parts[site] if name in floats}
        before, after = _Watch(watched), _Watch({site: int8s[site] for site in sites})
        for _ in range(rounds):
            before.run(model, example_inputs)
            after.run(qmodel, example_inputs)
    layers = [
        _layer(site, parts[site], before.times([n for n in parts[site] if n in watched]), after)
        for site in sites
        if any(site in ran for ran in after.rounds)
    ]
    return Profile(whole["float"], whole["int8"], tuple(layers), crowded())


def _layer(site: str, names: Sequence[str], floats: Times | None, after: _Watch) -> LayerTime:
    int8s = after.times([site])
    assert int8s is not None
    share = median(own / all_ for own, all_ in zip(int8s.rounds, after.wholes, strict=True))
    if floats is None:
        return LayerTime(site, tuple(names), math.nan, int8s.median, None, share)
    speedup = Speedup.of(floats, int8s)
    return LayerTime(site, tuple(names), floats.median, int8s.median, speedup, share)


class _Watch:
    """Times the calls of modules inside calls of a model; a module's time is summed over each.

    Attributes:
        rounds: milliseconds by name, for each call of the model.
        wholes: milliseconds of these calls.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.rounds: list[dict[str, float]] = []
        self.wholes: list[float] = []
        self._started: dict[str, float] = {}

    def times(self, names: Sequence[str]) -> Times | None:
        """Return the times of these modules together; None without any."""
        sums = (sum(ran.get(name, 0.0) for name in names) for ran in self.rounds)
        return Times(tuple(sums)) if names else None

    def run(self, model: nn.Module, inputs: Inputs) -> None:
        """One call of the model."""
        self.rounds.append(defaultdict(float))
        handles, (args, kwargs) = [], copied(*split_inputs(inputs))
        for name, module in self.modules.items():
            handles.append(module.register_forward_pre_hook(partial(self._start, name)))
            handles.append(module.register_forward_hook(partial(self._stop, name)))
        with watching(handles):
            start = timing.clock()
            model(*args, **kwargs)
            self.wholes.append(max(1e3 * (timing.clock() - start), 1e-9))

    def _start(self, name: str, module: nn.Module, args: object) -> None:
        self._started[name] = timing.clock()

    def _stop(self, name: str, module: nn.Module, args: object, result: object) -> None:
        self.rounds[-1][name] += 1e3 * (timing.clock() - self._started[name])

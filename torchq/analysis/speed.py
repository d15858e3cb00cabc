# SPDX-License-Identifier: Apache-2.0
"""Where the time of a model goes, in float and in int8."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from torchq.convert.explain import explain
from torchq.convert.inputs import Inputs, call
from torchq.convert.model_state import as_before
from torchq.nn.attached import computing_modules
from torchq.nn.module import QModule


@dataclass(frozen=True)
class LayerTime:
    """Medians over calls of the whole model, in milliseconds.

    Attributes:
        name: of the module that computes in the quantized model.
        modules: what it replaces in the float model.
        float_ms: of all of these together; NaN for functions, as in ``a + b``, which have no module
            to be timed at.
        int8_ms: of the quantized module.
    """

    name: str
    modules: tuple[str, ...]
    float_ms: float
    int8_ms: float

    @property
    def loses(self) -> bool:
        """Whether int8 is slower than float here."""
        return self.int8_ms > self.float_ms


@dataclass(frozen=True)
class Profile:
    """Whole-model times, measured without hooks, and the layers in order of execution."""

    float_ms: float
    int8_ms: float
    layers: tuple[LayerTime, ...]

    @property
    def losing(self) -> tuple[LayerTime, ...]:
        """Layers where int8 is slower than float: candidates for an override with None."""
        return tuple(layer for layer in self.layers if layer.loses)

    def __str__(self) -> str:
        """One line per layer, then the whole, then what loses; a function has no float time."""
        lines = [
            f"{layer.float_ms:9.3f} ms float  {layer.int8_ms:9.3f} ms int8  "
            f"{layer.float_ms / layer.int8_ms:5.1f}x".replace("nan", "  -")
            + f"  {layer.name}"
            for layer in self.layers
        ]
        whole = self.float_ms / self.int8_ms
        lines.append(f"{self.float_ms:9.3f} ms float  {self.int8_ms:9.3f} ms int8  {whole:5.1f}x")
        if self.losing:
            lines.append("int8 is slower in: " + ", ".join(layer.name for layer in self.losing))
        return "\n".join(lines)


def profile(
    model: nn.Module, qmodel: nn.Module, example_inputs: Inputs, rounds: int = 11
) -> Profile:
    """Times every quantized layer beside the float modules that it replaces.

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
        whole = milliseconds({"float": model, "int8": qmodel}, example_inputs, rounds)
        watched = {name: floats[name] for site in sites for name in parts[site] if name in floats}
        before, after = _Watch(watched), _Watch({site: int8s[site] for site in sites})
        for _ in range(rounds):
            for net, watch in ((model, before), (qmodel, after)):
                with watch:
                    call(net, example_inputs)
    layers = [
        LayerTime(
            site,
            tuple(parts[site]),
            _together([before.median(name) for name in parts[site] if name in watched]),
            after.median(site),
        )
        for site in sites
        if after.times[site]
    ]
    return Profile(whole["float"], whole["int8"], tuple(layers))


def _together(times: list[float]) -> float:
    return sum(times) if times else math.nan


class _Watch:
    """Times the calls of modules while it is entered; a call's time is summed over its run."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.times: dict[str, list[float]] = defaultdict(list)

    def median(self, name: str) -> float:
        return statistics.median(self.times[name]) if self.times[name] else 0.0

    def __enter__(self) -> None:
        self._run: dict[str, float] = defaultdict(float)
        self._started: dict[str, float] = {}
        self._handles = []
        for name, module in self.modules.items():
            self._handles.append(module.register_forward_pre_hook(partial(self._start, name)))
            self._handles.append(module.register_forward_hook(partial(self._stop, name)))

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        for name, elapsed in self._run.items():
            self.times[name].append(1e3 * elapsed)

    def _start(self, name: str, module: nn.Module, args: object) -> None:
        self._started[name] = time.perf_counter()

    def _stop(self, name: str, module: nn.Module, args: object, result: object) -> None:
        self._run[name] += time.perf_counter() - self._started[name]


def milliseconds(
    models: Mapping[str, nn.Module], inputs: Inputs, rounds: int = 11, calls: int = 1
) -> dict[str, float]:
    """Median time of one call, in milliseconds, for each model.

    The models take turns, so that a busy machine slows all alike: the times of one call of this
    function can be compared, those of two hardly. Each model runs three times before, in inference
    mode, with as many threads as ``torch.get_num_threads()``.

    Args:
        models: by the names that the result has.
        inputs: of every call: one input, a tuple of them, or a dict of keyword arguments.
        rounds: how many times each model has its turn; the median is of these.
        calls: of a turn, which counts as their mean: more for models of a few microseconds.

    Raises:
        ValueError: ``rounds`` or ``calls`` is less than 1.
    """
    if min(rounds, calls) < 1:
        raise ValueError(
            f"torchq.milliseconds: rounds and calls must be positive, got {rounds} and {calls}. "
            "Leave them out."
        )
    samples: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for model in models.values():
            for _ in range(3):
                call(model, inputs)
        for _ in range(rounds):
            for name, model in models.items():
                start = time.perf_counter()
                for _ in range(calls):
                    call(model, inputs)
                samples[name].append((time.perf_counter() - start) * 1e3 / calls)
    return {name: statistics.median(times) for name, times in samples.items()}

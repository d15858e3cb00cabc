# SPDX-License-Identifier: Apache-2.0
"""Times of models in turns, and what their spread lets one say."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchq.models.inputs import Inputs, call, call_with, split_inputs
from torchq.models.state import is_same
from torchq.models.trees import copied
from torchq.runtime.cpus import usable_cpus

clock = time.perf_counter
_TICK = 1e-6  # milliseconds: a clock may be too coarse to see a call
_WIDEST = 1.3
"""Quartiles of a ratio further apart than this bear out no single figure."""

UNSTEADY = "the times differ from round to round: run again on an idle machine for one figure"


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call, one figure for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of the rounds."""
        return _quartiles(self.rounds)

    def __str__(self) -> str:
        """Median and quartiles."""
        low, high = self.quartiles
        return f"{self.median:9.3f} ms ({low:.3f} to {high:.3f})"


@dataclass(frozen=True)
class Speedup:
    """How many times as fast one model is as another: the ratio of each round's two times.

    Attributes:
        median: of the rounds.
        low, high: the quartiles.
        best: the ratio of the shortest times.
    """

    median: float
    low: float
    high: float
    best: float

    @classmethod
    def of(cls, slow: Times, fast: Times) -> Speedup:
        """From the times of the same rounds."""
        pairs = zip(slow.rounds, fast.rounds, strict=True)
        ratios = [max(a, _TICK) / max(b, _TICK) for a, b in pairs]
        best = max(min(slow.rounds), _TICK) / max(min(fast.rounds), _TICK)
        return cls(statistics.median(ratios), *_quartiles(ratios), best)

    @property
    def is_steady(self) -> bool:
        """Return True where the spread bears out the median.

        The shortest times, which a busy machine disturbs least, must agree with it.
        """
        apart = max(self.best, self.median) / min(self.best, self.median)
        return self.high <= _WIDEST * self.low and apart <= _WIDEST

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the least and the most that the rounds bear out."""
        return min(self.low, self.best), max(self.high, self.best)

    def __str__(self) -> str:
        """Return the median, or in words what the rounds bear out where they differ much."""
        low, high = self.bounds
        if self.is_steady:
            return f"{self.median:.1f}x"
        if low >= 1:
            return f"at least {math.floor(10 * low) / 10:.1f}x"
        if high <= 1:
            return f"at most {math.ceil(10 * high) / 10:.1f}x"
        return f"{low:.1f}x to {high:.1f}x"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def crowded() -> str:
    """Return a sentence where there are more threads than CPUs to run them, else nothing."""
    threads, cpus = torch.get_num_threads(), usable_cpus()
    if threads <= max(cpus, 1):
        return ""
    return (
        f"{threads} threads share {cpus:g} CPUs, so that the times say little: call "
        f"torch.set_num_threads({max(int(cpus), 1)})"
    )


def measure(
    models: Mapping[str, nn.Module], inputs: Inputs, rounds: int = 11, calls: int = 1
) -> dict[str, Times]:
    """Time one call of each model, in turns.

    A busy machine slows all alike, so the times of one round can be compared. Each model runs three
    times before, in inference mode, with as many threads as ``torch.get_num_threads()``. The first
    call of a turn is not timed: it reads again what the other models have driven from the caches.
    A model that writes to its inputs gets copies in each call, made while no clock runs.

    Args:
        models: by the names that the result has.
        inputs: of every call: one input, a tuple of them, or a dict of keyword arguments.
        rounds: how many times each model has its turn.
        calls: of a turn, which counts as their mean: more for models of a few microseconds.

    Raises:
        TypeError: ``models`` is no dict of models.
        ValueError: ``rounds`` or ``calls`` is less than 1.
    """
    if not isinstance(models, Mapping):
        raise TypeError(
            f"torchq.milliseconds: models must be a dict of models, got {type(models).__name__}. "
            "Name each, as in {'float': model, 'int8': qmodel}."
        )
    if min(rounds, calls) < 1:
        raise ValueError(
            f"torchq.milliseconds: rounds and calls must be positive, got {rounds} and {calls}. "
            "Leave them out."
        )
    samples: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        written = {name: _is_written(model, inputs) for name, model in models.items()}
        for model in models.values():
            for _ in range(2):
                call(model, inputs)
        for _ in range(rounds):
            for name, model in models.items():
                call(model, inputs)
                given = split_inputs(inputs)
                turn = [copied(*given) if written[name] else given for _ in range(calls)]
                start = clock()
                for args, kwargs in turn:
                    model(*args, **kwargs)
                samples[name].append((clock() - start) * 1e3 / calls)
    return {name: Times(tuple(times)) for name, times in samples.items()}


class Milliseconds(dict[str, float]):
    """Median milliseconds by name, and a table of them as ``str``.

    Attributes:
        times: of each round, by name.
    """

    def __init__(self, times: Mapping[str, Times]) -> None:
        """Take the medians of the rounds."""
        super().__init__({name: each.median for name, each in times.items()})
        self.times = dict(times)

    def __str__(self) -> str:
        """One line per model: median, quartiles, and the speed beside the first model."""
        first, width = next(iter(self.times), ""), max(map(len, self.times), default=0)
        speedups = {n: Speedup.of(self.times[first], own) for n, own in self.times.items()}
        lines = [f"{name:{width}}{own}" for name, own in self.times.items()]
        for i, speedup in enumerate(speedups.values()):
            lines[i] += f"  {speedup} as fast as {first}" if i else ""
        steady = all(speedup.is_steady for speedup in speedups.values())
        if note := crowded() or ("" if steady else UNSTEADY):
            lines.append(note)
        return "\n".join(lines)

    __repr__ = __str__


def _is_written(model: nn.Module, inputs: Inputs) -> bool:
    """Call the model; return whether it writes to its inputs, so that each call needs new ones."""
    given, before = (copied(*split_inputs(inputs)) for _ in range(2))
    call_with(model, *given)
    return not is_same(before, given)


def milliseconds(
    models: Mapping[str, nn.Module], inputs: Inputs, rounds: int = 11, calls: int = 1
) -> Milliseconds:
    """Return the median time of one call of each model; the models take turns.

    Each model runs three times before, in inference mode, on ``torch.get_num_threads()`` threads.
    A model that writes to its inputs gets copies in each call, made while no clock runs.

    Args:
        models: by the names that the result has.
        inputs: of every call: one input, a tuple of them, or a dict of keyword arguments.
        rounds: how many times each model has its turn.
        calls: of a turn, which counts as their mean: more for models of a few microseconds.

    Returns:
        A dict that prints as a table, with the quartiles of the rounds.

    Raises:
        TypeError: ``models`` is no dict of models.
        ValueError: ``rounds`` or ``calls`` is less than 1.
    """
    return Milliseconds(measure(models, inputs, rounds, calls))

# SPDX-License-Identifier: Apache-2.0
"""Times competitors in turn: A B A B, in blocks of repeated executions."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torchq.ops  # noqa: F401  loads the library
from torchq.analysis.timing import crowded
from torchq.serialization.files import write_file

__all__ = [
    "FULL",
    "QUICK",
    "Blocks",
    "Plan",
    "Samples",
    "call_blocks",
    "interleave",
    "op_blocks",
    "use_threads",
    "write_text",
]

Blocks = Callable[[int, int], list[float]]
"""(iterations, count) to seconds per execution of ``count`` blocks of ``iterations`` executions."""


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Attributes:
        block_seconds: at least this long a block lasts; one block is one sample.
        rounds: turns each competitor gets.
        blocks: samples a turn. Blocks of at least ``_WARM_UP`` executions before them are not
            counted: they bring back the competitor's data and threads.
        pause_seconds: between turns. OpenMP threads spin for up to 8 ms after their last work.
    """

    block_seconds: float
    rounds: int
    blocks: int
    pause_seconds: float


# A turn finds its data where the turns before left them: beyond the caches if another process has
# just packed 16 MB of weights. With those, the first executions of a turn take 1.6, 1.4, 0.86 and
# 0.80 ms, the later ones 0.80; native oneDNN's 1.4, 0.90, 0.86 and 0.84, then 0.85. One execution
# that is not counted left torchq's kernel, whose turn follows oneDNN's, 1.15 times too slow.
_WARM_UP = 4

FULL = Plan(block_seconds=3e-3, rounds=9, blocks=3, pause_seconds=0.015)
QUICK = Plan(block_seconds=3e-4, rounds=2, blocks=2, pause_seconds=0)


@dataclass(frozen=True)
class Samples:
    """Microseconds per execution, one figure a block."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def iqr(self) -> float:
        """Distance between the quartiles."""
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return high - low


def use_threads(count: int) -> None:
    """Sets the number of threads; says where that is more than there are CPUs."""
    torch.set_num_threads(count)
    if note := crowded():
        print(f"benchmarks: {note}", file=sys.stderr)


def write_text(path: str, text: str) -> None:
    """Writes a file whole or not at all: a run may have taken hours."""
    write_file("benchmarks", path, [text.encode()])


def call_blocks(function: Callable[..., Any], args: Sequence[Any]) -> Blocks:
    """Times ``function(*args)`` from Python, the loop included (about 0.03 us a call)."""

    def block(iterations: int) -> float:
        start = time.perf_counter()
        for _ in range(iterations):
            function(*args)
        return (time.perf_counter() - start) / iterations

    return lambda iterations, count: [block(iterations) for _ in range(count)]


def op_blocks(function: Callable[..., Any], args: Sequence[Any]) -> Blocks:
    """Times what torchq's op does inside C++, output allocation included, calls from Python not."""
    last_us = torch.ops.torchq._last_us.default
    set_timing = torch.ops.torchq._set_timing.default

    def block(iterations: int) -> float:
        total = 0.0
        for _ in range(iterations):
            function(*args)
            total += last_us()
        return total / iterations * 1e-6

    def blocks(iterations: int, count: int) -> list[float]:
        before = set_timing(True)
        try:
            return [block(iterations) for _ in range(count)]
        finally:
            set_timing(before)

    return blocks


def interleave(competitors: dict[str, Blocks], plan: Plan) -> dict[str, Samples]:
    """Measures every competitor in every round, so that drift of the machine meets all."""
    iterations = {name: _iterations(blocks, plan) for name, blocks in competitors.items()}
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(plan.rounds):
        for name, blocks in competitors.items():
            time.sleep(plan.pause_seconds)
            uncounted = math.ceil(_WARM_UP / iterations[name])
            seconds[name] += blocks(iterations[name], uncounted + plan.blocks)[uncounted:]
    return {name: Samples([1e6 * s for s in values]) for name, values in seconds.items()}


def _iterations(blocks: Blocks, plan: Plan) -> int:
    """So many that a block lasts at least ``plan.block_seconds``."""
    iterations = 1
    while True:
        fastest = min(blocks(iterations, 3))
        if fastest * iterations >= plan.block_seconds / 4:
            return math.ceil(plan.block_seconds / fastest)
        iterations *= 8

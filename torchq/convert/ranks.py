# SPDX-License-Identifier: Apache-2.0
"""Calibrates on several ranks of a process group, which all end with the statistics of all data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist
from torch import nn

from torchq.convert.watching import watched_ranges
from torchq.models.attached import graphs_of
from torchq.models.observed import observers, weights_digest
from torchq.planning.plan import Plan
from torchq.quantization.config import QConfig
from torchq.quantization.observers.recorded import kind, recorded, replaced, restore

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    text: str


def calibrate_ranks(
    prepared: nn.Module,
    group: dist.ProcessGroup,
    check: Callable[[], None],
    run: Callable[[], int],
) -> None:
    """Let each rank run its share, and give the observers of all ranks the statistics of all.

    Merged in the order of the ranks, so that all of them compute the same.

    Args:
        prepared: of the same weights and settings on every rank.
        group: all of its ranks must call this.
        check: raises where ``prepared`` cannot be calibrated.
        run: records this rank's share and returns the number of its batches.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: this process is not of it, the models differ, or no rank has a batch.
        RuntimeError: another rank raised or did not answer, or an observer has data already or
            cannot merge.
    """
    _check_group(group)
    starts = _gathered(group, lambda: _start(prepared, check))
    for i, what, remedy in (
        (0, "weights", "Load one checkpoint on all of them."),
        (1, "observers and settings", "Prepare with one QConfig on all of them."),
    ):
        if other := [rank for rank, start in enumerate(starts) if start[i] != starts[0][i]]:
            raise ValueError(
                f"torchq.calibrate: prepared must have the same {what} on every rank, got others "
                f"on {_ranks(other)} than on rank 0. {remedy}"
            )

    def share() -> tuple[int, list[object]]:
        count = run()
        return count, [recorded(observer) for observer in observers(prepared).values()]

    shares = _gathered(group, share)
    if not any(count for count, _ in shares):
        raise ValueError(
            "torchq.calibrate: data must have at least one batch on some rank, got none. A "
            "generator that was used up already yields nothing."
        )
    of_observer = zip(*(found for _, found in shares), strict=True)
    for observer, (first, *others) in zip(observers(prepared).values(), of_observer, strict=True):
        restore(observer, first)
        for other in others:
            observer.merge(replaced(observer, other))


def _check_group(group: object) -> None:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "torchq.calibrate: group must have this process as a rank, got one without. Call it on "
            "the ranks of the group only."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"torchq.calibrate: group must be a ProcessGroup or None, got {type(group).__name__}. "
            "Pass torch.distributed.group.WORLD, after init_process_group."
        )


def _start(prepared: nn.Module, check: Callable[[], None]) -> tuple[str, list[str]]:
    """Return what must be the same on every rank: weights, and how they will be quantized."""
    check()
    found = observers(prepared)
    for name, observer in found.items():
        observer.check_merge()
        if observer.calibrated:
            raise RuntimeError(
                f"torchq.calibrate: prepared must have recorded nothing when ranks begin, got data "
                f"in '{name}', which every rank would add. Prepare the model anew, and add "
                "earlier statistics afterwards with torchq.load_calibration(..., merge=True)."
            )
    configs = [
        f"{name} {config}"
        for name, module in prepared.named_modules()
        if isinstance(config := getattr(module, "config", None), QConfig)
    ]
    configs += [
        f"{prefix} {node} {config}"
        for prefix, graph in graphs_of(prepared)
        if isinstance(plan := getattr(graph, "plan", None), Plan)
        for node, (_, config) in watched_ranges(plan).items()
    ]
    kinds = [f"{name} {kind(observer)}" for name, observer in found.items()]
    return weights_digest(prepared), [*configs, *kinds, *map(str, prepared.torchq_report)]  # type: ignore[arg-type]


def _gathered(group: dist.ProcessGroup, make: Callable[[], T]) -> list[T]:
    """Return what each rank makes, by rank; raise on all of them where one raises."""
    own: T | _Failure
    error: Exception | None = None
    try:
        own = make()
    except Exception as raised:
        error, own = raised, _Failure(f"{type(raised).__name__}: {raised}")
    found: list[T | _Failure | None] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, own, group=group)
    except RuntimeError as lost:
        raise error or RuntimeError(
            "torchq.calibrate: every rank must answer within the time limit of the group, got "
            f"{str(lost).splitlines()[0]!r}. See what the other ranks logged; where they are only "
            "slow, pass a longer timeout to init_process_group."
        ) from lost
    if error is not None:
        raise error
    failed = {rank: part.text for rank, part in enumerate(found) if isinstance(part, _Failure)}
    if failed:
        raise RuntimeError(
            f"torchq.calibrate: all ranks must complete their share, got an error on "
            f"{_ranks(list(failed))}: {next(iter(failed.values()))} Correct it there, prepare the "
            "model anew and calibrate again."
        )
    return cast("list[T]", found)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

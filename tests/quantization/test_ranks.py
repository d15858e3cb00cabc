# SPDX-License-Identifier: Apache-2.0
"""Calibration on several ranks, and through files, gives the bytes of one process."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchq
from tests.support.slow import rest_slow
from torchq.quantization.observers import (
    HistogramObserver,
    MinMaxObserver,
    Observer,
    PercentileObserver,
)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


class Total(Observer):
    """Covers twice the mean magnitude; counts in buffers of its own only."""

    def __init__(self) -> None:
        super().__init__()
        self._add_buffer("total", 0, torch.int64)
        self._add_buffer("count", 0, torch.int64)

    def _record(self, values: Tensor) -> None:
        self.total += (values.abs() * 1024).long().sum()
        self.count += values.numel()

    def _range(self, integers: tuple[int, int], symmetric: bool) -> tuple[Any, Any]:
        mean = float(self.total) / 1024 / float(self.count)
        return -2 * mean, 2 * mean

    def _merge(self, other: Total) -> None:
        self.total += other.total
        self.count += other.count


class Narrow(HistogramObserver):
    """Records in a way of its own, and inherits a merge that does not know of it."""

    def _record(self, values: Tensor) -> None:
        super()._record(values / 2)


class Listed(Observer):
    """Keeps a list, which no other process sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def _record(self, values: Tensor) -> None:
        self.seen.append(float(values.abs().max()))

    def _range(self, integers: tuple[int, int], symmetric: bool) -> tuple[Any, Any]:
        return -max(self.seen), max(self.seen)

    def _merge(self, other: Listed) -> None:
        self.seen += other.seen


OBSERVERS: dict[str, Any] = {
    **{name: name for name in ("minmax", "histogram", "percentile", "entropy")},
    "99 of 100, 600 bins": partial(PercentileObserver, 99.0, 600),
    "of a user": Total,
}


def images() -> nn.Module:
    """Has a graph of the whole, a residual, and a function behind a histogram."""
    torch.manual_seed(7)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.Hardswish()),
        *(nn.Flatten(), nn.Linear(12 * 9, 5)),
    ).eval()


class Recurrent(nn.Module):
    """Has no graph of the whole: its code looks at values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.lstm, self.fc = nn.LSTM(16, 8, proj_size=4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x.flatten(0, 1)[:, :3].flatten(1)[:, :16][:, None])[0]
        return self.fc(y if float(x.sum()) < 1e9 else -y)


def batches(count: int = 11) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, 3, 10, 10) * (1 + i % 3) + i % 4 for i in range(count)]


def prepared(model: nn.Module, observer: Any = "histogram") -> nn.Module:
    return torchq.prepare(model, batches()[0], torchq.QConfig(activation_observer=observer))


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    return {
        name: value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in torchq.convert(model).state_dict().items()
        if isinstance(value, Tensor)
    }


def in_ranks(
    count: int, run: Callable[[int], Any], folder: Path, seconds: float = 60
) -> dict[int, Any]:
    """Run a function on forked ranks; rank -> its result or exception, without those that died."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        limit = timedelta(seconds=seconds)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, limit, world_size=count, rank=rank)
        try:
            results.put((rank, run(rank)))
        except Exception as error:
            results.put((rank, error))
        results.close()
        results.join_thread()
        os._exit(0)  # without the end of the test run

    torch.set_num_threads(1)  # threads do not survive a fork
    processes = [context.Process(target=rank_main, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + 100
    while time.monotonic() < end and any(p.is_alive() for p in processes):
        while not results.empty():
            found |= [results.get()]
        time.sleep(0.02)
    while not results.empty():
        found |= [results.get()]
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive, "a rank hangs"
    return found


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    """Prepared models by name of the observer, and a recurrent one."""
    found = {name: prepared(images(), observer) for name, observer in OBSERVERS.items()}
    return found | {"recurrent": prepared(Recurrent().eval())}


@pytest.fixture(scope="module")
def expected(models: dict[str, nn.Module]) -> dict[str, dict[str, bytes]]:
    """Returns the states that one process computes from the data, in another order."""
    torch.set_num_threads(1)
    shuffled = random.Random(0).sample(batches(), 11)
    return {
        name: bytes_of(torchq.calibrate(copy.deepcopy(model), shuffled))
        for name, model in models.items()
    }


@pytest.mark.parametrize("count", rest_slow([1, 2, 4, 7], 1, 2))
def test_any_number_of_ranks_gives_the_same_bytes(
    count: int, models: Any, expected: Any, tmp_path: Path
) -> None:
    def run(rank: int) -> dict[str, bool]:
        share = batches()[rank::count]  # uneven
        for model in models.values():
            torchq.calibrate(model, reversed(share), group=dist.group.WORLD)
        return {name: bytes_of(model) == expected[name] for name, model in models.items()}

    found = in_ranks(count, run, tmp_path)
    assert found == {rank: dict.fromkeys(models, True) for rank in range(count)}


def test_ranks_without_data(models: Any, expected: Any, tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        share = batches() if rank == 2 else []
        torchq.calibrate(models["histogram"], share, group=dist.group.WORLD)
        same = bytes_of(models["histogram"]) == expected["histogram"]
        with pytest.raises(ValueError, match="data must have at least one batch on some rank"):
            torchq.calibrate(models["minmax"], iter([]), group=dist.group.WORLD)
        return same

    assert in_ranks(3, run, tmp_path) == {0: True, 1: True, 2: True}


def raising() -> Any:
    yield batches()[0]
    raise OSError("the disk is gone")


def refused(rank: int, make: Callable[[], nn.Module], data: Any) -> str:
    with pytest.raises(Exception) as error:
        torchq.calibrate(make(), data, group=dist.group.WORLD)
    return f"{error.type.__name__}: {error.value}"


def test_what_fails_on_one_rank_raises_on_all(models: Any, tmp_path: Path) -> None:
    nan = [batches()[0], torch.full((2, 3, 10, 10), torch.nan)]
    model = models["histogram"]

    def run(rank: int) -> list[str]:
        odd = rank == 1
        other, narrower = images(), torchq.QConfig(activation_bits=7)
        with torch.no_grad():
            other[2].weight[0, 0, 0, 0] += 1e-6
        x = batches()[0]
        seen = torchq.calibrate(copy.deepcopy(model), [x]) if odd else model
        return [
            refused(rank, lambda: copy.deepcopy(model), raising() if odd else [x]),
            refused(rank, lambda: copy.deepcopy(model), nan if odd else [x]),
            refused(rank, lambda: copy.deepcopy(model), x if odd else [x]),
            refused(rank, lambda: images() if odd else copy.deepcopy(model), [x]),
            refused(rank, lambda: seen, [x]),
            refused(rank, lambda: prepared(other) if odd else model, [x]),
            refused(rank, lambda: torchq.prepare(images(), x, narrower) if odd else model, [x]),
        ]

    found = in_ranks(3, run, tmp_path)
    assert found[0] == found[2] and all(
        text.startswith("RuntimeError: torchq.calibrate: all ranks must complete their share, got "
                        "an error on rank 1: ") for text in found[0][:5]
    )  # fmt: skip
    own = found[1]
    assert own[0] == "OSError: the disk is gone" and own[0] in found[0][0]
    assert own[1].startswith("ValueError: torchq.") and own[1] in found[0][1]
    assert own[2].startswith("TypeError: torchq.calibrate: data must be batches")
    assert own[3].startswith("ValueError: torchq.calibrate: prepared must come from torchq.prepare")
    assert own[4].startswith("RuntimeError: torchq.calibrate: prepared must have recorded nothing")
    assert own[5:] == found[0][5:]
    assert "same weights on every rank, got others on rank 1 than on rank 0" in own[5]
    assert "same observers and settings on every rank, got others on rank 1" in own[6]


def test_observers_that_cannot_merge_are_refused(tmp_path: Path) -> None:
    kinds = {
        "moving_average": "RuntimeError: torchq.MovingAverageObserver of '0': merge is impossible",
        Narrow: "NotImplementedError: torchq.Narrow of '0': class Narrow must implement _merge",
        Listed: "NotImplementedError: torchq.Listed of '0': class Listed must keep what it records",
    }
    models = [prepared(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), kind) for kind in kinds]

    def run(rank: int) -> list[str]:
        return [refused(rank, lambda m=m: m, batches(3)) for m in models]  # type: ignore[misc]

    for texts in in_ranks(2, run, tmp_path).values():
        for text, start in zip(texts, kinds.values(), strict=True):
            assert text.startswith(start)


@pytest.mark.parametrize("dies", rest_slow([False, True], True), ids=["hangs", "dies"])
def test_ranks_do_not_wait_forever(dies: bool, models: Any, tmp_path: Path) -> None:
    def stuck() -> Any:
        yield batches()[0]
        if dies:
            os._exit(1)
        time.sleep(6)

    def run(rank: int) -> tuple[str, float]:
        begin = time.monotonic()
        share = stuck() if rank == 1 else batches()
        return refused(rank, lambda: models["minmax"], share), time.monotonic() - begin

    found = in_ranks(2, run, tmp_path, seconds=60 if dies else 3)
    text, seconds = found[0]
    assert text.startswith("RuntimeError: torchq.calibrate: every rank must answer within the time")
    assert seconds < 30 and len(found) == 2 - dies


def test_groups_of_some_ranks(models: Any, expected: Any, tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        group = dist.new_group([0, 2])
        if rank == 1:
            return refused_by_group(models["minmax"], group)
        torchq.calibrate(models["minmax"], batches()[rank // 2 :: 2], group=group)
        return bytes_of(models["minmax"]) == expected["minmax"]

    found = in_ranks(3, run, tmp_path)
    assert found[0] is True and found[2] is True
    assert "ValueError: torchq.calibrate: group must have this process as a rank" in found[1]


def refused_by_group(model: nn.Module, group: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as error:
        torchq.calibrate(model, batches(), group=group)
    return f"{error.type.__name__}: {error.value}"


def test_a_group_is_a_process_group(models: Any) -> None:
    text = refused_by_group(models["minmax"], 4)
    assert text.startswith("TypeError: torchq.calibrate: group must be a ProcessGroup or None, got")


# Without a process group: files


@pytest.mark.parametrize("name", [*OBSERVERS, "recurrent"])
def test_files_merge_in_any_order(name: str, models: Any, expected: Any, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.calibration" for i in range(4)]
    for i, path in enumerate(paths):
        part = copy.deepcopy(models[name])
        if i < 3:  # the last one saw nothing
            torchq.calibrate(part, batches()[i::3])
        torchq.save_calibration(part, path)
    merged = []
    for seed in range(3):
        model = copy.deepcopy(models[name])
        for path in random.Random(seed).sample(paths, 4):
            torchq.load_calibration(model, path, merge=True)
        assert bytes_of(model) == expected[name]
        torchq.save_calibration(model, tmp_path / "merged")
        merged.append((tmp_path / "merged").read_bytes())
    assert len(set(merged)) == 1
    again = torchq.load_calibration(copy.deepcopy(models[name]), tmp_path / "merged")
    assert bytes_of(again) == expected[name]


def test_files_of_other_weights_do_not_merge(models: Any, tmp_path: Path) -> None:
    model = torchq.calibrate(copy.deepcopy(models["minmax"]), batches())
    torchq.save_calibration(model, tmp_path / "file")
    other = images()
    with torch.no_grad():
        other[5].bias[0] += 1
    fresh = prepared(other, "minmax")
    torchq.load_calibration(fresh, tmp_path / "file")  # resumes
    with pytest.raises(ValueError, match=r"the weights that '.*file' was calibrated with, got oth"):
        torchq.load_calibration(fresh, tmp_path / "file", merge=True)


def test_lists_are_not_saved_silently(tmp_path: Path) -> None:
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), Listed)
    torchq.calibrate(model, batches(2))
    with pytest.raises(NotImplementedError, match="must keep what it records in buffers, got none"):
        torchq.save_calibration(model, tmp_path / "file")


def test_a_merge_belongs_to_the_class_that_records() -> None:
    MinMaxObserver().check_merge()
    Total().check_merge()
    with pytest.raises(NotImplementedError, match=r"Narrow must implement _merge\(self, other\)"):
        Narrow().check_merge()

    class Shifted(PercentileObserver):
        def _range(self, integers: Any, symmetric: bool) -> tuple[float, float]:
            return -1.0, 1.0

    Shifted().check_merge()

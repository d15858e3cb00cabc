# SPDX-License-Identifier: Apache-2.0
"""Times: in turns, with their spread, and no figure that the spread does not bear out."""

from __future__ import annotations

import json
import pickle
from itertools import cycle
from pathlib import Path

import pytest
import torch
from flows import graph_of
from torch import Tensor, nn

import torchq
from torchq.analysis import Times, speed, timing
from torchq.analysis.timing import Speedup, measure
from torchq.runtime.cpus import usable_cpus

X = torch.ones(2, 8)


class Clock:
    """Time that passes only where a model says so, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing, "clock", lambda: self.now)

    def model(self, *milliseconds: float) -> nn.Module:
        """Takes these times, one after the other and again."""
        taken = cycle(milliseconds)

        class Takes(nn.Linear):
            def forward(own, x: Tensor) -> Tensor:
                self.now += next(taken) / 1e3
                return super().forward(x)

        return Takes(8, 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(speed, "crowded", str)
    return Clock(monkeypatch)


# A scheduler takes the float model's threads away in most rounds; the int8 model runs on one.
DISTURBED = (20.0, 900.0, 410.0, 19.0, 60.0, 880.0, 700.0)


def test_models_take_turns(clock: Clock) -> None:
    """Both are ten times slower for a while: the ratio of each round stays."""
    slow, fast = (8.0, 8.0, 8.0, 8.0, 80.0), (4.0, 4.0, 4.0, 4.0, 40.0)
    times = measure({"a": clock.model(*slow), "b": clock.model(*fast)}, X, 10)
    ratio = Speedup.of(times["a"], times["b"])
    assert ratio.is_steady and str(ratio) == "2.0x"
    assert str(times["a"]) == "    8.000 ms (8.000 to 8.000)"


@pytest.mark.parametrize(
    ("slow", "fast", "text"),
    [
        ((8.0, 8.1, 8.2), (4.0, 4.1, 4.0), "2.0x"),
        (DISTURBED, (4.0,) * 7, "at least 4.7x"),
        ((4.0,) * 7, DISTURBED, "at most 0.3x"),
        ((4.0, 9.0, 3.0), (5.0, 6.0, 6.0), "0.6x to 1.1x"),
        # all rounds but two alike disturbed: the quartiles do not tell, the shortest times do
        ((900.0,) * 9 + (20.0,) * 2, (4.0,) * 11, "at least 5.0x"),
    ],
)
def test_no_figure_of_a_disturbed_run(
    slow: tuple[float, ...], fast: tuple[float, ...], text: str
) -> None:
    ratio = Speedup.of(Times(slow), Times(fast))
    assert str(ratio) == text and ratio.is_steady == text.endswith("2.0x")


@pytest.mark.parametrize("disturbed", [False, True])
def test_no_headline_of_a_disturbed_run(
    disturbed: bool, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    prepared = torchq.calibrate(torchq.prepare(model, X), [X])
    qmodel = torchq.convert(prepared)
    spent = {id(model): cycle(DISTURBED if disturbed else (20.0,)), id(qmodel): cycle((4.0,))}
    for net in (model, qmodel):
        first = next(graph_of(net).children())

        def wait(module: nn.Module, args: object, key: int = id(net)) -> None:
            clock.now += next(spent[key]) / 1e3

        first.register_forward_pre_hook(wait, prepend=True)
    profile = torchq.profile(model, qmodel, X, rounds=7)
    assert profile.is_steady is not disturbed
    assert all(0 <= layer.share <= 1 for layer in profile.layers)
    page = tmp_path / "report.html"
    torchq.write_report(page, model, prepared, qmodel, [X])
    text, html = str(profile), page.read_text()
    if disturbed:
        assert "float by int8: at least 4.7x" in text and "run again on an idle machine" in text
        assert "At least 4.8 times faster and" in html and "run again on an idle machine" in html
    else:
        assert "float by int8: 5.0x" in text and "5.0 times faster and" in html


def test_milliseconds_are_a_dict_that_prints_its_spread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "crowded", str)
    models = {"float": clock.model(8.0), "int8": clock.model(4.0)}
    times = torchq.milliseconds(models, X, 3)
    assert times == {"float": pytest.approx(8), "int8": pytest.approx(4)}
    assert times["int8"] + 0 == times.get("int8") and json.loads(json.dumps(times)) == times
    assert pickle.loads(pickle.dumps(times)).times == times.times
    assert repr(times).splitlines() == [
        "float    8.000 ms (8.000 to 8.000)",
        "int8     4.000 ms (4.000 to 4.000)  2.0x as fast as float",
    ]
    disturbed = torchq.milliseconds(models | {"float": clock.model(*DISTURBED)}, X, 3)
    assert "at least" in str(disturbed) and str(disturbed).endswith(timing.UNSTEADY)
    assert str(torchq.milliseconds({}, X)) == ""


def test_a_layer_loses_only_beyond_the_spread(clock: Clock) -> None:
    noisy = Speedup.of(Times((4.0, 9.0, 5.0)), Times((5.0, 6.0, 6.0)))
    assert not speed.LayerTime("a", (), 5, 6, noisy).loses
    slower = Speedup.of(Times((4.0, 4.1, 4.0)), Times((5.0, 6.0, 6.0)))
    assert speed.LayerTime("a", (), 4, 6, slower).loses


def test_more_threads_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "usable_cpus", lambda: 1.5)
    torch.set_num_threads(2)
    assert timing.crowded().startswith("2 threads share 1.5 CPUs")
    assert timing.crowded().endswith("torch.set_num_threads(1)")
    torch.set_num_threads(1)
    assert timing.crowded() == ""


V2 = {"proc/self/cgroup": "0::/app/job\n"}
V1 = {"proc/self/cgroup": "7:cpuset:/\n4:cpu,cpuacct:/docker/1\n1:name=systemd:/\n"}
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n"}, 64),
        (V2 | {"sys/fs/cgroup/app/job/cpu.max": "max 100000\n"}, 64),
        (V2 | {"sys/fs/cgroup/app/job/cpu.max": "150000 100000\n"}, 1.5),
        (V2 | {"sys/fs/cgroup/app/cpu.max": "300000 100000\n"}, 3),
        (V2 | {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (V1 | {f"sys/fs/cgroup/cpu,cpuacct/docker/1/{QUOTA}": "-1\n",
               f"sys/fs/cgroup/cpu,cpuacct/docker/1/{PERIOD}": "100000\n"}, 64),
        (V1 | {f"sys/fs/cgroup/cpu,cpuacct/{QUOTA}": "200000\n",
               f"sys/fs/cgroup/cpu,cpuacct/{PERIOD}": "100000\n"}, 2),
        (V1 | {f"sys/fs/cgroup/cpu/docker/1/{QUOTA}": "80000\n",
               f"sys/fs/cgroup/cpu/docker/1/{PERIOD}": "20000\n"}, 4),
    ],
)  # fmt: skip
def test_cpus_that_may_be_used(
    files: dict[str, str], cpus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cpus(tmp_path) == cpus

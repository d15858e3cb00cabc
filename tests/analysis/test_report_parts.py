# SPDX-License-Identifier: Apache-2.0
"""Parts of the HTML report: layers in time, what to do next; and explain's table in notebooks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.analysis import timing
from torchq.analysis.advice import next_steps
from torchq.analysis.timeline import timeline
from torchq.report import reasons
from torchq.report.rows import Row


def test_explain_folds_in_a_notebook() -> None:
    """The summary is always seen; long tables are folded at first."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(21))).eval()
    html = torchq.explain(torchq.quantize(model, [torch.randn(8, 4)]))._repr_html_()
    summary = "21 of 21 convolutions and linears run in int8"
    assert html.startswith(f"<details><summary>{summary}</summary><table>")
    assert html.endswith("</details>") and html.count("<tr>") == 22 and html.count(summary) == 1


def fake_times(float_ms: float, layers: dict[str, tuple[float, float]]) -> torchq.analysis.Profile:
    """Returns times of a model whose int8 form takes 2 ms, and of its layers: all rounds agree."""
    rows = [
        torchq.analysis.LayerTime(
            name,
            (name,),
            one,
            other,
            timing.Speedup.of(timing.Times((one,)), timing.Times((other,))),
        )
        for name, (one, other) in layers.items()
    ]
    times = timing.Times((float_ms,) * 3), timing.Times((2.0,) * 3)
    return torchq.analysis.Profile(*times, tuple(rows))


def test_the_timeline_is_to_scale() -> None:
    """Layers follow each other in order, as wide as their times, and the rest of the call last."""
    times = fake_times(4.0, {"first": (1.0, 0.5), "second & <last>": (2.0, 0.5)})
    bars = re.findall(
        r'x="([\d.]+)" y="(\d+)" width="([\d.]+)"[^>]*><title>(.*?)</title>', timeline(times)
    )
    unit = (1000 - 44 - 10) / 4
    expected = [
        *[
            (0, 1, "first: 1 ms"),
            (1, 2, "second &amp; &lt;last&gt;: 2 ms"),
            (3, 1, "all else: 1 ms"),
        ],
        *[(0, 0.5, "first: 0.5 ms"), (0.5, 0.5, "second &amp; &lt;last&gt;: 0.5 ms")],
        (1, 1, "all else: 1 ms"),
    ]
    assert [title for *_, title in bars] == [title for *_, title in expected]
    for (x, _, width, _), (begin, ms, _) in zip(bars, expected, strict=True):
        assert abs(float(x) - 44 - begin * unit) < 0.1 and abs(float(width) - ms * unit) < 0.1
    assert len({y for _, y, *_ in bars[:3]}) == len({y for _, y, *_ in bars[3:]}) == 1


def layer(name: str, sqnr: float, clipped: float = 0.0) -> torchq.analysis.LayerAccuracy:
    return torchq.analysis.LayerAccuracy(name, sqnr, 0.1, clipped)


@pytest.mark.parametrize(
    ("accuracy", "layers", "rows", "said"),
    [
        (40.0, [layer("a", 40.0)], [], ["Check your own metric"]),
        (25.0, [layer("a", 25.0)], [], ["Compare your own metric"]),
        (
            12.0,
            [layer("a", 30.0), layer("b", 9.0, 0.02)],
            [],
            [
                "Win back accuracy: 12.0 dB is little. b has 9.0 dB.",
                "b give more than 1 %",
                "Compare",
            ],
        ),
        (
            40.0,
            [],
            [
                Row("f", "Linear", False, "why", "f", True, False),
                Row("g", "Linear", False, "kept", "g", True, True),
                Row("h", "Linear", False, reasons.NOT_CALLED, "h", True, False),
                Row("r", "relu", False, "why", "r", False, False),
            ],
            ["why f stay float", "Check"],
        ),
    ],
    ids=["fine", "medium", "poor", "float"],
)
def test_what_to_do_next(accuracy: float, layers: Any, rows: Any, said: list[str]) -> None:
    found = torchq.analysis.Accuracy(accuracy, tuple(layers))
    steps = list(next_steps(rows, found, fake_times(4.0, {"a": (1.0, 0.5)})))
    assert len(steps) == len(said) and all(map(str.__contains__, steps, said)), steps


def test_what_is_slower_than_float_is_to_be_kept_float() -> None:
    times = fake_times(4.0, {"a": (1.0, 0.5), "b": (0.1, 0.5), "c": (0.2, 0.5)})
    first, _ = next_steps([], torchq.analysis.Accuracy(40.0, ()), times)
    assert 'b, c, by overrides={"b": None, "c": None}.' in first
    unsteady = replace(times, note="the machine is busy")
    assert (
        "on an idle machine"
        in list(next_steps([], torchq.analysis.Accuracy(40.0, ()), unsteady))[1]
    )

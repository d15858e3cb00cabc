# SPDX-License-Identifier: Apache-2.0
"""``python -m torchq``."""

from __future__ import annotations

import re
from itertools import accumulate, cycle
from pathlib import Path

import pytest

import torchq
from torchq.__main__ import main
from torchq.analysis import timing

DEFINITION = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return model.eval(), [torch.randn(2, 3, 8, 8)]

def wrong():
    return 3

def empty():
    return nn.Linear(2, 2).eval(), []
"""

LABELS = """
def make():
    model, data = own()
    return model, [(x, None) for x in data]

def fails():
    raise TypeError("my own")
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "definition.py"
    path.write_text(DEFINITION)
    return f"{path}:make"


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "exact on every tier" in out
    assert all(tier in out for tier in torchq.supported_isas())


def test_analyze_then_inspect(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, saved = tmp_path / "report.html", tmp_path / "model.torchq"
    arguments = ["analyze", model, "--sensitivity", "--html", str(html), "--save", str(saved)]
    assert main([*arguments, "--isa", "reference"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 convolutions and linears run in int8" in out
    assert "dB alone in int8" in out and "ms int8" in out
    assert html.read_text().startswith("<!doctype html>")
    assert main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "0: QConv2d" in out and "weight" in out
    assert out.splitlines()[-1].endswith("MB")


def test_bench(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == [
        "float",
        "int8",
        "int8, frozen TorchScript",
    ]
    assert all(re.search(r" ms \([\d.]+ to [\d.]+\)", line) for line in lines[:3])


def test_bench_of_a_disturbed_run(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a machine that stops now and then."""
    jumps = cycle([0.001, 0.001, 0.9, 0.002, 0.4])
    ticks = accumulate(jumps)
    monkeypatch.setattr(timing, "clock", lambda: next(ticks))
    assert main(["bench", model]) == 0
    out = capsys.readouterr().out
    assert "no speedup: " in out and not re.search(r"\dx", out)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["bench", "nothing"], "MODEL must be file.py:function, got 'nothing'"),
        (["bench", "no.module:f"], "MODEL must be file.py:function or module:function, got"),
        (["inspect", __file__], "path must be a file written by torchq.save, got"),
        (["bench", "missing.py:make"], "must name a file that exists, got 'missing.py'"),
        (["inspect", "missing.torchq"], "missing.torchq does not exist"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_function_must_return_a_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", model.replace("make", "wrong")]) == 2
    assert "which gave int" in capsys.readouterr().err
    assert main(["bench", model.replace("make", "absent")]) == 2
    assert "which is no function" in capsys.readouterr().err
    assert main(["bench", model.replace("make", "empty")]) == 2
    assert "at least one batch, got none" in capsys.readouterr().err


def test_threads_are_positive(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", model, "--threads", "0"])
    assert "argument --threads: must be positive, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("option", ("--html", "--save"))
def test_folders_exist_before_the_run(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "missing" / "file", tmp_path):
        with pytest.raises(SystemExit):
            main(["analyze", "no.such.module:function", option, str(path)])
        message = capsys.readouterr().err
        assert f"{option}: must be a file in a folder that exists, got {str(path)!r}" in message


def test_type_errors_of_torchq_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the model's own code keep their traceback."""
    path = tmp_path / "definition.py"
    path.write_text(DEFINITION.replace("def make", "def own") + LABELS)
    assert main(["analyze", f"{path}:make"]) == 2
    err = capsys.readouterr().err
    assert "leave labels out" in err and err.count("\n") == 1
    with pytest.raises(TypeError, match="my own"):
        main(["analyze", f"{path}:fails"])

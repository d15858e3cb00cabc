# SPDX-License-Identifier: Apache-2.0
"""``python -m torchq``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import pytest
import torch

import torchq
from torchq import __main__ as cli
from torchq.__main__ import load_model, main
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
    assert re.search(r"^0 +QConv2d +836 +weight \[8, 3, 3, 3\], u8 -> u8", out, re.MULTILINE)
    assert "2 of 2 layers run in int8" in out
    assert out.splitlines()[-1] == f"{saved}: {saved.stat().st_size / 1e6:.3g} MB"


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
    assert "run again on an idle machine" in out and not re.search(r"  \d+\.\dx as", out)
    assert re.search(r"(at least|at most|x to) [\d.]+x as fast as float", out)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["bench", "nothing"], "MODEL must be file.py:function, got 'nothing'"),
        (["bench", "no.module:f"], "MODEL must be file.py:function or module:function, got"),
        (["inspect", __file__], "path must be a file written by torchq.save, got"),
        (["bench", "missing.py:make"], "must name a file that exists, got 'missing.py'"),
        (["inspect", "missing.torchq"], "got 'missing.torchq', which does not exist"),
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
    assert "which returns a value of type int" in capsys.readouterr().err
    assert main(["bench", model.replace("make", "absent")]) == 2
    assert "which is nothing. Write one: def absent(): return model." in capsys.readouterr().err
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


def run(*arguments: str, python: tuple[str, ...] = (), **environment: str) -> Any:
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, *python, "-m", "torchq", *arguments],
        cwd=Path(torchq.__file__).parent.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_without_docstrings() -> None:
    result = run("--help", python=("-OO",))
    assert result.returncode == 0 and "bench" in result.stdout, result.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"torchq {torchq.__version__}\n"


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torchq"] == torchq.__version__ and facts["torch"] == torch.__version__
    assert facts["self_test"] == "exact on every tier" and facts["cpus"] > 0
    assert {"python", "glibc", "torch_built_for", "model", "threads", "isa"} < facts.keys()


def test_inspect_as_json(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, data = load_model(model)
    torchq.save(torchq.quantize(net, data), tmp_path / "file")
    assert main(["inspect", str(tmp_path / "file"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    modules = found["modules"]
    assert modules["0"]["spec"]["class"] == "QuantizedLeaf"
    for name in ("0.layer", "torchq_graph.0"):  # of the model's own code, and of its graph
        assert modules[name]["spec"]["class"] == "QConv2d"
        assert modules[name]["tensors"]["bias"] == {"dtype": "float32", "shape": [8]}
    assert [row["name"] for row in found["explain"]] == ["0", "1", "2", "3"]
    assert found["bytes"] > 1000


def test_inspect_of_a_float_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"weight": torch.ones(3)}, tmp_path / "float.safetensors")
    assert main(["inspect", str(tmp_path / "float.safetensors")]) == 2
    assert "holds no quantized module" in capsys.readouterr().err


def test_a_pipe_that_is_closed_is_quiet() -> None:
    command = f"{sys.executable} -m torchq doctor | true"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120,
        cwd=Path(torchq.__file__).parent.parent,
    )  # fmt: skip
    assert result.stderr == ""


NAMED = """
import torch
from torch import nn

def make():
    model = nn.Sequential()
    model.add_module("сеть", nn.Linear(4, 4))
    return model.eval(), [torch.randn(2, 4)]
"""


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(NAMED, encoding="utf-8")
    result = run("analyze", f"{tmp_path}/named.py:make", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    assert "\\u0441\\u0435\\u0442\\u044c" in result.stdout


def test_errors_of_the_users_own_code_say_where(model: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("import math\n\ndef make():\n    return math.sqrt(-1)\n")
    result = run("bench", f"{own}:make")
    assert result.returncode == 1
    assert f'File "{own}", line 4, in make' in result.stderr and "math domain" in result.stderr
    own.write_text("import torchq\n\ndef make():\n    torchq.QConfig(activation_bits=3)\n")
    result = run("bench", f"{own}:make")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert f"(in {own}, line 4, in make)" in result.stderr


def test_no_more_threads_than_cpus(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "usable_cpus", lambda: 1.5)
    torch.set_num_threads(2)
    assert main(["bench", model]) == 0
    assert torch.get_num_threads() == 1

# SPDX-License-Identifier: Apache-2.0
"""Type checkers know the class of what torchq returns: that of the model it was given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchq

PROGRAM = """
import torch
from torch import Tensor, nn

import torchq


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 4), nn.Linear(4, 16)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.down(x))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.encode(x))
        return y


def score(model: Autoencoder) -> float:
    return float(model.encode(x).mean())


x, model = torch.randn(8, 16), Autoencoder().eval()
q = torchq.quantize(model, [x])
code: Tensor = q.encode(x)
prepared = torchq.calibrate(torchq.prepare(model, x), [x])
prepared.encode(x)
torchq.convert(prepared).encode(x)
training = torchq.prepare_qat(model, {"x": x})
training.encode(x)
torchq.convert(training.eval()).encode(x)
torchq.quantize_dynamic(model).encode(x)
torchq.tune(model, [x], score, max_drop=1.0).model.encode(x)
observed = torchq.eager.prepare(model, x)
torchq.eager.convert(torchq.eager.calibrate(observed, [x])).encode(x)
torchq.eager.quantize(model, [x], x).encode(x)
torchq.save(q, "model.safetensors")
torchq.load("model.safetensors", model).encode(x)
graph: nn.Module = torchq.load("model.safetensors")
program = torch.export.export(model, (x,))
torchq.quantize(program, [x]).eval()
torchq.convert(torchq.calibrate(torchq.prepare(program, x), [x])).eval()
"""

NOT_RUN = """

def not_run() -> None:
    torchq.from_torch_ao(model).encode(x)
    torchq.from_torchao(model).encode(x)
    # the rest are errors
    q.decode(x)
    torchq.load("model.safetensors").encode(x)
    torchq.QConfig(weight_bits=5)
    torchq.quantize(program, [x]).encode(x).mean()
    torchq.quantize(program, 3)
    torchq.from_torchao(model).decode(x)
"""


def checked(folder: Path, *command: str) -> list[int]:
    """Return the lines in which a type checker finds errors."""
    path = folder / "program.py"
    path.write_text(PROGRAM + NOT_RUN)
    # as an installed package: its py.typed counts
    paths = {"PYTHONPATH": str(Path(torchq.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-m", *command, path.name],
        cwd=folder, env=os.environ | paths, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    errors = re.findall(r"program\.py:(\d+)(?::\d+)?(?: -|:) error", run.stdout)
    assert run.returncode == 1, run.stdout + run.stderr
    return sorted({int(line) for line in errors})


@pytest.mark.parametrize(
    "command",
    [pytest.param(("mypy", "--strict"), marks=pytest.mark.slow), ("pyright",)],
    ids=["mypy", "pyright"],
)
def test_results_have_the_class_of_the_model(
    command: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip(command[0])
    if command[0] == "mypy":
        cache = request.config.cache
        command += ("--cache-dir", str(cache.mkdir("mypy") if cache else tmp_path))
    else:
        command += ("--pythonpath", sys.executable)
    last = (PROGRAM + NOT_RUN).count("\n")
    assert checked(tmp_path, *command) == list(range(last - 5, last + 1))


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "program"}
    exec(compile(PROGRAM, "program.py", "exec"), names)

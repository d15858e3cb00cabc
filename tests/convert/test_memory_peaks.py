# SPDX-License-Identifier: Apache-2.0
"""Quantizing shares the float model's parameters, and what it returns does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.support.slow import rest_slow

ROOT = Path(__file__).parents[2]


def memory(option: str, name: str, file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "memory", option, name, str(file)]
    run = subprocess.run(
        [*command, "--megabytes", "200"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", rest_slow(["torchq dynamic", "torchq static"]))
def test_peak_of_quantizing(name: str, tmp_path: Path) -> None:
    """The float model is 1, its int8 weights are a quarter."""
    found = memory("--one", name, tmp_path / "model")
    assert 1.2 < found["quantize"] < 1.5
    assert memory("--load", name, tmp_path / "model")["load"] < 3


class Net(nn.Module):
    """Weights in a layer, in a float module and in code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.layer = nn.Linear(16, 8)
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(self.embedding(x))) * self.factor


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_result_has_memory_of_its_own(dynamic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randint(0, 50, (4, 6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = torchq.quantize(model, [x], config=torchq.QConfig(dynamic=dynamic))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(p.requires_grad for p in model.parameters())
    memory = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shared = [n for n, t in tensors(result) if t.untyped_storage().data_ptr() in memory]
    assert not shared
    expected = result(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(result(x), expected) and float(expected.abs().max()) > 0.1

    tables = [t for _, t in tensors(result) if t.shape == (50, 16)]
    assert len({t.data_ptr() for t in tables}) == 1  # the graph's is that of the module
    torchq.save(result, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", Net().eval())(x), expected)


class Clamped(nn.Module):
    """Code that writes to its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.mul_(0.5)
        return self.layer(x)


def test_a_model_that_writes_to_its_parameters_is_copied() -> None:
    model, x = Clamped().eval(), torch.randn(4, 16)
    before = model.layer.weight.detach().clone()
    torchq.quantize(model, [x])
    assert torch.equal(model.layer.weight, before)


def test_prepare_copies() -> None:
    model, x = Net().eval(), torch.randint(0, 50, (4, 6))
    prepared = torchq.prepare(model, x)
    memory = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not any(p.untyped_storage().data_ptr() in memory for p in prepared.parameters())

# SPDX-License-Identifier: Apache-2.0
"""The sentence encoder with its trained weights: part of the zoo, which installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.zoo
def test_sentences_example() -> None:
    """Trained transformers are harder than random ones: some values are far larger than most."""
    command = [sys.executable, "examples/sentences/run.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {line[:18].strip(): line[18:].split() for line in run.stdout.splitlines()[2:]}
    ms = {name: float(row[0]) for name, row in rows.items()}
    decibels = {name: float(row[1]) for name, row in rows.items() if len(row) > 1}
    assert decibels["torchq static"] > 17 and decibels["torchq dynamic"] > 25, run.stdout
    assert decibels["torchq static"] + 4 < decibels["torchq mixed"], run.stdout
    assert decibels["torchq static"] > decibels["torch.ao dynamic"], run.stdout
    assert ms["torchq dynamic"] < ms["torch.ao dynamic"] < ms["float"], run.stdout

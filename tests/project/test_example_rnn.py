# SPDX-License-Identifier: Apache-2.0
"""The recurrent digits example, with less training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_rnn_digits_example() -> None:
    pytest.importorskip("sklearn")
    command = [sys.executable, "examples/rnn_digits/run.py", "--quick"]
    # One thread: with more, a busy machine makes OpenMP wait many times longer than it computes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    exact = re.findall(r"float +([\d.]+) %", run.stdout)
    assert len(exact) == 2 and all(float(x) > 95 for x in exact), run.stdout
    differences = re.findall(r"int8 .* ([+-][\d.]+) points", run.stdout)
    ratios = re.findall(r"int8 .* ([\d.]+) dB", run.stdout)
    assert len(ratios) == 4 and all(float(x) > 30 for x in ratios), run.stdout
    assert len(differences) == 4 and all(abs(float(x)) <= 0.5 for x in differences), run.stdout

# SPDX-License-Identifier: Apache-2.0
"""`make demo`, with less training and without judging speed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_digits_example(tmp_path: Path) -> None:
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    command = [sys.executable, "examples/digits/run.py", "--quick", "--output", str(tmp_path)]
    # One thread: with more, a busy machine makes OpenMP wait many times longer than it computes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"accuracy difference: ([+-]\d+\.\d+) points", run.stdout)
    assert found and abs(float(found[1])) <= 0.5, run.stdout
    assert run.stdout.count("identical bits") == 2
    assert "9 of 9 convolutions and linears run in int8" in run.stdout
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")

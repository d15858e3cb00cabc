# SPDX-License-Identifier: Apache-2.0
"""A slice of each fuzzer and of the soak; their scripts have options for hours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script: str, *args: str) -> None:
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / script), *args],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_calls_that_crashed_once() -> None:
    run("fuzz_ops.py", "--regressions")


def test_files_of_torchq_are_read_and_nothing_else_happens() -> None:
    run("watch_files.py", "--kinds", "weights", "graph", "calibration")


@pytest.mark.slow
def test_files_of_libraries_are_read_and_nothing_else_happens() -> None:
    run("watch_files.py", "--kinds", "script", "pretrained", "compressed")


@pytest.mark.slow
def test_random_calls_give_results_or_exceptions() -> None:
    run("fuzz_ops.py", "--calls=5000")


@pytest.mark.slow
def test_other_files_give_errors_or_the_same_numbers() -> None:
    run("fuzz_files.py", "--files=300", "--ways", "damage", "forge")


@pytest.mark.slow
def test_files_of_attackers_give_errors_or_models() -> None:
    own = "weights", "graph", "calibration"
    run("fuzz_files.py", "--files=500", "--ways", "attack", "--kinds", *own)
    run("fuzz_files.py", "--files=100", "--ways", "attack", "--kinds", "pretrained", "compressed")


@pytest.mark.slow
def test_a_minute_of_a_service_keeps_bits_and_memory() -> None:
    run("soak.py", "--minutes=1")

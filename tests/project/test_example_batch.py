# SPDX-License-Identifier: Apache-2.0
"""The example of Ray Data gives the bytes of one call, however the work is divided."""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchq

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
RUN = ROOT / "examples" / "batch" / "run.py"

pytestmark = pytest.mark.skipif(not RUN.exists(), reason="not in a source tree")


def test_workers_batches_and_tiers_change_no_byte(tmp_path: Path) -> None:
    pytest.importorskip("ray.data")
    tiers = [isa for isa in torchq.supported_isas() if isa != "reference"][:2]
    options = ["--workers=2", "--batch-size=7", f"--tiers={','.join(tiers)}"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(RUN), *options],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    example = runpy.run_path(str(RUN))
    images = torch.from_numpy(example["images"]())
    model = torchq.quantize(example["build"](), list(images[:64].split(16)), strict=True)
    digest = hashlib.sha256(model(images).numpy().tobytes()).hexdigest()
    lines = done.stdout.strip().splitlines()
    assert lines[-2:] == [f"tiers {' '.join(sorted(tiers))}", f"500 rows, sha256 {digest}"]

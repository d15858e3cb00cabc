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

pytestmark = [
    pytest.mark.skipif(not RUN.exists(), reason="not in a source tree"),
    pytest.mark.slow,
]


def run(folder: Path, *command: str) -> list[str]:
    """Runs Python; the lines that it prints."""
    pytest.importorskip("ray.data")
    paths = os.pathsep.join([str(ROOT), str(RUN.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()


@pytest.fixture(scope="module")
def expected() -> str:
    """Digest of the results of one call."""
    pytest.importorskip("ray.data")
    example = runpy.run_path(str(RUN))
    batches = torch.from_numpy(example["images"](64)).split(16)
    model = torchq.quantize(example["build"](), list(batches), strict=True)
    scores = model(torch.from_numpy(example["images"](500)))
    return hashlib.sha256(scores.numpy().tobytes()).hexdigest()


def test_workers_batches_and_tiers_change_no_byte(expected: str, tmp_path: Path) -> None:
    tiers = [isa for isa in torchq.supported_isas() if isa != "reference"][:2]
    options = ["--workers=2", "--batch-size=7", f"--tiers={','.join(tiers)}"]
    lines = run(tmp_path, str(RUN), *options)
    assert f"tiers {' '.join(sorted(tiers))}" in lines
    assert lines[-1] == f"500 rows, sha256 {expected}"


KILL = """
import argparse, time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import run


class Slow(run.Classifier):
    def __call__(self, batch):
        time.sleep(0.3)
        node = ray.get_runtime_context().get_node_id()
        return super().__call__(batch) | {"node": [node] * len(batch["path"])}


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
victim = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)
paths = run.write(Path("."), 16, 500, 20)
args, found, killed = argparse.Namespace(workers=2, threads=1, batch_size=25), [], False
for batch in run.classify([str(Path(path).absolute()) for path in paths], args, Slow):
    found.append(batch)
    if not killed and batch["node"][0] == victim.node_id:
        cluster.remove_node(victim, allow_graceful=False)
        killed = len(found) < 15
print(killed, run.digest(found), flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_a_node_that_dies_changes_no_byte(expected: str, tmp_path: Path) -> None:
    assert run(tmp_path, "-c", KILL)[-1] == f"True {expected}"

# SPDX-License-Identifier: Apache-2.0
"""Classifies images of files with Ray Data: the same bytes however the work is divided.

pip install -r examples/batch/requirements.txt
python examples/batch/run.py --workers 2 --batch-size 64 --tiers avx2,avx512_vnni

Ray shows progress, and restarts a worker that dies; its batch runs again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import torchq

try:
    import ray.data
except ImportError as error:
    sys.exit(f"{error}: run `pip install -r examples/batch/requirements.txt`.")

SIDE = 16


def build(width: int = 16) -> nn.Module:
    """A small classifier; a real job trains it, here its weights are random."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(50 * width, 10),
    ).eval()


def images(rows: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((rows, 3, SIDE, SIDE), np.float32)


def write(folder: Path, width: int, rows: int, files: int) -> list[str]:
    """Writes the model and the images; returns the paths of the images."""
    batches = [torch.from_numpy(part) for part in np.split(images(64), 4)]
    torchq.save(torchq.quantize(build(width), batches, strict=True), folder / "model.torchq")
    paths = [str(folder / f"{i:04}.npy") for i in range(files)]
    for path, part in zip(paths, np.array_split(images(rows), files), strict=True):
        np.save(path, part)
    return paths


class Classifier:
    """One worker. It gets a path: a model would travel to each worker, a file is mapped."""

    def __init__(self, path: str, threads: int) -> None:
        # Ray sets OMP_NUM_THREADS to num_cpus, or to 1 without; torch reads it once, when it is
        # imported. So the number is set here, whatever came first.
        torch.set_num_threads(threads)
        self.model = torchq.load(path, mmap=True)

    @torch.inference_mode()
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        scores = self.model(torch.tensor(batch["data"]))
        tiers = np.full(len(scores), torchq.isa())
        return {"path": batch["path"], "scores": scores.numpy(), "tier": tiers}


def classify(
    paths: list[str], args: argparse.Namespace, worker: type = Classifier, tier: str = ""
) -> Iterator[dict[str, Any]]:
    """Yields batches of results, the rows of each file in order."""
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    labels = ray.data.read_numpy(paths, include_paths=True).map_batches(
        worker,
        fn_constructor_args=(str(Path(paths[0]).with_name("model.torchq")), args.threads),
        batch_size=args.batch_size,
        num_cpus=args.threads,  # of each worker
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        runtime_env={"env_vars": {"TORCHQ_ISA": tier}} if tier else {},
    )
    yield from labels.iter_batches(batch_size=None)


def digest(found: list[dict[str, Any]]) -> str:
    """Returns a digest of the scores of all images, in the order of their files."""
    paths = np.concatenate([batch["path"] for batch in found])
    scores = np.concatenate([batch["scores"] for batch in found])
    return hashlib.sha256(scores[np.argsort(paths, kind="stable")].tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker; default 1")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tiers", default="", help="names of torchq.supported_isas()")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    args = parser.parse_args()
    ray.init(num_cpus=args.workers * args.threads + 1, include_dashboard=False)  # one reads
    found, seconds, later = [], 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        paths = write(Path(name), args.width, args.rows, args.files)
        tiers = args.tiers.split(",")
        for k, tier in enumerate(tiers):  # as machines of several kinds would share the files
            start = 0.0
            for batch in classify(paths[k :: len(tiers)], args, tier=tier):
                found.append(batch)
                later += len(batch["scores"]) if start else 0
                start = start or time.perf_counter()  # without the start of the workers
            seconds += time.perf_counter() - start
    print("tiers", *sorted({tier for batch in found for tier in batch["tier"]}))
    if later:
        print(f"{later / seconds:.0f} rows/s after the first batch")
    print(f"{args.rows} rows, sha256 {digest(found)}")


if __name__ == "__main__":
    main()

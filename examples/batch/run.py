# SPDX-License-Identifier: Apache-2.0
"""Classifies images with Ray Data; results are the same bytes however the work is divided.

pip install -r examples/batch/requirements.txt
python examples/batch/run.py --workers 2 --batch-size 64 --tiers avx2,avx512_vnni
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

import torchq

IMAGES, SIDE = 500, 16


def build() -> nn.Module:
    """A small classifier; a real job trains it, here its weights are random."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(32 * 25, 10),
    ).eval()


def images() -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.standard_normal((IMAGES, 3, SIDE, SIDE), np.float32)


class Classifier:
    """One worker. It gets a path: a model would travel to each worker, a file is mapped."""

    def __init__(self, path: str, threads: int) -> None:
        # Ray sets OMP_NUM_THREADS to num_cpus, or to 1 without; torch reads it once, when it is
        # imported. So the number is set here, whatever came first.
        torch.set_num_threads(threads)
        self.model = torchq.load(path, mmap=True)

    @torch.inference_mode()
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        scores = self.model(torch.tensor(batch["image"]))
        tiers = np.full(len(scores), torchq.isa())
        return {"id": batch["id"], "scores": scores.numpy(), "tier": tiers}


def classify(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows of all images, in order."""
    rows = [{"id": i, "image": image} for i, image in enumerate(images())]
    tiers = args.tiers.split(",") if args.tiers else [""]
    found: list[dict[str, Any]] = []
    for k, tier in enumerate(tiers):  # as machines of several kinds would share the rows
        environment = {"env_vars": {"TORCHQ_ISA": tier}} if tier else {}
        labels = ray.data.from_items(rows[k :: len(tiers)]).map_batches(
            Classifier,
            fn_constructor_args=(str(path), args.threads),
            batch_size=args.batch_size,
            num_cpus=args.threads,  # of each worker
            compute=ray.data.ActorPoolStrategy(size=args.workers),
            runtime_env=environment,
        )
        found += labels.take_all()
    return sorted(found, key=lambda row: int(row["id"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker; default 1")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tiers", default="", help="names of torchq.supported_isas()")
    args = parser.parse_args()
    ray.init(num_cpus=args.workers * args.threads, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.torchq")
        batches = [torch.from_numpy(part) for part in np.split(images()[:64], 4)]
        torchq.save(torchq.quantize(build(), batches, strict=True), path)
        rows = classify(path, args)
    scores = np.stack([row["scores"] for row in rows])
    print("tiers", *sorted({row["tier"] for row in rows}))
    print(f"{len(scores)} rows, sha256 {hashlib.sha256(scores.tobytes()).hexdigest()}")


if __name__ == "__main__":
    main()

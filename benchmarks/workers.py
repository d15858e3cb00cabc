# SPDX-License-Identifier: Apache-2.0
"""Memory of its own that one more worker of a service takes, by how it was started.

The parent has the model, a stack of linear layers. A worker answers twice and reports its private
memory: pages that no other process shares, from smaps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.memory import stack

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # before the first operation: threads do not survive a fork
    torch.manual_seed(0)
    model = torchq.quantize(stack(args.layers, args.width), [torch.randn(4, args.width)])
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        torchq.save(model, path)
        size = Path(path).stat().st_size
        answered(model, args.width)
        rows: dict[str, tuple[Callable[..., int], tuple[Any, ...]]] = {
            "spawn, Python and torch alone": (_spawned, (None, args.width)),
            "spawn, with the model": (_spawned, (model, args.width)),
            "spawn, load": (_spawned, ((path, False), args.width)),
            "spawn, load with mmap": (_spawned, ((path, True), args.width)),
            "fork": (_forked, (model, args.width)),
        }
        print(f"{size / 1e6:.0f} MB of weights")
        for name, (start, given) in rows.items():
            print(f"{name:32}{start(*given) / 1e6:8.1f} MB of its own")
    return 0


def answered(model: nn.Module, width: int) -> int:
    """Return the private memory of this process after two calls."""
    with torch.inference_mode():
        for _ in range(2):
            model(torch.ones(1, width))
    return _private()


def _private() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


def _serve(given: Any, width: int, told: Any) -> None:
    torch.set_num_threads(1)
    model = torchq.load(given[0], mmap=given[1]) if isinstance(given, tuple) else given
    told.put(_private() if model is None else answered(model, width))


def _spawned(given: Any, width: int) -> int:
    """Return what a second spawned worker tells while the first one lives."""
    context = multiprocessing.get_context("spawn")
    told, ends = context.Queue(), context.Event()
    found = 0
    workers = [context.Process(target=_wait, args=(given, width, told, ends)) for _ in range(2)]
    for worker in workers:
        worker.start()
        found = told.get()
    ends.set()
    for worker in workers:
        worker.join()
    return found


def _wait(given: Any, width: int, told: Any, ends: Any) -> None:
    _serve(given, width, told)
    ends.wait()


def _forked(model: nn.Module, width: int) -> int:
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(answered(model, width)).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 100))

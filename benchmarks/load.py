# SPDX-License-Identifier: Apache-2.0
"""A service's start, in a process of its own: imports, load by memory map, first answers.

Seconds are those since the start, of the clock and of the CPU; under the load, those of the digest,
and of the sums of weights, recomputed. ``--model bert`` is a BERT-base with random weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=("linear", "bert"), default="linear")
    parser.add_argument("--megabytes", type=int, default=100, help="of the linear layers' file")
    parser.add_argument("--file", type=Path, help="a file of torchq.save, in place of a new one")


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "model"
        if args.file is None:
            _write(path, args)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.load", str(path), args.model]
        rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    for name, wall, cpu in rows:
        print(f"{name:24}{wall:8.3f} s{cpu:8.3f} s of CPU")
    return 0


def _write(path: Path, args: argparse.Namespace) -> None:
    import torch

    import torchq
    from benchmarks.memory import stack

    torch.manual_seed(0)
    model: torch.nn.Module
    if args.model == "bert":
        from transformers import BertConfig, BertModel

        model, x = BertModel(BertConfig()).eval(), torch.ones(1, 32, dtype=torch.int64)
    else:
        model, x = stack(max(args.megabytes // 4, 1)), torch.randn(4, 2048)
    with torch.no_grad():
        torchq.save(torchq.quantize(model, [x]), path)


def _start(path: str, model: str) -> list[tuple[str, float, float]]:
    rows: list[tuple[str, float, float]] = []
    begin = time.perf_counter()

    def lap(name: str) -> None:
        rows.append((name, time.perf_counter() - begin, time.process_time()))

    import torch

    lap("import torch")
    import torchq

    lap("import torchq")
    torch.set_num_threads(1)
    parts = [_timed("torchq.serialization.tensor_file", "_digest")]
    parts.append(_timed("torchq.nn.module", "unproven"))
    loaded = torchq.load(path, mmap=True)
    lap("load")
    rows += [(f"  {name.strip('_')}", *map(sum, zip(*spent, strict=True))) for name, spent in parts]
    x = torch.ones(1, 32, dtype=torch.int64) if model == "bert" else torch.ones(1, 2048)
    with torch.inference_mode():
        loaded(x)
        lap("first answer")
        loaded(x)
        lap("second answer")
    return rows


def _timed(module: str, name: str) -> tuple[str, list[tuple[float, float]]]:
    """Replace a function by one that adds its seconds to a list."""
    home, spent = importlib.import_module(module), list[tuple[float, float]]()
    function = getattr(home, name)

    def timed(*args: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = function(*args)
        spent.append((time.perf_counter() - wall, time.process_time() - cpu))
        return result

    setattr(home, name, timed)
    return name, spent


if __name__ == "__main__":
    print(json.dumps(_start(*sys.argv[1:])))

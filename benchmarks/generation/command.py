# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of models that generate text, beside the runtimes that users would pick.

Each contender has a process of its own, which loads the model and keeps it. They generate in turns,
one at a time. The weights are random, and the prompts are random tokens: neither changes the work.

llama.cpp needs ``pip install llama-cpp-python gguf``. OpenVINO's models are written by optimum-cli,
which needs an older transformers: OPTIMUM_CLI is its path in another environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import torchq
from benchmarks.generation.contenders import FLOAT, contenders
from benchmarks.generation.markdown import page
from benchmarks.generation.shapes import SHAPES, Speech
from benchmarks.generation.worker import FailedError, Worker, written
from benchmarks.timing import use_threads, write_text

__all__ = ["add_arguments", "run"]

_PAUSE = 0.05  # seconds: threads without work spin for some milliseconds
_PACKAGES = "transformers", "ctranslate2", "openvino_genai", "llama_cpp_python"


@dataclass
class Results:
    """The measurements and their machine: a row for a shape, threads, a contender and a prompt."""

    options: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    cpu: str = field(default_factory=lambda: str(torchq.cpu_info()["model"]))
    isa: str = field(default_factory=torchq.isa)
    versions: dict[str, str] = field(default_factory=lambda: _versions())


def _versions() -> dict[str, str]:
    found = {"torchq": torchq.__version__, "torch": torch.__version__}
    modules = {"llama_cpp_python": "llama_cpp"}
    names = [name for name in _PACKAGES if find_spec(modules.get(name, name))]
    return found | {name.replace("_", "-"): version(name) for name in names}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = [name for name in SHAPES if "tiny" not in name]
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=usual)
    parser.add_argument("--contender", nargs="+", metavar="NAME", help="words of their names")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[32, 256], help="of text, in tokens"
    )
    parser.add_argument("--count", type=int, help="of tokens to generate, 2 or more")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--folder", help="keeps the models; what is there is not written again")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--markdown", help="file for the page")
    parser.add_argument(
        "--render", metavar="JSON", nargs="+", help="measure nothing; the page of these files"
    )


def run(args: argparse.Namespace) -> int:
    if args.render:
        results = [json.loads(Path(file).read_text(encoding="utf-8")) for file in args.render]
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = [asdict(_measured(args, Path(args.folder or folder)))]
        if args.json:
            write_text(args.json, json.dumps(results[0], indent=1) + "\n")
    if args.markdown:
        write_text(args.markdown, page(*results))
    return 0


def _measured(args: argparse.Namespace, folder: Path) -> Results:
    use_threads(max(args.threads))
    found = Results(_options(args))
    for shape in args.shape:
        failures = found.failures[shape] = {}
        for threads in args.threads:
            _measure(shape, threads, args, folder / shape, found)
        found.rows = [
            r for r in found.rows if r["shape"] != shape or r["contender"] not in failures
        ]
    return found


def _options(args: argparse.Namespace) -> str:
    """Return the options of a measurement as they are written."""
    text = ""
    for name in ("shape", "contender", "prompts", "count", "rounds", "threads"):
        given = getattr(args, name)
        values = given if isinstance(given, list) else [given]
        text += "" if given is None else " ".join([f" --{name}", *map(str, values)])
    return text


def _measure(
    shape: str, threads: int, args: argparse.Namespace, folder: Path, found: Results
) -> None:
    """Add the rows of a shape and a number of threads."""
    failures, count = found.failures[shape], args.count or SHAPES[shape].count
    workers = {
        name: worker
        for name in contenders(SHAPES[shape])
        if name not in failures  # on fewer threads
        if name == FLOAT or not args.contender or any(w in name for w in args.contender)
        if (worker := _started(name, shape, threads, folder, failures))
    }
    for length in [4] if isinstance(SHAPES[shape], Speech) else args.prompts:
        times = _turns(workers, length, count, args.rounds, failures)
        common = {"shape": shape, "threads": threads, "prompt": length, "count": count}
        rows = [{**common, "contender": name, **_medians(count, t)} for name, t in times.items()]
        found.rows += rows
        _print(rows)
    for name, worker in workers.items():
        row = {"shape": shape, "threads": threads, "contender": name}
        seconds = worker.load_seconds
        found.memory.append({**row, "load_s": seconds, "peak_mb": worker.close() / 1e6})


def _turns(
    workers: dict[str, Worker], length: int, count: int, rounds: int, failures: dict[str, str]
) -> dict[str, list[tuple[float, float]]]:
    """Return the times of each contender; one that fails leaves the workers."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
    for turn in range(rounds + 1):  # the first finds kernels, or compiles them
        for name, worker in [*workers.items()]:
            time.sleep(_PAUSE)
            try:
                taken = worker.generate(length, count, turn)
            except FailedError as error:
                failures[name] = str(error)
                del workers[name], times[name]
            else:
                times[name] += [taken] if turn else []
    return times


def _started(
    name: str, shape: str, threads: int, folder: Path, failures: dict[str, str]
) -> Worker | None:
    """Return a worker with its model; what cannot be made is noted."""
    start = time.perf_counter()
    worker, said = None, "ready"
    try:
        for contender in (None, name):
            done = folder / f"{contender or 'float'}.done"
            if not done.exists():
                written(shape, folder, contender)
                done.touch()
        worker = Worker(name, shape, folder, threads)
    except FailedError as error:
        failures[name] = said = str(error)
    print(f"{shape}, {name}: {said}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return worker


def _medians(count: int, times: list[tuple[float, float]]) -> dict[str, Any]:
    prompts, steps = ([1e3 * seconds for seconds in each] for each in zip(*times, strict=True))
    steps = [ms / (count - 1) for ms in steps]
    return {
        "rounds": len(times),
        **{"prompt_ms": statistics.median(prompts), "token_ms": statistics.median(steps)},
        **{"token_low_ms": min(steps), "token_high_ms": max(steps)},
    }


def _print(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(
        f"{first['shape']}, threads: {first['threads']}, a prompt of {first['prompt']}, "
        f"{first['count']} tokens, {first['rounds']} rounds"
    )
    for row in rows:
        spread = f"{row['token_low_ms']:.2f} to {row['token_high_ms']:.2f}"
        print(
            f"  {row['contender']:26}prompt {row['prompt_ms']:8.1f} ms, token "
            f"{row['token_ms']:7.2f} ms ({spread}), {1e3 / row['token_ms']:6.1f} tokens/s",
            flush=True,
        )

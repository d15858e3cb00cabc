# SPDX-License-Identifier: Apache-2.0
"""The models of torch.ao's users in torch.ao, torchao, ONNX Runtime and torchq.

Everyone gets the same float model, and what its documentation says to write for it: see
benchmarks/migrate/contenders.py. Times are medians of one input at a time, all in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.inference import quality
from benchmarks.inference.runtimes import Runtime
from benchmarks.migrate.contenders import CONTENDERS, RUNTIME, lines_of, why_absent
from benchmarks.migrate.markdown import page
from benchmarks.migrate.models import MODELS
from benchmarks.timing import FULL, QUICK, Plan, call_blocks, interleave, use_threads, write_text

__all__ = ["add_arguments", "run"]


@dataclass
class Row:
    """One contender on one model; what is None was not measured."""

    model: str
    contender: str
    lines: int | None = None
    ms: float | None = None
    bytes: int | None = None
    sqnr_db: float | None = None
    failure: str = ""


@dataclass
class Results:
    """All rows, and where they are from."""

    rows: list[Row] = field(default_factory=list)
    cpu: str = field(default_factory=lambda: str(torchq.cpu_info()["model"]))
    isa: str = field(default_factory=torchq.isa)
    threads: int = 1
    versions: dict[str, str] = field(default_factory=lambda: _versions())


def _versions() -> dict[str, str]:
    found = {"torchq": torchq.__version__, "torch": torch.__version__}
    names = [name for name in ("torchao", "onnxruntime") if find_spec(name) is not None]
    return found | {name: version(name) for name in names}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", choices=MODELS, metavar="TITLE", default=[*MODELS])
    parser.add_argument(
        "--contender", nargs="+", choices=CONTENDERS, metavar="NAME", default=[*CONTENDERS]
    )
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--markdown", help="file for the page")
    parser.add_argument("--render", metavar="JSON", help="measure nothing; the page of this file")
    parser.add_argument("--quick", action="store_true", help="few short samples; only to try it")
    parser.add_argument("--small", action="store_true", help="narrow variants; only to try it")


def run(args: argparse.Namespace) -> int:
    if args.render:
        results = json.loads(Path(args.render).read_text(encoding="utf-8"))
    else:
        use_threads(1)
        found = Results()
        for title in args.model:
            network = MODELS[title]
            if not network.available:
                found.rows.append(Row(title, "float", failure=f"{network.requires} is missing"))
                continue
            rows = _Measurement(title, args.contender, args.small).rows(
                QUICK if args.quick else FULL
            )
            found.rows += rows
            _print(title, rows)
        results = asdict(found)
    if args.json:
        write_text(args.json, json.dumps(results, indent=1) + "\n")
    if args.markdown:
        write_text(args.markdown, page(results))
    return 0


class _Measurement:
    """One model, quantized by everyone, compared and timed."""

    def __init__(self, title: str, contenders: Sequence[str], small: bool) -> None:
        network, self.contenders = MODELS[title], contenders
        self.title, self.model = title, network.build(small)
        self.batches, self.inputs = network.calibration(small), network.inputs(8, small=small)
        has_table = any(isinstance(m, nn.EmbeddingBag) for m in self.model.modules())
        self.kind = "embedding" if has_table else "dynamic" if network.dynamic else "static"
        self.expected = _run(self.model, self.inputs)

    def rows(self, plan: Plan) -> list[Row]:
        src = self.inputs[:1].clone()
        size = quality.float_bytes(self.model)
        found = [Row(self.title, "float", 0, bytes=size)]
        with torch.no_grad(), contextlib.ExitStack() as stack:
            blocks = {"float": call_blocks(self.model, (src,))}
            for name in (name for name in self.contenders if self.kind in CONTENDERS[name]):
                row = Row(self.title, name, failure=why_absent(name, self.kind))
                found.append(row)
                if not row.failure:
                    with _noted(row):
                        blocks[name] = self._converted(row, stack)
            samples = interleave(blocks, plan)
        for row in found:
            if row.contender in samples:
                row.ms = 1e-3 * samples[row.contender].median
        return found

    def _converted(self, row: Row, stack: contextlib.ExitStack) -> Any:
        """Fill in what a contender's model is; return what times it."""
        make = CONTENDERS[row.contender][self.kind]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with _working_folder(folder):
            made = make(self.model, self.batches)
        if row.contender == RUNTIME:
            path = Path(folder) / made
            runtime = Runtime("onnxruntime", path, self.inputs, 1)
            stack.enter_context(runtime)
            outputs, row.bytes, blocks = runtime.outputs, path.stat().st_size, runtime.blocks
        else:
            outputs, row.bytes = _run(made, self.inputs), _bytes(row.contender, made)
            blocks = call_blocks(made, (self.inputs[:1].clone(),))
        row.sqnr_db, row.lines = torchq.sqnr(self.expected, outputs), lines_of(make)
        return blocks


def _run(model: Callable[[Tensor], Any], inputs: Tensor) -> list[Tensor]:
    """The results, one input at a time; torchao's tensors refuse inference mode."""
    with torch.no_grad():
        return [model(x).flatten().float() for x in inputs.split(1)]


def _bytes(contender: str, model: Any) -> int:
    if contender.startswith("torchq"):
        return quality.int8_bytes(model)
    file = io.BytesIO()
    torch.save(getattr(model, "_orig_mod", model).state_dict(), file)
    return file.tell()


@contextlib.contextmanager
def _working_folder(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _noted(row: Row) -> Iterator[None]:
    """Note why a contender cannot take part, and go on without it."""
    try:
        yield
    except Exception as error:
        line = (str(error).strip() or "no message").splitlines()[0]
        row.failure = f"{type(error).__name__}: {line}"


def _print(title: str, rows: list[Row]) -> None:
    print(title)
    for row in rows:
        if row.failure:
            print(f"  {row.contender:20}{row.failure}")
        else:
            decibels = "" if row.sqnr_db is None else f"{row.sqnr_db:6.1f} dB"
            print(
                f"  {row.contender:20}{row.lines or 0:3} lines {row.ms or 0:9.3f} ms "
                f"{(row.bytes or 0) / 1e6:9.2f} MB {decibels}"
            )

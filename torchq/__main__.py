# SPDX-License-Identifier: Apache-2.0
"""``python -m torchq doctor | quantize | analyze | bench | inspect | migrate``."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import torchq
from torchq.analysis.timing import crowded
from torchq.commands.listing import add_inspect, inspect
from torchq.commands.model import load_model
from torchq.commands.quantize import add_quantize, quantize
from torchq.migrate.source import find_uses
from torchq.models.inputs import split_inputs
from torchq.ops import LIBRARY_PATH
from torchq.runtime import library
from torchq.runtime.cpus import usable_cpus

_DESCRIPTION = """Quantizes, times and inspects models.

A MODEL is file.py:function or package.module:function; the function takes nothing and returns the
float model, in eval mode, and a list of calibration batches. For quantize it may be a folder of
transformers or sentence-transformers, too."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Return how to print."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def doctor(args: argparse.Namespace) -> int:
    """Say what torchq found here, and run every tier once against the reference."""
    wrong = _wrong_tiers()
    facts: dict[str, object] = {
        "torchq": torchq.__version__,
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1] or "none",
        **torchq.cpu_info(),
        "torch_built_for": library.built_for(),
        "library": str(LIBRARY_PATH),
        "self_test": f"wrong on {', '.join(wrong)}" if wrong else "exact on every tier",
    }
    if args.json:
        print(json.dumps(facts, indent=1))
        return len(wrong) > 0
    for key, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else value
        print(f"{key.replace('_', ' '):18}{f'{text:g}' if isinstance(text, float) else text}")
    if note := crowded():
        print(f"{'advice':18}{note}")
    return len(wrong) > 0


def _wrong_tiers() -> Sequence[str]:
    """Tiers whose products are not exact."""
    src = torch.arange(256, dtype=torch.uint8, device="cpu").repeat(9, 3)
    weight = (
        torch.arange(-128, 128, dtype=torch.int8, device="cpu").repeat_interleave(3).repeat(33, 1)
    )
    expected, wrong = (src.double() @ weight.double().T).int(), []
    for tier in torchq.supported_isas():
        with torchq.use_isa(tier):
            result = torchq.functional.linear(src, weight, dst_dtype=torch.int32)
        if not torch.equal(result, expected):
            wrong.append(tier)
    return wrong


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {number}")
    return number


def _new_file(text: str) -> str:
    """Check the folder of a file that a run writes last, before the run begins."""
    if not Path(text).absolute().parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return text


def add_model(parser: argparse.ArgumentParser) -> None:
    """Return the arguments that say what to quantize."""
    parser.add_argument("model", metavar="MODEL", help="file.py:function or package:function")
    parser.add_argument("--threads", type=_positive, help="torch.set_num_threads")
    parser.add_argument("--isa", choices=torchq.supported_isas(), help="tier to run on")


def add_analyze(parser: argparse.ArgumentParser) -> None:
    """As bench, with the reports."""
    add_model(parser)
    parser.add_argument("--sensitivity", action="store_true", help="two quantizations per layer")
    parser.add_argument("--html", type=_new_file, help="file for the report")
    parser.add_argument("--save", type=_new_file, help="file for the quantized model")


def analyze(args: argparse.Namespace) -> int:
    """Quantize a model and say what happened to every layer."""
    model, data = load_model(args.model)
    prepared = torchq.calibrate(torchq.prepare(model, data[0]), data)
    qmodel = torchq.convert(prepared)
    print(torchq.explain(qmodel), end="\n\n")
    print(torchq.compare(prepared, qmodel, data), end="\n\n")
    print(torchq.profile(model, qmodel, data[0]))
    if args.sensitivity:
        print(f"\n{torchq.sensitivity(model, data, data[0])}")
    if args.html:
        torchq.write_report(args.html, model, prepared, qmodel, data, args.model)
    if args.save:
        torchq.save(qmodel, args.save)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Time a model in float, in int8, and in int8 as frozen TorchScript."""
    model, data = load_model(args.model)
    qmodel = torchq.quantize(model, data, data[0])
    models: dict[str, nn.Module] = {"float": model, "int8": qmodel}
    positional, keywords = split_inputs(data[0])
    if not keywords:
        with torch.inference_mode():
            traced: object = torch.jit.trace(qmodel, positional)
            models["int8, frozen TorchScript"] = torch.jit.freeze(traced)
    print(torchq.milliseconds(models, data[0]))
    return 0


def add_migrate(parser: argparse.ArgumentParser) -> None:
    """Add the path."""
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="a Python file, or a folder of them"
    )
    add_json(parser)


def migrate(args: argparse.Namespace) -> int:
    """List calls of torch.ao and of torchao's PT2E, with what to write instead."""
    uses = find_uses(args.path)
    if args.json:
        print(json.dumps([asdict(use) for use in uses], indent=1))
        return 0
    for use in uses:
        print(use)
    files = len({use.file for use in uses})
    count = f"{_counted(len(uses), 'place')} in {_counted(files, 'file')}; nothing was changed"
    print(count if uses else "nothing of torch.ao's quantization is used there")
    return 0


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


Setup = Callable[[argparse.ArgumentParser], None]
COMMANDS: dict[str, tuple[str, Setup, Callable[[argparse.Namespace], int]]] = {
    "doctor": ("say what torchq found here, and test every tier", add_json, doctor),
    "quantize": ("quantize a model and write it", add_quantize, quantize),
    "analyze": ("quantize a model and say what happened to every layer", add_analyze, analyze),
    "bench": ("time a model in float, in int8, and as frozen TorchScript", add_model, bench),
    "inspect": ("list the modules of a saved model, and what is float", add_inspect, inspect),
    "migrate": ("list calls of torch.ao and what to write instead", add_migrate, migrate),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake in its arguments is said in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of modules may be any text
            stream.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(argv)
    if "threads" in args:
        usable = max(int(usable_cpus()), 1)
        torch.set_num_threads(args.threads or min(torch.get_num_threads(), usable))
    try:
        with torchq.use_isa(getattr(args, "isa", None) or torchq.isa()):
            status = COMMANDS[args.command][2](args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads has enough, as with "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        if not str(error.args[-1] if error.args else "").startswith("torchq"):
            raise  # of the model's own code: the traceback says where
        print(f"{error}{_place(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    # no docstrings: python -OO has none
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m torchq", description=_DESCRIPTION, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"torchq {torchq.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (summary, setup, _) in COMMANDS.items():
        setup(commands.add_parser(name, help=summary, description=f"{summary.capitalize()}."))
    return parser


def _place(error: BaseException) -> str:
    """Return the place in the user's own files where an error of torchq came up, if it did."""
    libraries = tuple(str(Path(module.__file__ or "").parent) for module in (torchq, torch, os))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*libraries, "<")):
            return f" (in {frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Peak memory of quantizing a model and of loading the result, each in a process of its own.

The model is a stack of linear layers with relus. Peaks are those of resident memory over what the
process has after its imports and after the same steps with a tiny model, so that what they import
is not counted. Of quantizing, the float model is a part: 1.0 means nothing beside it. Loading is
divided by the size of the file.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.timing import write_text

__all__ = ["add_arguments", "peak_bytes", "resident_bytes", "run"]

_WIDTH = 2048
Make = Callable[[nn.Module, Tensor], nn.Module]


def _ao(model: nn.Module, x: Tensor) -> nn.Module:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(model, {nn.Linear})


def _torchao(model: nn.Module, x: Tensor) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


CONTENDERS: dict[str, Make] = {
    "torch.ao dynamic": _ao,
    "torchao, in place": _torchao,
    "torchq dynamic": lambda model, x: torchq.quantize_dynamic(model),
    "torchq dynamic, in place": lambda model, x: torchq.quantize_dynamic(model, inplace=True),
    "torchq static": lambda model, x: torchq.quantize(model, [x]),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=600, help="of the float model")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    count = max(round(args.megabytes * 1e6 / (4 * _WIDTH * _WIDTH)), 1)
    if args.one or args.load:
        name, file = args.one or args.load
        step = _quantize if args.one else _load
        print(json.dumps(step(name, Path(file), count)))
        return 0
    rows = [_row(name, args.megabytes) for name in CONTENDERS]
    print(f"{'':26}{'quantizing / float':>20}{'loading / file':>18}{'file, MB':>12}")
    for row in rows:
        told = row["failure"]
        if not told:
            load, size = row["load"], row["bytes"] / 1e6
            told = f"{row['quantize']:>20.2f}{load:>18.2f}{size:>12.1f}"
        print(f"{row['contender']:26}{told}")
    if args.json:
        write_text(args.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _row(name: str, megabytes: int) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("contender", "quantize", "load", "bytes", "failure"))
    row |= {"contender": name, "failure": ""}
    if name.startswith("torchao") and find_spec("torchao") is None:
        return row | {"failure": "torchao is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        for option in ("one", "load"):
            command = [sys.executable, "-m", "benchmarks", "memory", f"--{option}", name]
            command += [str(Path(folder) / "model"), "--megabytes", str(megabytes)]
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.returncode:
                reason = (ended.stderr.strip().splitlines() or ["no message"])[-1]
                return row | {"failure": f"{option}: {reason}"}
            row |= json.loads(ended.stdout.strip().splitlines()[-1])
    return row


def stack(count: int, width: int = _WIDTH) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers).eval()


def _quantize(name: str, file: Path, count: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    make = CONTENDERS[name]
    make(stack(2, 64), torch.randn(4, 64))  # what is imported late
    before = resident_bytes()
    model, x = stack(count), torch.randn(4, _WIDTH)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    made = make(model, x)
    peak = (peak_bytes() - before) / size
    _save(name, made, file)
    return {"quantize": peak, "bytes": file.stat().st_size}


def _save(name: str, model: nn.Module, file: Path) -> None:
    if name.startswith("torchq"):
        torchq.save(model, file)
    else:
        torch.save(model.state_dict() if name.startswith("torchao") else model, file)


def _load(name: str, file: Path, count: int) -> dict[str, Any]:
    """Load what :func:`_quantize` wrote; a float model that loading needs is a part of the peak."""
    warnings.simplefilter("ignore")
    tiny = file.with_name("tiny")
    small = CONTENDERS[name](stack(2, 64), torch.randn(4, 64))
    _save(name, copy.deepcopy(small), tiny)
    _loaded(name, tiny, 2, 64)
    before = resident_bytes()
    loaded = _loaded(name, file, count, _WIDTH)
    peak = (peak_bytes() - before) / file.stat().st_size
    del loaded
    return {"load": peak}


def _loaded(name: str, file: Path, count: int, width: int) -> nn.Module:
    if name.startswith("torchao"):  # its models do not pickle: a state for a model without memory
        with torch.device("meta"):
            model = stack(count, width)
        model.load_state_dict(torch.load(file, weights_only=False), assign=True)
        return model
    if not name.startswith("torchq"):
        loaded: nn.Module = torch.load(file, weights_only=False)
        return loaded
    if "static" in name:
        return torchq.load(file)
    with torch.device("meta"):
        skeleton = stack(count, width)
    return torchq.load(file, skeleton)


def resident_bytes() -> int:
    """Resident memory now, after what can be given back was; the peak starts here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024

# SPDX-License-Identifier: Apache-2.0
"""Whole networks of the zoo in torchq, beside float and the int8 of torch.ao and two runtimes.

Everyone gets the same float weights, the same calibration data and the same inputs, one at a time.
torch.ao converts with its FX flow and x86 engine, ONNX Runtime with its static quantizer, OpenVINO
runs what NNCF quantized. The output SQNR is the power of the float outputs by that of the
difference. Peers that are not installed are left out, files of runtimes are kept in build/zoo.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import torchq
from benchmarks import peak
from benchmarks.inference.markdown import page
from benchmarks.inference.measure import PEERS, WAYS, Measured, installed, measure
from benchmarks.models import NETWORKS
from benchmarks.timing import FULL, QUICK, use_threads, write_text

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", nargs="+", choices=NETWORKS, metavar="NAME", help="of the zoo")
    which.add_argument("--all", action="store_true", help="every network that can be built here")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of everyone")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {','.join(PEERS)}; or ''")
    parser.add_argument("--json", help="file for the results: one object, or a list of several")
    parser.add_argument("--markdown", help="file for the results as a page of tables")
    parser.add_argument("--quick", action="store_true", help="few short samples; only to try it")
    parser.add_argument("--ways", action="store_true", help="torch.export and torch.compile, too")
    parser.add_argument("--small", action="store_true", help="narrow variants; only to try it")


def run(args: argparse.Namespace) -> int:
    peers = [name for name in args.peers.split(",") if name]
    if unknown := sorted(set(peers) - set(PEERS)):
        raise RuntimeError(f"--peers must be of {', '.join(PEERS)}, got {', '.join(unknown)}.")
    for name in [name for name in peers if not installed(name)]:
        print(f"benchmarks: no {name}: it is not installed", file=sys.stderr)
        peers.remove(name)
    names = args.model or [name for name, network in NETWORKS.items() if network.available]
    if absent := [name for name in names if not NETWORKS[name].available]:
        needed = NETWORKS[absent[0]].requires
        raise RuntimeError(f"{absent[0]} needs the package {needed}. Run `pip install {needed}`.")
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += _in_process(name, args) if len(names) > 1 else _measured(name, peers, args)
    if args.json:
        found = rows[0] if len(rows) == 1 else rows
        write_text(args.json, json.dumps(found, indent=1) + "\n")
    if args.markdown:
        write_text(args.markdown, page(rows))
    return int(len({row["model"] for row in rows}) < len(names))


def _measured(name: str, peers: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    use_threads(max(args.threads))
    busy = [] if args.quick else [_share_of_peak(max(args.threads))]
    plan, ways = QUICK if args.quick else FULL, WAYS if args.ways else ()
    result = measure(name, peers, args.threads, plan, args.small, ways)
    busy += [] if args.quick else [_share_of_peak(max(args.threads))]
    _print(result)
    quiet = min(busy, default=None)
    if quiet is not None and quiet < peak.REQUIRED_FRACTION:
        print(
            f"benchmarks: {name}: the machine was busy ({quiet:.1%} of its peak)", file=sys.stderr
        )
    cpu = torchq.cpu_info()["model"]
    versions = {"torch": torch.__version__, "isa": torchq.isa(), "cpu": cpu}
    return [{**row, "share_of_peak": quiet, **versions} for row in result.rows()]


def _share_of_peak(threads: int) -> float:
    """Returns the VNNI loop's share of the clock's limit; 1 where there is no VNNI."""
    return peak.measure(threads, torchq.isa()).fraction


def _in_process(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One of several networks: it shall neither share memory with the others nor end them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        options = ["--peers", args.peers, "--json", str(file), "--model", name, "--threads"]
        options += [str(count) for count in args.threads]
        options += [f"--{flag}" for flag in ("quick", "small", "ways") if getattr(args, flag)]
        status = subprocess.run([sys.executable, "-m", "benchmarks", "models", *options]).returncode
        if status or not file.exists():
            print(f"benchmarks: {name} ended with status {status}", file=sys.stderr)
            return []
        rows = json.loads(file.read_text())
        return rows if isinstance(rows, list) else [rows]


def _print(result: Measured) -> None:
    print(f"{result.model}: {result.macs / 1e9:.3f} GMAC, {result.int8_share:.1%} in int8")
    seconds = ", ".join(f"{n} {s:.1f}" for n, s in result.seconds.items())
    sizes = (result.float_bytes / 1e6, result.torchq_bytes / 1e6)
    print(f"  size {sizes[0]:.1f} -> {sizes[1]:.1f} MB, quantized in s: {seconds}")
    print("  output SQNR, dB: " + ", ".join(f"{n} {db:.1f}" for n, db in result.sqnr_db.items()))
    for threads, times in result.times.items():
        line = ", ".join(f"{name} {ms:.3f}" for name, ms in times.items())
        print(f"  ms on {threads} thread(s): {line}")
    groups = Counter((kind, reason) for _, kind, _, reason in result.float_layers)
    for (kind, reason), count in groups.items():
        print(f"  float: {count} x {kind}: {reason}")
    for name, reason in result.failures.items():
        print(f"  no {name}: {reason}")

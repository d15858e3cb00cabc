# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks peak``: what this machine can do, and what one op call costs at least."""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.competitors import Operands, torchq_call
from benchmarks.suites import Linear
from benchmarks.timing import FULL, QUICK, Plan, call_blocks, interleave
from torchq.nn import QLinear
from torchq.quantization.qparams import QParams

__all__ = ["PATIENT", "BusyMachineError", "Peak", "add_arguments", "measure", "run"]

_SOURCE = Path(__file__).with_suffix(".cpp")
_LIBRARY = Path(__file__).resolve().parents[1] / "build" / "peak" / "libpeak.so"
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_TIER_LOOPS = {
    "amx": "amx",
    "avx512": "avx512",
    "avx2_vnni": "vnni256",
    "avx2": "avx2",
    "reference": "clock",
}

PATIENT = 20
"""Tries before a run is refused: a neighbour's seconds on the same cores are waited for."""

REQUIRED_FRACTION = 0.98
"""Of the peak the VNNI loop must reach, or something else runs on the machine."""


class BusyMachineError(RuntimeError):
    """The machine does not reach its own peak, so that times would mean nothing."""


@dataclass(frozen=True)
class Peak:
    """Limits of a number of threads.

    Attributes:
        clock_ghz: measured with dependent additions, between those of the VNNI loop.
        vnni_gops: 2 x 64 MAC x clock, times the VNNI units a core has; None without VNNI.
        measured_vnni_gops: what the vpdpbusd loop reached in half a second.
        tier_gops: of the tier: ``vnni_gops`` for avx512_vnni; measured for amx (tdpbusd), avx2_vnni
            (vpdpbusd of 256 bits), avx512 and avx2 (pairs of vpmaddwd and vpaddd); for the
            reference one multiply-add a cycle.
    """

    threads: int
    clock_ghz: float
    vnni_gops: float | None
    measured_vnni_gops: float | None
    tier_gops: float

    @property
    def fraction(self) -> float:
        """Returns the VNNI loop's share of the clock's limit; 1 where there is no VNNI."""
        return (self.measured_vnni_gops or 1.0) / (self.vnni_gops or 1.0)

    @property
    def quiet(self) -> bool:
        """Returns True if no other job takes a share of the machine."""
        return self.fraction >= REQUIRED_FRACTION

    def check_quiet(self) -> None:
        """Raises BusyMachineError if another job takes a share of the machine."""
        if not self.quiet:
            raise BusyMachineError(
                f"the machine is busy: its VNNI loop reaches {self.measured_vnni_gops:.0f} GOPS on "
                f"{self.threads} thread(s), {self.fraction:.1%} of the {self.vnni_gops:.0f} that "
                f"its clock of {self.clock_ghz:.2f} GHz allows; below {REQUIRED_FRACTION:.0%} "
                "times mean nothing. Stop what else runs (see top) and start again."
            )


def measure(threads: int, isa: str, tries: int = 3) -> Peak:
    """Measures clock and peak on ``threads`` threads, up to ``tries`` times until it is quiet.

    A try takes half a second.

    Raises:
        RuntimeError: there is no compiler, or the CPU is no x86-64.
    """
    for _ in range(tries):
        peak = _measure(threads, isa)
        if peak.quiet:
            break
    return peak


def _measure(threads: int, isa: str) -> Peak:
    measured = vnni = None
    if found := vnni_rates(threads):
        macs, cycles = found
        clock = cycles / threads
        units = max(1, round(macs / (64 * cycles)))
        measured, vnni = 2e-9 * macs, 2e-9 * 64 * units * cycles
    else:
        clock = max(rates("clock", threads)) / threads  # the fastest window, undisturbed
    tier = vnni
    if isa in _TIER_LOOPS or tier is None:
        loop = _TIER_LOOPS.get(isa, "clock")
        tier = 2e-9 * statistics.median(rates(loop, threads) or rates("clock", threads))
    return Peak(threads, 1e-9 * clock, vnni, measured, tier)


def vnni_rates(threads: int) -> tuple[float, float] | None:
    """MACs a second of the VNNI loop and clock meanwhile, of all threads together; None without.

    The means of half a second: a median of short windows does not see another job's time slices.
    """
    windows, seconds = 20, 20e-3
    macs, clock = ((ctypes.c_double * (threads * windows))() for _ in range(2))
    if _library().torchq_vnni(threads, seconds, windows, macs, clock):
        return None
    return sum(macs) / windows, sum(clock) / windows


def rates(loop: str, threads: int, data_bytes: int = 0, seconds: float = 1e-3) -> list[float]:
    """Units a second of a loop of peak.cpp, all threads together, one figure a window.

    Empty if the CPU lacks the instructions.
    """
    windows = 20
    out = (ctypes.c_double * (threads * windows))()
    if _library().torchq_rates(loop.encode(), threads, seconds, windows, data_bytes, out):
        return []
    return [sum(out[window::windows]) for window in range(windows)]


@functools.cache
def _library() -> ctypes.CDLL:
    if not _LIBRARY.exists() or _LIBRARY.stat().st_mtime < _SOURCE.stat().st_mtime:
        _compile()
    library = ctypes.CDLL(str(_LIBRARY))
    library.torchq_rates.argtypes = [
        *(ctypes.c_char_p, ctypes.c_int, ctypes.c_double, ctypes.c_int, ctypes.c_long),
        ctypes.POINTER(ctypes.c_double),
    ]
    library.torchq_vnni.argtypes = [
        *(ctypes.c_int, ctypes.c_double, ctypes.c_int),
        *(ctypes.POINTER(ctypes.c_double),) * 2,
    ]
    return library


def _compile() -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise RuntimeError(f"no C++ compiler {compiler!r} found. Install g++ or set CXX.")
    _LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_LIBRARY.parent) as scratch:
        fresh = Path(scratch) / _LIBRARY.name
        flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]
        command = [*compiler.split(), *flags, str(_SOURCE), "-o", str(fresh)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{compiler} cannot compile {_SOURCE.name}:\n{result.stderr}")
        fresh.replace(_LIBRARY)


def read_sizes() -> dict[str, int]:
    """Bytes a thread reads to stay in each cache: half of L1 and L2, of L3 what L2 cannot hold."""
    sizes = {1: 32 << 10, 2: 1 << 20, 3: 16 << 20}  # where the system does not tell
    for index in _CACHES.glob("index*"):
        if (index / "type").read_text().strip() != "Instruction":
            size = (index / "size").read_text().strip()
            sizes[int((index / "level").read_text())] = int(size.removesuffix("K")) << 10
    chosen = {"L1": sizes[1] // 2, "L2": sizes[2] // 2, "L3": min(4 * sizes[2], sizes[3] // 2)}
    return {cache: size // 4096 * 4096 for cache, size in chosen.items()}


def call_floors(plan: Plan) -> dict[str, float]:
    """Microseconds from Python, on one thread."""
    data = Operands.random(Linear(4, 64, 64), torch.uint8)
    src, dst = (QParams.per_tensor(scale, 0, torch.uint8) for scale in (0.02, 0.05))
    module = QLinear.from_float(nn.Linear(64, 64), src, dst)
    ops = torch.ops.torchq
    byte, table = torch.zeros(1, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    calls: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
        "lookup of one byte (an op of two tensors)": (ops.lookup.default, [byte, table]),
        "linear 4x64->64, op": torchq_call(Linear(4, 64, 64), data),
        "linear 4x64->64, module": (module, [data.src]),
    }
    competitors = {name: call_blocks(*call) for name, call in calls.items()}
    return {name: samples.median for name, samples in interleave(competitors, plan).items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cpus, help="largest number of threads")
    parser.add_argument("--quick", action="store_true", help="shorter samples; only to try it")


def run(args: argparse.Namespace) -> int:
    _library()  # compiler messages come before the table
    counts = sorted({args.threads, *(1 << i for i in range(args.threads.bit_length()))})
    peaks = [measure(threads, "avx2") for threads in counts]
    print(f"{'threads':<34}" + "".join(f"{peak.threads:>9}" for peak in peaks))
    _row("clock, GHz", [f"{peak.clock_ghz:.2f}" for peak in peaks])
    if peaks[0].vnni_gops is None:
        print("this CPU has no AVX512-VNNI: no vpdpbusd peak")
    else:
        _row("vpdpbusd, GOPS", [f"{peak.measured_vnni_gops:.0f}" for peak in peaks])
        _row("  of 64 MAC x units x clock", [f"{peak.fraction:.1%}" for peak in peaks])
    if "avx2" in torchq.supported_isas():
        _row("vpmaddwd + vpaddd, AVX2, GOPS", [f"{peak.tier_gops:.0f}" for peak in peaks])
        _print_bandwidth(peaks)
    torch.set_num_threads(1)
    print("\none call from Python, us, one thread")
    with torch.inference_mode():
        for name, us in call_floors(QUICK if args.quick else FULL).items():
            print(f"  {name:<44}{us:>7.2f}")
    for peak in peaks:
        try:
            peak.check_quiet()
        except BusyMachineError as error:
            print(f"benchmarks: {error}", file=sys.stderr)
    return 0


def _row(name: str, figures: Sequence[str]) -> None:
    print(f"{name:<34}" + "".join(f"{figure:>9}" for figure in figures))


def _print_bandwidth(peaks: Sequence[Peak]) -> None:
    loop = "read512" if rates("read512", 1, 4096) else "read256"
    for cache, size in read_sizes().items():
        speeds = [statistics.median(rates(loop, peak.threads, size)) for peak in peaks]
        _row(f"{cache} read ({size >> 10} KiB each), GB/s", [f"{s * 1e-9:.0f}" for s in speeds])
        per_cycle = [
            speed / (1e9 * peak.clock_ghz * peak.threads)
            for speed, peak in zip(speeds, peaks, strict=True)
        ]
        _row("  bytes a cycle and core", [f"{figure:.1f}" for figure in per_cycle])

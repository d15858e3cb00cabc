# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged files, read by children that report.

    python tests/fuzz/fuzz_files.py --files 20000 --seed 0

A damaged file, some of whose bytes changed, gives the right numbers or one error that names it. A
forged file, whose parts changed under a valid digest, may hold another model. So may the file of an
attack, which has other structure: nodes, guards, names, aliases, shapes. It gives an error of the
documented classes or a model; never a crash, an import, or more time and memory than SECURITY.md
promises.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from children import limit_memory, run_forked
from file_kinds import MODELS, Calibration, Graphs, Kind, Weights
from other_kinds import HAS_TRANSFORMERS, Compressed, Pretrained, Script
from watched import watched

import torchq

KINDS: tuple[type[Kind], ...]
KINDS = Weights, Graphs, Calibration, Script, Pretrained, Compressed
BATCH = 100
SLACK = 192 << 20
"""Bytes beyond three times the file: the largest graphs, Python's own, and the allocator's."""
SECONDS, PER_MEGABYTE, PER_LAYER = 3.0, 1.0, 0.002
"""Of computing that loading may take: whatever the file, for each of its megabytes, and for each
quantized layer, of which a megabyte can hold a thousand."""
OTHER_MODEL = "calls: another model"


def kinds_in(folder: Path, chosen: list[str]) -> dict[str, Kind]:
    """Returns the chosen kinds by name, each with files of its own."""
    found: dict[str, Kind] = {}
    for i, made in enumerate(MODELS):
        for kind in (Weights, Graphs, Calibration, Script):
            has_observers = not made[2]  # dynamic layers have none
            if kind.name in chosen and (has_observers or kind is not Calibration):
                found[f"{kind.name}-{i}"] = kind(folder / f"{kind.name}-{i}", *made)
    if not HAS_TRANSFORMERS:
        return found
    folders = [(Pretrained, {}), (Pretrained, {"weight_bits": 4, "embedding_bits": 8})]
    folders += [(Compressed, {"bits": 8}), (Compressed, {"bits": 4})]
    for i, (other, options) in enumerate(folders):
        if other.name in chosen:
            (folder / f"{other.name}-{i}").mkdir()
            ids = torch.tensor([[5, 7, 11, 42], [1, 80, 4, 9]])
            found[f"{other.name}-{i}"] = other(folder / f"{other.name}-{i}", ids, options)
    return found


def memory(name: str) -> int:
    """Returns VmRSS, the memory now, or VmHWM, the most since :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Check:
    """Writes one file and reads it; raises where that breaks a promise.

    What happened is a line of ``notes``: the last one tells what a child did when it died.
    """

    def __init__(self, kinds: dict[str, Kind], notes: Path) -> None:
        self.kinds, self.notes = kinds, notes

    def __call__(self, case: str) -> None:
        name, way, _ = case.split()
        kind = self.kinds[name]
        kind.change(random.Random(case), way)
        self.note(f"dies: {kind.excuse()}")
        self.note(f"{name.partition('-')[0]} {way}: {self.outcome(kind, way)}")

    def note(self, line: str) -> None:
        with self.notes.open("a") as notes:
            notes.write(f"{line}\n")

    def outcome(self, kind: Kind, way: str) -> str:
        forget_peak()
        contents = [file.read_bytes() for file in kind.files()]
        size, layers = sum(map(len, contents)), sum(c.count(b'.spec"') for c in contents)
        longest = SECONDS + PER_MEGABYTE * size / 1e6 + PER_LAYER * layers
        before, start = memory("VmRSS"), time.process_time()
        with watched(*kind.reads) as events:
            try:
                loaded = kind.load()
            except Exception as error:
                loaded, refusal = None, error
        seconds, grown = time.process_time() - start, memory("VmHWM") - before
        assert not kind.is_own or not events, events
        what = "" if loaded is not None else kind.refuses(refusal, way)
        if grown > 3 * size + SLACK or seconds > longest:
            told = f"{grown >> 20} MB more and {seconds:.1f} s for a file of {size >> 10} kB"
            assert kind.excuse(), told
            self.note(f"{kind.name}: took memory or time, {kind.excuse()}")
        return what if loaded is None else self.use(kind, loaded, way)

    def use(self, kind: Kind, loaded: torch.nn.Module, way: str) -> str:
        why = kind.may_differ(way)
        # no loader is at work
        self.note(f"dies: {kind.unsafe}" if kind.unsafe or way == "damage" else OTHER_MODEL)
        results = []
        for tier in torchq.supported_isas():
            with torchq.use_isa(tier):
                try:
                    with watched(*kind.reads) as events:
                        results.append(kind.use(loaded))
                except Exception as error:
                    assert why, error
                    return f"{why}, whose call raises"
                assert not kind.is_own or not events, events
        same = all(_equal(result, results[0]) for result in results)
        assert same or kind.unsafe, "other numbers on other tiers"
        if not same:
            return kind.unsafe
        if _equal(results[0], kind.expected):
            return "the right numbers"
        assert why, "other numbers"
        return why


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and bool(((a == b) | ((a != a) & (b != b))).all())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20000, help="of each kind; default 20000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="a case of a report, run here and not in a child")
    names = [kind.name for kind in KINDS]
    parser.add_argument("--kinds", nargs="*", choices=names, default=names)
    parser.add_argument("--ways", nargs="*", choices=Kind.ways, default=Kind.ways)
    args = parser.parse_args()
    chosen = [args.case.partition("-")[0]] if args.case else args.kinds
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        kinds = kinds_in(Path(folder), chosen)
        check = Check(kinds, notes)
        if args.case:
            check(args.case)
            print(notes.read_text())
            return 0
        limit_memory(2 << 30)
        failures = 0
        for name in kinds:
            same_kind = sum(other.partition("-")[0] == name.partition("-")[0] for other in kinds)
            ways = [way for way in args.ways if way in kinds[name].ways]
            each = -(-args.files // same_kind // max(len(ways), 1))
            for way in ways:
                cases = [f"{name} {way} {args.seed + number}" for number in range(each)]
                failures += run(cases, check)
            print(f"{name}: {len(ways) * each} files, {failures} failures so far", flush=True)
        lines = [
            line
            for line in notes.read_text().splitlines()
            if not line.startswith(("dies", "calls"))
        ]
        for kind in KINDS:
            excused = sum(line.startswith(f"{kind.name}: ") for line in lines)
            if excused > kind.most_excused * args.files:
                failures += 1
                print(f"{kind.name}: {excused} of {args.files} files crash or take much memory")
        for line, count in sorted(Counter(lines).items()):
            print(f"{count:6} {line}")
    return bool(failures)


def run(cases: list[str], check: Check) -> int:
    """Runs cases in children; prints what fails, and returns how often."""
    failures = 0
    while cases:  # a batch, or what a failure leaves of it
        batch = cases[:BATCH]
        cases = cases[BATCH:]
        if failure := run_forked(batch, check):
            failed = failure.split(": ", 1)[1].partition("\n")[0]
            cases = batch[batch.index(failed) + 1 :] + cases
            last = check.notes.read_text().splitlines()[-1]
            slow = last == OTHER_MODEL and failure.startswith(("signal SIGPROF", "signal SIGALRM"))
            if failure.startswith("signal") and last != OTHER_MODEL:
                last = last.removeprefix("dies: ")
            if slow or (failure.startswith("signal") and last not in ("", OTHER_MODEL)):
                check.note(f"{failed.split()[0].partition('-')[0]}: died, {last}")
                continue
            failures += 1
            print(failure, flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged files, read by children that report.

    python tests/fuzz/fuzz_files.py --files 20000 --seed 0

A damaged file, some of whose bytes changed, gives the right numbers or one error that names it. A
forged file, whose parts changed under a valid digest, may hold another model. It gives an error of
the documented classes or a model; never a crash, a hang, or memory beyond three times the file.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from children import limit_memory, run_forked
from file_kinds import MODELS, Calibration, Graphs, Kind, Weights
from other_kinds import HAS_TRANSFORMERS, Compressed, Pretrained, Script

import torchq

BATCH = 100
SLACK = 64 << 20
"""Bytes beyond three times the file: Python's own, and the allocator's."""


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


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        before, size = peak(), kind.path.stat().st_size
        try:
            loaded = kind.load()
        except Exception as error:
            loaded, what = None, kind.refuses(error, way)
        grown = peak() - before
        if grown > 3 * size + SLACK:
            assert kind.excuse(), f"{grown >> 20} MB more for a file of {size >> 10} kB"
            self.note(f"{kind.name}: took memory, {kind.excuse()}")
        return what if loaded is None else self.use(kind, loaded, way)

    def use(self, kind: Kind, loaded: torch.nn.Module, way: str) -> str:
        self.note(f"dies: {kind.unsafe}")  # no loader is at work
        why = kind.may_differ(way)
        results = []
        for tier in torchq.supported_isas():
            with torchq.use_isa(tier):
                try:
                    results.append(kind.use(loaded))
                except Exception as error:
                    assert why and "INTERNAL ASSERT" not in str(error), error
                    return f"{why}, whose call raises"
        same = all(_equal(result, results[0]) for result in results)
        assert same or kind.unsafe, "other numbers on other tiers"
        if not same:
            return kind.unsafe
        if _equal(results[0], kind.expected):
            return "the right numbers"
        assert why, "other numbers"
        return why


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20000, help="of each kind; default 20000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="a case of a report, run here and not in a child")
    every = (Weights, Graphs, Calibration, Script, Pretrained, Compressed)
    names = [kind.name for kind in every]
    parser.add_argument("--kinds", nargs="*", choices=names, default=names)
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
            each = -(-args.files // same_kind // 2)
            for way in ("damage", "forge"):
                cases = [f"{name} {way} {args.seed + number}" for number in range(each)]
                failures += run(cases, check)
            print(f"{name}: {2 * each} files, {failures} failures so far", flush=True)
        lines = [line for line in notes.read_text().splitlines() if not line.startswith("dies")]
        for kind in every:
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
            last = check.notes.read_text().splitlines()[-1].removeprefix("dies: ")
            if failure.startswith("signal") and last:
                check.note(f"{failed.partition('-')[0]}: died, {last}")
                continue
            failures += 1
            print(failure, flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())

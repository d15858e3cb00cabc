# SPDX-License-Identifier: Apache-2.0
"""Reads one good file of each kind, and prints what reading and the first call do beside that.

    python tests/fuzz/watch_files.py --kinds weights graph

Nothing may be imported, no library loaded, no code run but that of graphs and guards, no other file
opened, and no variable of the environment read.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import sys
import tempfile
from pathlib import Path

from fuzz_files import KINDS, kinds_in
from watched import watched

_EXPECTED = "import", "open", "exec", "compile", "ctypes.dlopen", "os.environ", "sys.modules"


def sees_all() -> bool:
    """Returns whether the watcher tells each kind of what it is there for."""
    sys.modules.pop("this", None)
    with watched() as events, open(os.devnull, "w") as sys.stdout:
        importlib.import_module("this")
        exec("1 + 1")
        eval("1 + 1")
        ctypes.CDLL(None)
        os.environ.get("PATH")
        os.getenv("HOME")
    sys.stdout = sys.__stdout__
    return all(any(event.startswith(kind) for event in events) for kind in _EXPECTED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--kinds", nargs="*", choices=names, default=names)
    chosen = parser.parse_args().kinds
    bad = [] if sees_all() else ["the watcher does not see all"]
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in kinds_in(Path(folder), chosen).items():
            kind.use(kind.load())  # the first time, libraries import parts of their own
            with watched(*kind.reads, variables=kind.variables) as events:
                kind.use(kind.load())
            print(f"{name}: {len(events)} events beside reading it", flush=True)
            bad += [f"{name}: {event}" for event in events]
    print("\n".join(bad))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Sees what a process does while a file is read: imports, opened files, code, the environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_HARMLESS = {"builtins.id", "object.__getattr__", "object.__setattr__", "object.__delattr__"}
_HARMLESS |= {"sys._getframe", "mmap.__new__"}
"""Events of Python without an effect outside of the process."""
_CODE = re.compile(r"<torchq guards>|<eval_with_key>\.\d+")
"""Files of the code that torchq and torch.fx write of graphs and guards."""
_PARSED = "<unknown>"
"""File of what ``ast.parse`` reads: the text of guards, which nothing runs."""
_ENVIRONMENT = {"FX_GRAPH_SHOW_STRIDE", "FX_GRAPH_SHOW_DEVICE", "FX_GRAPH_SHOW_META"}
"""Variables that torch.fx reads where it writes code."""

_seen: list[str] | None = None
_paths: tuple[str, ...] = ()
_variables: set[str] = set()


def _look(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None or event in _HARMLESS:
        return
    source = (
        args[1] if event == "compile" else getattr(args[0], "co_filename", args[0]) if args else ""
    )
    what = str(source)
    fine: Any = event in ("exec", "compile") and _CODE.fullmatch(what)
    fine = fine or (event == "compile" and what == _PARSED)
    fine = fine or (event in ("open", "os.listdir", "os.scandir") and what.startswith(_paths))
    # the source of what is imported, for a warning
    fine = fine or (event == "open" and what.endswith(".py") and what in _sources())
    if not fine:
        _seen.append(f"{event} {what[:200]}")


def _sources() -> set[str]:
    return {str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]}


class _Environment(os._Environ):  # type: ignore[type-arg]
    def __getitem__(self, key: str) -> str:
        if _seen is not None and key not in _variables:
            _seen.append(f"os.environ {key}")
        return super().__getitem__(key)


class _Finder:
    """Is asked for each module first, and knows none; importlib has no audit event."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if _seen is not None:
            _seen.append(f"import {name}")


@contextmanager
def watched(*paths: Path, variables: Collection[str] = ()) -> Iterator[list[str]]:
    """Returns what happens in a block beyond reading these files; threads are seen, too.

    Python tells it by audit events: imports, ``ctypes``, files, code, processes, sockets, pickles.
    """
    global _seen, _paths, _variables
    if _look not in _installed:
        sys.addaudithook(_look)  # stays for good
        _installed.append(_look)
    _seen, _paths, _variables = [], tuple(map(str, paths)), {*_ENVIRONMENT, *variables}
    before, kind, modules = _seen, type(os.environ), set(sys.modules)
    os.environ.__class__, finder = _Environment, _Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield before
    finally:
        os.environ.__class__ = kind
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        _seen = None
        before += [f"sys.modules {name}" for name in sorted(sys.modules.keys() - modules)]


_installed: list[Any] = []

# SPDX-License-Identifier: Apache-2.0
"""A process of its own for each contender: its memory is its own, and so are its threads."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.generation.contenders import contenders
from benchmarks.generation.shapes import SHAPES, prompt, write_folder
from benchmarks.memory import peak_bytes, resident_bytes

__all__ = ["FailedError", "Worker", "written"]


class FailedError(Exception):
    """A contender could not do what was asked; the text is its error's."""


def written(shape: str, folder: Path, contender: str | None = None) -> None:
    """Write the float model, or what a contender makes of it, in a process that then ends."""
    with _Process(_write, contender, shape, folder) as told:
        told()


class Worker:
    """A contender that has loaded its model.

    Attributes:
        load_seconds: of loading, without imports.
    """

    def __init__(self, contender: str, shape: str, folder: Path, threads: int) -> None:
        self._process = _Process(_serve, contender, shape, folder, threads)
        self.load_seconds: float = self._process.told()

    def generate(self, length: int, count: int, seed: int) -> tuple[float, float]:
        """Return the seconds to the first token, and from there to the last."""
        self._process.connection.send((length, count, seed))
        first, rest = self._process.told()
        return first, rest

    def close(self) -> int:
        """End the process; return how much its resident memory has grown at most, in bytes."""
        self._process.connection.send(None)
        grown: int = self._process.told()
        self._process.join()
        return grown


class _Process:
    def __init__(self, target: Any, *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_guarded, args=(target, other, *args), daemon=True)
        self._process.start()
        other.close()

    def told(self) -> Any:
        try:
            value = self.connection.recv()
        except EOFError:
            self.join()
            raise FailedError(f"its process ended with {self._process.exitcode}") from None
        if isinstance(value, FailedError):
            raise value
        return value

    def join(self) -> None:
        self._process.join()
        self.connection.close()

    def __enter__(self) -> Any:
        return self.told

    def __exit__(self, *error: object) -> None:
        self.join()


def _guarded(target: Any, connection: Connection, *args: object) -> None:
    try:
        target(connection, *args)
    except Exception as error:  # of a peer: the page says so
        line = (str(error).strip().splitlines() or [""])[0]
        connection.send(FailedError(f"{type(error).__name__}: {line}"))


def _write(connection: Connection, contender: str | None, shape: str, folder: Path) -> None:
    if contender is None:
        write_folder(SHAPES[shape], folder)
    else:
        made = contenders(SHAPES[shape])[contender](SHAPES[shape], folder, 1)
        made.needs()
        made.write()
    connection.send(None)


def _serve(connection: Connection, contender: str, shape: str, folder: Path, threads: int) -> None:
    made = contenders(SHAPES[shape])[contender](SHAPES[shape], folder, threads)
    made.needs()
    before = resident_bytes()
    start = time.perf_counter()
    made.load()
    connection.send(time.perf_counter() - start)
    while (asked := connection.recv()) is not None:
        length, count, seed = asked
        src = prompt(made.shape, length, seed)
        start = time.perf_counter()
        stamps = made.generate(src, count)
        if len(stamps) != count:
            raise RuntimeError(f"{len(stamps)} tokens came where {count} were asked for")
        connection.send((stamps[0] - start, stamps[-1] - stamps[0]))
    connection.send(peak_bytes() - before)

# SPDX-License-Identifier: Apache-2.0
"""Writes files whole or not at all: beside the target, then renamed."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

Chunk = bytes | memoryview


def write_file(op: str, path: str | os.PathLike[str], chunks: Iterable[Chunk]) -> None:
    """Replace a file by these bytes, or leave what was there.

    Readers and a crash see the old file or the new one. Of several writers the last one wins.
    Devices and pipes are written in place. A killed process may leave a ``.<name>.*.tmp``.

    Args:
        op: name of the caller, for errors.
        path: of the file; a link is followed.
        chunks: the contents.

    Raises:
        OSError: the file cannot be written, say for a full disk; of the class that its number has.
    """
    try:
        named, target = Path(path), Path(os.path.realpath(path))
        special = named.exists() and not named.is_file()
        with named.open("wb") if special else _replacing(target) as file:
            for chunk in chunks:
                file.write(chunk)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(
            error.errno,
            f"{op}: path must be a file that can be written, got {os.fspath(path)!r}: "
            f"{error.strerror}. What was there has not changed. Free space, or choose another "
            "folder.",
        ) from error


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a new file in the folder of the target, which takes its place in the end."""
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, os.strerror(13))
    beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}.tmp")
    # 0o666: with the umask, the mode of any new file
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with suppress(FileNotFoundError):
            beside.unlink()
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the new name outlive a crash, on file systems that can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

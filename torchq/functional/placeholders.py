# SPDX-License-Identifier: Apache-2.0
"""Tensors of modules that are about to be loaded, within limits of memory and time.

A few bytes of a file can name large sizes, and many modules. So what its specs ask for is counted.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_left: ContextVar[float] = ContextVar("_left", default=math.inf)
"""Bytes that may still be taken."""
_modules_left: ContextVar[float] = ContextVar("_modules_left", default=math.inf)
"""Modules that may still be built."""
_SLACK = 1000
"""Modules that the smallest file may have. One takes a millisecond, and a kilobyte of its file."""

OF_A_NAME = 0.25
"""Share of a module that a name, and a place in a list, is worth."""


@contextmanager
def limited_placeholders(nbytes: int) -> Iterator[None]:
    """Limit the memory of placeholders, and the number of modules, in a block.

    Args:
        nbytes: of the file. Twice as much is allowed, because layers of recurrent networks are
            built twice, and a megabyte; and one module for each thousand.
    """
    token, other = _left.set(2 * nbytes + (1 << 20)), _modules_left.set(nbytes // 1000 + _SLACK)
    try:
        yield
    finally:
        _left.reset(token)
        _modules_left.reset(other)


def are_limited() -> bool:
    """Return whether new modules are to be loaded, so that their values do not matter yet."""
    return _left.get() < math.inf


def count_modules(count: float = 1) -> None:
    """Count modules against the limit.

    Raises:
        ValueError: :func:`limited_placeholders` allows less.
    """
    left = _modules_left.get() - max(count, 0)
    if left < 0:
        raise ValueError(
            "torchq.load: the file's specs must ask for no more modules than its tensors allow, "
            f"{_SLACK} and one for each kilobyte, got more. Was it written by torchq.save?"
        )
    _modules_left.set(left)


@contextmanager
def replaced_placeholders() -> Iterator[None]:
    """Give back, at the end of the block, what was taken in it."""
    token = _left.set(_left.get())
    try:
        yield
    finally:
        _left.reset(token)


def take(nbytes: int) -> None:
    """Count memory against the limit.

    Raises:
        ValueError: :func:`limited_placeholders` allows less.
    """
    left = _left.get() - max(nbytes, 0)  # a negative size must not give more
    if left < 0:
        raise ValueError(
            "torchq.load: the file's specs must ask for no more memory than its tensors allow, got "
            f"{-left} bytes too many. Was it written by torchq.save?"
        )
    _left.set(left)


def placeholder(*shape: int, dtype: torch.dtype = torch.float32, value: int = 1) -> Tensor:
    """Return a tensor of one value, which loading replaces.

    Many zeros take no memory until something is written to them.

    Raises:
        ValueError: as of :func:`take`.
    """
    size = math.prod(shape) * dtype.itemsize
    take(size)
    if value == 0 and size >= 1 << 20:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(pages, dtype=dtype).view(shape)
    return torch.full(shape, value, dtype=dtype, device="cpu")

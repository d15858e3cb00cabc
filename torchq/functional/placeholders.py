# SPDX-License-Identifier: Apache-2.0
"""Tensors of modules that are about to be loaded, within a limit of memory.

A few bytes of a file can name large sizes, so what a file's specs ask for is counted.
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


@contextmanager
def limited_placeholders(nbytes: int) -> Iterator[None]:
    """Limit the memory of placeholders in a block.

    Args:
        nbytes: of the file's tensors. Twice as much is allowed, because layers of recurrent
            networks are built twice, and a megabyte.
    """
    token = _left.set(2 * nbytes + (1 << 20))
    try:
        yield
    finally:
        _left.reset(token)


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

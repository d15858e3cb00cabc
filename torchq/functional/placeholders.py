# SPDX-License-Identifier: Apache-2.0
"""Tensors of modules that are about to be loaded, within limits of memory and time.

A few bytes of a file can name large sizes, and many modules. So what its specs ask for is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_left: ContextVar[float] = ContextVar("_left", default=math.inf)
"""Bytes that may still be taken."""
_modules_left: ContextVar[float] = ContextVar("_modules_left", default=math.inf)
"""Modules that may still be built."""
_values_left: ContextVar[float] = ContextVar("_values_left", default=math.inf)
"""Values that specs may still have together."""
_SLACK = 1000
"""Modules that the smallest file may have. One takes a millisecond, and a kilobyte of its file."""
_VALUES = 500_000
"""Values that specs of the smallest file may have: 90 MB of objects. As many layers as the header
of a file may name have fewer."""

OF_A_NAME = 0.25
"""Share of a module that a name, a source, and a place in a list, is worth."""


@contextmanager
def limited_placeholders(nbytes: int) -> Iterator[None]:
    """Limit the memory of placeholders, and the number of modules, in a block.

    Args:
        nbytes: of the file. Twice as much is allowed, and a megabyte; one module for each thousand,
            and one value of specs for each hundred.
    """
    token, modules = _left.set(2 * nbytes + (1 << 20)), _modules_left.set(nbytes // 1000 + _SLACK)
    values = _values_left.set(nbytes // 100 + _VALUES)
    try:
        yield
    finally:
        _left.reset(token)
        _modules_left.reset(modules)
        _values_left.reset(values)


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


def count_values(count: int) -> None:
    """Count values of a spec against the limit.

    Raises:
        ValueError: :func:`limited_placeholders` allows less.
    """
    left = _values_left.get() - count
    if left < 0:
        raise ValueError(
            "torchq.load: the file's specs must have no more values than its tensors allow, "
            f"{_VALUES} and one for each hundred bytes, got more. Was it written by torchq.save?"
        )
    _values_left.set(left)


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

    Where placeholders are limited it is on meta, and so is all that is made of it: that takes no
    memory, whatever the sizes.

    Raises:
        ValueError: as of :func:`take`.
    """
    take(math.prod(shape) * dtype.itemsize)
    return torch.full(shape, value, dtype=dtype, device=placeholder_device())


def placeholder_device() -> str:
    """Return where the tensors of a module are that is made of placeholders."""
    return "meta" if are_limited() else "cpu"

# SPDX-License-Identifier: Apache-2.0
"""Tensors of modules that are about to be loaded, within limits of memory and time.

A few bytes of a file can name large sizes, and many modules. So what its specs ask for is counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_LIMITS: dict[str, tuple[int, float]] = {
    "bytes of memory": (1 << 20, 2),
    "modules": (1_000, 1 / 1_000),  # one takes a millisecond, and a kilobyte of its file
    # of specs and graphs, which may have many names; of one a Python text may take four
    "bytes of texts": (1 << 22, 1 / 4),
    "values of specs": (500_000, 1 / 100),  # 90 MB of objects
    "nodes of graphs": (9_000, 1 / 8_000),  # encoders of 48 layers have 3,000; 0.3 ms and 8 KB each
    "values in graphs": (100_000, 1 / 1_000),  # in arguments of nodes; a value takes 0.7 KB
    "sizes of arguments": (4_000, 1 / 8_000),  # of the calls that take graphs
    "conditions": (2_000, 1 / 8_000),  # models here have up to 70
    "characters of conditions": (1 << 17, 1 / 100),
}
"""What a file may ask for -> how much of it the smallest file may, and each byte of a file more."""
_left: ContextVar[dict[str, float] | None] = ContextVar("_left", default=None)
"""What may still be asked for; None where nothing is counted."""

MOST_DIMS = 64
"""Of a tensor of torch."""
OF_A_NAME = 0.25
"""Share of a module that a name, a source, and a place in a list, is worth."""


@contextmanager
def limited_placeholders(nbytes: int) -> Iterator[None]:
    """Limit what is asked for in a block; ``nbytes`` are of the file."""
    token = _left.set({kind: base + nbytes * more for kind, (base, more) in _LIMITS.items()})
    try:
        yield
    finally:
        _left.reset(token)


def are_limited() -> bool:
    """Return whether new modules are to be loaded, so that their values do not matter yet."""
    return _left.get() is not None


def count(kind: str, number: float = 1) -> None:
    """Count what a file asks for against the limit, of a kind that :data:`_LIMITS` has.

    Raises:
        ValueError: :func:`limited_placeholders` allows less.
    """
    left = _left.get()
    if left is None:
        return
    left[kind] -= max(number, 0)  # a negative size must not give more
    if left[kind] < 0:
        base, more = _LIMITS[kind]
        raise ValueError(
            f"torchq.load: the file must ask for no more {kind} than its tensors allow, "
            f"{base} and {more:g} for each byte, got {-left[kind]:g} too many. Was it written by "
            "torchq.save?"
        )


def take(nbytes: int) -> None:
    """Count memory against the limit; see :func:`count`."""
    count("bytes of memory", nbytes)


def count_modules(number: float = 1) -> None:
    """Count modules against the limit; see :func:`count`."""
    count("modules", number)


@contextmanager
def replaced_placeholders() -> Iterator[None]:
    """Give back, at the end of the block, the memory that was taken in it."""
    left = _left.get() or {"bytes of memory": 0.0}
    before = left["bytes of memory"]
    try:
        yield
    finally:
        left["bytes of memory"] = before


def check_sizes(sizes: Collection[object]) -> None:
    """Refuse what are no sizes of a tensor: a product of lists, or of many numbers, may never end.

    Raises:
        ValueError: there are more than torch has dims, or others than whole numbers of 64 bits.
    """
    if len(sizes) > MOST_DIMS or not all(
        isinstance(size, int) and abs(size) < 2**63 for size in sizes
    ):
        raise ValueError(
            f"torchq.load: sizes in the file's specs must be up to {MOST_DIMS} whole numbers of 64 "
            f"bits, got {str(sizes)[:60]}. Was it written by torchq.save?"
        )


def placeholder(*shape: int, dtype: torch.dtype = torch.float32, value: int = 1) -> Tensor:
    """Return a tensor of one value, which loading replaces.

    Where placeholders are limited it is on meta, and so is all that is made of it: that takes no
    memory, whatever the sizes.

    Raises:
        ValueError: as of :func:`count` and :func:`check_sizes`.
    """
    check_sizes(shape)
    take(math.prod(shape) * dtype.itemsize)
    return torch.full(shape, value, dtype=dtype, device=placeholder_device())


def placeholder_device() -> str:
    """Return where the tensors of a module are that is made of placeholders."""
    return "meta" if are_limited() else "cpu"

# SPDX-License-Identifier: Apache-2.0
"""How a converted model calls a module's op without the module; csrc/python/site.cpp reads it."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """The origins that an argument of the op can have, in the order of site.cpp."""

    STATE = 0  # what the module holds
    NONE = 1
    SOURCE = 2  # an argument of the call, of a dtype that the module holds
    SOURCES = 3  # a list of them
    OTHERS = 4  # a list of all other arguments of the call
    GIVEN = 5  # an argument of the call as it is; without one, the op's default


class Argument(NamedTuple):
    """An argument of the op: its kind, and the attributes that lead to the state or the dtype."""

    kind: Kind
    path: tuple[str, ...] = ()


NONE, OTHERS, GIVEN = Argument(Kind.NONE), Argument(Kind.OTHERS), Argument(Kind.GIVEN)


def state(*names: str) -> tuple[Argument, ...]:
    """Return arguments that the module holds; ``lookup.table`` is in a module inside."""
    return tuple(Argument(Kind.STATE, tuple(name.split("."))) for name in names)


def source(dtype: str) -> Argument:
    """Return a source, of the dtype that this attribute tells."""
    return Argument(Kind.SOURCE, (dtype,))


def sources(dtype: str) -> Argument:
    """Return a list of sources, of the dtypes that this attribute tells."""
    return Argument(Kind.SOURCES, (dtype,))


class DirectCall(NamedTuple):
    """A call of an op, where a module's ``forward`` comes to one.

    Attributes:
        op: name, in ``torch.ops.torchq``.
        arguments: of the op; those behind them have their defaults.
        unless: attributes that must be None, False or 0.
        forward: what it stands for, set by itself: another forward does something else.
    """

    op: str
    arguments: tuple[Argument, ...]
    unless: tuple[str, ...] = ()
    forward: object = None

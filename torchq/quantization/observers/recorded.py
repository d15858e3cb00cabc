# SPDX-License-Identifier: Apache-2.0
"""Recordings of observers, as data that files and other processes take."""

from __future__ import annotations

import copy
from typing import NamedTuple

from torch import Tensor

from torchq.quantization.observers.base import Observer


class Recorded(NamedTuple):
    """Holds what an observer has recorded.

    Attributes:
        kind: class and settings of the observer.
        state: its buffers.
        elsewhere: whether other buffers than ``min_value`` and ``max_value`` tell that it has data.
    """

    kind: str
    state: dict[str, Tensor]
    elsewhere: bool = False


def kind(observer: Observer) -> str:
    """Return class and settings of an observer, as text."""
    return f"{type(observer).__name__}({observer.extra_repr()})"


def recorded(observer: Observer) -> Recorded:
    """Return what an observer has recorded.

    Raises:
        NotImplementedError: it keeps data, but not in buffers.
    """
    state = observer.state_dict()
    if observer._elsewhere and state.keys() == {"min_value", "max_value"}:
        name = type(observer).__name__
        raise NotImplementedError(
            f"torchq.{name} of {observer.name!r}: class {name} must keep what it records in "
            "buffers, got none of its own. Register them with _add_buffer and change them in place."
        )
    return Recorded(kind(observer), state, observer._elsewhere)


def restore(observer: Observer, given: Recorded) -> Observer:
    """Make an observer forget what it has recorded, and take over this; return it."""
    observer.load_state_dict(given.state)
    observer._elsewhere, observer.row_count = given.elsewhere, None
    return observer


def replaced(observer: Observer, given: Recorded) -> Observer:
    """Return a copy of an observer that has recorded this instead.

    Raises:
        ValueError: no such observer records this.
    """
    own = observer.state_dict()
    for key, value in given.state.items():
        if key in own and value.dtype != own[key].dtype:
            raise ValueError(f"'{key}' must be {own[key].dtype}, got {value.dtype}")
    if given.elsewhere and given.state.keys() <= {"min_value", "max_value"}:
        raise ValueError("it has recorded nothing, and says that it has")
    made = restore(copy.deepcopy(observer), given)
    made.check_state()
    return made

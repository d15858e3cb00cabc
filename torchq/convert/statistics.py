# SPDX-License-Identifier: Apache-2.0
"""Reads and replaces what the observers of a prepared model have recorded."""

from __future__ import annotations

import copy
import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchq.nn.attached import computing_modules
from torchq.quantization.observers import Observer


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


def observers(prepared: nn.Module) -> dict[str, Observer]:
    """Return the observers of a prepared model by qualified name."""
    return {name: m for name, m in computing_modules(prepared).items() if isinstance(m, Observer)}


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


def replace(observer: Observer, given: Recorded) -> Observer:
    """Make an observer forget what it has recorded, and take over this; return it."""
    observer.load_state_dict(given.state)
    observer._elsewhere = given.elsewhere
    return observer


def replaced(observer: Observer, given: Recorded) -> Observer:
    """Return a copy of an observer that has recorded this instead."""
    return replace(copy.deepcopy(observer), given)


def weights_digest(prepared: nn.Module) -> str:
    """Return a digest of the float model: its parameters and its persistent buffers."""
    own = {id(t) for m in prepared.modules() if isinstance(m, Observer) for t in m.buffers()}
    state = nn.Module.state_dict(prepared, keep_vars=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if id(tensor) not in own and "torchq_graph." not in name:
            values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()

# SPDX-License-Identifier: Apache-2.0
"""Calibration statistics that outlive the process: save, load, merge, resume."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from torchq.nn.attached import computing_modules
from torchq.observers import Observer

_FORMAT = "torchq-calibration-1"


def observers(prepared: nn.Module) -> dict[str, Observer]:
    """The observers of a prepared model by qualified name."""
    return {name: m for name, m in computing_modules(prepared).items() if isinstance(m, Observer)}


def save_calibration(prepared: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes what the observers have recorded, so that calibration can go on elsewhere.

    Args:
        prepared: from :func:`torchq.prepare`, calibrated or not.
        path: of the file; `torch.load(weights_only=True)` reads it.

    Raises:
        ValueError: ``prepared`` has no observers.
    """
    found = _some_observers("save_calibration", prepared)
    entries = {name: (_kind(observer), observer.state_dict()) for name, observer in found.items()}
    torch.save({"format": _FORMAT, "observers": entries}, path)


def load_calibration(
    prepared: nn.Module, path: str | os.PathLike[str], merge: bool = False
) -> nn.Module:
    """Gives observers what was saved: calibration then resumes, or conversion follows.

    Args:
        prepared: of the same model and configuration as the saved one; returned for chaining.
        path: written by :func:`save_calibration`.
        merge: add to what the observers hold, as if both had seen all data, in place of replacing
            it. Observers that depend on the order of data (moving averages) cannot.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no calibration, or its observers are not those of ``prepared``.
        RuntimeError: ``merge`` with an observer that cannot.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"torchq.load_calibration: path must be a file written by save_calibration, got "
            f"'{path}', which does not exist."
        )
    try:
        content = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):  # what it raises of other files
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(
            f"torchq.load_calibration: path must be a file written by save_calibration, got "
            f"'{path}', which is not one."
        )
    saved: dict[str, tuple[str, dict[str, Tensor]]] = content["observers"]
    own = _some_observers("load_calibration", prepared)
    kinds = {name: _kind(observer) for name, observer in own.items()}
    given = {name: kind for name, (kind, _) in saved.items()}
    if kinds != given:
        different = sorted(set(kinds.items()) ^ set(given.items()))
        raise ValueError(
            "torchq.load_calibration: prepared must have the observers that were saved; "
            f"{len(different)} differ, first {different[0]}. Prepare the same model with the same "
            "QConfig and overrides."
        )
    loaded = {name: copy.deepcopy(observer) for name, observer in own.items()}
    for name, observer in loaded.items():
        observer.load_state_dict(saved[name][1])
    for name, observer in own.items():
        if merge:
            observer.merge(loaded[name])
        else:
            observer.load_state_dict(saved[name][1])
    return prepared


def _kind(observer: Observer) -> str:
    return f"{type(observer).__name__}({observer.extra_repr()})"


def _some_observers(op: str, prepared: nn.Module) -> dict[str, Observer]:
    found = observers(prepared)
    if not found:
        raise ValueError(
            f"torchq.{op}: prepared must come from torchq.prepare, got "
            f"{type(prepared).__name__} without observers."
        )
    return found

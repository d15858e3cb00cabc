# SPDX-License-Identifier: Apache-2.0
"""Calibration statistics that outlive the process: save, load, merge, resume."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchq.nn.attached import computing_modules
from torchq.quantization.observers import Observer
from torchq.serialization.tensor_file import is_zip, read_pickled, read_tensors, write_tensors

_FORMAT = "torchq-calibration-2"
_FORMAT_0_1 = "torchq-calibration-1"
Saved = dict[str, tuple[str, dict[str, Tensor]]]
"""Qualified name -> kind and state of an observer."""


def observers(prepared: nn.Module) -> dict[str, Observer]:
    """Return the observers of a prepared model by qualified name."""
    return {name: m for name, m in computing_modules(prepared).items() if isinstance(m, Observer)}


def save_calibration(prepared: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what the observers have recorded, so that calibration can go on elsewhere.

    The file is written whole or not at all, and has a digest that :func:`load_calibration` checks.

    Args:
        prepared: from :func:`torchq.prepare`, calibrated or not.
        path: of the file, in the format of safetensors.

    Raises:
        OSError: the file cannot be written.
        ValueError: ``prepared`` has no observers.
    """
    found = _some_observers("save_calibration", prepared)
    tensors: dict[str, Tensor] = {}
    for i, observer in enumerate(found.values()):
        tensors |= {f"{i}.{key}": value for key, value in observer.state_dict().items()}
    kinds = [[name, _kind(observer)] for name, observer in found.items()]
    metadata = {"format": _FORMAT, "observers": json.dumps(kinds)}
    write_tensors("torchq.save_calibration", path, tensors, metadata)


def load_calibration(
    prepared: nn.Module, path: str | os.PathLike[str], merge: bool = False
) -> nn.Module:
    """Give observers what was saved: calibration then resumes, or conversion follows.

    Args:
        prepared: of the same model and configuration as the saved one; returned for chaining.
        path: written by :func:`save_calibration`.
        merge: add to what the observers hold, as if both had seen all data, in place of replacing
            it. Observers that depend on the order of data (moving averages) cannot.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no calibration or was damaged, or its observers are not those of
            ``prepared``.
        RuntimeError: ``merge`` with an observer that cannot.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"torchq.load_calibration: path must be a file written by save_calibration, got "
            f"'{path}', which does not exist."
        )
    saved = _read(Path(path))
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
    try:
        for name, observer in loaded.items():
            observer.load_state_dict(saved[name][1])
    except (RuntimeError, TypeError, AttributeError) as error:
        raise _not_ours(Path(path), f"the state of '{name}' does not fit") from error
    for name, observer in own.items():
        if merge:
            observer.merge(loaded[name])
        else:
            observer.load_state_dict(saved[name][1])
    return prepared


def _read(path: Path) -> Saved:
    """Return what a file holds.

    Raises:
        ValueError: it is no calibration, or was damaged.
    """
    if path.is_dir():
        raise _not_ours(path, "it is a directory")
    try:
        if is_zip(path):
            content: Any = read_pickled(path)
            if content["format"] != _FORMAT_0_1:
                raise ValueError("it is of another version")
            old: Saved = content["observers"]
            return {name: (kind, dict(state)) for name, (kind, state) in old.items()}
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != _FORMAT:
            raise ValueError("it holds no calibration")
        kinds = json.loads(metadata["observers"])
        states: list[dict[str, Tensor]] = [{} for _ in kinds]
        for key, value in tensors.items():
            i, _, name = key.partition(".")
            states[int(i)][name] = value
        return {name: (kind, state) for (name, kind), state in zip(kinds, states, strict=True)}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _not_ours(path, str(error)) from None


def _not_ours(path: Path, why: str) -> ValueError:
    return ValueError(
        f"torchq.load_calibration: path must be a file written by save_calibration, got '{path}', "
        f"which is not one: {why}. Save the calibrated model anew, or copy the file again."
    )


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

# SPDX-License-Identifier: Apache-2.0
"""Calibration statistics that outlive the process: save, load, merge, resume."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import Tensor, nn

from torchq.attributes.json_text import read_json
from torchq.convert.swap.observed import ObservedLeaf
from torchq.models.observed import observers, weights_digest
from torchq.quantization.observers import Observer, PerChannelMinMaxObserver
from torchq.quantization.observers.recorded import (
    Recorded,
    kind,
    recorded,
    replaced,
    restore,
)
from torchq.quantization.recipes.rows import RowPowers
from torchq.serialization.tensor_file import read_tensors, write_tensors

_FORMAT = "torchq-calibration-2"


def save_calibration(prepared: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what the observers have recorded, so that calibration can go on elsewhere.

    The file is written whole or not at all, and has a digest that :func:`load_calibration` checks.

    Args:
        prepared: from :func:`torchq.prepare`, calibrated or not.
        path: of the file, in the format of safetensors.

    Raises:
        NotImplementedError: an observer of your own keeps data, but not in buffers.
        OSError: the file cannot be written.
        ValueError: ``prepared`` has no observers.
    """
    found = _some_observers("save_calibration", prepared)
    tensors: dict[str, Tensor] = {}
    given = {name: recorded(observer) for name, observer in found.items()}
    for i, each in enumerate(given.values()):
        tensors |= {f"{i}.{key}": value for key, value in each.state.items()}
    metadata = {
        "format": _FORMAT,
        "observers": json.dumps([[name, each.kind] for name, each in given.items()]),
        "elsewhere": json.dumps([name for name, each in given.items() if each.elsewhere]),
        "weights": weights_digest(prepared),
    }
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
            ``prepared``; with ``merge``, also if its weights are not.
        NotImplementedError, RuntimeError: ``merge`` with an observer that cannot.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"torchq.load_calibration: path must be a file written by save_calibration, got "
            f"'{path}', which does not exist."
        )
    saved, weights = _read(Path(path))
    own = _some_observers("load_calibration", prepared)
    kinds = {name: kind(observer) for name, observer in own.items()}
    given = {name: each.kind for name, each in saved.items()}
    # these only refine what ranges decide; the first files of 0.1 lack them
    for name in kinds.keys() - given:
        observer = own[name]
        of_channels = "channels" in name.split(".")
        if isinstance(observer, RowPowers) or (
            isinstance(observer, PerChannelMinMaxObserver) and of_channels
        ):
            own.pop(name)
            observer.forget()
    kinds = {name: kinds[name] for name in own}
    unused = _unused(prepared)
    given = {n: text for n, text in given.items() if n in own or n.rpartition(".")[0] not in unused}
    if kinds != given:
        different = sorted(set(kinds.items()) ^ set(given.items()))
        raise ValueError(
            f"torchq.load_calibration: prepared must have the observers that '{path}' holds; "
            f"{len(different)} differ, first {different[0]}. Prepare the same model with the same "
            "QConfig and overrides."
        )
    if merge and weights not in ("", weights_digest(prepared)):
        raise ValueError(
            f"torchq.load_calibration: prepared must have the weights that '{path}' was calibrated "
            "with, got others. Load the same checkpoint before torchq.prepare."
        )
    try:
        loaded = {name: replaced(observer, saved[name]) for name, observer in own.items()}
    except Exception as error:
        raise _not_ours(Path(path), f"the state of an observer does not fit: {error}") from error
    for name, observer in own.items():
        if merge:
            observer.merge(loaded[name]).check_state()  # counts of many files may overflow
        else:
            restore(observer, saved[name])
    return prepared


def _unused(prepared: nn.Module) -> set[str]:
    """Return the names of layers that are dynamic here, and were observed for earlier files."""
    leaves = {n: leaf for n, leaf in prepared.named_modules() if isinstance(leaf, ObservedLeaf)}
    return {n for n, leaf in leaves.items() if leaf.observer is None and not leaf.by_rows}


def _read(path: Path) -> tuple[dict[str, Recorded], str]:
    """Return what a file holds, and the digest of the weights, "" in files without one.

    Raises:
        ValueError: it is no calibration, or was damaged.
    """
    if path.is_dir():
        raise _not_ours(path, "it is a directory")
    try:
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != _FORMAT:
            raise ValueError("it holds no calibration")
        names = read_json(metadata["observers"].encode())
        if not all(isinstance(text, str) for pair in names for text in pair):
            raise ValueError("its observers are no pairs of texts")
        elsewhere = {*read_json(metadata.get("elsewhere", "[]").encode())}
        found = [Recorded(text, {}, name in elsewhere) for name, text in names]
        for key, value in tensors.items():
            i, _, name = key.partition(".")
            found[int(i)].state[name] = value
        read = {name: each for (name, _), each in zip(names, found, strict=True)}
        return read, metadata.get("weights", "")
    except OSError:
        raise
    except Exception as error:  # of a forged file: anything
        raise _not_ours(path, str(error) or type(error).__name__) from None


def _not_ours(path: Path, why: str) -> ValueError:
    return ValueError(
        f"torchq.load_calibration: path must be a file written by save_calibration, got '{path}', "
        f"which is not one: {why}. Save the calibrated model anew, or copy the file again."
    )


def _some_observers(op: str, prepared: nn.Module) -> dict[str, Observer]:
    found = observers(prepared)
    if not found:
        raise ValueError(
            f"torchq.{op}: prepared must come from torchq.prepare, got "
            f"{type(prepared).__name__} without observers."
        )
    return found

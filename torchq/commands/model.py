# SPDX-License-Identifier: Apache-2.0
"""The MODEL of a command: a function that returns a model, or a pickled file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.nn.inputs import Inputs


def load_model(spec: str) -> tuple[nn.Module, Sequence[Inputs]]:
    """Call the function that a MODEL names, which returns a model and batches.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    result = call_function(spec)
    if not _is_pair(result):
        raise ValueError(
            f"torchq: MODEL must name a function that returns (model, batches), got '{spec}', "
            f"which gave {type(result).__name__}."
        )
    return result[0], batches_of(result[1], spec)


def model_and_batches(spec: str) -> tuple[nn.Module, Sequence[Inputs]]:
    """Call the function that a MODEL names; where it returns a model alone, there are no batches.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    result = call_function(spec)
    if isinstance(result, nn.Module):
        return result, []
    if not _is_pair(result):
        raise ValueError(
            f"torchq: MODEL must name a function that returns a model or (model, batches), got "
            f"'{spec}', which gave {type(result).__name__}."
        )
    return result[0], batches_of(result[1], spec)


def _is_pair(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)


def batches_of(data: Any, spec: str) -> Sequence[Inputs]:
    """Return the batches: a tensor, a tuple or a dict is one, anything else holds several."""
    batches = [data] if isinstance(data, Tensor | tuple | Mapping) else list(data)
    if not batches:
        raise ValueError(f"torchq: MODEL must give at least one batch, got none from '{spec}'.")
    return batches


def call_function(spec: str) -> Any:
    """Return what the function returns that a MODEL names.

    Raises:
        ValueError: there is no such function.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(f"torchq: MODEL must be file.py:function, got '{spec}'.")
    if place.endswith(".py"):
        found = importlib.util.spec_from_file_location(Path(place).stem, place)
        if found is None or found.loader is None or not Path(place).exists():
            raise ValueError(f"torchq: MODEL must name a file that exists, got '{place}'.")
        module = importlib.util.module_from_spec(found)
        sys.path.insert(0, str(Path(place).parent))
        found.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # from inside of it
            raise ValueError(
                f"torchq: MODEL must be file.py:function or module:function, got '{spec}', and "
                f"there is no module {error.name}."
            ) from None
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(
            f"torchq: MODEL must name a function that returns a model, got '{spec}', which is no "
            "function."
        )
    return make()


def unpickled(path: Path, trusted: bool) -> nn.Module:
    """Return the model that ``torch.save`` wrote as a whole.

    Raises:
        ValueError: it was not said that the file is trusted, or it holds no model.
    """
    if not trusted:
        raise ValueError(
            f"torchq quantize: MODEL must not be a pickled file, got '{path}': loading one runs "
            "the code in it. If you trust who wrote it, add --trust-pickle."
        )
    try:
        model = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # a pickle may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"torchq quantize: MODEL must be a file that torch.load reads, got '{path}': {reason}. "
            "Write file.py:function, which builds the model and loads its state."
        ) from None
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"torchq quantize: MODEL must be a file of a whole model, got '{path}', which holds a "
            f"{type(model).__name__}. Write file.py:function, which builds the model and loads "
            "its state."
        )
    return model

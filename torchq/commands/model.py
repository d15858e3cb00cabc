# SPDX-License-Identifier: Apache-2.0
"""The MODEL of a command: a function that returns a model, or a pickled file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchq.attributes.arguments import nearest
from torchq.models.inputs import Inputs

_NO_CODE = (".safetensors", ".onnx", ".gguf", ".json", ".bin", ".h5")
"""Ends of the names of files of tensors or graphs."""


def load_model(spec: str) -> tuple[nn.Module, Sequence[Inputs]]:
    """Call the function that a MODEL names, which returns a model and batches.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    model, batches = model_and_batches(spec)
    if not batches:
        raise ValueError(
            f"torchq: MODEL must name a function that returns (model, batches), got '{spec}', "
            f"which returns a {type(model).__name__} alone. Return batches to calibrate with, too."
        )
    return model, batches


def model_and_batches(spec: str) -> tuple[nn.Module, Sequence[Inputs]]:
    """Call the function that a MODEL names; where it returns a model alone, there are no batches.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    result = call_function(spec)
    if isinstance(result, nn.Module):
        return result, []
    pair = isinstance(result, tuple | list) and len(result) == 2
    if not pair or not isinstance(result[0], nn.Module):
        raise ValueError(
            f"torchq: MODEL must name a function that returns a model or (model, batches), got "
            f"'{spec}', which returns {_described(result)}. Build the model there, load its state "
            "and return it."
        )
    return result[0], batches_of(result[1], spec)


def _described(result: object) -> str:
    """Return what a function returned, as text."""
    if isinstance(result, type):
        return f"the class {result.__name__}"
    if isinstance(result, tuple | list):
        kinds = ", ".join(type(item).__name__ for item in result[:4])
        return f"a {type(result).__name__} of {len(result)}: {kinds}"
    return "nothing" if result is None else f"a value of type {type(result).__name__}"


def batches_of(data: Any, spec: str) -> Sequence[Inputs]:
    """Return the batches: a tensor, a tuple or a dict is one, anything else holds several."""
    batches = [data] if isinstance(data, Tensor | tuple | Mapping) else list(data)
    if not batches:
        raise ValueError(f"torchq: MODEL must give at least one batch, got none from '{spec}'.")
    return batches


def call_function(spec: str) -> Any:
    """Return what the function returns that a MODEL names.

    Raises:
        ValueError: there is no such function, or it takes arguments.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise _no_function(spec)
    module = _from_file(place) if place.endswith(".py") else _imported(place, spec)
    make = getattr(module, name, None)
    if isinstance(make, nn.Module) or not callable(make):
        known = [key for key, value in vars(module).items() if _is_own_function(module, value)]
        found = f"a {type(make).__name__}" if make is not None else "nothing"
        near = nearest(name, known, 0.5)
        remedy = f"Did you mean {near}?" if near else f"Write one: def {name}(): return model."
        raise ValueError(
            f"torchq: MODEL must name a function that returns a model, got '{spec}', which is "
            f"{found}. {remedy}"
        )
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(
            f"torchq: MODEL must name a function without arguments, got '{spec}': {error}. Write "
            "one that calls it with what it needs."
        ) from None
    except ValueError:  # of what is not written in Python
        pass
    return make()


def _no_function(spec: str) -> ValueError:
    """Return the error of a MODEL without a colon."""
    path = Path(spec)
    if path.suffix == ".py" and path.is_file():
        names = _functions_of(path)
        known = f" Its functions are {', '.join(names[:5])}." if names else ""
        return ValueError(
            f"torchq: MODEL must name a function of the file, got '{spec}'. Write "
            f"{spec}:{(names or ['make'])[0]}.{known}"
        )
    if path.suffix == ".py":
        return ValueError(f"torchq: MODEL must name a file that exists, got '{spec}'.")
    if path.exists():
        return ValueError(
            f"torchq: MODEL must be file.py:function, got '{spec}', which is a "
            f"{'folder' if path.is_dir() else 'file'} that this command does not read."
        )
    return ValueError(
        f"torchq: MODEL must be file.py:function, got '{spec}', and there is no such folder. Names "
        "of a model hub are not downloaded: save the model with save_pretrained first."
    )


def _functions_of(path: Path) -> list[str]:
    """Return the functions of a file that take no arguments; the file is read, not run."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    functions = (node for node in body if isinstance(node, ast.FunctionDef))
    return [
        f.name for f in functions if not f.args.args or len(f.args.defaults) == len(f.args.args)
    ]


def _is_own_function(module: ModuleType, value: object) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _from_file(place: str) -> ModuleType:
    """Return the module that a file is; it may import its neighbors."""
    found = importlib.util.spec_from_file_location(Path(place).stem, place)
    if found is None or found.loader is None or not Path(place).exists():
        raise ValueError(f"torchq: MODEL must name a file that exists, got '{place}'.")
    module = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(Path(place).parent))
    found.loader.exec_module(module)
    return module


def _imported(place: str, spec: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # from inside of it
        raise ValueError(
            f"torchq: MODEL must be file.py:function or module:function, got '{spec}', and "
            f"there is no module {error.name}."
        ) from None


def unpickled(path: Path, trusted: bool) -> nn.Module:
    """Return the model that ``torch.save`` wrote as a whole.

    Raises:
        ValueError: it was not said that the file is trusted, or it holds no model.
    """
    if path.suffix in _NO_CODE:
        raise ValueError(
            f"torchq quantize: MODEL must come with its code, got '{path}', which holds none. "
            "Write file.py:function, which builds the model and loads its state."
        )
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

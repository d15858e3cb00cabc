# SPDX-License-Identifier: Apache-2.0
"""The guards of graphs as text: what ``torchq.save`` writes beside graphs and tensors."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from torchq.attributes.json_text import JsonObject, read_json, values_in
from torchq.capture.cached import CachedExample
from torchq.capture.condition import Condition
from torchq.capture.guards import Example
from torchq.capture.likeness import Argument
from torchq.convert.dispatch import Dispatch, attach
from torchq.functional.placeholders import MOST_DIMS, count, count_modules
from torchq.nn.module import text_bytes
from torchq.serialization.conditions import is_option, is_size
from torchq.serialization.structures import read_structure, write_structure

CALL_KEY = "torchq_call"
"""Name of the tensor that holds the text, in the state of the graph's module."""

_OF_A_GRAPH = 4
"""Modules that a graph is worth: the smallest takes 4 ms."""
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def describe(dispatch: Dispatch) -> Tensor:
    """Return which calls take a graph, as a tensor of text.

    Raises:
        NotImplementedError: the example gave an argument that is no plain value.
    """
    example = dispatch.example
    structure = example.structure
    fields = {
        "arguments": [[a.index, str(a.dtype), list(a.shape)] for a in example.arguments],
        "values": {name: _encode(value, example, name) for name, value in example.values.items()},
        "guards": list(map(str, example.guards)),
        "limits": list(map(str, example.limits)),
        "neutral": example.neutral,
        "result": None if structure is None else write_structure(structure),
        "strict": dispatch.strict,
        "cached": isinstance(example, CachedExample),
    }
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8, device="cpu")


def restore(module: nn.Module, graph: nn.Module, name: str, text: Tensor) -> None:
    """Attach a graph to a module, with what :func:`describe` wrote of its calls.

    Raises:
        ValueError: the module returns a class that is not imported yet, or the text holds what
            torchq does not write.
    """
    count_modules(_OF_A_GRAPH)
    raw = text_bytes(text)
    count("bytes of texts", len(raw))
    count("values in graphs", values_in(raw))
    fields = read_json(raw)
    guards, limits = _conditions(fields["guards"], name), _conditions(fields["limits"], name)
    _check(fields, name)
    arguments = [Argument(i, _DTYPES[dtype], tuple(s)) for i, dtype, s in fields["arguments"]]
    values = {key: _decode(value, arguments) for key, value in fields["values"].items()}
    structure = None
    if fields["result"] is not None:
        try:
            structure = read_structure(fields["result"], type(module).__module__)
        except Exception as error:  # of a text that torchq does not write: anything
            raise ValueError(
                f"torchq.load: '{name}' returns a class that must be known, got {error}. Import "
                "the library of the model first."
            ) from error
    neutral = fields.get("neutral", {})  # files of earlier versions have none
    cls, kind = type(module), CachedExample if fields.get("cached") else Example
    example = kind(cls, arguments, guards, values, structure, limits, neutral=neutral)
    attach(Dispatch(module, graph, example, name, fields["strict"]))


def _check(fields: JsonObject, name: str) -> None:
    """Refuse what could run as code within the function that chooses calls."""
    wrong: list[object] = []
    for index, _, shape in fields["arguments"]:
        count("sizes of arguments", 1 + len(shape))
        wrong += [size for size in (index, *shape) if not is_size(size)] + shape[MOST_DIMS:]
    wrong += [n for n, values in fields.get("neutral", {}).items() if not is_option(n, values)]
    if wrong:
        raise ValueError(
            f"torchq.load: the file's guards of '{name}' must be conditions on sizes, got "
            f"{str(wrong[0])[:60]!r}. Was it written by torchq.save?"
        )


def _conditions(texts: list[str], name: str) -> list[Condition]:
    try:
        count("conditions", len(texts))
        count("characters of conditions", sum(map(len, texts)))
        return [Condition.parse(text) for text in texts]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"torchq.load: the file's guards of '{name}' must be conditions on sizes: {error}. "
            "Was it written by torchq.save?"
        ) from error


def _encode(value: object, example: Example, name: str) -> object:
    if isinstance(value, Argument):
        return {"argument": example.arguments.index(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_encode(item, example, name) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item, example, name) for key, item in value.items()}}
    raise NotImplementedError(
        f"torchq.save: arguments of the example call must be plain values, got a "
        f"{type(value).__name__} for '{name}'. Save the whole model with torch.save."
    )


def _decode(value: object, arguments: list[Argument]) -> object:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "argument":
        return arguments[content]
    if kind == "dict":
        return {key: _decode(item, arguments) for key, item in content.items()}
    items = [_decode(item, arguments) for item in content]
    return tuple(items) if kind == "tuple" else items

# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the report of a converted model as text, compressed by zlib."""

import json
import zlib
from dataclasses import astuple, replace
from dataclasses import fields as fields_of
from typing import Any

import torch
from torch import Tensor, nn

from torchq.attributes.json_text import read_json
from torchq.convert.sources import CHECKS, CLIPS
from torchq.nn.module import text_bytes
from torchq.report.rows import Row, Weight

REPORT_KEY = "torchq_report"
"""Name of the tensor that holds the text."""
_NOTE = "torchq_note"
_WEIGHTS = "torchq_weights"


def write_report(model: nn.Module) -> Tensor:
    """Return the text of a converted model's report."""
    fields = {
        "rows": [astuple(row) for row in model.torchq_report],  # type: ignore[union-attr]
        "note": getattr(model, _NOTE, ""),
        "weights": [astuple(weight) for weight in getattr(model, _WEIGHTS, ())],
    } | {name: vars(model)[name] for name in (CHECKS, CLIPS) if name in vars(model)}
    text = zlib.compress(json.dumps(fields, separators=(",", ":")).encode())
    return torch.tensor(list(text), dtype=torch.uint8, device="cpu")


def read_report(text: Tensor) -> dict[str, Any]:
    """Return what :func:`save` wrote of the report, by the names that a model has it under."""
    try:
        fields = read_json(_unpacked(text_bytes(text)))
        options = {CHECKS: bool, CLIPS: float}
        return {
            "torchq_report": [_row(row) for row in fields["rows"]],
            _NOTE: _text(fields["note"]),
            _WEIGHTS: [Weight(*_checked(Weight, weight)) for weight in fields["weights"]],
        } | {name: kind(fields[name]) for name, kind in options.items() if name in fields}
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"torchq.load: the file's report must be rows that torchq.save wrote, got "
            f"{text_bytes(text)[:30]!r}. Was it written by another version of torchq?"
        ) from error


_REPORT_BYTES = 1 << 24
"""Of a report, unpacked: the rows of 100,000 layers."""


def _unpacked(text: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(text, _REPORT_BYTES)
    if not unpacker.eof:  # more than that, or cut short
        raise ValueError("not the whole of a text")
    return unpacked


def _row(fields: list[object]) -> Row:
    """Return a row; JSON makes lists of tuples."""
    row = Row(*_checked(Row, fields))
    return replace(row, weights=tuple(map(_text, row.weights)))


_KINDS = {"str": str, "bool": bool, "int": int, "tuple[str, ...]": list}


def _checked(cls: type, values: list[object]) -> list[Any]:
    """Return the fields of a row, if they have the types that it has."""
    for field, value in zip(fields_of(cls), values, strict=False):
        if type(value) is not _KINDS[str(field.type)]:
            raise TypeError(f"{field.name} of another type")
    return values


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value

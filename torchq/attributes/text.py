# SPDX-License-Identifier: Apache-2.0
"""What the text of post-ops and attributes is made of: locale-free scalars, strict reading."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from torchq.attributes.arguments import to_dtype, to_float32


def float_text(value: float) -> str:
    """The shortest text that reads back as this float32, whether read as float32 or as float64.

    It never holds a ``+`` (the separator of post-ops): 3.4e38, 1e-45, 6, -0.
    """
    single = np.float32(value)
    if value == 0 or 1e-4 <= abs(value) < 1e16:
        text = np.format_float_positional(single, trim="-")
    else:
        text = np.format_float_scientific(single, trim="-", exp_digits=1)
    if np.float32(float(text)) != single:  # rounding twice misses it, as with 7.038531e-26
        text = repr(float(single))
    return text.replace("e+", "e")


def parse_float(where: str, text: str) -> float:
    """The inverse of `float_text`; takes any decimal text without a ``+``."""
    if not re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]{1,3})?", text):
        raise ValueError(f"{where} must be a number like 6, 0.5, 1e-5 or 1e20 (without '+')")
    return to_float32(where, float(text))


def parse_int(where: str, text: str) -> int:
    """A decimal integer of at most 10 digits."""
    if not re.fullmatch(r"0|-?[1-9][0-9]{0,9}", text):
        raise ValueError(f"{where} must be an integer like 0 or 128")
    return int(text)


def parse_groups(where: str, text: str) -> list[int]:
    """Group sizes of the last two dims, ``32x1``."""
    return [parse_int(where, size) for size in text.split("x")]


def split_at(text: str, separator: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """The (position, text) of the parts between separators; ``text`` itself is at ``start``."""
    for part in text.split(separator):
        yield start, part
        start += len(part) + len(separator)


@contextmanager
def at_position(op: str, position: int, got: str) -> Iterator[None]:
    """Adds the op, the position (from 0) and the text there to a ValueError from inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"torchq.{op}: at position {position}, got {got!r}: {error}") from None


def join_fields(name: str, *fields: tuple[str, str]) -> str:
    """Joins a name and its (text, default) fields with ``:``, without the trailing defaults."""
    kept = list(fields)
    while kept and kept[-1][0] == kept[-1][1]:
        kept.pop()
    return ":".join([name, *(text for text, _ in kept)])


_READERS: dict[str, Callable[[str, str], Any]] = {
    "scale": parse_float,
    "shift": parse_float,
    "alpha": parse_float,
    "beta": parse_float,
    "zero_point": parse_int,
    "mask": parse_int,
    "dtype": to_dtype,
    "bias_dtype": to_dtype,
    "kernel": parse_int,
    "stride": parse_int,
    "padding": parse_int,
    "groups": parse_groups,
    "mode": lambda _, text: text,
}


def read_fields(
    op: str, position: int, token: str, names: Sequence[str], required: int = 0
) -> dict[str, Any]:
    """Reads ``<head>:<field>:...`` by the fields' names; the first ``required`` must be there."""
    (_, head), *parts = split_at(token, ":", position)
    if not required <= len(parts) <= len(names):
        form = "".join([f":<{name}>" for name in names[:required]])
        form += "".join(f"[:<{name}>]" for name in names[required:])
        with at_position(op, position, token):
            raise ValueError(f"must have the form {head}{form}")
    fields = {}
    for name, (start, text) in zip(names, parts, strict=False):
        with at_position(op, start, text):
            fields[name] = _READERS[name](name, text)
    return fields

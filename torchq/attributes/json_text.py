# SPDX-License-Identifier: Apache-2.0
"""Reads JSON that others wrote, within limits: one byte of text can become 60 of objects."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

JsonObject = dict[str, Any]
"""An object of a text of others: each value is to be checked before its use."""

_VALUES = 500_000
"""The most values of one text: 50 MB of objects, and three times what the largest graphs have."""
_DEPTH = 100
_WIDE = 1 << 20
"""The most bytes of a text with characters beyond ASCII, which Python may hold in four bytes each.

Texts of torchq are ASCII, whatever they tell.
"""
_CONTROLS = re.compile(rb"\\(?:u00(?:[0189][0-9a-f]|7f)|[bfr])|\x7f|\xc2[\x80-\x9f]", re.IGNORECASE)
"""Control characters, raw or escaped, except tabs and line feeds as ``\\t`` and ``\\n``."""


def printable(text: str) -> str:
    """Return a text with spaces for what :func:`read_json` refuses, and for line feeds."""
    return "".join(c if c.isprintable() else " " for c in text)


def read_json(text: bytes | memoryview, nbytes: int = 0) -> Any:
    """Parse a text.

    Args:
        text: of others.
        nbytes: of the file, if the text is its header; each hundred may have one value more.

    Raises:
        ValueError: it is no JSON, or has more values or levels than files of torchq have, or
            control characters, or is long and not ASCII.
    """
    text = bytes(text)
    if why := why_refused(text, nbytes):
        raise ValueError(why)
    if _brackets(text) > _DEPTH and _levels(text) > _DEPTH:
        raise ValueError("its text has too many levels")
    try:
        return json.loads(str(text, "utf-8"))  # of bytes, json would guess, and import, an encoding
    except RecursionError:
        raise ValueError("its text has too many levels") from None


def why_refused(text: bytes, nbytes: int = 0) -> str:
    """Return why :func:`read_json` reads no text of such length and characters, or ""."""
    if _CONTROLS.search(text.replace(rb"\\", b"")):  # an escaped backslash begins no escape
        return "its text has control characters"
    is_long = nbytes > 0 and len(text) > _WIDE + nbytes // 16  # other texts count their bytes
    if (is_long and b"\\u" in text) or (len(text) > _WIDE and not text.isascii()):
        return "its text is long, and has characters beyond ASCII"
    return "its text has too many values" if values_in(text) > _VALUES + nbytes // 100 else ""


def values_in(text: bytes) -> int:
    """Return how many values a text has, and what holds them."""
    return text.count(b",") + text.count(b":") + _brackets(text)


def _brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _levels(text: bytes) -> int:
    """Return the most brackets that are open at a place."""
    raw = np.frombuffer(text, np.uint8)
    opens, closes = (raw == ord("[")) | (raw == ord("{")), (raw == ord("]")) | (raw == ord("}"))
    steps = opens[opens | closes].astype(np.int8) * 2 - 1
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))

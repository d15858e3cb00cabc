# SPDX-License-Identifier: Apache-2.0
"""Reads JSON that others wrote, within limits: one byte of text can become 60 of objects."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_VALUES = 500_000
"""The most values of one text: 50 MB of objects, and three times what the largest graphs have."""
_DEPTH = 100


def read_json(text: bytes | memoryview) -> Any:
    """Parse a text.

    Raises:
        ValueError: it is no JSON, or has more values or levels than files of torchq have.
    """
    raw = np.frombuffer(text, np.uint8)
    opens, closes = (raw == ord("[")) | (raw == ord("{")), (raw == ord("]")) | (raw == ord("}"))
    places = np.flatnonzero(opens | closes)
    levels = np.cumsum(np.where(opens[places], 1, -1))
    separators = int(((raw == ord(",")) | (raw == ord(":"))).sum())
    if separators + len(places) > _VALUES or (len(levels) and int(levels.max()) > _DEPTH):
        raise ValueError("its text has too many values or levels")
    try:
        return json.loads(bytes(text))
    except RecursionError:
        raise ValueError("its text has too many levels") from None

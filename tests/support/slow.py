# SPDX-License-Identifier: Apache-2.0
"""Parameters of which ``make test`` takes some, and ``make test-slow`` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the parameters of a test; a tuple is of several, and what is not in quick is slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in quick else pytest.mark.slow,
        )
        for value in values
    ]

# SPDX-License-Identifier: Apache-2.0
"""Parameters of which ``make test`` takes some, and ``make test-slow`` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the parameters of a test, all but those in quick marked slow.

    A tuple is several arguments.
    """
    values = list(values)
    assert all(one in values for one in quick), f"{quick} are not all among {values}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in quick else pytest.mark.slow,
        )
        for value in values
    ]

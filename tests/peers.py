# SPDX-License-Identifier: Apache-2.0
"""oneDNN in a process of its own; tests skip where its wheels cannot be had."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.onednn import Peer, WheelsUnavailableError


def start_onednn(**options: Any) -> Peer:
    """On one thread; the caller closes it, as by `with`."""
    try:
        return Peer(threads=1, **options)
    except WheelsUnavailableError as error:
        pytest.skip(str(error))

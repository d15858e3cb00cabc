# SPDX-License-Identifier: Apache-2.0
"""Where in the model's code a node comes from."""

from __future__ import annotations

import dis
import os
import sys
from types import FrameType

__all__ = ["assigns_item", "line", "place"]


def _frame() -> FrameType:
    """The call in the model's code that is traced."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__"))
        calls = name == "torch.nn.modules.module"
        if not f"{name}.".startswith(("torch.", "torchq.")) or (
            name.startswith("torch.nn.modules.") and not calls
        ):
            break
        frame = frame.f_back
    return frame


def place() -> tuple[str, int, int]:
    """File, function and instruction of that call."""
    frame = _frame()
    return frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti


def line() -> str:
    """The same as people say it."""
    frame = _frame()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def assigns_item(frame: FrameType) -> bool:
    """Whether the operator at work in ``frame`` is that of ``a[i] += b``."""
    following = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    moves = ("SWAP", "ROT_THREE")
    name = next((i.opname for i in following if i.opname not in moves), "")
    return name in ("STORE_SUBSCR", "STORE_SLICE")

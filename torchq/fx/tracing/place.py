# SPDX-License-Identifier: Apache-2.0
"""Where in the model's code a node, or an error, comes from."""

from __future__ import annotations

import dis
import os
import sys
import traceback
from types import FrameType

from torch import fx

__all__ = ["assigns_item", "is_models", "line", "place", "why"]


def _frame() -> FrameType:
    """The call in the model's code that is traced."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_models(frame):
        frame = frame.f_back
    return frame


def is_models(frame: FrameType) -> bool:
    """Whether it is of code that is traced: somebody's, or of a module of torch.nn."""
    name = str(frame.f_globals.get("__name__"))
    ours = f"{name}.".startswith(("torch.", "torchq."))
    return not ours or (name.startswith("torch.nn.modules.") and name != "torch.nn.modules.module")


def place() -> tuple[str, int, int]:
    """File, function and instruction of that call."""
    frame = _frame()
    return frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti


def line() -> str:
    """The same as people say it."""
    frame = _frame()
    return _at(frame, frame.f_lineno)


def _at(frame: FrameType, number: int | None) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{number}"


def why(error: Exception) -> str:
    """What an error of the traced code says, on one line, and where it came up."""
    kind, text = type(error).__name__, " ".join(str(error).split())[:200]
    if not isinstance(error, fx.proxy.TraceError):
        text = f"{kind}: {text}" if text else kind
    if "Proxy" in text:
        given = "its Python code gives a size or tensor to what does not know the Proxy"
        text = f"{given} that stands for it in tracing (int(size) is a number): {text}"
    found = [at for at in traceback.walk_tb(error.__traceback__) if is_models(at[0])]
    return f"{text} ({_at(*found[-1])})" if found else text


def assigns_item(frame: FrameType) -> bool:
    """Whether the operator at work in ``frame`` is that of ``a[i] += b``."""
    following = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    moves = ("SWAP", "ROT_THREE")
    name = next((i.opname for i in following if i.opname not in moves), "")
    return name in ("STORE_SUBSCR", "STORE_SLICE")

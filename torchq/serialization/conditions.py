# SPDX-License-Identifier: Apache-2.0
"""Checks what a file holds before it becomes a part of generated code."""

from __future__ import annotations

import keyword
from typing import Any


def is_size(size: Any) -> bool:
    """Return whether it is a fixed size of a tensor, or None for a dynamic one."""
    return size is None or (type(size) is int and size >= 0)


def is_option(name: Any, values: Any) -> bool:
    """Return whether it is the name of an option, with values that are True, False or None."""
    known = isinstance(values, list) and all(v is None or type(v) is bool for v in values)
    return known and is_name(name)


def is_name(name: Any) -> bool:
    """Return whether generated code may have a variable of this name."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def is_path(name: Any) -> bool:
    """Return whether generated code may quote the name of a module or tensor, as ``a-b.weight``."""
    return isinstance(name, str) and name.isprintable() and not {'"', "\\"} & set(name)

# SPDX-License-Identifier: Apache-2.0
"""Checks what a file holds before it becomes a part of generated code."""

from __future__ import annotations

import keyword
import unicodedata
from typing import TypeGuard

from torch import nn

from torchq.serialization.tensor_file import is_short

_OF_CODE = "self", "torch"
"""Names that the code of a graph reads."""
_OF_CALLS = tuple(f"_torchq_{kind}" for kind in ("torch", "named", "module", "tensor", "site"))
"""Begin names that the code of a graph gives to modules and tensors."""
_OF_MODULES = {*vars(nn.Module()), *dir(nn.Module)}
"""Names of what every module has, as ``_modules`` and ``load_state_dict``."""


def is_size(size: object) -> bool:
    """Return whether it is a fixed size of a tensor, or None for a dynamic one."""
    return size is None or (type(size) is int and size >= 0)


def is_option(name: object, values: object) -> bool:
    """Return whether it is the name of an option, with values that are True, False or None."""
    known = isinstance(values, list) and all(v is None or type(v) is bool for v in values)
    return known and is_name(name)


def is_name(name: object) -> TypeGuard[str]:
    """Return whether generated code may have an argument of this name."""
    if not isinstance(name, str) or not is_short(name):  # normalizing takes quadratic time
        return False
    if not name.isidentifier() or keyword.iskeyword(name):
        return False
    return unicodedata.normalize("NFKC", name) == name  # Python reads the latter


def is_variable(name: object) -> TypeGuard[str]:
    """Return whether generated code may have a variable of this name, which hides no other."""
    return is_name(name) and name not in _OF_CODE and not name.startswith(_OF_CALLS)


def is_path(name: object) -> bool:
    """Return whether generated code may quote the name of a module or tensor, as ``a-b.weight``.

    Where a part is a name of Python the code has it as an attribute, so it must be the same in
    Python's form of names. :func:`is_held` then tells whether these attributes are what they seem.
    """
    if not isinstance(name, str) or not is_short(name):
        return False
    if not name.isprintable() or {'"', "\\"} & set(name):
        return False
    parts = name.split(".") if name else []
    normal = unicodedata.normalize("NFKC", name) == name
    return normal and "" not in parts and _OF_MODULES.isdisjoint(parts)


def is_held(root: nn.Module, name: str) -> bool:
    """Return whether attributes by this name are modules, and a tensor or module at its end.

    An attribute of a module's own, or of its class, would hide those.
    """
    *outer, last = name.split(".")
    for part in outer:
        inner = root._modules.get(part)
        if _is_hidden(root, part) or inner is None:
            return False
        root = inner
    held = (root._modules, root._parameters, root._buffers)
    return not _is_hidden(root, last) and any(last in each for each in held)


def _is_hidden(owner: nn.Module, name: str) -> bool:
    return hasattr(type(owner), name) or name in vars(owner)

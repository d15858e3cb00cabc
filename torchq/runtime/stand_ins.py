# SPDX-License-Identifier: Apache-2.0
"""Lets fake kernels raise what the ops raise: the ops check stand-ins for the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_UNREAD = {"src", "src0", "src1", "srcs", "query", "key", "value", "cos", "sin", "post_op_srcs"}
"""Arguments whose values no check reads: memory that nothing touches takes no time."""

_MOST_VALUES = 1 << 22
"""Of any other stand-in but 8-bit ones. Filling 16 MB takes about 4 ms."""

_SYMBOLS = torch.SymInt, torch.SymFloat, torch.SymBool


class _Unknown(Exception):
    """An argument that nothing can stand in for."""


def _known(value: object) -> Any:
    """Return the number that a symbol has in this trace; a hint adds no guard."""
    if not isinstance(value, _SYMBOLS):
        return value
    hint = getattr(value.node, "hint", None)
    if not isinstance(hint, int | float):
        raise _Unknown
    return hint


def _stand_in(value: object, unread: bool) -> object:
    """Return a CPU tensor of the same dtype, shape and strides; lists part by part."""
    if isinstance(value, list | tuple):
        return [_stand_in(part, unread) for part in value]
    if not isinstance(value, Tensor):
        return _known(value)
    if value.layout != torch.strided:
        raise _Unknown
    shape = [_known(size) for size in value.shape]
    strides = [_known(stride) for stride in value.stride()]
    size = 0 if 0 in shape else 1 + sum((n - 1) * st for n, st in zip(shape, strides, strict=True))
    unread = unread or value.dtype in (torch.uint8, torch.int8)
    if not unread and size > _MOST_VALUES:
        raise _Unknown
    flat = torch.empty(size, dtype=value.dtype, device="cpu")
    if not unread:
        flat.fill_(1 if value.is_floating_point() else 0)
    return flat.as_strided(shape, strides)


def check_as_op(name: str, given: Mapping[str, object]) -> None:
    """Raise what the op raises for these arguments, unless their values are to blame.

    Note [Checks alone] in csrc/runtime/dispatch.h has the idea. Sizes without a number, arguments
    too large to stand in for, and packed sequences, whose batch is data, are left to the run.
    """
    if given.get("batch_sizes") is not None:
        return
    ops = torch.ops.torchq
    # _disable_current_modes imports sympy, which takes 0.4 s; loading a model needs no modes
    traced = torch._C._len_torch_dispatch_stack() > 0
    with _disable_current_modes() if traced else nullcontext():
        before = False
        try:
            before = ops._set_only_checks(True)
            args = [_stand_in(value, key in _UNREAD) for key, value in given.items()]
            getattr(ops, name).default(*args)
        except Exception as error:  # of memory, or _Unknown: the arguments may be right
            if str(error).startswith("torchq."):
                raise
        finally:
            ops._set_only_checks(before)

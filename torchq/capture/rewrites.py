# SPDX-License-Identifier: Apache-2.0
"""Rewrites ATen calls of a captured graph as calls of torch, which script."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch.fx.node import Target

from torchq.models.trees import Args, Kwargs

_RENAMED = {
    "view": "reshape", "view_as": "reshape_as", "_unsafe_view": "reshape", "_to_copy": "to",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
}  # fmt: skip
_IGNORED = ("layout", "device", "pin_memory", "non_blocking", "copy")
_METHODS = {
    "reshape", "expand", "contiguous", "repeat", "expand_as", "reshape_as", "type_as", "unfold",
    "new_zeros", "new_ones", "new_full", "new_empty", "item",
}  # fmt: skip
NUMBERS: dict[object, Callable[..., object]] = {
    torch.sym_max: max, torch.sym_min: min, torch.sym_float: float, torch.sym_int: int,
    torch.sym_not: operator.not_,
}  # fmt: skip
"""Functions of torch for sizes, and those of Python for numbers."""
_PASSED = {"lift_fresh_copy", "detach", "alias", "lift", "_unsafe_view_copy"}
_Call = tuple[str, Target, Args, Kwargs]


def base_name(target: object) -> str:
    """Return the name of an ATen call without its overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return str(getattr(target, "__name__", target))


def full_name(target: object) -> str | None:
    """Return the name of an ATen call as in its schema; None for Python's operators."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return f"{target._schema.name}.{target._schema.overload_name}".rstrip(".")


def is_random(target: object) -> bool:
    """Return whether an ATen call gives other values each time."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def as_torch_call(target: Target, args: Args, kwargs: Kwargs) -> _Call:
    """Return kind, target and arguments of the node that makes an ATen call.

    Ops keep their overloads: Note [Overloads] in graphs/data.py.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return "call_function", NUMBERS.get(target, target), args, kwargs
    name, schema = base_name(target), target._schema
    if name == "sym_size":
        return "call_method", "size", args, {}
    if name == "sym_numel":
        return "call_method", "numel", args, {}
    args, kwargs = _floats(schema, args, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    if target.namespace != "aten":
        return "call_function", target, args, kwargs
    if name == "slice":
        return _slice(target, args)
    kwargs = {k: v for k, v in kwargs.items() if k not in _IGNORED}
    if schema.overload_name == "dtype":  # a view of the bits
        return "call_method", name, args, kwargs
    name = _RENAMED.get(name, name)
    if name in ("to", "_to_copy"):
        dtype = _dtype(args, kwargs)
        if dtype is None:
            return "call_method", "contiguous", args[:1], {}
        return "call_method", "to", (args[0], dtype), {}
    if name.endswith("_") and not name.endswith("__"):
        raise NotImplementedError(f"{name} writes in place")
    function = _function_of(name)
    if function is not None:
        return "call_function", function, args, kwargs
    if name in _METHODS:
        return "call_method", name, args, kwargs
    return "call_function", target, args, kwargs


def _function_of(name: str) -> Callable[..., object] | None:
    """Return the C++ function of torch that makes this ATen call: shorter than ``torch.ops``.

    Files can name only public functions of torch, and ops.
    """
    if name.startswith("_"):
        return None
    for namespace in (torch, torch._C._nn):
        function = getattr(namespace, name, None)
        if isinstance(function, BuiltinFunctionType):
            return function
    return None


def _slice(target: Target, args: Args) -> _Call:
    """``x[:, start:end]``, which is faster than the call."""
    given = [*args, *(0, None, None, 1)[len(args) - 1 :]]
    src, dim, start, end, step = given
    end = None if end == sys.maxsize else end
    if not isinstance(dim, int) or dim < 0:
        return "call_function", target, args, {}
    part = slice(start or None if not isinstance(start, fx.Node) else start, end, step)
    part = slice(part.start, part.stop, None if step == 1 else step)
    return "call_function", operator.getitem, (src, (*[slice(None)] * dim, part)), {}


def _floats(schema: torch.FunctionSchema, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Integers that a schema takes as floats, as floats: TorchScript does not convert them."""
    kinds = {a.name: str(a.type) for a in schema.arguments}

    def as_float(value: object, kind: str) -> object:
        if "float" not in kind:
            return value
        if isinstance(value, list | tuple):
            return [as_float(v, kind) for v in value]
        return float(value) if type(value) is int else value

    names = list(kinds)
    args = tuple(as_float(a, kinds[n]) for n, a in zip(names, args, strict=False))
    return args, {n: as_float(v, kinds[n]) for n, v in kwargs.items()}


def passed_on(node: fx.Node, args: Sequence[Any]) -> object:
    """Return the source that a call gives as it is: no copy is left where nobody writes to one."""
    name = base_name(node.target)
    if name == "slice" and len(args) > 3 and args[4:] in ((), (1,)):
        whole = args[2] in (0, None) and args[3] in (sys.maxsize, None)
        return args[0] if whole else None
    if name == "cat" and len(args[0]) == 1:
        return None if is_returned(node) else args[0][0]
    if name == "clone":  # what is left of one where in-place code was rewritten
        return None if node.kwargs or is_returned(node) else args[0]
    if name in ("to", "_to_copy"):
        same = args[0].meta["value"].dtype == _dtype(args, node.kwargs)
        return args[0] if same and not is_returned(node) else None
    dropout = "dropout" in name and len(args) > 2 and args[2] is False
    return args[0] if dropout or name in _PASSED else None


def _dtype(args: Args, kwargs: Kwargs) -> object:
    """Return the dtype that a conversion names, or None."""
    return kwargs.get("dtype") or next((a for a in args if type(a) is torch.dtype), None)


def is_returned(node: fx.Node) -> bool:
    """Return whether the output has the node's memory, to which callers may write."""
    return any(
        user.op == "output" or (_may_be_view(user.target) and is_returned(user))
        for user in node.users
    )


def _may_be_view(target: object) -> bool:
    """Return whether a result may have the memory of an argument, by its schema if it has one."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    name = base_name(target)
    shares = any(result.alias_info is not None for result in target._schema.returns)
    return shares or name == "_unsafe_view" or "dropout" in name

# SPDX-License-Identifier: Apache-2.0
"""Spellings of the float model that TorchScript refuses, or that depend on the memory's layout."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from torchq.fx.tracing.guards import with_condition, with_indices, with_view, with_view_filled

_OF_STRIDES = frozenset({
    "stride", "is_contiguous", "storage_offset", "as_strided", torch.as_strided,
    torch.view_as_complex, torch.as_strided_copy, torch.as_strided_scatter,
})  # fmt: skip


def depends_on_strides(node: fx.Node) -> bool:
    """Whether it asks for its source's strides, or reads other elements where they are others."""
    if node.target == "view" and node.op == "call_method":
        return any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))
    return node.op != "call_module" and node.target in _OF_STRIDES


def respell(copied: fx.Node, original: fx.Node) -> None:
    """Changes a node to what computes the same on more layouts, and scripts.

    - ``view`` refuses what a converted convolution returns: channels-last. ``reshape`` copies then.
      (Where somebody writes to a view that others see, the strides are those of the float model.)
    - ``operator.abs`` is no function of TorchScript, ``torch.abs`` is, and ``abs`` of a number; nor
      is ``math.trunc``, which is ``int``.
    - An int for a float argument, as in ``F.interpolate(x, scale_factor=2)``, becomes a float.
    - ``axis`` and ``keepdims``, as numpy has them, are ``dim`` and ``keepdim`` there; ``...`` with
      a tensor of indices is the dims that it stands for; ``indexing=None`` is nothing; ``bool()``
      is ``to``; tuples that ``torch.tensor`` gets are lists; slices backwards have both ends.
    - ``t // x`` of a constant is called as a method of it.
    - ``2 // x``, ``1 << x`` and the like, and ``+x``, know only tensors there.
    """
    values = [*copied.args, *copied.kwargs.values()]
    if copied.op == "call_method" and copied.target == "view":
        if not any(isinstance(value, torch.dtype) for value in values):
            copied.target, copied.args, copied.kwargs = "reshape", tuple(values), {}
    elif copied.op == "call_method" and copied.target == "view_as":
        copied.target = "reshape_as"
    elif copied.op == "call_method" and copied.target == "bool" and len(values) == 1:
        copied.target, copied.args = "to", (copied.args[0], torch.bool)
    elif copied.target is torch.tensor and copied.args:
        copied.args = (_as_lists(copied.args[0]), *copied.args[1:])
    elif copied.target is operator.getitem:
        copied.args = _without_ellipsis(copied, original)
        copied.args = (copied.args[0], _with_ends(copied.args[1]))
    elif copied.target in _OPERATORS:
        copied.op, copied.target = "call_function", _OPERATORS[copied.target]
    elif copied.target in _OF_TENSORS and not _dtype(original.args[0]):
        _give_tensor(copied, original)
    elif copied.target is operator.pos and _dtype(original):
        copied.target = torch.positive
    elif copied.target is operator.pos:
        copied.target, copied.args = operator.mul, (*copied.args, 1)
    elif copied.target is operator.abs:
        copied.target = abs if original.meta["value"].shape is None else torch.abs
    elif copied.target is math.trunc:
        copied.target = int
    elif copied.target is torch.functional.meshgrid and copied.kwargs.get("indexing", "") is None:
        copied.kwargs = {}
    elif copied.target is F.scaled_dot_product_attention:  # no signature says so
        copied.args = tuple(_as_float(v) for v in copied.args)
        copied.kwargs = {k: _as_float(v) for k, v in copied.kwargs.items()}
    elif copied.kwargs.keys() & _NUMPY.keys() and _takes_dim(copied.target):
        copied.kwargs = {_NUMPY.get(k, k): v for k, v in copied.kwargs.items()}
    elif inspect.isfunction(copied.target) and (floats := _floats(copied.target)):
        names = list(inspect.signature(copied.target).parameters)
        given = dict(zip(names, copied.args, strict=False)) | copied.kwargs
        known = {k: _as_float(v) if k in floats else v for k, v in given.items()}
        copied.args = tuple(known.pop(name) for name in names[: len(copied.args)])
        copied.kwargs = known


def write(graph: fx.Graph, node: fx.Node, form: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """``with_item`` as TorchScript takes it, where that is possible: through a view of a copy."""
    index, value = node.args[1:]
    parts = index if isinstance(index, tuple) else (index,)
    views = all(_is_view(part) for part in parts)
    condition = len(parts) == 1 and _is_condition(parts[0])
    first, indexed = _between_slices(parts)
    gathers = condition or all(_gathers(part) or type(part) is int for part in indexed)
    number = isinstance(value, bool | int | float)
    if not (number or _dtype(value)) or not (views or gathers):
        return graph.node_copy(node, form)
    if not (views or number or _dtype(value) == _dtype(node)):
        return graph.node_copy(node, form)
    src, index, value = fx.node.map_arg(node.args, form)
    if condition:
        value = graph.call_method("new_full", (src, [1], value)) if number else value
        return graph.call_function(with_condition, (src, index, value))
    if not views:
        indices = [
            form(p) if isinstance(p, fx.Node) else graph.call_function(torch.full, ([1], p))
            for p in indexed
        ]
        value = graph.call_method("new_full", (src, [1], value)) if number else value
        return graph.call_function(with_indices, (src, indices, value, first))
    copied = graph.call_method("clone", (src,))
    whole = parts in ((), (...,))
    view = copied if whole else graph.call_function(operator.getitem, (copied, index))
    if number:
        filled = graph.call_method("fill_", (view, value))
        return graph.call_function(with_view_filled, (copied, filled))
    return graph.call_function(with_view, (copied, view, value))


_OPERATORS: dict[Any, Any] = {
    f"__{name}__": getattr(operator, f"__{name}__")
    for name in ("floordiv", "lshift", "rshift", "and", "or", "xor")
}
_OF_TENSORS = frozenset(_OPERATORS.values())
"""Operators whose result TorchScript takes for a number where a number is in front of a tensor."""


def _give_tensor(copied: fx.Node, original: fx.Node) -> None:
    """Makes the number in front a tensor, of the dtype that the result has in any case."""
    if dtype := _dtype(original):
        with copied.graph.inserting_before(copied):
            options: dict[str, Any] = {"dtype": dtype}
            number = copied.graph.call_function(torch.scalar_tensor, copied.args[:1], options)
        copied.args = (number, *copied.args[1:])


_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


@functools.cache
def _takes_dim(target: Any) -> bool:
    """Whether a method, or function of torch, has ``dim`` where Python may say ``axis``."""
    packet = getattr(torch.ops.aten, target if isinstance(target, str) else target.__name__, None)
    schemas = [getattr(packet, name)._schema for name in packet.overloads()] if packet else []
    names = {argument.name for schema in schemas for argument in schema.arguments}
    return "dim" in names and "axis" not in names


def _without_ellipsis(copied: fx.Node, original: fx.Node) -> tuple[Any, ...]:
    """Arguments of an index, with slices for ``...`` if tensors or lists of ints gather."""
    src, index = original.args
    shape = src.meta["value"].shape if isinstance(src, fx.Node) else None
    parts = index if isinstance(index, tuple) else ()
    ellipses = sum(part is ... for part in parts)
    if shape is None or ellipses != 1 or all(_is_view(part) for part in parts):
        return copied.args
    dims = [_dims(part) for part in parts]
    left = len(shape) - sum(n or 0 for n in dims)
    if None in dims or left < 0:
        return copied.args
    at, written = parts.index(...), tuple(copied.args[1])  # type: ignore[arg-type]
    return copied.args[0], (*written[:at], *[slice(None)] * left, *written[at + 1 :])


def _with_ends(index: Any) -> Any:
    """A slice backwards (of a sequence: tensors have none) with both ends.

    TorchScript reads None as 0 in front and as the largest int behind.
    """
    if not isinstance(index, slice) or type(index.step) is not int or index.step >= 0:
        return index
    start = sys.maxsize if index.start is None else index.start
    return slice(start, -sys.maxsize if index.stop is None else index.stop, index.step)


def _dims(part: Any) -> int | None:
    """How many dims of a tensor this part of an index stands for; None if that is not clear."""
    if part is None or part is ...:
        return 0
    if dtype := _dtype(part):
        mask = dtype in (torch.bool, torch.uint8)
        return len(part.meta["value"].shape) if mask else 1
    ints = isinstance(part, list) and all(type(p) is int for p in part)
    return 1 if ints or _is_view(part) else None


def _between_slices(parts: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
    """How many dims an index leaves whole before those that it names, and the parts for these."""
    named = [i for i, part in enumerate(parts) if part != slice(None)] or [0]
    return named[0], parts[named[0] : named[-1] + 1]


def _is_view(part: Any) -> bool:
    """Whether this index gives a view: a list, a range or a bool gathers, too."""
    if isinstance(part, fx.Node):
        is_int: bool = part.meta["value"].is_int
        return is_int
    return type(part) in (int, slice) or part is None or part is ...


def _gathers(part: Any) -> bool:
    """Whether it is a tensor of indices, or a mask of one dim or more."""
    if (dtype := _dtype(part)) is None:
        return False
    mask = dtype in (torch.bool, torch.uint8)
    return not (mask and part.meta["value"].shape == ())


def _is_condition(part: Any) -> bool:
    """Whether it is a mask without dims, which writes everything or nothing."""
    return _dtype(part) == torch.bool and part.meta["value"].shape == ()


def _dtype(value: Any) -> torch.dtype | None:
    """Of a node that is a tensor."""
    if not isinstance(value, fx.Node) or value.meta["value"].shape is None:
        return None
    dtype: torch.dtype | None = value.meta["value"].dtype
    return dtype


def _as_float(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_float(v) for v in value]
    return float(value) if type(value) is int else value


def _as_lists(value: Any) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, list | tuple) else value


@functools.cache
def _floats(function: Callable[..., Any]) -> frozenset[str]:
    """Its parameters that are annotated as floats, or as lists of them; none outside of torch."""
    if not function.__module__.startswith("torch."):
        return frozenset()
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if "float" in str(p.annotation))

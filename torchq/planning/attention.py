# SPDX-License-Identifier: Apache-2.0
"""Attention that a model spells out: products, masks and softmax become one operation.

``softmax(q @ k.mT * scale + bias, -1) @ v``, where nothing else reads what is in between. Between
the product and the softmax may be any number of steps that leave the scores a multiple of the
product plus a mask: factors above 0, sums and differences with biases, values that hide scores, and
reshapes of heads. A step is kept as it is; done to 0, all of them give the mask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from torchq.capture.graph import aten_name
from torchq.capture.ops import Op, Role, Split, Step, clip_bounds, is_float, is_size
from torchq.nn.float_modules import Attention, AttentionOptions, MatMul
from torchq.planning.plan import Plan

_HIDES = -1e4  # whose exponential is 0 in float32, beside that of any score worth mentioning
_ABSORBS = -1e9  # a bias added to it is lost
_HIDES_SURELY = -1e30  # where it is added, scores are lost as they are where it is filled in
_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")


@dataclass
class _Scores:
    """A product of queries and keys, and what is done to it, in the order of the model.

    Attributes:
        first: the product.
        parts: its operations.
        steps: what is done; see Recognized.
        scale: product of the numbers among them.
        is_weak: whether a value hides scores only where no bias is added to it.
        split: the reshape that gives the product other leading sizes.
        joined: the reshape back.
        masks: what the steps read, and whether that is between the two reshapes.
    """

    first: Op
    parts: list[Op] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    scale: float = 1.0
    is_weak: bool = False
    split: fx.Node | None = None
    joined: fx.Node | None = None
    masks: dict[fx.Node, bool] = field(default_factory=dict)


_Take = Callable[[_Scores], bool]
"""Notes a step; returns False where the scores do not allow it."""


def fuse_attention(plan: Plan) -> Plan:
    """Return the plan, where the second product of each attention is the whole of it."""
    ops = dict(plan.ops)
    for op in plan.ops.values():
        if op.role is Role.PRODUCT and isinstance(op.module, MatMul):
            scores = _scores_before(ops, op.srcs[0], op.node, is_normalized=False)
            if scores is not None and _fits_heads(scores):
                ops[op.node] = replace(
                    op,
                    module=Attention(AttentionOptions(scale=scores.scale, transposed_key=True)),
                    srcs=[*scores.first.srcs, op.srcs[1]],
                    steps=tuple(scores.steps),
                    absorbed=tuple(scores.parts[::-1]),
                    split=_leading(scores.split),
                    joined=_leading(scores.joined),
                )
    return replace(plan, ops=ops)


def _scores_before(
    ops: dict[fx.Node, Op], node: fx.Node, user: fx.Node, is_normalized: bool
) -> _Scores | None:
    """Return the scores that a value is made of; None where anything else is in between.

    Args:
        ops: all operations.
        node: the value.
        user: what alone may read it.
        is_normalized: whether a softmax follows.
    """
    op = ops.get(node)
    if op is None or op.requested or list(node.users) != [user] or _times_read(user, node) != 1:
        return None
    if is_normalized and op.role is Role.PRODUCT and isinstance(op.module, MatMul):
        return _Scores(op, [op])
    normalizes = not is_normalized and _is_softmax(op)
    for source, take in _sources(op, is_normalized, normalizes):
        scores = _scores_before(ops, source, node, is_normalized or normalizes)
        if scores is not None and take(scores):
            scores.parts.append(op)
            return scores
    return None


def _times_read(user: fx.Node, node: fx.Node) -> int:
    """Squares and sums of a node with itself read it twice."""
    read: list[fx.Node] = []
    fx.node.map_arg((user.args, user.kwargs), read.append)
    return read.count(node)


def _sources(op: Op, is_normalized: bool, normalizes: bool) -> Iterator[tuple[fx.Node, _Take]]:
    """Yield what an operation may be a step from, and what notes the step."""
    node, name = op.node, aten_name(op.node)
    source = node.args[0] if node.args else None
    if normalizes:
        yield node.all_input_nodes[0], lambda scores: True
    elif op.role is Role.PASS:
        yield op.srcs[0], lambda scores: True
    elif name in ("to", "type_as", "contiguous") and not node.kwargs:
        if isinstance(source, fx.Node) and is_float(source) and is_float(node):
            yield source, lambda scores: True
    elif name in _RESHAPES and isinstance(source, fx.Node):
        yield source, lambda scores: _reshape(scores, source, node)
    elif is_normalized:
        yield from _steps(op, name)


def _is_softmax(op: Op) -> bool:
    """Return whether it is a softmax along the last dimension, in float32."""
    node = op.node
    if node.target is not torch.softmax:
        return False
    rank = len(node.meta["value"].shape or ())
    options = dict(zip(("input", "dim", "dtype"), node.args, strict=False)) | dict(node.kwargs)
    last = rank > 0 and options.get("dim") in (-1, rank - 1)
    return last and options.get("dtype") in (None, torch.float32) and is_float(node)


def _steps(op: Op, name: str) -> Iterator[tuple[fx.Node, _Take]]:
    """Yield the scores that an operation may read, and what notes the step."""
    node, args = op.node, op.node.args
    affine, bounds = op.affine, clip_bounds(op.module)
    if affine is not None and affine[0].numel() == affine[1].numel() == 1:
        scale = float(affine[0])  # a softmax does not see the shift
        source = next(src for src in op.srcs if src.meta["varying"])
        if _shape(source) == _shape(node):
            yield source, lambda scores: _multiply(scores, scale)
    elif bounds is not None and bounds[0] <= _HIDES and bounds[1] >= -_HIDES:
        yield op.srcs[0], lambda scores: not scores.masks
    elif len(args) == 2 and not node.kwargs:  # a division may round, say
        for scores, other in (args, args[::-1]) if name == "add" else (args,):
            if not isinstance(scores, fx.Node) or not isinstance(other, fx.Node):
                return
            if name in ("mul", "div") and is_size(other) and _is_tensor(scores):
                function = operator.mul if name == "mul" else operator.truediv
                yield scores, _noted(function, (None, other))
            elif name in ("add", "sub") and all(map(_is_tensor, (scores, other, node))):
                function = operator.add if name == "add" else operator.sub
                if _shape(scores) == _shape(node):
                    yield scores, _added(function, other)
    elif len(args) == 3 and name in ("masked_fill", "where"):
        yield from _filled(node, name)


def _is_tensor(node: fx.Node) -> bool:
    return node.meta["value"].shape is not None and is_float(node)


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    shape: tuple[int, ...] | None = node.meta["value"].shape
    return shape


def _multiply(scores: _Scores, scale: float) -> bool:
    scores.scale *= scale
    scores.steps.append((operator.mul, (None, scale)))
    return 0 < scale < math.inf


def _noted(function: Callable[..., object], args: tuple[Argument, ...]) -> _Take:
    def take(scores: _Scores) -> bool:
        scores.steps.append((function, args))
        for mask in args:
            if isinstance(mask, fx.Node) and not is_size(mask):
                scores.masks[mask] = scores.split is not None and scores.joined is None
        return True

    return take


def _added(function: Callable[..., object], bias: fx.Node) -> _Take:
    note = _noted(function, (None, bias))
    return lambda scores: not scores.is_weak and note(scores)


def _filled(node: fx.Node, name: str) -> Iterator[tuple[fx.Node, _Take]]:
    """``masked_fill(scores, mask, value)``, ``where(mask, scores, value)`` or the other way round.

    What hides a score in its place hides it when added, as 0 changes no other one.
    """
    first, second, third = node.args
    if name == "masked_fill":
        scores, mask, given, inside = first, second, third, True
    elif _hiding(third) is not None:
        scores, mask, given, inside = second, first, third, False
    else:
        scores, mask, given, inside = third, first, second, True
    value = _hiding(given)
    if value is None or not isinstance(scores, fx.Node) or not isinstance(mask, fx.Node):
        return
    if mask.meta["value"].dtype != torch.bool or _shape(scores) != _shape(node):
        return
    filled = _HIDES_SURELY if value > -math.inf else value
    note = _noted(torch.where, (mask, filled, None) if inside else (mask, None, filled))

    def take(scores: _Scores) -> bool:
        scores.is_weak |= value > _ABSORBS
        return note(scores)

    yield scores, take


def _hiding(value: object) -> float | None:
    """Return the number that is filled in where it hides scores; None for others."""
    number = value.meta.get("constant") if isinstance(value, fx.Node) else value
    if not isinstance(number, int | float | Tensor):
        return None
    if torch.as_tensor(number, device="cpu").numel() != 1 or float(number) > _HIDES:
        return None
    return float(number)


# Reshapes of heads


def _reshape(scores: _Scores, source: fx.Node, node: fx.Node) -> bool:
    """Note a reshape of all sizes but those of queries and keys, or back."""
    before, after = source.meta["sizes"], node.meta["sizes"]
    if before is None or after is None or before[-2:] != after[-2:] or _leading(node) is None:
        return False
    if scores.split is None:
        scores.split = node
        return True
    back = scores.joined is None and after == scores.first.node.meta["sizes"]
    scores.joined = node
    return bool(back)


def _leading(node: fx.Node | None) -> list[Argument] | None:
    """Return the sizes that a reshape gives, without the last two; None where it has others."""
    if node is None:
        return None
    name, sizes = aten_name(node), list(node.meta["sizes"])
    if name == "flatten":
        return [-1] if len(sizes) == 3 else None
    if name == "unflatten":
        given: Any = node.args[2]
        return list(given) if len(given) == len(sizes) - 2 else None
    given = node.args[1]
    return list(given[:-2])


def _fits_heads(scores: _Scores) -> bool:
    """Return whether all masks broadcast to the split scores, or split as these do."""
    if scores.split is None:
        return True
    sizes, split = scores.first.node.meta["sizes"], scores.split.meta["sizes"]
    pairs = zip(sizes[::-1], split[::-1], strict=False)
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), len(sizes) + len(split))
    found: dict[object, Split] = {}
    for mask, is_split in scores.masks.items():
        own = mask.meta["sizes"]
        if is_split or own is None or all(size == "1" for size in own[:-alike]):
            continue
        if own[:-2] != sizes[:-2]:
            return False
        found[mask] = Split(mask)
    scores.steps = [(call, tuple(found.get(a, a) for a in args)) for call, args in scores.steps]
    return True

# SPDX-License-Identifier: Apache-2.0
"""Attention that a model spells out: products, masks and softmax become one operation.

``softmax(q @ k.mT * scale + bias, -1) @ v`` with any number of biases, or with a ``masked_fill`` in
their place, with or without dropout, where nothing else reads what is in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torchq.capture.ops import NOT_FINITE, Mask, Op, Role, is_float, is_size
from torchq.nn.float_modules import Add, Attention, AttentionOptions, MatMul

_CASTS = ("to", "type_as")
_HIDES = -1e4  # whose exponential is 0 in float32, beside that of any score worth mentioning
_HIDES_SURELY = -1e30  # where it is added, scores are lost as they are where it is filled in


@dataclass
class _Found:
    """Operations between the two products, the last one first."""

    parts: list[Op] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    scale: float = 1.0
    factors: list[tuple[fx.Node, bool]] = field(default_factory=list)


def fuse_attention(ops: dict[fx.Node, Op]) -> None:
    """Make the second product of each attention the whole of it, in place."""
    for op in ops.values():
        if op.role is Role.PRODUCT and isinstance(op.module, MatMul):
            found = _Found()
            first = _first_product(ops, op, found)
            if first is not None:
                options = AttentionOptions(scale=found.scale, transposed_key=True)
                op.module, op.srcs = Attention(options), [*first.srcs, op.srcs[1]]
                op.masks, op.factors = found.masks[::-1], found.factors
                op.absorbed = found.parts


def _first_product(ops: dict[fx.Node, Op], second: Op, found: _Found) -> Op | None:
    """Walk back from the second product; None where anything else is in between."""
    node: fx.Node | None = second.srcs[0]
    user, normalized = second.node, False
    while node is not None and list(node.users) == [user]:
        op = ops.get(node)
        if op is None or op.requested or _times_read(user, node) != 1:
            return None
        found.parts.append(op)
        if normalized and op.role is Role.PRODUCT and isinstance(op.module, MatMul):
            return op
        user = node
        if op.role is Role.PASS:
            node = op.srcs[0]
        elif (source := _source_of_cast(op.node)) is not None:
            node = source
        elif normalized:
            node = _scores_behind(op, found)
        else:
            normalized = _is_softmax(op)
            node = op.node.all_input_nodes[0] if normalized else None
    return None


def _times_read(user: fx.Node, node: fx.Node) -> int:
    """Squares and sums of a node with itself read it twice."""
    read: list[fx.Node] = []
    fx.node.map_arg((user.args, user.kwargs), read.append)
    return read.count(node)


def _source_of_cast(node: fx.Node) -> fx.Node | None:
    """Return the source of a cast from float32 to float32, which does nothing inside a graph."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or node.kwargs:
        return None
    cast = node.target in _CASTS and len(node.args) == 2
    return source if cast and is_float(source) and is_float(node) else None


def _is_softmax(op: Op) -> bool:
    """Return whether it is a softmax along the last dimension, in float32."""
    node = op.node
    if node.target is not torch.softmax:
        return False
    rank = len(node.meta["value"].shape or ())
    options = dict(zip(("input", "dim", "dtype"), node.args, strict=False)) | dict(node.kwargs)
    last = rank > 0 and options.get("dim") in (-1, rank - 1)
    return last and options.get("dtype") in (None, torch.float32) and is_float(node)


def _scores_behind(op: Op, found: _Found) -> fx.Node | None:
    """Return the scores to which a factor or a mask is applied; it is then in ``found``."""
    if op.role is Role.UNARY and op.affine is not None:
        scale, shift = (float(value) for value in op.affine)
        found.scale *= scale
        return op.srcs[0] if 0 < scale < math.inf and shift == 0 else None
    count = 0 if op.node.kwargs else len(op.node.args)  # a division may round, say
    if count == 2 and op.node.target in (torch.mul, torch.div):
        return _scores_times_number(op, found)
    if found.factors or found.scale != 1:  # the mask would be scaled, too
        return None
    if isinstance(op.module, Add) and (op.role is Role.COMBINE or op.reason == NOT_FINITE):
        return _scores_added_to(op, found)
    if count == 3 and op.node.target in (torch.masked_fill, torch.where):
        return _scores_filled(op, found)
    return None


def _scores_times_number(op: Op, found: _Found) -> fx.Node | None:
    """Return scores times a number that the model makes of sizes, as 1 / sqrt(q.size(-1))."""
    scores, number = op.node.args
    if not isinstance(scores, fx.Node) or not isinstance(number, fx.Node):
        return None
    if not is_size(number) or scores.meta["value"].shape is None:
        return None
    found.factors.append((number, op.node.target is torch.div))
    return scores


def _scores_added_to(op: Op, found: _Found) -> fx.Node | None:
    shape = op.node.meta["value"].shape
    if not all(map(is_float, [*op.srcs, op.node])):
        return None
    for scores, bias in (op.srcs, op.srcs[::-1]):
        if scores.meta["value"].shape == shape and not any(map(_fills, found.masks)):
            found.masks.append(bias)
            return scores
    return None


def _scores_filled(op: Op, found: _Found) -> fx.Node | None:
    """``masked_fill(scores, mask, value)``, ``where(mask, scores, value)`` or the other way round.

    What hides a score in its place hides it when added, as 0 changes no other one.
    """
    first, second, third = op.node.args
    if op.node.target is torch.masked_fill:
        scores, mask, value, inside = first, second, _hiding(third), True
    elif _hiding(third) is not None:
        scores, mask, value, inside = second, first, _hiding(third), False
    else:
        scores, mask, value, inside = third, first, _hiding(second), True
    if not isinstance(scores, fx.Node) or not isinstance(mask, fx.Node) or found.masks:
        return None
    if value is None or mask.meta["value"].dtype != torch.bool:
        return None
    found.masks.append((mask, value, 0.0) if inside else (mask, 0.0, value))
    return scores if scores.meta["value"].shape == op.node.meta["value"].shape else None


def _hiding(value: Any) -> float | None:
    """Return what to add where a number is filled in that hides scores; None for others."""
    number = value.meta.get("constant") if isinstance(value, fx.Node) else value
    if (
        not isinstance(number, int | float | Tensor)
        or torch.as_tensor(number, device="cpu").numel() != 1
    ):
        return None
    if float(number) == -math.inf:
        return -math.inf
    return _HIDES_SURELY if float(number) <= _HIDES else None


def _fills(mask: Mask) -> bool:
    return isinstance(mask, tuple)

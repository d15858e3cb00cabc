# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings that a model spells out become one operation, in float32.

``x * cos + cat([-x[..., h:], x[..., :h]], -1) * sin``, where h is half the last size and nothing
else reads what is in between, as Llama and most decoders turn queries and keys.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from torchq.capture.graph import aten_name
from torchq.capture.ops import Op, Role
from torchq.capture.patterns import arguments_of
from torchq.nn.float_modules import Rotary
from torchq.planning.plan import Plan
from torchq.report import reasons


class _Match(NamedTuple):
    """The sources of the embedding that an addition ends, and the nodes in between."""

    srcs: list[fx.Node]
    inside: list[fx.Node]


def join_rotaries(plan: Plan) -> Plan:
    """Return the plan, where the addition of each rotary embedding that stays float is all of it.

    It stays float where its products do: the sine and cosine of positions alone have no scale, and
    what is dynamic leaves products in float. Where overrides tell its parts apart, they stay apart.
    """
    ops, used = dict(plan.ops), {op.name for op in plan.ops.values()}
    used.update(name for name, _ in plan.captured.model.named_modules())
    for op in plan.ops.values():
        found = _match(op.node)
        parts = [] if found is None else [ops[node] for node in found.inside if node in ops]
        if found is None or len(parts) < len(found.inside) or not _is_float(plan, [op, *parts]):
            continue
        for part in parts:
            del ops[part.node]
        name = _free_name(f"{op.node.meta['scope']}.rotary".lstrip("."), used)
        ops[op.node] = replace(
            op, role=Role.OPAQUE, module=Rotary(), srcs=found.srcs, name=name, base=name,
            kind="rotary", reason=reasons.OVERRIDE if op.requested else reasons.ROTARY,
            absorbed=tuple(parts),
        )  # fmt: skip
    return replace(plan, ops=ops)


def _free_name(first: str, used: set[str]) -> str:
    """Return a name, or the first with a number behind it that nothing has, and note it."""
    names = itertools.chain([first], (f"{first}_{i}" for i in itertools.count(1)))
    name = next(name for name in names if name not in used)
    used.add(name)
    return name


def _is_float(plan: Plan, ops: list[Op]) -> bool:
    """Return whether functions of the graph, all with one configuration, leave products in float.

    The reason must not change with calibration, as that of a report would.
    """
    if any(op.owner is not None for op in ops):
        return False
    config, is_chosen = plan.config(ops[0].base), plan.is_chosen(ops[0].base)
    for op in ops:
        if plan.config(op.base) != config or plan.is_chosen(op.base) != is_chosen:
            return False
    products = [op for op in ops if aten_name(op.node) == "mul"]
    return all(op.role is Role.OPAQUE for op in products) or config is None or config.dynamic


def _match(node: fx.Node) -> _Match | None:
    """Return what a node is made of, if it is a rotary embedding of float32."""
    if aten_name(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    for first, second in _orders(node):
        if not _is_alone(first, "mul") or not _is_alone(second, "mul"):
            continue
        for turned, sin in _orders(second):
            found = _turned(turned)
            if found is None:
                continue
            for src, cos in _orders(first):
                if src is found.srcs[0] and _fits(node, [src, cos, sin]):
                    return _Match([src, cos, sin], [first, second, *found.inside])
    return None


def _orders(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the two tensors that a node reads, in both orders."""
    first, second = (*node.args, None, None)[:2]
    if isinstance(first, fx.Node) and isinstance(second, fx.Node):
        yield first, second
        yield second, first


def _is_alone(node: fx.Node, name: str) -> bool:
    """Return whether a value is such a call, which one node reads."""
    return aten_name(node) == name and len(node.users) == 1


def _turned(node: fx.Node) -> _Match | None:
    """Return what a node is made of, if it is ``cat([-x[..., h:], x[..., :h]], -1)``."""
    if not _is_alone(node, "cat"):
        return None
    a = arguments_of(node)
    parts = a.tensors
    if not isinstance(parts, list | tuple) or len(parts) != 2 or a.dim not in (-1, _rank(node) - 1):
        return None
    minus, low = parts
    if not isinstance(minus, fx.Node) or not _is_alone(minus, "neg"):
        return None
    high = minus.all_input_nodes[0]
    above, below = _half(high, 1), _half(low, 0)
    if above is None or below is None or above.srcs != below.srcs:
        return None
    inside = dict.fromkeys([node, minus, *above.inside, *below.inside])
    return _Match(above.srcs, list(inside))


def _half(node: object, index: int) -> _Match | None:
    """Return what a node takes the lower half (0) of the last dimension of, or the upper one."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or len(node.users) > 1:
        return None
    source, key = node.args
    assert isinstance(source, fx.Node)
    if aten_name(source) == "chunk":
        a = arguments_of(source)
        halves = a.chunks == 2 and a.dim in (-1, _rank(a.input) - 1) and len(source.users) == 2
        fits = halves and key == index and _last_size(a.input) is not None
        return _Match([a.input], [node, source]) if fits else None
    size = _last_size(source)
    if size is None or not isinstance(key, tuple) or len(key) != _rank(source):
        return None
    *others, last = key
    if any(other != slice(None) for other in others) or not isinstance(last, slice):
        return None
    bounds = (last.start or 0, size if last.stop is None else last.stop)
    begin = index * size // 2
    fits = bounds == (begin, begin + size // 2) and last.step in (None, 1)
    return _Match([source], [node]) if fits else None


def _rank(node: fx.Node) -> int:
    return len(node.meta["value"].shape or ())


def _last_size(node: fx.Node) -> int | None:
    """Return the last size of a tensor, if it is even and the same in each call."""
    sizes = node.meta.get("sizes")
    size = int(sizes[-1]) if sizes and sizes[-1].isdecimal() else 1
    return size if size % 2 == 0 else None


def _fits(node: fx.Node, srcs: list[fx.Node]) -> bool:
    """Return whether all are float32, and the result has the shape of the first source."""
    alike = all(n.meta["value"].dtype == torch.float32 for n in (node, *srcs))
    return alike and node.meta["sizes"] == srcs[0].meta["sizes"]

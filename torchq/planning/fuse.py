# SPDX-License-Identifier: Apache-2.0
"""From operations to layers: which of them become one quantized op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, fx, nn

from torchq.capture.module_kinds import MATMUL
from torchq.capture.ops import Op, Role, clip_bounds, have_one_size, only_reader
from torchq.nn.batch_norm import TRANSPOSED, Affine
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.float_modules import Add, Attention, Cat, Mul
from torchq.planning.layers import HARD, Layer
from torchq.planning.plan import Plan
from torchq.report import reasons

_ALONE = {Role.SLOPES: reasons.CHANNEL_SLOPES, Role.NORM: reasons.ALONE_ON_ROWS}
"""Roles of operations that stay float where no layer takes them, and why."""


def fuse(plan: Plan) -> Plan:
    """Return the plan with its layers, in the order of their results.

    What a configuration wants dynamic and has only a static form stays float.
    """
    finder = _Finder(plan.ops)

    def configured(layer: Layer) -> Layer:
        config, dst = plan.config(layer.op.base), plan.config(f"{layer.op.base}.dst")
        emits = dst is not None and not dst.dynamic
        why = reasons.NO_DYNAMIC_FORM if config is not None and config.dynamic else ""
        return replace(layer, may_emit_int8=emits, reason=why)

    layers = tuple(map(configured, finder.run()))
    alone = [op for op in plan.ops.values() if op.role in _ALONE and op.node not in finder.taken]
    left = {op.node: replace(op, reason=_ALONE[op.role]) for op in alone}
    return replace(plan, layers=layers, ops={**plan.ops, **left})


class _Finder:
    def __init__(self, ops: Mapping[fx.Node, Op]) -> None:
        self.ops = ops
        self.taken: set[fx.Node] = set()

    def run(self) -> list[Layer]:
        layers: list[Layer] = []
        # Matmuls take what they can first, the last one first: an addition goes to the nearer one.
        for op in reversed(list(self.ops.values())):
            if op.role is Role.MATMUL:
                layers.append(self._matmul(op))
            elif op.role is Role.PRODUCT and op.node not in self.taken:
                layers.append(self._other(op))
            elif op.role is Role.MEAN:
                layers.append(self._start(op))
        layers.extend(self._expressions())
        for op in self.ops.values():
            if op.node not in self.taken and (self._is_alone(op) or op.role is Role.COMBINE):
                layers.append(self._other(op))
        layers = [self._with_fakes(layer) for layer in layers]
        position = {node: i for i, node in enumerate(self.ops)}
        return sorted(layers, key=lambda layer: position[layer.dst])

    def _start(self, op: Op) -> Layer:
        layer = Layer(op, op.srcs, op.node, (op, *op.absorbed))
        self.taken.update(part.node for part in layer.parts)
        return layer

    def _matmul(self, op: Op) -> Layer:
        layer = self._start(op)
        pad = self.ops.get(op.srcs[0])
        if pad is not None and pad.role is Role.PAD and pad.pad and self._merges(pad, op):
            layer = replace(layer, pad=pad.pad, srcs=pad.srcs, parts=(*layer.parts, pad))
            self.taken.add(pad.node)
        return self._with_followers(layer)

    def _merges(self, pad: Op, op: Op) -> bool:
        alone = list(pad.node.users) == [op.node]
        takes = alone and not isinstance(op.module, (nn.Linear, *TRANSPOSED))
        return takes and not isinstance(getattr(op.module, "padding", None), str)

    def _is_alone(self, op: Op) -> bool:
        """Return whether it becomes a depthwise convolution."""
        shape = op.node.meta["value"].shape
        same = bool(op.srcs) and op.srcs[0].meta["value"].shape == shape
        fits = op.role is Role.NORM and 2 < len(shape) < 6 and same
        return fits and not self._follows_kept(op) and _channel_affine(op, 1) is not None

    def _follows_kept(self, op: Op) -> bool:
        """Return whether an override keeps its matmul float: int8 would only round."""
        before = self.ops.get(op.srcs[0])
        if before is None or not before.requested or list(before.node.users) != [op.node]:
            return False
        return before.is_matmul or isinstance(before.owner, MATMUL)

    def _other(self, op: Op) -> Layer:
        layer = self._start(op)
        if op.role is Role.NORM:
            affine = _channel_affine(op, 1)
            assert affine is not None
            layer = replace(layer, affines=(affine,))
        return layer if isinstance(op.module, Attention | Cat) else self._with_followers(layer)

    def _with_followers(self, layer: Layer) -> Layer:
        """Return the layer with the operations after it, while each alone reads the one before."""
        while layer.slopes is None and (op := self._next(layer.dst)) is not None:
            bounds = clip_bounds(op.module)
            if op.role is Role.PASS:
                pass
            elif (affine := self._affine(layer, op)) is not None:
                layer = replace(layer, affines=(*layer.affines, affine))
            elif self._fits_sum(layer, op):
                residual = next(src for src in op.srcs if src is not layer.dst)
                layer = replace(layer, residual=residual)
            elif self._fits_clip(layer, bounds):
                layer = replace(layer, clip=bounds)
            elif self._fits_slopes(layer, op):
                assert isinstance(op.module, nn.PReLU)
                layer = replace(layer, slopes=op.module.weight.detach())
            else:
                break
            layer = self._ending_in(op, layer)
        return layer

    def _with_fakes(self, layer: Layer) -> Layer:
        """Return the layer with the fake quantizer of its result, and what dequantizes then."""
        src = layer.dst
        while len(layer.dst.users) == 1:
            op = self.ops.get(next(iter(layer.dst.users)))
            free = op is not None and op.node not in self.taken
            if op is None or not free or op.role is not Role.FAKE or list(op.srcs) != [src]:
                break
            assert isinstance(op.module, FakeQuantize)
            if layer.role not in HARD and op.module.levels not in (128, 256):
                break
            layer = self._ending_in(op, replace(layer, fake=op.module))
        return layer

    def _ending_in(self, op: Op, layer: Layer) -> Layer:
        """Return the layer with one more part, whose result is the layer's."""
        self.taken.add(op.node)
        return replace(layer, dst=op.node, parts=(*layer.parts, op))

    def _next(self, node: fx.Node) -> Op | None:
        """Return the one operation that reads a node, if it may be fused and no layer has it."""
        op = only_reader(node, self.ops)
        return None if op is None or op.node in self.taken else op

    def _affine(self, layer: Layer, op: Op) -> Affine | None:
        """Return what an operation does to each channel of a matmul, or to a whole product."""
        if layer.role not in HARD or layer.clip or layer.residual is not None:
            return None
        shape = layer.dst.meta["value"].shape
        if op.node.meta["value"].shape != shape or op.role is Role.FAKE:
            return None
        if layer.role is Role.PRODUCT:  # a division by sqrt(d), say
            affine = _channel_affine(op, 0) if op.role is Role.UNARY else None
            return affine if affine and affine[0].numel() == affine[1].numel() == 1 else None
        return _channel_affine(op, len(shape) - 1 if isinstance(layer.op.module, nn.Linear) else 1)

    def _fits_sum(self, layer: Layer, op: Op) -> bool:
        if layer.role is not Role.MATMUL or layer.residual is not None or layer.clip:
            return False
        if op.role is not Role.COMBINE or not isinstance(op.module, Add):
            return False
        other = next(src for src in op.srcs if src is not layer.dst)
        # What is the same for all of a batch broadcasts to other ones; a sum would not.
        return have_one_size(other, layer.dst) and bool(other.meta["varying"])

    def _fits_clip(self, layer: Layer, bounds: tuple[float, float] | None) -> bool:
        if bounds is None or layer.clip is not None or layer.role is Role.UNARY:
            return False
        return layer.role in HARD or bounds == (0.0, math.inf)

    def _fits_slopes(self, layer: Layer, op: Op) -> bool:
        """Return whether the slopes are of the matmul's channels."""
        if layer.role is not Role.MATMUL or op.role is not Role.SLOPES or layer.clip is not None:
            return False
        linear = isinstance(layer.op.module, nn.Linear)
        return not linear or len(layer.dst.meta["value"].shape) == 2

    # Expressions of one tensor

    def _expressions(self) -> list[Layer]:
        """Functions, and sums and products of functions, of one tensor: one table each."""
        roots = self._roots()
        layers = []
        for op in reversed(list(self.ops.values())):
            if op.node in self.taken or op.role not in (Role.UNARY, Role.COMBINE):
                continue
            found = [(len(parts), root, parts) for root, parts in roots[op.node].items() if parts]
            closed = [item for item in found if self._is_closed(op, item[2])]
            if closed:
                _, root, parts = max(closed, key=lambda item: item[0])
                if self._is_taken_over(root, parts):
                    continue
                function = _evaluate(self.ops, root, op.node)
                layers.append(Layer(op, [root], op.node, parts, function=function))
                self.taken.update(part.node for part in parts)
        return layers

    def _is_taken_over(self, root: fx.Node, parts: tuple[Op, ...]) -> bool:
        """Return whether it is the relu of an add or mul, or a batch norm's clip."""
        before = self.ops.get(root)
        taken = before is None or before.node in self.taken
        if before is None or taken or self._next(root) is not parts[0]:
            return False
        bounds = [clip_bounds(part.module) for part in parts if part.role is not Role.PASS]
        if self._is_alone(before):
            return len(bounds) == 1 and bounds[0] is not None
        return isinstance(before.module, Add | Mul) and bounds == [(0.0, math.inf)]

    def _roots(self) -> dict[fx.Node, dict[fx.Node, tuple[Op, ...]]]:
        """Node -> every node that it is a function of -> the operations in between."""
        table: dict[fx.Node, dict[fx.Node, tuple[Op, ...]]] = {}

        def of(node: fx.Node) -> dict[fx.Node, tuple[Op, ...]]:
            return table.setdefault(node, {node: ()})

        for op in self.ops.values():
            mine = of(op.node)
            if op.node in self.taken or op.requested:
                continue
            if op.role in (Role.UNARY, Role.PASS):
                for root, parts in of(op.srcs[0]).items():
                    mine[root] = (*parts, op)
            elif op.role is Role.COMBINE and isinstance(op.module, Add | Mul):
                first, second = (of(src) for src in op.srcs)
                for root in first.keys() & second.keys():
                    more = [part for part in second[root] if part not in first[root]]
                    mine[root] = (*first[root], *more, op)
        return table

    def _is_closed(self, last: Op, parts: tuple[Op, ...]) -> bool:
        """Return whether nobody else reads what is in between."""
        nodes = {part.node for part in parts}
        free = self.taken.isdisjoint(nodes)
        return free and all(set(part.node.users) <= nodes for part in parts if part is not last)


def _evaluate(
    ops: Mapping[fx.Node, Op], root: fx.Node, node: fx.Node
) -> Callable[[Tensor], Tensor]:
    """Return a function of the root that computes the node."""

    def run(value: Tensor) -> Tensor:
        known = {root: value.clone()}

        def visit(current: fx.Node) -> Tensor:
            if current not in known:
                op = ops[current]
                srcs = [visit(src).clone() for src in op.srcs]  # modules may work in place
                known[current] = srcs[0] if op.module is None else op.module(*srcs)
            return known[current]

        return visit(node)

    return run


def _channel_affine(op: Op, axis: int) -> Affine | None:
    """(scale, shift) per channel along ``axis`` of the result, if that is all that it does."""
    rank = len(op.node.meta["value"].shape or ())
    if op.role is Role.OPAQUE or op.affine is None:
        return None
    found = []
    for value in op.affine:
        sizes = [1] * (rank - value.dim()) + list(value.shape)
        if any(size != 1 for i, size in enumerate(sizes) if i != axis):
            return None
        found.append(value.reshape(-1) if value.numel() > 1 else value.reshape(()))
    return found[0], found[1]

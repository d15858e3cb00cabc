# SPDX-License-Identifier: Apache-2.0
"""From operations to layers: which of them become one quantized op."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from torchq.capture.module_kinds import MATMUL
from torchq.capture.ops import Op, Role, clip_bounds, have_one_size, only_reader
from torchq.nn.batch_norm import TRANSPOSED, Affine, fold_affines
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.float_modules import Add, Attention, Cat, Mul

HARD = (Role.MATMUL, Role.PRODUCT)
"""What int8 is for: they quantize what they read."""


@dataclass(eq=False)
class Layer:
    """Operations that become one quantized op.

    Attributes:
        op: the main operation.
        srcs: nodes it reads, without the residual.
        dst: node of its result; the converted graph computes the layer there.
        parts: the operations it consists of; those behind the main one are fused into it.
        affines: factors and shifts of its channels behind it, folded into the weight.
        clip: bounds of a relu, relu6 or hardtanh behind it.
        residual: node added before the clip.
        pad: zeros before and after each spatial dim, beside those of the module.
        function: of a UNARY, what the whole chain computes.
        slopes: of a leaky relu behind it, one per channel.
        fake: the fake quantizer of its result.
        src_factors: what each channel of its source was divided by; float modules lack them.
    """

    op: Op
    srcs: list[fx.Node]
    dst: fx.Node
    parts: list[Op]
    affines: list[Affine] = field(default_factory=list)
    clip: tuple[float, float] | None = None
    residual: fx.Node | None = None
    pad: tuple[list[int], list[int]] | None = None
    function: Callable[[Tensor], Tensor] | None = None
    slopes: Tensor | None = None
    fake: FakeQuantize | None = None
    src_factors: Tensor | None = None

    @property
    def reads(self) -> list[fx.Node]:
        """All nodes it reads."""
        return self.srcs if self.residual is None else [*self.srcs, self.residual]

    @property
    def role(self) -> Role:
        """Return the role of the main operation; a NORM is a depthwise MATMUL."""
        if self.function is not None:
            return Role.UNARY
        return Role.MATMUL if self.op.role is Role.NORM else self.op.role

    def float_module(self) -> nn.Module:
        """Return the main operation with the factors and shifts folded into it."""
        return fold_affines(self.unfolded(), self.affines)

    def unfolded(self) -> nn.Module:
        """Return the main operation alone; of a NORM, a convolution that changes nothing."""
        norm = self.op.role is Role.NORM
        module = _identity(self.dst.meta["value"].shape) if norm else self.op.module
        assert module is not None
        return module


def find_layers(ops: dict[fx.Node, Op]) -> list[Layer]:
    """Layers in the order of their results."""
    return _Finder(ops).run()


class _Finder:
    def __init__(self, ops: dict[fx.Node, Op]) -> None:
        self.ops = ops
        self.taken: set[Op] = set()

    def run(self) -> list[Layer]:
        layers: list[Layer] = []
        # Matmuls take what they can first, the last one first: an addition goes to the nearer one.
        for op in reversed(list(self.ops.values())):
            if op.role is Role.MATMUL:
                layers.append(self._matmul(op))
            elif op.role is Role.PRODUCT and op not in self.taken:
                layers.append(self._other(op))
            elif op.role is Role.MEAN:
                layers.append(self._start(op))
        layers.extend(self._expressions())
        for op in self.ops.values():
            if op not in self.taken and (self._is_alone(op) or op.role is Role.COMBINE):
                layers.append(self._other(op))
        for layer in layers:
            self._absorb_fake(layer)
        position = {node: i for i, node in enumerate(self.ops)}
        return sorted(layers, key=lambda layer: position[layer.dst])

    def _start(self, op: Op) -> Layer:
        layer = Layer(op, list(op.srcs), op.node, [op, *op.absorbed])
        self.taken.update(layer.parts)
        return layer

    def _matmul(self, op: Op) -> Layer:
        layer = self._start(op)
        pad = self.ops.get(op.srcs[0])
        if pad is not None and pad.role is Role.PAD and pad.pad and self._merges(pad, op):
            layer.pad, layer.srcs = pad.pad, list(pad.srcs)
            layer.parts.append(pad)
            self.taken.add(pad)
        self._absorb(layer)
        return layer

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
            layer.affines.append(affine)
        if not isinstance(op.module, Attention | Cat):
            self._absorb(layer)
        return layer

    def _absorb(self, layer: Layer) -> None:
        """Extend the layer by the operations behind it, while each alone reads the one before."""
        while (op := self._next(layer.dst)) is not None:
            bounds = clip_bounds(op.module)
            if op.role is Role.PASS:
                pass
            elif (affine := self._affine(layer, op)) is not None:
                layer.affines.append(affine)
            elif self._fits_sum(layer, op):
                layer.residual = next(src for src in op.srcs if src is not layer.dst)
            elif self._fits_clip(layer, bounds):
                layer.clip = bounds
            elif self._fits_slopes(layer, op):
                assert isinstance(op.module, nn.PReLU)
                layer.slopes = op.module.weight.detach()
            else:
                break
            layer.parts.append(op)
            layer.dst = op.node
            self.taken.add(op)
            if layer.slopes is not None:
                break

    def _absorb_fake(self, layer: Layer) -> None:
        """Extend the layer by the fake quantizer of its result, and what dequantizes behind it."""
        src = layer.dst
        while len(layer.dst.users) == 1:
            op = self.ops.get(next(iter(layer.dst.users)))
            if op is None or op in self.taken or op.role is not Role.FAKE or op.srcs != [src]:
                break
            assert isinstance(op.module, FakeQuantize)
            if layer.role not in HARD and op.module.levels not in (128, 256):
                break
            layer.fake, layer.dst = op.module, op.node
            layer.parts.append(op)
            self.taken.add(op)

    def _next(self, node: fx.Node) -> Op | None:
        """Return the one operation that reads a node, if it may be fused and no layer has it."""
        op = only_reader(node, self.ops)
        return None if op in self.taken else op

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
            if op in self.taken or op.role not in (Role.UNARY, Role.COMBINE):
                continue
            found = [(len(parts), root, parts) for root, parts in roots[op.node].items() if parts]
            closed = [item for item in found if self._is_closed(op, item[2])]
            if closed:
                _, root, parts = max(closed, key=lambda item: item[0])
                if self._is_taken_over(root, parts):
                    continue
                function = _evaluate(self.ops, root, op.node)
                layers.append(Layer(op, [root], op.node, list(parts), function=function))
                self.taken.update(parts)
        return layers

    def _is_taken_over(self, root: fx.Node, parts: tuple[Op, ...]) -> bool:
        """Return whether it is the relu of an add or mul, or a batch norm's clip."""
        before = self.ops.get(root)
        if before is None or before in self.taken or self._next(root) is not parts[0]:
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
            if op in self.taken or op.requested:
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
        free = self.taken.isdisjoint(parts)
        return free and all(set(part.node.users) <= nodes for part in parts if part is not last)


def _evaluate(ops: dict[fx.Node, Op], root: fx.Node, node: fx.Node) -> Callable[[Tensor], Tensor]:
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


def _identity(shape: tuple[int, ...]) -> nn.Module:
    """Return a convolution of one tap per channel that changes nothing."""
    cls = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
    conv = cls(shape[1], shape[1], 1, groups=shape[1], bias=False)
    conv.weight = nn.Parameter(torch.ones_like(conv.weight), False)
    return conv.eval()

# SPDX-License-Identifier: Apache-2.0
"""Finds the values that share one scale and zero point, and those whose scale the model gives.

Nodes that are joined by what merely moves elements, or pools them, form a group: one scale and
zero point. So do the sources of a concatenation that nobody else reads, with its result; of its
other sources :mod:`torchq.convert.recipes.concatenations` decides when the ranges are known. An
average over all positions begins a group of its own: means lie closer together than values. Where
the model rounds a group to levels itself, with a fake quantizer, that says what the scale and zero
point are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from torchq.capture.ops import Op, Role, clip_bounds
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.fake_scales import Fixed, fixed_qparams
from torchq.planning.layers import KEEPING, Layer
from torchq.planning.plan import Plan, averages
from torchq.report import reasons


def find_groups(plan: Plan) -> Plan:
    """Return the plan with its groups, and with the levels of those that have fake quantizers."""
    return _Groups(plan).run()


class _Groups:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.ops = plan, dict(plan.ops)
        self.parent: dict[fx.Node, fx.Node] = {}
        self.joined: set[fx.Node] = set()
        self.fakes: dict[fx.Node, Fixed] = {}
        self.levels: dict[fx.Node, Fixed] = {}  # by root

    def run(self) -> Plan:
        in_layers = {part.node for layer in self.plan.layers for part in layer.parts}
        for op in self.ops.values():
            if op.node not in in_layers and self._keeps(op):
                self._join(op.node, op.srcs[0])
        for op in list(self.ops.values()):
            if op.role is Role.FAKE:
                self._fake(op, absorbed=op.node in in_layers)
        layers = tuple(self._follow(layer) for layer in self.plan.layers)
        plan = replace(self.plan, ops=self.ops, layers=layers, joined=frozenset(self.joined))
        plan = replace(plan, fakes=self.fakes, levels=self.levels, roots=self._roots())
        self._join_concatenations(plan)
        return replace(plan, roots=self._roots())

    def root(self, node: fx.Node) -> fx.Node:
        while self.parent.get(node, node) is not node:
            node = self.parent[node]
        return node

    def _roots(self) -> dict[fx.Node, fx.Node]:
        return {node: self.root(node) for node in self.parent}

    def _fixed(self, node: fx.Node) -> Fixed | None:
        return self.levels.get(self.root(node))

    def _keeps(self, op: Op) -> bool:
        if op.role not in KEEPING or not op.srcs:
            return False
        src = op.srcs[0]
        if src.meta["value"].is_sequence:  # of a chunk, yes; of an LSTM, no
            return src in self.joined
        return bool(src.meta["varying"]) or not op.node.meta["positional"]

    def _join(self, node: fx.Node, src: fx.Node) -> None:
        self.parent[self.root(node)] = self.root(src)
        self.joined.add(node)

    # Fake quantizers

    def _fake(self, op: Op, absorbed: bool) -> None:
        """Give a group the scale and zero point of a fake quantizer."""
        fixed, src = self._says(op), op.srcs[0]
        before = self._fixed(src)
        known = before is not None and before.dequantize == fixed.quantize
        if not absorbed and fixed.keeps and (known or self._rounds_first(src, fixed)):
            self.ops[op.node] = replace(op, role=Role.PASS)
            self._join(op.node, src)
        else:
            self.fakes[op.node] = fixed
        self.levels[self.root(op.node)] = fixed

    def _says(self, op: Op) -> Fixed:
        assert isinstance(op.module, FakeQuantize)
        return fixed_qparams(op.module, self.plan.default.activation_dtype)

    def _rounds_first(self, src: fx.Node, fixed: Fixed) -> bool:
        """Return whether values may be rounded before they are moved: no other form is read."""
        root = self.root(src)
        if root in self.levels:
            return False
        for node in self.plan.captured.graph.nodes:
            if self.root(node) is not root:
                continue
            if averages(self.ops, node):
                return False
            for op in (self.ops.get(user) for user in node.users):
                if op is None or not (op.node in self.joined or self._is_same(op, fixed)):
                    return False
        return True

    def _is_same(self, op: Op, fixed: Fixed) -> bool:
        """Return whether it is a fake quantizer of these parameters, or asks for sizes."""
        if op.role is not Role.FAKE:
            return op.role is Role.SHAPE
        other = self._says(op)
        return other.keeps and other.quantize == fixed.quantize

    def _follow(self, layer: Layer) -> Layer:
        """Give a clip or mean of fake-quantized values the levels of their fake quantizer.

        Not where fake quantizers alone read it: each rounds the float mean, once. A mean that is
        fake-quantized only afterwards was trained on float values.
        """
        clips = [clip_bounds(p.module) for p in layer.parts if p.role is not Role.PASS]
        follows = layer.role is Role.MEAN or (layer.role is Role.UNARY and None not in clips)
        source = self._fixed(layer.srcs[0]) if follows else None
        dst = self._fixed(layer.dst)
        if layer.role is Role.MEAN and source is None and dst is not None:
            layer = replace(layer, reason=reasons.NO_LEVELS)
        rounded = layer.role is Role.MEAN and all(user in self.fakes for user in layer.dst.users)
        if source is not None and dst is None and not rounded:
            self.levels[self.root(layer.dst)] = Fixed(source.dequantize, source.dequantize)
        return layer

    # Concatenations

    def _join_concatenations(self, plan: Plan) -> None:
        """Give the sources of a concatenation its scale, where nobody else reads them."""
        layers = plan.concatenations
        concatenations = {layer.op.node for layer in layers}
        for layer in layers:
            for src in layer.srcs:
                alone = plan.users.get(self.root(src), set()) <= concatenations
                if src.meta["varying"] and alone and self._may_merge(src, layer.dst):
                    first, second = self.root(src), self.root(layer.dst)
                    if first is not second:
                        self.parent[first] = second

    def _may_merge(self, src: fx.Node, dst: fx.Node) -> bool:
        """Return whether fake quantizers, if any, say the same or nothing of the source."""
        first, second = self._fixed(src), self._fixed(dst)
        if first is None:
            return second is None or second.keeps
        return second is not None and first.dequantize == second.dequantize

# SPDX-License-Identifier: Apache-2.0
"""A plan: what is decided of a captured model.

:mod:`torchq.planning.passes` lists what decides. Each pass takes a plan and returns another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx, nn

from torchq.capture.graph import Captured
from torchq.capture.ops import Op, Role
from torchq.nn.fake_scales import Fixed
from torchq.nn.float_modules import Cat
from torchq.planning.layers import HARD, Layer
from torchq.quantization.config import Overrides, QConfig, resolve


@dataclass(frozen=True, eq=False)
class Plan:
    """Decisions for one captured model, whose graph is not changed.

    Attributes:
        captured: what is decided about.
        default: how to quantize what no override names.
        overrides: exceptions, by name.
        coarse: nodes of layers that one scale does not suit, as calibration tells, and why; None
            before that.
        ops: node -> operation.
        sized: values whose range depends on sizes of the input.
        self_contained: modules that are quantized as one unit.
        layers: in the order of their results; each says whether it stays float.
        roots: node -> the node that stands for its group, where that is another one.
        joined: nodes that only move or pool what they read.
        fakes: node of a fake quantizer -> what it says; those that change nothing are not in.
        levels: root of a group, or a node in it -> the levels that a fake quantizer gave it.
        int8: roots of the groups that have an int8 form.
        table_hosts: layer that is a function of each element -> the matmul before it, which has its
            table.
    """

    captured: Captured
    default: QConfig
    overrides: Overrides | None = None
    coarse: Mapping[fx.Node, str] | None = None
    ops: Mapping[fx.Node, Op] = field(default_factory=dict)
    sized: frozenset[fx.Node] = frozenset()
    self_contained: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    roots: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    joined: frozenset[fx.Node] = frozenset()
    fakes: Mapping[fx.Node, Fixed] = field(default_factory=dict)
    levels: Mapping[fx.Node, Fixed] = field(default_factory=dict)
    int8: frozenset[fx.Node] = frozenset()
    table_hosts: Mapping[Layer, Layer] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Return the name of the captured module in the model, with a dot after it."""
        return self.captured.prefix

    def config(self, name: str) -> QConfig | None:
        """Return how to quantize a module, or its destination ``<name>.dst``; None: not at all."""
        return resolve(self.overrides, f"{self.prefix}{name}", self.default)

    def is_chosen(self, name: str) -> bool:
        """Return whether an override chooses a configuration for a module."""
        return resolve(self.overrides, f"{self.prefix}{name}", None) is not None

    # Layers

    @cached_property
    def active(self) -> list[Layer]:
        """The quantized layers."""
        return [layer for layer in self.layers if not layer.reason]

    @cached_property
    def layer_at(self) -> dict[fx.Node, Layer]:
        """Node -> the quantized layer whose result it is."""
        return {layer.dst: layer for layer in self.active}

    @property
    def layer_names(self) -> set[str]:
        """Return the names, in the model, of the modules that quantized layers are."""
        owned = [layer.op for layer in self.active if layer.op.owner is not None]
        return {f"{self.prefix}{op.base}" for op in owned}

    @property
    def dynamic_names(self) -> set[str]:
        """Return the names, in the model, of linear layers that are dynamic in all their calls."""
        calls = [op for op in self.ops.values() if isinstance(op.owner, nn.Linear)]
        static = {op.base for op in calls if op.role is not Role.DYNAMIC}
        return {f"{self.prefix}{op.base}" for op in calls if op.base not in static}

    @cached_property
    def dynamic_at(self) -> dict[fx.Node, Op]:
        """Node -> the operation whose result it is, of those that passes made dynamic."""
        return {op.dst: op for op in self.ops.values() if op.role is Role.DYNAMIC}

    @cached_property
    def dynamic_wholes(self) -> dict[fx.Node, Op]:
        """Node of an operation that is a part of a dynamic one -> that one."""
        wholes = self.dynamic_at.values()
        return {part.node: op for op in wholes for part in (*op.absorbed, *op.behind)}

    @cached_property
    def inside(self) -> set[fx.Node]:
        """Nodes that exist only within quantized layers."""
        inside = {part.node for layer in self.active for part in layer.parts}
        inside |= {op.node for op in self.dynamic_at.values()} | self.dynamic_wholes.keys()
        return inside - self.layer_at.keys() - self.dynamic_at.keys()

    @property
    def multiplies(self) -> bool:
        """Return whether it computes anything in int8 that is worth a graph."""
        hard = any(layer.role in HARD for layer in self.active)
        return hard or bool(self.dynamic_at) or bool(self.self_contained)

    @property
    def concatenations(self) -> list[Layer]:
        """Return them in the order of their results, quantized or not."""
        return [layer for layer in self.layers if isinstance(layer.op.module, Cat)]

    def emits_int8(self, layer: Layer) -> bool:
        """Return whether a quantized layer's destination is int8."""
        return self.is_int8(layer.dst) and (layer.fake is not None or layer.may_emit_int8)

    # Groups: values that share one scale and zero point

    def root(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for the group of ``node``."""
        return self.roots.get(node, node)

    def is_int8(self, node: fx.Node) -> bool:
        """Return whether the value has an int8 form."""
        return self.root(node) in self.int8

    def fixed(self, node: fx.Node) -> Fixed | None:
        """Return what a fake quantizer says about the group of ``node``."""
        return self.levels.get(self.root(node))

    def comes_as_int8(self, node: fx.Node) -> bool:
        """Return whether the value is made as int8, not float32 that some reader quantizes."""
        layer = self.layer_at.get(node)
        made = node in self.joined or (layer is not None and self.emits_int8(layer))
        made |= node in self.fakes
        return made and self.is_int8(node)

    @cached_property
    def groups(self) -> dict[fx.Node, list[fx.Node]]:
        """Root -> the nodes that bring values into the group, for int8 groups to be observed."""
        result: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        nodes = [node for node in self.captured.graph.nodes if node not in self.inside]
        for node in nodes:
            observed = self.is_int8(node) and self.fixed(node) is None
            if observed and node not in self.joined:
                result[self.root(node)].append(node)
        return dict(result)

    def group_config(self, producers: list[fx.Node]) -> tuple[str, QConfig]:
        """Return name for messages, and configuration, of the group with these producers."""
        for node in producers:
            layer = self.layer_at.get(node)
            if layer is not None and self.emits_int8(layer):
                config = self.config(f"{layer.op.base}.dst")
                assert config is not None
                return f"{self.prefix}{layer.op.base}.dst", config
        root = self.root(producers[0])
        for layer in self.active:
            if any(self.root(node) is root for node in layer.reads):
                config = self.config(layer.op.base)
                assert config is not None
                return f"{self.prefix}{layer.op.base}", config
        return f"{self.prefix}{producers[0].name}", self.default

    @cached_property
    def readers(self) -> Mapping[fx.Node, int]:
        """Root -> how many quantized layers read the group as int8."""
        count: dict[fx.Node, int] = defaultdict(int)
        for layer in self.active:
            residual = layer.residual
            for node in layer.reads:
                if node is not residual or self.comes_as_int8(node):
                    count[self.root(node)] += 1
        return dict(count)

    @cached_property
    def users(self) -> Mapping[fx.Node, set[fx.Node]]:
        """Root -> the nodes that read its group's values, without what moves, pools or measures."""
        found: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in self.captured.graph.nodes:
            for user in node.users:
                op = self.ops.get(user)
                if user not in self.joined and not (op and op.role is Role.SHAPE):
                    found[self.root(node)].add(user)
        return dict(found)

    def function_of(self, root: fx.Node) -> Layer | None:
        """Return the function that alone reads the values of a group, if it becomes a table.

        None behind an average pool: the function reads averages, so it says little about the values
        before the pool.
        """
        functions = (layer for layer in self.active if layer.role is Role.UNARY)
        layer = next((f for f in functions if self.root(f.srcs[0]) is root), None)
        users = self.users.get(root, set())
        if layer is None or not users <= {part.node for part in layer.parts}:
            return None
        if any(self.root(node) is root and averages(self.ops, node) for node in self.joined):
            return None
        return layer if layer.function is not None else None


def averages(ops: Mapping[fx.Node, Op], node: fx.Node) -> bool:
    """Return whether it is a pool that may give others than the values it reads."""
    op = ops.get(node)
    pools = op is not None and op.role is Role.POOL
    return op is not None and pools and "Max" not in type(op.module).__name__

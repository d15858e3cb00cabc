# SPDX-License-Identifier: Apache-2.0
"""Decides which values are int8, and which share one scale and zero point.

Nodes that are joined by what merely moves elements, or pools them, form a group: one scale and
zero point. So do the sources of a concatenation that nobody else reads, with its result; of its
other sources ``concatenations.shared_qparams`` decides when the ranges are known. An average over
all positions begins a group of its own: means lie closer together than values. A group is int8 if a
matmul reads it, or if a layer emits it as int8 and another can read that, or if the model rounds it
to levels itself: with a fake quantizer, which then says what the scale and zero point are. Where an
int8 value is read as float32, the converted graph dequantizes it there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

from torch import fx, nn

from torchq.capture.graph import Captured
from torchq.capture.module_kinds import NO_DYNAMIC_FORM, RECURRENT, why_float
from torchq.capture.ops import Op, Role, clip_bounds
from torchq.convert.fuse import HARD, Layer, find_layers
from torchq.convert.fuse_attention import fuse_attention
from torchq.convert.fuse_dynamic import make_dynamic
from torchq.convert.lengths import LENGTH, leave_lengths
from torchq.convert.phases import coarse_phases
from torchq.convert.recognize import recognize
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.fake_scales import Fixed, fixed_qparams, is_per_token
from torchq.nn.float_modules import Cat
from torchq.quantization.config import Overrides, QConfig, resolve

_KEEPING = (Role.MOVE, Role.PASS, Role.POOL, Role.PAD)


class Plan:
    """Decisions for one captured model; the graph is not changed.

    Attributes:
        captured: what was decided about.
        ops: node -> operation.
        layers: in the order of their results.
        layer_at: node -> the layer whose result it is, where that is quantized.
        inside: nodes that exist only within quantized layers.
        reasons: layer -> why it stays float; "" where it is quantized.
        fakes: node of a fake quantizer -> what it says; those that change nothing are not in.
        self_contained: modules that are quantized by themselves.
        dynamic_at: node -> the dynamic operation whose result it is.
        dynamic_wholes: operation that is a part of a dynamic one -> that one.
        table_hosts: layer that is a function of each element -> the matmul in front that applies
            its table.
    """

    def __init__(
        self,
        captured: Captured,
        config: QConfig,
        overrides: Overrides | None,
        coarse: Mapping[fx.Node, str] = MappingProxyType({}),
    ) -> None:
        """Decide; ``coarse`` has nodes of layers that one scale does not suit, and why."""
        self.captured, self.prefix = captured, captured.prefix
        self._config, self._overrides = config, overrides
        self.ops = recognize(captured, lambda name: self.config(name) is None)
        fuse_attention(self.ops)
        for op in self.ops.values():
            self._read_tokens(op)
            own = self.config(op.base)
            if own is not None and own.by_rows:
                make_dynamic(op, self.ops)
        self._sized = leave_lengths(self.ops, self._is_chosen)
        self.self_contained = self._find_self_contained()
        self.layers = find_layers(self.ops)
        self.reasons = {layer: self._no_dynamic_form(layer.op) for layer in self.layers}
        self._leave_phases()
        sized = [v for v in self.layers if not self._sized.isdisjoint(v.srcs)]
        self.reasons |= {v: LENGTH for v in sized if not self._is_chosen(v.op.base)}
        self.reasons |= {v: coarse[v.op.node] for v in self.layers if v.op.node in coarse}
        self._parent: dict[fx.Node, fx.Node] = {}
        in_layers = {part for layer in self.layers for part in layer.parts}
        self._joined: set[fx.Node] = set()  # nodes that have the parameters of what they read
        for op in self.ops.values():
            if op not in in_layers and self._keeps(op):
                self._join(op.node, op.srcs[0])
        self.fakes: dict[fx.Node, Fixed] = {}
        self._fixed: dict[fx.Node, Fixed] = {}  # by root
        for op in self.ops.values():
            if op.role is Role.FAKE:
                self._fake(op, absorbed=op in in_layers)
        for layer in self.layers:
            self._follow_fixed(layer)
        self._join_concatenations()
        self._int8: set[fx.Node] = set()
        while not self._decide():
            pass
        for layer in self._active():
            if layer.role in (Role.COMBINE, Role.PRODUCT):  # whatever it reads must have parameters
                self._int8.update(self.root(src) for src in layer.srcs)
        self.layer_at = {layer.dst: layer for layer in self._active()}
        self.inside = {part.node for layer in self._active() for part in layer.parts}
        self.inside -= set(self.layer_at)
        dynamic = [op for op in self.ops.values() if op.role is Role.DYNAMIC]
        self.dynamic_at = {op.dst: op for op in dynamic}
        self.dynamic_wholes = {part: op for op in dynamic for part in op.absorbed + op.behind}
        self.inside.update(part.node for part in [*dynamic, *self.dynamic_wholes])
        self.inside -= set(self.dynamic_at)
        found = {layer: self._table_host(layer) for layer in self._active()}
        self.table_hosts = {layer: host for layer, host in found.items() if host is not None}

    def _leave_phases(self) -> None:
        """Leave float what computes phases of many periods."""
        for one, reason in dict(coarse_phases(self)).items():
            if isinstance(one, Layer):
                self.reasons[one] = self.reasons[one] or reason
            else:
                one.role, one.reason = Role.OPAQUE, reason

    def config(self, name: str) -> QConfig | None:
        """Return how to quantize a module, or its destination ``<name>.dst``; None: not at all."""
        return resolve(self._overrides, f"{self.prefix}{name}", self._config)

    def _is_chosen(self, name: str) -> bool:
        return resolve(self._overrides, f"{self.prefix}{name}", None) is not None

    @property
    def multiplies(self) -> bool:
        """Return whether it computes anything in int8 that is worth a graph."""
        hard = any(layer.role in HARD for layer in self.layer_at.values())
        dynamic = any(op.role is Role.DYNAMIC for op in self.ops.values())
        return hard or dynamic or bool(self.self_contained)

    def root(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for the group of ``node``."""
        while self._parent.get(node, node) is not node:
            node = self._parent[node]
        return node

    def is_int8(self, node: fx.Node) -> bool:
        """Return whether the value has an int8 form."""
        return self.root(node) in self._int8

    def fixed(self, node: fx.Node) -> Fixed | None:
        """Return what a fake quantizer says about the group of ``node``."""
        return self._fixed.get(self.root(node))

    def is_joined(self, node: fx.Node) -> bool:
        """Return whether it only moves or pools what it reads."""
        return node in self._joined

    def comes_as_int8(self, node: fx.Node) -> bool:
        """Return whether the value is made as int8, not float32 that some reader quantizes."""
        layer = self.layer_at.get(node)
        made = self.is_joined(node) or (layer is not None and self.emits_int8(layer))
        made |= node in self.fakes
        return made and self.is_int8(node)

    def emits_int8(self, layer: Layer) -> bool:
        """Return whether a quantized layer's destination is int8."""
        wanted = layer.fake is not None or self._may_emit_int8(layer)
        return self.is_int8(layer.dst) and wanted

    def _table_host(self, layer: Layer) -> Layer | None:
        """Return the matmul whose int8 destination only this function reads."""
        host = self.layer_at.get(layer.srcs[0]) if layer.role is Role.UNARY else None
        if host is None or host.role is not Role.MATMUL or not self.emits_int8(host):
            return None
        alone = set(host.dst.users) <= {part.node for part in layer.parts}
        fake = self.fakes.get(host.dst)
        return host if alone and (fake is None or fake.quantize == fake.dequantize) else None

    def groups(self) -> dict[fx.Node, list[fx.Node]]:
        """Root -> the nodes that bring values into the group, for int8 groups to be observed."""
        result: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        nodes = [node for node in self.captured.graph.nodes if node not in self.inside]
        for node in nodes:
            observed = self.is_int8(node) and self.fixed(node) is None
            if observed and not self.is_joined(node):
                result[self.root(node)].append(node)
        return result

    def group_config(self, producers: list[fx.Node]) -> tuple[str, QConfig]:
        """Name for messages, and configuration, of the group with these producers."""
        for node in producers:
            layer = self.layer_at.get(node)
            if layer is not None and self.emits_int8(layer):
                config = self.config(f"{layer.op.base}.dst")
                assert config is not None
                return f"{self.prefix}{layer.op.base}.dst", config
        root = self.root(producers[0])
        for layer in self._active():
            if any(self.root(node) is root for node in layer.reads):
                config = self.config(layer.op.base)
                assert config is not None
                return f"{self.prefix}{layer.op.base}", config
        return f"{self.prefix}{producers[0].name}", self._config

    def readers(self) -> dict[fx.Node, int]:
        """Root -> how many quantized layers read the group as int8."""
        count: dict[fx.Node, int] = defaultdict(int)
        for layer in self._active():
            residual = layer.residual
            for node in layer.reads:
                if node is not residual or self.comes_as_int8(node):
                    count[self.root(node)] += 1
        return count

    def _find_self_contained(self) -> list[str]:
        """Give these modules' calls their reason; return the names of those without one."""
        calls: dict[str, list[Op]] = defaultdict(list)
        for op in self.ops.values():
            if op.node.op == "call_module" and isinstance(op.owner, RECURRENT):
                calls[op.base].append(op)
        names = []
        for name, ops in calls.items():
            assert ops[0].owner is not None
            values = [src.meta["value"] for op in ops for src in op.node.all_input_nodes]
            dtypes = {value.dtype for value in values if value.dtype is not None}
            reason = why_float(ops[0].owner, self.config(name), dtypes)
            for op in ops:
                op.role, op.reason = Role.OPAQUE, reason
            if not reason:
                names.append(name)
        return names

    def _read_tokens(self, op: Op) -> None:
        """Make a linear layer dynamic if its source is fake-quantized token by token."""
        fake = self.ops.get(op.srcs[0]) if op.role is Role.MATMUL else None
        if fake is not None and is_per_token(fake.owner) and isinstance(op.module, nn.Linear):
            op.role, op.absorbed, op.srcs = Role.DYNAMIC, [fake], [fake.node.all_input_nodes[0]]

    def _no_dynamic_form(self, op: Op) -> str:
        config = self.config(op.base)
        return NO_DYNAMIC_FORM if config is not None and config.dynamic else ""

    def _may_emit_int8(self, layer: Layer) -> bool:
        config = self.config(f"{layer.op.base}.dst")
        return config is not None and not config.dynamic

    def _active(self) -> list[Layer]:
        return [layer for layer in self.layers if not self.reasons[layer]]

    def _keeps(self, op: Op) -> bool:
        if op.role not in _KEEPING or not op.srcs:
            return False
        src = op.srcs[0]
        if src.meta["value"].is_sequence:  # of a chunk, yes; of an LSTM, no
            return src in self._joined
        return bool(src.meta["varying"]) or not op.node.meta["positional"]

    def _join(self, node: fx.Node, src: fx.Node) -> None:
        self._parent[self.root(node)] = self.root(src)
        self._joined.add(node)

    def _fake(self, op: Op, absorbed: bool) -> None:
        """Give a group the scale and zero point of a fake quantizer."""
        assert isinstance(op.module, FakeQuantize)
        fixed, src = fixed_qparams(op.module, self._config.activation_dtype), op.srcs[0]
        before = self.fixed(src)
        known = before is not None and before.dequantize == fixed.quantize
        if not absorbed and fixed.keeps and (known or self._rounds_first(src, fixed)):
            op.role = Role.PASS
            self._join(op.node, src)
        else:
            self.fakes[op.node] = fixed
        self._fixed[self.root(op.node)] = fixed

    def _follow_fixed(self, layer: Layer) -> None:
        """Give a clip or mean of fake-quantized values the levels of their fake quantizer.

        Not where fake quantizers alone read it: each rounds the float mean, once. A mean that is
        fake-quantized only behind was trained on float values.
        """
        clips = [clip_bounds(p.module) for p in layer.parts if p.role is not Role.PASS]
        follows = layer.role is Role.MEAN or (layer.role is Role.UNARY and None not in clips)
        source = self.fixed(layer.srcs[0]) if follows else None
        if layer.role is Role.MEAN and source is None and self.fixed(layer.dst) is not None:
            self.reasons[layer] = "the model has a fake quantizer behind it, and none in front"
        if layer.role is Role.MEAN and all(user in self.fakes for user in layer.dst.users):
            return
        if source is not None and self.fixed(layer.dst) is None:
            kept = Fixed(source.dequantize, source.dequantize)
            self._fixed[self.root(layer.dst)] = kept

    def _rounds_first(self, src: fx.Node, fixed: Fixed) -> bool:
        """Return whether values may be rounded before they are moved: no other form is read."""
        root = self.root(src)
        if root in self._fixed:
            return False
        for node in self.captured.graph.nodes:
            if self.root(node) is not root:
                continue
            if self._averages(node):
                return False
            for op in (self.ops.get(user) for user in node.users):
                if op is None or not (op.node in self._joined or self._is_same(op, fixed)):
                    return False
        return True

    def _averages(self, node: fx.Node) -> bool:
        """Return whether it is a pool that may give others than the values it reads."""
        op = self.ops.get(node)
        pools = op is not None and op.role is Role.POOL
        return op is not None and pools and "Max" not in type(op.module).__name__

    def _is_same(self, op: Op, fixed: Fixed) -> bool:
        """Return whether it is a fake quantizer of these parameters, or asks for sizes."""
        if op.role is not Role.FAKE:
            return op.role is Role.SHAPE
        assert isinstance(op.module, FakeQuantize)
        other = fixed_qparams(op.module, self._config.activation_dtype)
        return other.keeps and other.quantize == fixed.quantize

    def concatenations(self) -> list[Layer]:
        """In the order of their results, quantized or not."""
        return [layer for layer in self.layers if isinstance(layer.op.module, Cat)]

    def users(self) -> dict[fx.Node, set[fx.Node]]:
        """Root -> the nodes that read its group's values, without what moves, pools or measures."""
        found: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in self.captured.graph.nodes:
            for user in node.users:
                op = self.ops.get(user)
                if user not in self._joined and not (op and op.role is Role.SHAPE):
                    found[self.root(node)].add(user)
        return found

    def function_behind(self, root: fx.Node) -> Layer | None:
        """Return the function that alone reads the values of a group, if it becomes a table.

        None where averages lie between: what it makes of them says little of what they are made of.
        """
        functions = (layer for layer in self._active() if layer.role is Role.UNARY)
        layer = next((f for f in functions if self.root(f.srcs[0]) is root), None)
        if layer is None or not self.users()[root] <= {part.node for part in layer.parts}:
            return None
        if any(self.root(node) is root and self._averages(node) for node in self._joined):
            return None
        return layer if layer.function is not None else None

    def _join_concatenations(self) -> None:
        """Give the sources of a concatenation its scale, where nobody else reads them."""
        readers, layers = self.users(), self.concatenations()
        concatenations = {layer.op.node for layer in layers}
        for layer in layers:
            for src in layer.srcs:
                alone = readers[self.root(src)] <= concatenations
                if src.meta["varying"] and alone and self._may_merge(src, layer.dst):
                    self._merge(src, layer.dst)

    def _may_merge(self, src: fx.Node, dst: fx.Node) -> bool:
        """Return whether fake quantizers, if any, say the same or nothing of the source."""
        first, second = self.fixed(src), self.fixed(dst)
        if first is None:
            return second is None or second.keeps
        return second is not None and first.dequantize == second.dequantize

    def _merge(self, src: fx.Node, dst: fx.Node) -> None:
        first, second = self.root(src), self.root(dst)
        if first is not second:
            self._parent[first] = second

    def _read_as_float(self) -> set[fx.Node]:
        """Roots of the groups that something reads which is no quantized layer."""
        inside = {part.node for layer in self._active() for part in layer.parts} | self._joined
        found: set[fx.Node] = set()
        for node in self.captured.graph.nodes:
            op = self.ops.get(node)
            if node not in inside and not (op and op.role is Role.SHAPE):
                found.update(self.root(src) for src in node.all_input_nodes)
        return found

    def _decide(self) -> bool:
        """One attempt; False if some layer turned out to have to stay float."""
        hard = {self.root(node) for node in self._fixed}
        soft: set[fx.Node] = set()
        emitted: set[fx.Node] = set()
        for layer in self._active():
            roots = {self.root(node) for node in layer.srcs}
            (hard if layer.role in HARD else soft).update(roots)
            if layer.residual is not None:
                soft.add(self.root(layer.residual))
            if self._may_emit_int8(layer):
                emitted.add(self.root(layer.dst))
        # What a float operation reads as well gains nothing from 8 bits: a residual stream, say.
        self._int8 = hard | (emitted & soft - self._read_as_float())
        failed = False
        for layer in self._active():
            if layer.role not in HARD and (why := self._why_not(layer, hard)):
                self.reasons[layer], failed = why, True
        return not failed

    def _why_not(self, layer: Layer, hard: set[fx.Node]) -> str:
        """Return why a layer that is no matmul would gain nothing from int8; "" where it does."""
        if not any(self.is_int8(node) for node in layer.srcs):
            return "its sources are float"
        wanted = hard.issuperset(self.root(node) for node in layer.srcs)
        if not self.emits_int8(layer) and (layer.role is Role.UNARY or not wanted):
            return "its destination is float"
        return ""

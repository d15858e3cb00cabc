# SPDX-License-Identifier: Apache-2.0
"""The prepared model: the float graph with observers at the values that will be int8."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.capture.graph import Captured
from torchq.capture.module_kinds import MATMUL
from torchq.capture.ops import Role
from torchq.convert.equalize import between, channel_axis, magnitudes, pairs
from torchq.convert.fuse import Layer
from torchq.convert.graph_data import graph_of, plain_nodes
from torchq.convert.outliers import observed_nodes
from torchq.convert.plan import Plan
from torchq.convert.rows import Row
from torchq.quantization.config import Overrides, QConfig
from torchq.quantization.observers import HistogramObserver, Observer, PerChannelMinMaxObserver
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.equalization import Between
from torchq.quantization.recipes.rows import RowPowers
from torchq.quantization.recipes.sample import SourceSample

_VALUES = 64  # of a channel, at least: a range of fewer may be far from that of other data

_META = (
    *("value", "aten", "owner", "scope", "varying", "static", "positional", "sizes", "phase"),
    *("line", "constant"),
)


class Prepared(nn.Module):
    """Computes what the float model computes, and records ranges on the way.

    Attributes:
        plan: what each node will become.
        observers: one for each group of values that will share a scale and zero point.
        graph_module: the traced model; its opaque submodules may be prepared by torchq.eager.
        opaque_names: those submodules.
        samples: of what dynamic linear layers read, for their recipes.
        channels: ranges of the channels of values that ``outliers`` and ``equalize`` look at.
        rows: of what layers read, for ``coarse``.
        torchq_report: what was decided for each module.
    """

    def __init__(
        self,
        plan: Plan,
        opaque: dict[str, nn.Module],
        samples: dict[str, SourceSample],
        rows: list[Row],
    ) -> None:
        """``opaque``: submodules that were prepared by themselves; ``samples``: by base name."""
        super().__init__()
        self.plan = plan
        # QParams by root and range; None until with_plan, since observers may still record
        self._known: dict[tuple[str, tuple[float, float] | None], QParams] | None = None
        self.torchq_report = rows
        self.opaque_names = list(opaque)
        self.observers = nn.ModuleList()
        # name of a node -> index of its observer, and what its group is quantized by
        self._groups: dict[str, tuple[int, QConfig]] = {}
        graph = copy.deepcopy(plan.captured.graph)
        twins = dict(zip(plan.captured.graph.nodes, graph.nodes, strict=True))
        model = fx.GraphModule(plan.captured.model, graph)
        for name, module in opaque.items():
            model.set_submodule(name, module)

        def watch(kind: str, i: int, module: nn.Module, *nodes: fx.Node) -> None:
            model.add_submodule(f"torchq_{kind}_{i}", module)
            for node in nodes:
                with graph.inserting_after(twins[node]):
                    graph.call_module(f"torchq_{kind}_{i}", (twins[node],))

        for i, (root, producers) in enumerate(plan.groups().items()):
            name, config = plan.group_config(producers)
            self.observers.append(config.make_observer(name))
            self._groups[root.name] = i, config
            watch("observer", i, self.observers[i], *producers)
        self.samples, self._sample_of = nn.ModuleList(samples.values()), dict[str, int]()
        dynamic = [op for op in plan.ops.values() if op.role is Role.DYNAMIC]
        for i, (name, sample) in enumerate(samples.items()):
            self._sample_of[name] = i
            watch("sample", i, sample, *(op.srcs[0] for op in dynamic if op.base == name))
        self.channels = nn.ModuleList()
        self._channels_of: dict[str, int] = {}  # name of a node -> index
        axes = dict.fromkeys(observed_nodes(plan), -1)
        axes |= {first.dst: channel_axis(first) for first, _ in pairs(plan)}
        for i, (node, axis) in enumerate(axes.items()):
            self._channels_of[node.name] = i
            observer = PerChannelMinMaxObserver(axis)
            observer.name = f"{plan.prefix}{node.name}"
            self.channels.append(observer)
            watch("channels", i, observer, node)
        self.rows, self._rows_of = nn.ModuleList(), dict[str, int]()  # name of a result -> index
        known: dict[tuple[fx.Node, str], int] = {}
        for layer in _judged(plan):
            assert layer.op.module is not None
            powers, node = RowPowers.of(layer.op.module), layer.srcs[0]
            i = known.setdefault((node, powers.extra_repr()), len(known))
            self._rows_of[layer.dst.name] = i
            if i == len(self.rows):
                powers.name = f"{plan.prefix}{layer.op.base}"
                self.rows.append(powers)
                watch("rows", i, powers, node)
        self._result_names: dict[str, str] = {}
        for i, (name, node) in enumerate(self._result_nodes()):
            self._result_names[name] = f"torchq_result_{i}"
            watch("result", i, nn.Identity(), node)
        model.recompile()
        self.graph_module = model

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        """Copy all but the plan, which nothing changes."""
        memo[id(self.plan)] = self.plan
        other = Prepared.__new__(Prepared)
        memo[id(self)] = other
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def with_plan(self, plan: Plan) -> Prepared:
        """Return the same graph and observers with a plan of this graph, after calibration."""
        other = Prepared.__new__(Prepared)
        other.__dict__ = {**vars(self), "plan": plan, "_known": {}}
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what the plan was made of, and make it again: it holds functions of its own."""
        captured, plan = self.plan.captured, self.plan
        nodes = plain_nodes(captured.graph, _META)
        opaque = {name: self.graph_module.get_submodule(name) for name in self.opaque_names}
        parts = replace(captured, graph=None), plan._config, plan._overrides  # type: ignore[arg-type]
        samples = {name: self.samples[i] for name, i in self._sample_of.items()}
        observers = list(self.observers), list(self.channels), list(self.rows)
        return _rebuild, (nodes, *parts, opaque, samples, self.torchq_report, *observers)

    def _result_nodes(self) -> list[tuple[str, fx.Node]]:
        """Return the names of quantized modules to be, and the nodes of their results."""
        pools = [op for op in self.plan.ops.values() if op.role is Role.POOL]
        int8 = [(op, op.node) for op in pools if self.plan.is_int8(op.node)]
        # of a function whose table is a matmul's, the matmul's name again: the later one counts
        hosts = self.plan.table_hosts
        layers = [(hosts.get(v, v).op, node) for node, v in self.plan.layer_at.items()]
        dynamic = [(op, node) for node, op in self.plan.dynamic_at.items()]
        return [
            (op.name, node) for op, node in layers + int8 + dynamic if not (op.flatten or op.joined)
        ]

    def results(self) -> dict[str, nn.Module]:
        """Name of a quantized module to be -> a module here that passes on its float result."""
        found = {}
        for name, target in self._result_names.items():
            found[name] = self.graph_module.get_submodule(target)
        for name in self.plan.self_contained:
            found[name] = self.graph_module.get_submodule(name)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the float model."""
        return self.graph_module(*args, **kwargs)

    def qparams(self, node: fx.Node, within: tuple[float, float] | None = None) -> QParams:
        """Scale and zero point of a node of the plan's graph, of its values ``within`` a range.

        Raises:
            RuntimeError: it was never calibrated; the message names the module.
        """
        fixed = self.plan.fixed(node)
        if fixed is not None:
            return fixed.dequantize
        root = self.plan.root(node)
        if self._known is None:
            return self._searched(root, within)
        key = root.name, within
        if key not in self._known:
            self._known[key] = self._searched(root, within)
        return self._known[key]

    def _searched(self, root: fx.Node, within: tuple[float, float] | None) -> QParams:
        i, config = self._groups[root.name]
        observer = self.observers[i]
        assert isinstance(observer, Observer)
        if within is not None and isinstance(observer, HistogramObserver):
            observer = observer.within(*within)
        options = config.activation_dtype, config.activation_bits, config.symmetric
        function = self.plan.function_behind(root)
        if function is not None and isinstance(observer, HistogramObserver):
            return observer.qparams_before(function, *options)
        return observer.qparams(*options)

    def between(self) -> dict[fx.Node, Between]:
        """Root of a group -> how its tensor is quantized, where channels have their own scales."""
        found, sizes = {}, dict[fx.Node, Tensor]()
        for first, second in pairs(self.plan):
            if (seen := self.channels_of(first.dst)) is None:
                continue
            config, given = self._groups[first.dst.name][1], self.qparams(first.dst)
            low, high = seen.min_value, seen.max_value
            before = sizes.get(self.plan.root(first.srcs[0]))
            largest = magnitudes(first, torch.maximum(low.abs(), high.abs()), before)
            sizes[first.dst] = largest
            one = between(first, second, largest, float(low.min()), given, config.symmetric)
            if one is not None:
                found[first.dst] = one
        return found

    def first_observers(self) -> Iterator[tuple[fx.Node, Observer]]:
        """Yield observers of values with no quantized layer in front, and nodes of these values."""
        behind = set[fx.Node]()
        roots = {node: root for root, nodes in self.plan.groups().items() for node in nodes}
        for node in self.plan.captured.graph.nodes:
            later = not behind.isdisjoint(node.all_input_nodes)
            alone = node.op == "call_module" and node.target in self.opaque_names
            made = alone or node in self.plan.layer_at
            if node.meta["varying"] and not later and (alone or (node in roots and not made)):
                observer = (
                    getattr(self.graph_module.get_submodule(str(node.target)), "src_observer", None)
                    if alone
                    else self.observers[self._groups[roots[node].name][0]]
                )
                if isinstance(observer, Observer):
                    yield node.all_input_nodes[0] if alone else node, observer
            if later or made:
                behind.add(node)

    def sample(self, base: str) -> SourceSample | None:
        """Return the sample of what a dynamic linear layer reads; None where it has no recipe."""
        i = self._sample_of.get(base)
        sample = None if i is None else self.samples[i]
        assert sample is None or isinstance(sample, SourceSample)
        return sample

    def channels_of(self, node: fx.Node) -> PerChannelMinMaxObserver | None:
        """Return the ranges of the channels of a value; None where too little was recorded."""
        i, group = self._channels_of.get(node.name), self._groups.get(self.plan.root(node).name)
        if i is None or group is None:
            return None
        seen, of_all = self.channels[i], self.observers[group[0]]
        assert isinstance(seen, PerChannelMinMaxObserver)
        if not seen.calibrated or not isinstance(of_all, HistogramObserver):
            return None
        return seen if of_all.counts.sum() >= _VALUES * len(seen.min_value) else None

    def rows_of(self, layer: Layer) -> RowPowers | None:
        """Return what was counted of the rows that a layer reads; None where nobody asked."""
        i = self._rows_of.get(layer.dst.name)
        rows = None if i is None else self.rows[i]
        assert rows is None or isinstance(rows, RowPowers)
        return rows

    def constant(self, node: fx.Node) -> Tensor:
        """Return the value of a node that does not depend on the inputs."""
        value = node.meta["constant"]
        assert isinstance(value, Tensor)
        return value


def _judged(plan: Plan) -> list[Layer]:
    """Return the layers that the row rule may be for."""
    return [
        layer
        for layer in plan.layer_at.values()
        if layer.op.role is Role.MATMUL
        and isinstance(layer.op.module, MATMUL)
        and plan.fixed(layer.srcs[0]) is None
    ]


def _rebuild(
    nodes: list[tuple[Any, ...]],
    captured: Captured,
    config: QConfig,
    overrides: Overrides | None,
    opaque: dict[str, nn.Module],
    samples: dict[str, SourceSample],
    rows: list[Row],
    observers: list[nn.Module],
    channels: list[nn.Module],
    rows_read: list[nn.Module],
) -> Prepared:
    plan = Plan(replace(captured, graph=graph_of(nodes)), config, overrides)
    prepared = Prepared(plan, opaque, samples, rows)
    for kind, found in (("observer", observers), ("channels", channels), ("rows", rows_read)):
        own: Any = getattr(prepared, "observers" if kind == "observer" else kind)
        for i, observer in enumerate(found):
            own[i] = observer
            prepared.graph_module.set_submodule(f"torchq_{kind}_{i}", observer)
    return prepared.eval()


def source_samples(
    plan: Plan, of_leaf: Callable[[str], SourceSample | None]
) -> dict[str, SourceSample]:
    """Return samples of what dynamic linear layers read, by base name.

    Args:
        plan: with dynamic layers whose configuration has a recipe.
        of_leaf: qualified name -> the sample of the leaf, which its graph shares, or None.
    """
    found: dict[str, SourceSample] = {}
    for op in plan.ops.values():
        config, linear = plan.config(op.base), op.module
        if op.role is not Role.DYNAMIC or not isinstance(linear, nn.Linear):
            continue
        if config is not None and config.samples_rows and linear.weight.numel():
            name = f"{plan.prefix}{op.base}"
            leaf = of_leaf(name)
            shared = leaf is not None and leaf.channels == linear.in_features
            made = leaf if leaf and shared else SourceSample(linear.in_features, name)
            found.setdefault(op.base, made)
    return found


_CLIPPED = 1 / 8  # of the source's range, at most


def shared_qparams(prepared: Prepared) -> dict[fx.Node, QParams]:
    """Root of a group that a concatenation reads -> the parameters it takes from the result.

    A value that passes twenty concatenations, each with parameters of its own, is rounded twenty
    times; with the same parameters they copy bytes. But what else reads the source then gets the
    steps of the concatenation. Let ``s`` be the source's own step, ``c`` that of the concatenation,
    and ``S`` and ``C`` how many other operations read each; a rounding adds the square of its step,
    over 12. To share costs less if ``(S + C) c^2 < S s^2 + C (s^2 + c^2)``, that is,
    ``S c^2 < (S + C) s^2``.

    The last concatenation of a chain decides. Parameters of fake quantizers stay.

    Raises:
        RuntimeError: as :meth:`Prepared.qparams`.
    """
    plan, found = prepared.plan, dict[fx.Node, QParams]()
    active = set(plan.layer_at.values())
    layers = [layer for layer in plan.concatenations() if layer in active]
    copies = {layer.op.node for layer in layers}
    readers = {root: len(users - copies) for root, users in plan.users().items()}
    beyond: dict[fx.Node, int] = {}  # readers of what a group's values are copied to
    for layer in reversed(layers):
        root = plan.root(layer.dst)
        if not plan.emits_int8(layer) or plan.fixed(root) is not None:
            continue
        dst = found.get(root) or prepared.qparams(root)
        count = readers.get(root, 0) + beyond.get(root, 0)
        for src in dict.fromkeys(plan.root(src) for src in layer.srcs):
            if src is root or src in found or plan.fixed(src) is not None:
                continue
            own = prepared.qparams(src)
            step, other = float(own.scale), float(dst.scale)
            if _covers(dst, own) and readers[src] * other**2 < (readers[src] + count) * step**2:
                found[src], beyond[src] = dst, count
    return found


def _covers(dst: QParams, src: QParams) -> bool:
    """Return whether ``dst`` covers what ``src`` covers, but for a little at the ends."""
    (low, high), (other_low, other_high) = src.range, dst.range
    alike = (src.dtype, src.bits) == (dst.dtype, dst.bits)
    return alike and max(other_low - low, high - other_high) <= _CLIPPED * (high - low)

# SPDX-License-Identifier: Apache-2.0
"""The prepared model: the float graph with observers at the values that will be int8."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.capture.graph import Captured
from torchq.capture.module_kinds import MATMUL
from torchq.capture.ops import Role
from torchq.convert.equalize import between, channel_axis, magnitudes, pairs
from torchq.convert.fuse import Layer
from torchq.convert.outliers import observed_nodes
from torchq.convert.plan import Plan
from torchq.graphs.data import graph_of, plain_nodes
from torchq.quantization.config import Overrides, QConfig
from torchq.quantization.observers import HistogramObserver, Observer, PerChannelMinMaxObserver
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.equalization import Between
from torchq.quantization.recipes.rows import RowPowers
from torchq.quantization.recipes.sample import SourceSample
from torchq.report.rows import Row

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
        self._searches: dict[Any, Any] = {}  # results that plans of this graph share
        self.torchq_report = rows
        self.opaque_names = list(opaque)
        self.observers, self.samples = nn.ModuleList(), nn.ModuleList()
        self.channels, self.rows = nn.ModuleList(), nn.ModuleList()
        # kind, id of settings and names of nodes -> index, and the settings
        self._watched: dict[Any, tuple[int, object]] = {}
        graph = copy.deepcopy(plan.captured.graph)
        self.graph_module = model = fx.GraphModule(plan.captured.model, graph)
        for name, module in opaque.items():
            model.set_submodule(name, module)
        self._watch_all(samples)
        self._result_names: dict[str, str] = {}
        for i, (name, node) in enumerate(self._result_nodes()):
            self._result_names[name] = f"torchq_result_{i}"
            self._insert(f"torchq_result_{i}", nn.Identity(), node)
        model.recompile()

    def _watch_all(self, samples: dict[str, SourceSample]) -> None:
        """Watch what the plan needs, where nothing does yet, and note which module does."""
        plan = self.plan
        # name of a node -> index of its observer, and what its group is quantized by
        self._groups: dict[str, tuple[int, QConfig]] = {}
        for root, producers in plan.groups().items():
            name, config = plan.group_config(producers)
            i = self._watch("observer", config, partial(config.make_observer, name), *producers)
            self._groups[root.name] = i, config
        self._sample_of: dict[str, int] = {}  # base name -> index
        for name, sample in samples.items():
            sources = _sampled(plan, name)
            self._sample_of[name] = self._watch("sample", name, partial(_itself, sample), *sources)
        self._channels_of: dict[str, int] = {}  # name of a node -> index
        axes = dict.fromkeys(observed_nodes(plan), -1)
        axes |= {first.dst: channel_axis(first) for first, _ in pairs(plan)}
        for node, axis in axes.items():
            make = partial(_channel_observer, axis, f"{plan.prefix}{node.name}")
            self._channels_of[node.name] = self._watch("channels", axis, make, node)
        self._rows_of: dict[str, int] = {}  # name of a result -> index
        for layer in _judged(plan):
            assert layer.op.module is not None
            powers = RowPowers.of(layer.op.module)
            powers.name = f"{plan.prefix}{layer.op.base}"
            i = self._watch("rows", powers.extra_repr(), partial(_itself, powers), layer.srcs[0])
            self._rows_of[layer.dst.name] = i

    def _watch(
        self, kind: str, settings: object, make: Callable[[], nn.Module], *nodes: fx.Node
    ) -> int:
        """Return the index of the module of a kind that records what these nodes give."""
        own = id(settings) if isinstance(settings, QConfig) else settings  # may not be hashable
        key = kind, own, tuple(node.name for node in nodes)
        if key not in self._watched:
            modules: Any = getattr(
                self, {"observer": "observers", "sample": "samples"}.get(kind, kind)
            )
            self._watched[key] = len(modules), settings
            modules.append(make())
            self._insert(f"torchq_{kind}_{len(modules) - 1}", modules[-1], *nodes)
        return self._watched[key][0]

    def _insert(self, name: str, module: nn.Module, *nodes: fx.Node) -> None:
        """Call a module behind each of these nodes."""
        graph = self.graph_module.graph
        own = [node for node in graph.nodes if "watches" not in node.meta]
        twins = dict(zip(self.plan.captured.graph.nodes, own, strict=True))
        self.graph_module.add_submodule(name, module)
        for node in nodes:
            with graph.inserting_after(twins[node]):
                graph.call_module(name, (twins[node],)).meta["watches"] = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        """Copy all but the plan, which nothing changes."""
        memo[id(self.plan)] = self.plan
        other = Prepared.__new__(Prepared)
        memo[id(self)] = other
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def with_plan(self, plan: Plan, searches: dict[Any, Any] | None = None) -> Prepared:
        """Return the same graph and observers with a plan of this graph, after calibration.

        ``searches``: what other plans of the graph found, and this one adds to.
        """
        other = Prepared.__new__(Prepared)
        known = {"_known": {}, "_searches": self._searches if searches is None else searches}
        other.__dict__ = {**vars(self), "plan": plan, **known}
        return other

    def sharing(self, plan: Plan) -> Prepared:
        """Return the same graph with a plan of it, and observers in it of what only that needs.

        The graph is to be compiled anew before it runs.
        """
        other = Prepared.__new__(Prepared)
        other.__dict__ = {**vars(self), "plan": plan}
        other._watch_all(source_samples(plan, lambda name: None))
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
        function = self.plan.function_behind(root)
        i, config = self._groups[root.name]
        if self._known is None:
            return self._search(i, config, within, function)
        key = i, id(config), within, function and function.dst.name
        if key not in self._searches:
            self._searches[key] = self._search(i, config, within, function)
        found: QParams = self._searches[key]
        return found

    def _search(
        self, i: int, config: QConfig, within: tuple[float, float] | None, function: Layer | None
    ) -> QParams:
        observer = self.observers[i]
        assert isinstance(observer, Observer)
        if within is not None and isinstance(observer, HistogramObserver):
            observer = observer.within(*within)
        options = config.activation_dtype, config.activation_bits, config.symmetric
        if function is not None and isinstance(observer, HistogramObserver):
            assert function.function is not None
            return observer.qparams_before(function.function, *options)
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
            names = (part.node.name for part in (second.op, *second.parts))
            ends = first.dst.name, *names, float(given.scale), int(given.zero_point)
            key = *ends, id(config), largest.numpy().tobytes()
            if key not in self._searches:
                lowest = float(low.min())
                made = between(first, second, largest, lowest, given, config.symmetric)
                self._searches[key] = made
            if (one := self._searches[key]) is not None:
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


def _itself(module: nn.Module) -> nn.Module:
    return module


def _channel_observer(axis: int, name: str) -> PerChannelMinMaxObserver:
    observer = PerChannelMinMaxObserver(axis)
    observer.name = name
    return observer


def _sampled(plan: Plan, base: str) -> list[fx.Node]:
    """Return what the dynamic calls of a layer read."""
    dynamic = (op for op in plan.ops.values() if op.role is Role.DYNAMIC and op.base == base)
    return [op.srcs[0] for op in dynamic]


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

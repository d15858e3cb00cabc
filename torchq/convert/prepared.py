# SPDX-License-Identifier: Apache-2.0
"""The prepared model: the float graph with observers at the values that will be int8."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from torch import fx, nn

from torchq.capture.graph import Captured
from torchq.capture.ops import Role
from torchq.convert.watching import KINDS, Watch, watched_ranges
from torchq.graphs.data import graph_of, plain_nodes
from torchq.planning.passes import decided
from torchq.planning.plan import Plan
from torchq.quantization.config import Overrides, QConfig
from torchq.quantization.observers import Observer
from torchq.report.rows import Row

_META = (
    *("value", "aten", "owner", "scope", "varying", "static", "positional", "sizes", "phase"),
    *("line", "constant"),
)


class Prepared(nn.Module):
    """Computes what the float model computes, and records ranges on the way.

    Attributes:
        plan: what each node will become.
        graph_module: the captured model with the recorders.
        opaque_names: its submodules that were prepared as one unit.
        observers: one for each group of values that will share a scale and zero point.
        samples: of what dynamic linear layers read, for their recipes.
        channels: ranges of the channels of some values.
        rows: of what layers read, for the row rule.
        torchq_report: what was decided for each module.
    """

    observers: nn.ModuleList
    samples: nn.ModuleList

    def __init__(self, plan: Plan, opaque: Mapping[str, nn.Module], rows: list[Row]) -> None:
        """Start with nothing to record.

        Args:
            plan: of the captured model.
            opaque: submodules that were prepared as one unit.
            rows: of the report.
        """
        super().__init__()
        self.plan, self.torchq_report, self.opaque_names = plan, rows, list(opaque)
        for name in KINDS.values():
            self.add_module(name, nn.ModuleList())
        # key of a watch -> its place in the list
        self._index: dict[tuple[str, Hashable, tuple[str, ...]], int] = {}
        graph = copy.deepcopy(plan.captured.graph)
        self.graph_module = model = fx.GraphModule(plan.captured.model, graph)
        for name, module in opaque.items():
            model.set_submodule(name, module)
        self._result_names: dict[str, str] = {}
        twins = self._twins()
        for i, (name, node) in enumerate(self._result_nodes()):
            self._result_names[name] = f"torchq_result_{i}"
            self._insert(f"torchq_result_{i}", nn.Identity(), twins, node)
        model.recompile()

    def watch(
        self, watches: Iterable[Watch], leaves: Mapping[str, Observer] = MappingProxyType({})
    ) -> None:
        """Record what is not recorded yet.

        ``leaves`` are recorders of layers by name, for the watches that share one.
        """
        known, twins = len(self._index), self._twins()
        for watch in watches:
            if watch.key in self._index:
                continue
            recorder, own = watch.make(), leaves.get(watch.leaf)
            if own is not None and own.extra_repr() == recorder.extra_repr():
                recorder = own
            recorders = self._list(watch.kind)
            self._index[watch.key] = len(recorders)
            self._insert(f"torchq_{watch.kind}_{len(recorders)}", recorder, twins, *watch.nodes)
            recorders.append(recorder)
        if len(self._index) > known:
            self.graph_module.recompile()

    def _list(self, kind: str) -> nn.ModuleList:
        """Return the recorders of a kind."""
        found = self.get_submodule(KINDS[kind])
        assert isinstance(found, nn.ModuleList)
        return found

    def recorder(self, watch: Watch) -> Observer | None:
        """Return what records for a watch; None where nothing does."""
        i = self._index.get(watch.key)
        recorder = None if i is None else self._list(watch.kind)[i]
        assert recorder is None or isinstance(recorder, Observer)
        return recorder

    def _twins(self) -> dict[fx.Node, fx.Node]:
        """Return the nodes here by those of the plan's graph."""
        own = [node for node in self.graph_module.graph.nodes if "watches" not in node.meta]
        return dict(zip(self.plan.captured.graph.nodes, own, strict=True))

    def _insert(
        self, name: str, module: nn.Module, twins: Mapping[fx.Node, fx.Node], *nodes: fx.Node
    ) -> None:
        """Call a module after each of these nodes."""
        graph = self.graph_module.graph
        self.graph_module.add_submodule(name, module)
        for node in nodes:
            with graph.inserting_after(twins[node]):
                graph.call_module(name, (twins[node],)).meta["watches"] = True

    def __deepcopy__(self, memo: dict[int, object]) -> Prepared:
        """Copy all but the plan, which nothing changes."""
        memo[id(self.plan)] = self.plan
        other = Prepared.__new__(Prepared)
        memo[id(self)] = other
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what the plan was decided of: it holds functions of its own."""
        plan, captured = self.plan, self.plan.captured
        nodes = plain_nodes(captured.graph, _META)
        decided_of = replace(captured, graph=fx.Graph()), plan.default, plan.overrides
        opaque = {name: self.graph_module.get_submodule(name) for name in self.opaque_names}
        own = {watch.key for watch, _ in watched_ranges(plan).values()}
        recorders = [
            (kind, None if kind == "observer" else settings, names, self._list(kind)[i])
            for (kind, settings, names), i in self._index.items()
            if kind != "observer" or (kind, settings, names) in own
        ]
        return _rebuilt, (nodes, *decided_of, opaque, self.torchq_report, recorders)

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

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the float model."""
        return self.graph_module(*args, **kwargs)


def _rebuilt(
    nodes: list[tuple[object, ...]],
    captured: Captured,
    config: QConfig,
    overrides: Overrides | None,
    opaque: dict[str, nn.Module],
    rows: list[Row],
    recorders: list[tuple[str, Hashable, tuple[str, ...], Observer]],
) -> Prepared:
    plan = decided(replace(captured, graph=graph_of(nodes)), config, overrides)
    prepared = Prepared(plan, opaque, rows)
    own = {node.name: node for node in plan.captured.graph.nodes}
    ranges = {watch.key[2]: watch.settings for watch, _ in watched_ranges(plan).values()}
    for kind, settings, names, recorder in recorders:
        found = ranges[names] if kind == "observer" else settings
        watched = tuple(own[name] for name in names)
        prepared.watch([Watch(kind, watched, found, partial(_itself, recorder))])
    return prepared.eval()


def _itself(recorder: Observer) -> Observer:
    return recorder

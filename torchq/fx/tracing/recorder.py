# SPDX-License-Identifier: Apache-2.0
"""A graph whose nodes are computed while they are recorded: their values, and guards on sizes."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchq._library import all_tensors
from torchq.fx.tracing.aliases import copied_sources, memory
from torchq.fx.tracing.guards import expect, expect_real
from torchq.fx.tracing.nodes import compute, counts
from torchq.fx.tracing.place import line, place
from torchq.fx.tracing.sequences import SequenceTracer

__all__ = ["LEN", "Recorder"]

_ASKS_SHAPE = frozenset({
    "size", "shape", "numel", "nelement", "stride", "storage_offset", "is_contiguous",
})  # fmt: skip


LEN: Callable[..., int] = len  # as TorchScript knows it: builtins has another one meanwhile


class Recorder(SequenceTracer):
    """What a traced call knows of its nodes; :class:`torchq.fx.tracing.tracer.Tracer` makes them.

    Attributes:
        values: what each node is on the example inputs.
        untraceable: names of modules that are one opaque call each -> why.
        asked_rank: the code has asked for a number of dimensions.
        asked_dtype: nodes whose dtype the code has asked for.
        asked: guards of numbers that may have been asked for in vain, see ``Proxy.__index__``.
        released: the call is over, and nothing more is guarded.
        constants: those that were written to, see :mod:`torchq.fx.tracing.written`.
        older: tensors that are there before the call, in the model, objects, globals: by storage,
            and kept, so that no other tensor gets their memory.

    In ``meta``, nodes have
        scope, place: where in the model's code they come from.
        varying: whether they depend on the inputs.
        static: whether they depend on sizes and numbers only, not on values in a tensor.
        counted: whether values in a tensor decide about their size.
        writes: the sources that they write to in place.
    """

    def __init__(self) -> None:
        """Nothing is recorded yet; other threads than this one compute as usual."""
        super().__init__()
        self.values: dict[fx.Node, Any] = {}
        self.untraceable: dict[str, str] = {}
        self.asked_rank = False
        self.asked_dtype = set[fx.Node]()
        self.asked: list[tuple[FrameType, int, list[fx.Node]]] = []
        self.released = False
        self._running, self._thread = False, threading.get_ident()
        self._written: dict[fx.Node, fx.Node] = {}
        self._copied: dict[fx.Node, list[fx.Node]] = {}
        self.constants: list[Any] = []
        strided = [x for x in all_tensors() if x.layout == torch.strided]
        self.older = {p: x for x in strided if (p := x.untyped_storage().data_ptr())}

    @property
    def running(self) -> bool:
        """Whether calls are to be computed, not recorded: other threads' always."""
        return self._running or threading.get_ident() != self._thread

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> fx.Node:
        """A node; attributes are computed here."""
        node = super().create_node(kind, target, args, kwargs, *rest, **more)
        if kind == "get_attr":  # of a tensor constant, too, which has no proxy
            self._run(node)
        return node

    def _run(self, node: fx.Node) -> None:
        """Computes a node, and notes what it depends on and writes to."""
        sources = [n for n in node.all_input_nodes if isinstance(self.values[n], Tensor)]
        versions = [self.values[n]._version for n in sources]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        before, self._running = self._running, True
        randomness = torch.get_rng_state()
        try:
            self.values[node] = compute(self.root, node, args, kwargs)
        finally:
            self._running = before
        random = not torch.equal(randomness, torch.get_rng_state())
        node.meta["scope"] = self.scope.module_path
        node.meta["place"] = (self.scope.module_path, *place())
        opaque = node.op == "call_module" and node.target in self.untraceable
        varies = any(n.meta["varying"] for n in node.all_input_nodes)
        node.meta["varying"] = varies or opaque or random
        node.meta["writes"] = [
            n for n, version in zip(sources, versions, strict=True)
            if self.values[n]._version != version
        ]  # fmt: skip
        asks = (
            node.target in _ASKS_SHAPE
            or node.target is LEN
            or (node.target is getattr and node.args[1] in _ASKS_SHAPE)
        )
        static = all(n.meta["static"] for n in node.all_input_nodes)
        counted = [n for n in node.all_input_nodes if n.meta.get("counted")]
        node.meta["counted"] = bool(counted) or counts(node, args)
        node.meta["static"] = node.op != "get_attr" and ((asks and not counted) or static)

    def latest(self, node: fx.Node) -> fx.Node:
        """What it became, if code wrote to it."""
        while node in self._written:
            node = self._written[node]
        return node

    def kept(self, value: Tensor) -> str:
        """The name of the parameter or buffer that it is, or is a part of, without its module's."""
        storage = value.untyped_storage().data_ptr()
        for name, kept in [*self.root.named_parameters(), *self.root.named_buffers()]:
            if kept.layout == torch.strided and kept.untyped_storage().data_ptr() == storage:
                return name.rpartition(".")[2]
        return ""

    def replace(self, old: fx.Proxy, new: fx.Proxy) -> None:
        """Whoever reads ``old`` from here on gets ``new``."""
        self._written[self.latest(old.node)] = new.node

    def has_views(self, proxy: fx.Proxy, besides: Sequence[fx.Node] = ()) -> bool:
        """Whether another node that somebody may read has the same memory, or may have it."""
        known = {self.latest(node) for node in (proxy.node, *besides)}
        shared = self.one_memory(self.latest(proxy.node))
        return any(
            memory(value) in shared and self.latest(node) not in known
            for node, value in self.values.items()
        )

    def one_memory(self, node: fx.Node) -> set[int]:
        """Where its elements are, and copies of them that are none for other strides."""
        shared = {memory(self.values[node])} - {0}
        while pair := self.copied(shared):
            shared.update(memory(self.values[node]) for node in pair)
        return shared

    def copied(self, memories: set[int]) -> tuple[fx.Node, fx.Node] | None:
        """A source and a copy of it that is none for other strides; one is in ``memories``."""
        for node, value in self.values.items():
            sources = self._copied.get(node, node.all_input_nodes)
            if not sources or not isinstance(value, Tensor):
                continue
            inside = memory(value) in memories
            for source in sources:
                if (memory(self.values[source]) in memories) == inside:
                    continue
                if node not in self._copied:
                    before, self._running = self._running, True
                    try:
                        self._copied[node] = copied_sources(self.root, node, self.values)
                    finally:
                        self._running = before
                if source in self._copied[node]:
                    return source, node
        return None

    def _forget(self, mark: int) -> set[fx.Node]:
        """Takes back all nodes but the first ``mark`` ones."""
        nodes = list(self.graph.nodes)[mark:]
        for node in reversed(nodes):
            self.graph.erase_node(node)
            del self.values[node]
        gone = set(nodes)
        self._written = {a: b for a, b in self._written.items() if not gone & {a, b}}
        return gone

    def known(self, proxy: fx.Proxy) -> Any:
        """The value of a size, of all of a shape or of a condition on sizes, guarded.

        Raises:
            TraceError: it depends on the values in a tensor.
        """
        value, node = self.values[proxy.node], proxy.node
        if isinstance(value, Tensor) or not node.meta["static"]:
            raise fx.proxy.TraceError(f"its Python code acts on values in a tensor ({node.name})")
        if isinstance(value, (bool, int, float)) and node.meta["varying"]:
            if (parts := _compared(self, node)) is not None:
                for part, expected in parts:
                    self.guard(expect, part.node, expected)
                return value
            self.guard(expect_real if isinstance(value, float) else expect, node, value)
        elif isinstance(value, tuple):
            self.asked_rank, parts = True, cast(Any, proxy)
            for i in range(len(value)):
                self.known(parts[i])
        return value

    def guard(self, check: Callable[..., None], *args: Any) -> None:
        """Adds a call of one of the guards."""
        if check in (expect, expect_real) and len(args) == 2:
            inside = self.scope.module_path
            args = (*args, f" ({line()}, in '{inside}')" if inside else f" ({line()})")
        guard = self.create_node("call_function", check, args, {})
        guard.meta.update(scope="", varying=False, writes=[], static=True)
        self.values[guard] = None


def _compared(tracer: Recorder, node: fx.Node) -> list[tuple[fx.Proxy, int | bool]] | None:
    """What must stay as it is if a shape is to compare with a constant one as now, and how it is.

    That is each size of equal shapes, and whether there is another one in shapes that differ.
    TorchScript compares no shape with a tuple. None if this is no such comparison.
    """
    if node.target not in (operator.eq, operator.ne):
        return None
    known: list[Any] = [x for x in node.args if type(x) in (tuple, torch.Size)]
    shapes = [x for x in node.args if isinstance(x, fx.Node)]
    if len(known) != 1 or type(tracer.values[shapes[0]]) is not torch.Size:
        return None
    tracer.asked_rank = True
    expected: Any = [tracer.proxy(n) if isinstance(n, fx.Node) else n for n in known[0]]
    values = [tracer.values[n] if isinstance(n, fx.Node) else n for n in known[0]]
    sizes: Any = tracer.proxy(shapes[0])
    if len(expected) != len(tracer.values[shapes[0]]):
        return []
    if tracer.values[shapes[0]] == tuple(values):
        return [
            (sizes[i] != size, False) if isinstance(size, fx.Proxy) else (sizes[i], size)
            for i, size in enumerate(expected)
        ]
    return [(functools.reduce(operator.or_, [sizes[i] != n for i, n in enumerate(expected)]), True)]

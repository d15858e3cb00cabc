# SPDX-License-Identifier: Apache-2.0
"""Asserts the guards of a graph in the graph itself, for calls that no dispatch chooses.

A scripted model is its graph alone, and so is one that was loaded without the float model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, Target

from torchq.capture.condition import Condition
from torchq.capture.guards import Example
from torchq.capture.terms import COMPUTE, FUNCTIONS
from torchq.graphs.direct import CHECK
from torchq.report.rows import joined

_RECORDED = {name: f for name, f in (COMPUTE | FUNCTIONS).items() if "." not in name}
_RECORDED |= {"and": operator.and_, "or": operator.or_, "not": operator.eq,
              "torch.sym_float": float, "torch.sym_max": max, "torch.sym_min": min}  # fmt: skip
_OF_PAIRS = ("+", "*", "and", "or", "max", "min", "torch.sym_max", "torch.sym_min")


class _Tracer(fx.proxy.GraphAppendingTracer):
    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: object = None,
    ) -> fx.Node:
        """Name the node."""
        return super().create_node(kind, target, args, kwargs, CHECK, type_expr)

    def call(self, function: Callable[..., object], *operands: object) -> fx.Proxy:
        """Return the result of a function."""
        return self.create_proxy("call_function", function, operands, {})


def add_checks(module: fx.GraphModule, example: Example) -> None:
    """Let the graph refuse tensors that do not meet the guards of ``example``."""
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    tracer = _Tracer(graph)
    with graph.inserting_before(inputs[-1].next):
        tensors: list[Any] = [fx.Proxy(node, tracer) for node in inputs]
        pairs = list(zip(tensors, example.arguments, strict=True))
        kinds = [t.dim() == len(argument.shape) for t, argument in pairs]
        # a graph takes integers for quantized values
        kinds += [torch.is_floating_point(t) for t, a in pairs if a.dtype.is_floating_point]
        _assert(kinds, example, tracer)
        sizes = [
            tensor.size(d) == size
            for tensor, argument in pairs
            for d, size in enumerate(argument.shape)
            if size is not None
        ]
        for guard in example.guards:
            sizes += _recorded(guard, tensors, tracer)
        _assert(sizes, example, tracer)
    module.recompile()


def _assert(conditions: list[Any], example: Example, tracer: _Tracer) -> None:
    if conditions:
        told = joined(example.describe()).replace("'", "")
        message = f"torchq: a call of this graph must meet its guards: {told}"
        every = reduce(operator.and_, conditions)
        tracer.create_node("call_function", torch._assert, (every.node, message), {})


def _recorded(guard: Condition, tensors: list[fx.Proxy], tracer: _Tracer) -> list[object]:
    """Return the condition as nodes; none where a graph cannot express it."""

    def call(name: str, operands: list[object]) -> object:
        function = _RECORDED.get(name)
        if function is None:
            raise NotImplementedError(name)
        if name in _OF_PAIRS:  # of more: one after the other
            return reduce(partial(tracer.call, function), operands)
        operands += [False] if name == "not" else []
        return tracer.call(function, *operands)

    try:
        return [guard.recorded(lambda size: tensors[size.tensor].size(size.dim), call)]
    except NotImplementedError:
        return []

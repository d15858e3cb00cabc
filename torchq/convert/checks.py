# SPDX-License-Identifier: Apache-2.0
"""Asserts the guards of a graph in the graph itself, for calls that no dispatch chooses.

A scripted model is its graph alone, and so is one that was loaded without the float model.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx

from torchq.capture.guards import Example
from torchq.convert.graph_module import CHECK
from torchq.convert.rows import joined


class _Tracer(fx.proxy.GraphAppendingTracer):
    def create_node(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: Any = None,
        type_expr: Any = None,
    ) -> fx.Node:
        """Name the node."""
        return super().create_node(kind, target, args, kwargs, CHECK, type_expr)


class _Shape:
    """A tensor's shape, whose items are nodes."""

    def __init__(self, tensor: fx.Proxy) -> None:
        self.tensor = tensor

    def __getitem__(self, dim: int) -> fx.Proxy:
        return self.tensor.size(dim)


class _Plain(ast.NodeTransformer):
    """Writes ``and``, ``or``, ``not`` and chains, which a graph cannot record, as operators."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Join the values by ``&`` or ``|``."""
        joint = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return _joined(joint, [self.visit(value) for value in node.values])

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Make pairs of a chain such as ``2 <= s0[0] <= 9``."""
        values = [self.visit(value) for value in (node.left, *node.comparators)]
        pairs = zip(values, node.ops, values[1:], strict=False)
        return _joined(ast.BitAnd(), [ast.Compare(a, [op], [b]) for a, op, b in pairs])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        """Compare with False."""
        value = self.visit(node.operand)
        if not isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, value)
        return ast.Compare(value, [ast.Eq()], [ast.Constant(False)])


def _joined(joint: ast.operator, values: list[ast.expr]) -> ast.expr:
    return reduce(lambda a, b: ast.BinOp(a, joint, b), values)


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
        shapes = {f"s{i}": _Shape(tensor) for i, tensor in enumerate(tensors)}
        for guard in example.guards:
            sizes += _recorded(guard, shapes, tracer)
        _assert(sizes, example, tracer)
    module.recompile()


def _assert(conditions: list[Any], example: Example, tracer: _Tracer) -> None:
    if conditions:
        told = joined(example.describe()).replace("'", "")
        message = f"torchq: a call of this graph must meet its guards: {told}"
        every = reduce(operator.and_, conditions)
        tracer.create_node("call_function", torch._assert, (every.node, message), {})


def _recorded(guard: str, shapes: dict[str, _Shape], tracer: _Tracer) -> list[Any]:
    """Return the condition; none where a graph cannot express the guard."""

    def call(function: Any) -> Callable[..., Any]:
        def of_two(*pair: Any) -> fx.Proxy:
            return tracer.create_proxy("call_function", function, pair, {})

        return lambda *args: reduce(of_two, args)

    names = {"torch": torch, "math": math, "max": call(max), "min": call(min)}
    tree = ast.fix_missing_locations(_Plain().visit(ast.parse(guard, mode="eval")))
    try:
        return [eval(compile(tree, "<torchq guard>", "eval"), names, shapes)]
    except Exception:  # of a function of numbers, say
        return []

# SPDX-License-Identifier: Apache-2.0
"""Values whose range depends on sizes of the input: no calibrated scale suits every size.

Each value gets a degree: where sizes are ``n`` times as large, its range is about ``n ** degree``
times as large. A sum over positions has 1, and weights of a softmax over positions have -1. What
these weigh, as in attention, has -0.5: an average of ``n`` values that differ in sign is about
``n ** -0.5`` times as large as they are. A mean has 0, and so has the quotient of two sums. A layer
that reads a value of another degree is not static; nor is a product that reads weights of a
softmax, most of which are small beside the largest.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from torchq.capture.graph import function_name
from torchq.capture.ops import Op, Role, is_float
from torchq.capture.patterns import arguments_of
from torchq.nn.float_modules import Attention, MatMul
from torchq.planning.dynamic import make_dynamic
from torchq.planning.layers import HARD, Layer
from torchq.planning.plan import Plan
from torchq.report import reasons

_SYMBOL = re.compile(r"\b[su]\d+\b(?:\*\*(\d+))?")
FRESH = (
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "instance_norm"),
    *("embedding", "embedding_bag", "one_hot", "arange", "zeros_like", "ones_like"),
)
_BOUNDED = ("sigmoid", "tanh", "sin", "cos", "erf", "hardsigmoid", "hardtanh", "relu6", "sign")
SOFTMAX = ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax")
_SUMS = ("sum", "nansum", "cumsum", "logsumexp", "logcumsumexp")
_NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "frobenius_norm")
_CONTRACTIONS = ("matmul", "linalg_matmul", "bmm", "mm", "mv", "dot", "einsum")
_POWERS = {"square": 2.0, "var": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_PRODUCTS = ("mul", "multiply")
_QUOTIENTS = ("div", "divide", "true_divide", "truediv", "floordiv", "floor_divide")


class _Range(NamedTuple):
    degree: float = 0.0
    is_weight: bool = False  # of a softmax over any size


def leave_lengths(plan: Plan) -> Plan:
    """Return the plan, without static products of values that no calibrated scale suits.

    They become dynamic, or stay float. Layers that an override chose a configuration for are static
    all the same, and so is what reads the result of a fake quantizer.
    """
    ops = dict(plan.ops)
    ranges = _Ranges(ops)
    for node in plan.ops:
        ranges.add(node)
    for node in plan.ops:
        op = ops[node]
        if op.role not in HARD or plan.is_chosen(op.base):
            continue
        read = [ranges.of(src) for src in op.srcs if not _is_fixed(src, ops)]
        if any(one.degree for one in read):
            op, reason = make_dynamic(op, ops), reasons.LENGTH
        elif isinstance(op.module, MatMul) and any(one.is_weight for one in read):
            reason = reasons.WEIGHTS
        else:
            continue
        if op.role is Role.DYNAMIC:
            ops[node] = replace(op, reason=f"{reasons.DYNAMIC}{reason}")
        else:
            ops[node] = replace(op, reason=reason, role=Role.OPAQUE)
    sized = frozenset(node for node in ops if ranges.of(node).degree)
    return replace(plan, ops=ops, sized=sized)


def leave_sized(plan: Plan) -> Plan:
    """Return the plan, with the layers in float that read such values and no override chose."""

    def left(layer: Layer) -> Layer:
        reads = not plan.sized.isdisjoint(layer.srcs) and not plan.is_chosen(layer.op.base)
        return replace(layer, reason=reasons.LENGTH) if reads else layer

    return replace(plan, layers=tuple(map(left, plan.layers)))


def _is_fixed(node: fx.Node, ops: dict[fx.Node, Op]) -> bool:
    """Return whether a fake quantizer gave a value its scale."""
    op = ops.get(node)
    while op is not None and op.role in (Role.MOVE, Role.PASS):
        op = ops.get(op.srcs[0])
    return op is not None and op.role is Role.FAKE


class _Ranges:
    """Ranges of values, each from those of what it is made of."""

    def __init__(self, ops: dict[fx.Node, Op]) -> None:
        self._ops, self._found = ops, dict[fx.Node, _Range]()

    def of(self, value: object) -> _Range:
        """Return the range of a value; that of an input, constant or number has degree 0."""
        return self._found.get(value, _Range()) if isinstance(value, fx.Node) else _Range()

    def add(self, node: fx.Node) -> None:
        """Find the range of what a call gives."""
        name, op = function_name(node), self._ops[node]
        if node.op == "call_module" or name in FRESH or node.meta["value"].dtype is torch.bool:
            return
        first, second, *_ = [*map(self.of, node.args), _Range(), _Range()]
        if isinstance(op.module, Attention):
            found = _Range(self.of(op.srcs[2]).degree - 0.5 * _of_sizes(op.srcs[2], -2))
        elif name in ("sym_size", "sym_numel"):
            found = _Range(_of_sizes(node.args[0], node.args[1:]))
        elif name in _CONTRACTIONS:
            found = _Range(self._contraction(node, name))
        elif name in (*SOFTMAX, *_SUMS, *_NORMS):
            found = self._along_dims(node, name)
        elif name in (*_PRODUCTS, *_QUOTIENTS):
            sign = 1 if name in _PRODUCTS else -1
            found = _Range(first.degree + sign * second.degree, first.is_weight or second.is_weight)
        elif name in ("add", "sub", "subtract") and len(node.all_input_nodes) == 2:
            # of logarithms, as x - x.logsumexp(-1), a difference is that of a quotient
            falls = name != "add" and first.degree == 0 < second.degree
            degree = -second.degree if falls else max(first.degree, second.degree)
            found = _Range(degree, first.is_weight or second.is_weight)
        elif name == "pow" and isinstance(node.args[1], int | float):
            found = _Range(first.degree * node.args[1], first.is_weight)
        else:
            found = self._like_sources(node, name)
        self._found[node] = found._replace(is_weight=found.is_weight and not op.is_matmul)

    def _like_sources(self, node: fx.Node, name: str) -> _Range:
        """Return the range of a function of each element, or of what moves or pools elements."""
        sources = node.all_input_nodes
        if not node.meta["value"].is_number and name != "scalar_tensor":
            sources = [src for src in sources if not src.meta["value"].is_number]  # sizes
            floats = [src for src in sources if is_float(src)]
            sources = floats or sources  # without indices
        ranges = [self.of(src) for src in sources]
        degree = max((one.degree for one in ranges), key=abs, default=0.0)
        degree = min(degree, 0.0) if name in _BOUNDED else degree * _POWERS.get(name, 1.0)
        return _Range(degree, any(one.is_weight for one in ranges))

    def _along_dims(self, node: fx.Node, name: str) -> _Range:
        """Return the range of a softmax, sum or norm along dims."""
        a = arguments_of(node)
        degree, dims = self.of(a.nodes["input"]).degree, a.get("dim")
        count = _of_sizes(a.nodes["input"], () if dims is None else dims)
        if name in SOFTMAX:
            return _Range(-count, True)
        if name in _SUMS:
            return _Range(degree + count)
        order = a.get("ord", a.get("p", 2))
        order = 2.0 if not isinstance(order, int | float) or not order else order
        return _Range(degree + count / order)

    def _contraction(self, node: fx.Node, name: str) -> float:
        """Return the degree of sums of products."""
        operands = [arg for arg in node.all_input_nodes if arg.meta["value"].shape is not None]
        degree = sum(self.of(operand).degree for operand in operands)
        averages = any(self.of(operand).degree < 0 for operand in operands)
        grows = 0.5 if averages else 1.0
        if name != "einsum":
            return degree + grows * _of_sizes(node.args[0], -1)
        text, _, result = str(node.args[0]).replace(" ", "").partition("->")
        summed: dict[str, float] = {}
        given: Any = node.args[1]
        for labels, operand in zip(text.split(","), given, strict=False):
            for i, label in enumerate(labels if "." not in labels else ""):
                if label not in result:
                    summed[label] = _of_sizes(operand, i)
        return degree + grows * sum(summed.values())


def _of_sizes(node: object, dims: object) -> float:
    """Return the degree of a product of sizes of a tensor; ``()`` means all."""
    sizes = node.meta.get("sizes") if isinstance(node, fx.Node) else None
    if not sizes:
        return 0.0
    chosen = dims if isinstance(dims, tuple | list) else (dims,)
    texts = sizes if len(chosen) == 0 else [sizes[d] for d in chosen if isinstance(d, int)]
    return float(sum(max(map(_factors, re.split(r" [+-] ", text))) for text in texts))


def _factors(term: str) -> int:
    return sum(int(power or 1) for power in _SYMBOL.findall(term))

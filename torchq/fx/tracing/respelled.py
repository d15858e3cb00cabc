# SPDX-License-Identifier: Apache-2.0
"""Calls that the tracer records as other ones, which have int8 forms or which TorchScript knows."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.tracing.attention import attention
from torchq.fx.tracing.einsum import einsum
from torchq.fx.tracing.proxy import Proxy
from torchq.fx.tracing.recorder import Recorder

__all__ = ["UNSCRIPTED", "instead", "settle_filter"]

UNSCRIPTED = tuple(
    getattr(math, name)
    for name in (
        "cbrt", "comb", "dist", "exp2", "fsum", "gamma", "hypot", "isclose", "isqrt", "lcm",
        "ldexp", "lgamma", "log2", "nextafter", "perm", "ulp",
    ) if hasattr(math, name)
)  # fmt: skip
"""Functions of sizes that TorchScript does not know, or that have other bits there."""

_CONSTANTS = frozenset({
    "dim", "ndimension", "is_floating_point", "is_complex", "element_size", "get_device",
    "is_inference",
})  # fmt: skip
"""Methods of a tensor that do not depend on the inputs."""

_PRODUCT = math.prod  # torch.fx replaces the name while it traces
_CONVOLUTIONS = (
    *(F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
)


def _writes_sizes(tracer: Recorder, args: Sequence[Any]) -> bool:
    """Whether numbers alone are written to a constant, at an index of such."""
    given = [tracer.values[x.node] for x in tree_leaves(args[1:]) if type(x) is Proxy]
    return type(args[0]) is not Proxy and not any(isinstance(value, Tensor) for value in given)


def instead(tracer: Recorder, kind: str, target: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """What stands for the call; None for the call itself."""
    source = tracer.values.get(args[0].node) if args and isinstance(args[0], fx.Proxy) else None
    if kind == "call_method" and isinstance(source, Tensor) and target in _CONSTANTS:
        tracer.asked_rank |= "dim" in target
        if target in ("is_floating_point", "is_complex", "element_size"):
            tracer.asked_dtype.add(args[0].node)
        return getattr(source, target)()
    if kind == "call_method" and isinstance(source, torch.Size) and target == "numel":
        return functools.reduce(operator.mul, args[0], 1)
    if kind == "call_method" and target == "__setitem__" and _writes_sizes(tracer, args):
        # to a constant, which the code goes on reading as it is now
        index, value = tree_map(lambda x: tracer.known(x) if type(x) is Proxy else x, args[1:])
        args[0][index] = value
        return args[0]
    if kind == "call_method" and target == "is_integer" and isinstance(source, int | float):
        return args[0] % 1 == 0
    if target in (torch.is_floating_point, torch.is_complex) and isinstance(source, Tensor):
        tracer.asked_dtype.add(args[0].node)
        return target(source)
    if kind == "call_method" and target == "type" and isinstance(source, Tensor) and not args[1:]:
        tracer.asked_dtype.add(args[0].node)
        return source.type()  # the name of its dtype, as of torch's old classes
    if target in (operator.eq, operator.ne) and any(x is None for x in args):
        return target(*(tracer.values[x.node] if type(x) is Proxy else x for x in args))
    if tracer.running:
        return None
    if target is _PRODUCT:
        return functools.reduce(operator.mul, args[0], kwargs.get("start", 1))
    if target is F.multi_head_attention_forward:
        return attention(tuple(args), kwargs, source.dim() if isinstance(source, Tensor) else 0)
    if target is F.glu:
        return _gated(*args, **kwargs)
    if target is torch.einsum:
        return einsum(args, lambda x: _known(tracer, x))
    return None


def _gated(input: Proxy, dim: int = -1) -> Any:
    """F.glu as a table and a product; like it, this raises where the size of ``dim`` is odd."""
    halves = input.unflatten(dim, (2, -1))
    value, gate = halves.unbind(dim if dim >= 0 else dim - 1)
    return value * torch.sigmoid(gate)


def _known(tracer: Recorder, x: Any) -> tuple[Tensor, bool]:
    """The value of an operand, and whether it varies from call to call."""
    return (tracer.values[x.node], x.node.meta["varying"]) if type(x) is Proxy else (x, False)


def settle_filter(
    tracer: Recorder, target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments of a convolution whose numbers are known, as torch has asked for them anyway.

    A weight that varies with numbers of channels only becomes a constant, such as a filter that is
    repeated for every channel of what it is applied to. They are guarded.
    """
    if target not in _CONVOLUTIONS or tracer.running:
        return args, kwargs

    def known(x: Any) -> Any:
        is_int = type(x) is Proxy and type(tracer.values[x.node]) is int
        return tracer.known(x) if is_int else x

    _settle(tracer, args[1] if len(args) > 1 else kwargs.get("weight"))
    return tuple(map(known, args)), {name: known(x) for name, x in kwargs.items()}


def _settle(tracer: Recorder, weight: Any) -> None:
    if type(weight) is not Proxy:
        return
    sizes, made, left = set[fx.Node](), set[fx.Node](), [weight.node]
    while left:
        node = left.pop()
        if node in made or not node.meta["varying"]:
            continue
        if _is_channels(node):
            sizes.add(node)
        elif node.op in ("call_function", "call_method") and not node.meta["writes"]:
            made.add(node)
            left.extend(node.all_input_nodes)
        else:
            return
    for node in sizes:
        tracer.known(tracer.proxy(node))
    for node in made:
        node.meta["varying"] = False


def _is_channels(node: fx.Node) -> bool:
    """Whether it is ``x.shape[1]`` or ``x.size(1)``."""
    if node.target is operator.getitem and node.args[1] == 1:
        shape = node.all_input_nodes[0]
        return shape.target == "size" or (shape.target is getattr and shape.args[1] == "shape")
    return node.target == "size" and node.args[1:] == (1,)

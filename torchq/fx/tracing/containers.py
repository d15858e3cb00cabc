# SPDX-License-Identifier: Apache-2.0
"""How many items a traced tuple, list or dict has, and which: what the model's code went through.

The graph holds one node for each, so another number of them raises. Sizes of shapes are ranks.
"""

from __future__ import annotations

import operator
from collections.abc import KeysView
from typing import Any

import torch
from torch import Tensor, fx

from torchq.fx.tracing.guards import expect_key, expect_keys
from torchq.fx.tracing.recorder import LEN, Recorder

__all__ = ["has_key", "is_given", "is_part", "keys", "length", "whole"]


def length(tracer: Recorder, proxy: fx.Proxy, iterated: bool = False) -> int:
    """Guarded where other inputs may give another one; ``iterated``: each item is asked for."""
    value = tracer.values[proxy.node]
    if isinstance(value, dict):
        return len(keys(tracer, proxy.node))
    tracer.asked_rank = True
    if type(value) is torch.Size or not isinstance(value, tuple | list):
        return len(value)
    if not (is_given(tracer, proxy.node) or _may_differ(proxy.node, len(value), iterated)):
        return len(value)
    return int(tracer.known(tracer.create_proxy("call_function", LEN, (proxy,), {})))


def keys(tracer: Recorder, node: fx.Node) -> KeysView[Any]:
    """Of a dict, in their order; guarded."""
    value: dict[Any, Any] = tracer.values[node]
    if is_given(tracer, node):
        tracer.guard(expect_keys, node, list(value))
    return value.keys()


def has_key(tracer: Recorder, node: fx.Node, key: Any) -> bool:
    """Whether a dict has it; guarded."""
    present = key in tracer.values[node]
    if is_given(tracer, node):
        tracer.guard(expect_key, node, key, present)
    return present


def _source(node: fx.Node) -> fx.Node:
    """Of what a node is a part."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_given(tracer: Recorder, node: fx.Node) -> bool:
    """Whether it is an argument of the model or what an opaque module returns, or a part."""
    source = _source(node)
    return source.op == "placeholder" or source.target in tracer.untraceable


def is_part(tracer: Recorder, node: fx.Node) -> bool:
    """Whether it is an argument, or an item or a field of one that is no tensor."""
    found = whole(tracer, node)
    return found is not None and found.op == "placeholder"


def whole(tracer: Recorder, node: fx.Node) -> fx.Node | None:
    """What it is, or is an item or a field of: an argument, or what an opaque module returned."""
    while node.op != "placeholder" and node.target not in tracer.untraceable:
        takes = node.target in (operator.getitem, getattr, "get") and node.args
        if not takes or len(node.all_input_nodes) != 1 or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
        if isinstance(tracer.values[node], Tensor):
            return None
    return node


def _may_differ(node: fx.Node, parts: int, iterated: bool) -> bool:
    """Whether a function that cuts a tensor, here into ``parts``, may cut another one otherwise.

    As many as asked for by number are never more; of fewer, whoever goes through misses the last.
    """
    source = _source(node)
    name = str(getattr(source.target, "__name__", source.target)).removeprefix("unsafe_")
    by_name = ("chunks", "split_size", "split_size_or_sections")
    named: list[Any] = [source.kwargs[key] for key in by_name if key in source.kwargs]
    given: list[Any] = [*named, *source.args[1:]]
    if name == "chunk":
        return bool(given[0] != parts) or not iterated
    return name == "unbind" or (name == "split" and not isinstance(given[0], list | tuple))

# SPDX-License-Identifier: Apache-2.0
"""What a node of a traced graph computes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["compute", "counts", "phase"]

_WAVES = ("sin", "cos", "sin_", "cos_")
_COUNTING = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")


def compute(root: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Its value for these arguments."""
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(root)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def counts(node: fx.Node, args: Any) -> bool:
    """Whether the values in a tensor decide about the size of the result."""
    if node.target is operator.getitem:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(p, Tensor) and p.dtype in (torch.bool, torch.uint8) for p in parts)
    name = getattr(node.target, "__name__", node.target)
    return name in _COUNTING or (name == "where" and len(args) == 1)


def phase(node: fx.Node, values: Mapping[fx.Node, Any]) -> float | None:
    """The largest phase that a sine or cosine takes on the example inputs."""
    name = str(getattr(node.target, "__name__", node.target))
    if node.op not in ("call_function", "call_method") or name not in _WAVES:
        return None
    source = values.get(node.all_input_nodes[0]) if node.all_input_nodes else None
    if not isinstance(source, Tensor) or not source.is_floating_point() or not source.numel():
        return None
    return float(source.abs().max())

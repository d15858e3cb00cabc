# SPDX-License-Identifier: Apache-2.0
"""Arguments of a traced model, their items and fields: tensors, or constants; all are guarded.

The model's code may ask an argument for more than a graph could see: `is None`, `is True`, its
class. So the graph knows a tensor where there was one, and one value of what is none.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from torchq.fx.tracing.guards import (
    expect,
    expect_kind,
    expect_nan,
    expect_none,
    expect_number,
    expect_same,
    expect_tensor,
    expect_text,
)
from torchq.fx.tracing.memory import leaves
from torchq.fx.tracing.recorder import Recorder

__all__ = ["collection", "holds_tensors", "part", "returned", "with_defaults"]


def part(tracer: Recorder, name: str, proxy: fx.Proxy) -> Any:
    """An argument, an item or a field, as the model's code shall see it."""
    node, value = proxy.node, tracer.values[proxy.node]
    if isinstance(value, Tensor):
        tracer.guard(expect_tensor, node)
        return proxy
    if holds_tensors(name, value):
        kind = next((cls for cls in (tuple, list, dict) if isinstance(value, cls)), type(value))
        pair = kind in (tuple, list)  # which are the same to most code
        tracer.guard(expect_kind, node, "tuple or list" if pair else kind.__name__)
        return proxy
    if isinstance(value, (bool, int)):
        named = (f" (its argument '{name}')",) if node.op == "placeholder" else ()
        tracer.guard(expect, node, value, *named)
    elif isinstance(value, float) and math.isnan(value):
        tracer.guard(expect_nan, node)
    elif isinstance(value, float | str):
        tracer.guard(expect_text if isinstance(value, str) else expect_number, node, value)
    elif value is None:
        tracer.guard(expect_none, node)
    else:
        tracer.guard(expect_same, node, tracer.create_arg(value))
    return value


def returned(tracer: Recorder, module: str, node: fx.Node) -> None:
    """What an opaque module returned, or an item or a field of it; tensors are guarded.

    Numbers, such as sizes, may be others in each call.

    Raises:
        TraceError: it is something that code can only act on.
    """
    value = tracer.values[node]
    if isinstance(value, Tensor):
        tracer.guard(expect_tensor, node)
        return
    known = value is None or isinstance(value, int | float | tuple | list | dict)
    if type(value) is bool or not (
        known or any(isinstance(x, Tensor) for x in leaves(value, set()))
    ):
        raise fx.proxy.TraceError(f"its Python code takes a {type(value).__name__} from '{module}'")


def holds_tensors(name: str, value: Any) -> bool:
    """Whether an argument is a tensor, or a container with one.

    Raises:
        TraceError: it is something else that holds tensors.
    """
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        return True
    if any(isinstance(leaf, Tensor) for leaf in leaves(value, set())):
        raise fx.proxy.TraceError(
            f"its argument '{name}' is a {type(value).__name__} that holds tensors; only a "
            "tuple, list or dict may"
        )
    return False


def with_defaults(bound: inspect.BoundArguments) -> set[str]:
    """The names of what was given; what was left out is added, where a graph can have it.

    So that no argument takes another one's place. Behind the last given one a default that
    TorchScript has no literal of ends the list.
    """
    given, parameters = set(bound.arguments), bound.signature.parameters
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values()):
        return given
    bound.apply_defaults()
    last = max(i for i, name in enumerate(parameters) if name in given)
    ended = False
    for i, (name, parameter) in enumerate(parameters.items()):
        plain = parameter.default is None or isinstance(parameter.default, bool | int | float | str)
        ended = ended or (i > last and not plain)
        if ended:
            del bound.arguments[name]
    return given


def collection(value: Any) -> Any:
    """The type of what holds tensors, which TorchScript else takes for one; None if unknown."""
    return None if isinstance(value, Tensor) else _type(value)


def _type(value: Any) -> Any:
    if isinstance(value, Tensor) or type(value) in (bool, int, float, str):
        return Tensor if isinstance(value, Tensor) else type(value)
    if type(value) not in (tuple, list, dict) or not value:
        return None
    if isinstance(value, dict) and any(type(key) is not str for key in value):
        return None
    kinds = [_type(v) for v in (value.values() if isinstance(value, dict) else value)]
    if None in kinds or (not isinstance(value, tuple) and len(set(kinds)) > 1):
        return None
    if isinstance(value, tuple):
        return tuple[tuple(kinds)]  # type: ignore[misc]
    return dict[str, kinds[0]] if isinstance(value, dict) else list[kinds[0]]  # type: ignore[valid-type]

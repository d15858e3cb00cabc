# SPDX-License-Identifier: Apache-2.0
"""Constants that a model's code writes to while it is traced: from then on they are nodes.

``out = torch.zeros(4)`` is the same in each call. ``out[0] = x`` or ``out += x`` changes that,
under every name that the code has for it, and a graph that wrote to the constant would give all
its callers the same tensor. So the code gets a copy made in each run, and calls with the constant
are recorded as calls with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import is_tensor_method_or_property
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.tracing.memory import SHARES
from torchq.fx.tracing.proxy import Proxy
from torchq.fx.tracing.recorder import Recorder

__all__ = ["Written", "writes_to_constant"]


class Written(Tensor):
    """What a constant becomes, in place; ``torchq_proxy`` is its node."""

    torchq_proxy: Proxy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The call with nodes."""
        kwargs = kwargs or {}
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Written))
        if found.torchq_proxy.tracer.running:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func.__name__ == "__get__":  # of a property
            return getattr(found.torchq_proxy, func.__self__.__name__)
        args, kwargs = tree_map(_node, (tuple(args), dict(kwargs)))
        if isinstance(args[0], fx.Proxy) and is_tensor_method_or_property(func):
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def settle(self, value: Tensor | None) -> None:
        """The call is over: a tensor like any other, with what was written to it."""
        del self.torchq_proxy
        self.__class__ = Tensor  # type: ignore[assignment]
        if value is not None and value.shape == self.shape:
            self.copy_(value)


def _node(leaf: Any) -> Any:
    return leaf.torchq_proxy if isinstance(leaf, Written) else leaf


def writes_to_constant(
    tracer: Recorder, kind: str, target: Any, args: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]] | None:
    """Arguments with a node instead of the constant that a call writes to: in place, or as ``out``.

    None if it writes to no constant, or to one that was there before: somebody keeps it.

    Raises:
        TraceError: the constant has views, or is one.
    """
    name = str(getattr(target, "__name__", target))
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    constant: Any = kwargs.get("out", args[0] if args and in_place else None)
    if kind == "call_module" or type(constant) is not Tensor or constant.layout != torch.strided:
        return None
    storage = constant.untyped_storage()
    if storage.data_ptr() in tracer.older:
        return None
    # Writes to a view, or behind one, would have to be seen in the other: the tensor and
    # `storage` are all that may hold it, and arrays of numpy see what is written to theirs.
    shared = torch._C._storage_Use_Count(storage._cdata) > 2
    if constant._is_view() or shared or not storage.resizable():
        raise fx.proxy.TraceError(SHARES)
    copied = tracer.create_proxy("call_method", "clone", (constant.clone(),), {})
    copied.node.meta["varying"] = True
    constant.__class__ = Written
    vars(constant)["torchq_proxy"] = copied
    tracer.constants.append(constant)
    return (args, {**kwargs, "out": copied}) if "out" in kwargs else ((copied, *args[1:]), kwargs)

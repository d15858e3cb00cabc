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

    None if it writes to no constant, or to what the model itself has, and keeps call after call.
    """
    name = str(getattr(target, "__name__", target))
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    constant: Any = kwargs.get("out", args[0] if args and in_place else None)
    if kind == "call_module" or type(constant) is not Tensor or constant.layout != torch.strided:
        return None
    kept = [*tracer.root.parameters(), *tracer.root.buffers()]
    kept += [x for x, name in tracer.tensor_attrs.items()
             if isinstance(x, Tensor) and not name.startswith("_tensor_constant")]  # fmt: skip
    storage = constant.untyped_storage().data_ptr()
    if any(x.layout == torch.strided and x.untyped_storage().data_ptr() == storage for x in kept):
        return None
    copied = tracer.create_proxy("call_method", "clone", (constant.clone(),), {})
    copied.node.meta["varying"] = True
    constant.__class__ = Written
    vars(constant)["torchq_proxy"] = copied
    tracer.constants.append(constant)
    return (args, {**kwargs, "out": copied}) if "out" in kwargs else ((copied, *args[1:]), kwargs)

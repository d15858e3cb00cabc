# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that do not dispatch on what they get, as they are while a model is traced."""

from __future__ import annotations

import builtins
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from torchq.fx.tracing.proxy import Proxy
from torchq.fx.tracing.tracer import Tracer

__all__ = ["traced_factories"]

_FACTORIES = (
    *("zeros", "ones", "full", "full_like", "empty", "arange", "eye", "linspace", "tensor"),
    "scalar_tensor",
)
_METHODS = ("expand", "new_zeros", "new_ones", "new_empty", "roll", "__getitem__")
_LOCK = threading.RLock()


class _Context:
    """What an autograd function keeps for its backward pass: nothing."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *tensors: Any) -> None:
        """Nothing."""

    save_for_forward = mark_dirty = mark_non_differentiable = save_for_backward
    set_materialize_grads = save_for_backward


@contextmanager
def traced_factories(tracer: Tracer) -> Iterator[None]:
    """Makes torch.zeros(n) and the like nodes where n is one: torch does not dispatch on sizes.

    Nor do methods of a tensor that is no node, where sizes are given as separate arguments, and
    indices are taken for sequences.
    And functions that ask for the class or dtype of a tensor, isinstance and callable among them,
    take a node for its value; the length of a tensor is a node; functions that TorchScript compiled
    take nodes as the Python functions that they were, and so do those with a backward pass of their
    own. Checks of conditions on sizes guard them.
    Other threads see the originals do their work; those that trace as well wait.
    """
    traced = _Traced(tracer)
    patches: list[tuple[Any, str, Callable[[Any], Any]]] = [
        *((torch, name, traced.factory) for name in _FACTORIES),
        *((Tensor, name, traced.method) for name in _METHODS),
        *((torch, name, traced.as_tensor) for name in ("as_tensor", "asarray")),
        *((torch, "is_tensor", traced.of_value), (F, "_none_or_dtype", traced.of_value)),
        (builtins, "callable", traced.is_callable),
        (builtins, "isinstance", traced.is_instance),
        (builtins, "len", traced.length),
        (torch.jit.ScriptFunction, "__call__", traced.uncompiled),
        (torch.autograd.Function, "apply", traced.forward),
        (torch._functorch.utils, "unwrap_dead_wrappers", traced.unwrapped),
        (torch, "_check_with", traced.check),
        (torch, "_assert", traced.asserted),
    ]
    with _LOCK:
        own = [(place, name, vars(place).get(name)) for place, name, _ in patches]
        try:
            for place, name, replaced in patches:
                setattr(place, name, replaced(getattr(place, name)))
            yield
        finally:
            for place, name, original in own:
                if original is None:  # inherited
                    delattr(place, name)
                else:
                    setattr(place, name, original)


class _Traced:
    """From functions as torch and Python have them to ones that take nodes."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def _records(self, leaves: Iterable[Any]) -> bool:
        """Whether a call with these arguments is to become a node."""
        return not self._tracer.running and any(isinstance(leaf, fx.Proxy) for leaf in leaves)

    def _value(self, x: Any) -> Any:
        return self._tracer.values[x.node] if isinstance(x, fx.Proxy) else x

    def factory(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if not self._records(tree_leaves((args, kwargs))):
                return original(*args, **kwargs)
            return self._tracer.create_proxy("call_function", original, args, kwargs)

        return make

    def method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._records(
                part for leaf in tree_leaves((args, kwargs)) for part in _parts(leaf)
            ):
                return original(*args, **kwargs)
            if original.__name__ == "__getitem__":
                return self._tracer.create_proxy("call_function", operator.getitem, args, kwargs)
            return self._tracer.create_proxy("call_method", original.__name__, args, kwargs)

        return call

    def as_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def keep(data: Any, dtype: Any = None, device: Any = None, **more: Any) -> Any:
            options = {"dtype": dtype, "device": device}
            if not self._records(tree_leaves(data)):
                return original(data, **options, **more)
            if not isinstance(self._value(data), Tensor):
                return torch.tensor(data, **options)
            given = {name: option for name, option in options.items() if option is not None}
            return data.to(**given) if given else data

        return keep

    def of_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: original(self._value(x))

    def is_callable(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def look(x: Any) -> bool:
            known = type(x) is Proxy and x.tracer is self._tracer
            return original(self._value(x) if known else x)

        return look

    def is_instance(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def look(x: Any, classes: Any) -> bool:
            if type(x) is Proxy and not original(x, classes):
                return issubclass(x.looks_like(sys._getframe(1)), classes)
            return original(x, classes)

        return look

    def length(self, original: Callable[..., int]) -> Callable[..., Any]:
        """Python makes a number of what ``__len__`` returns, which would be guarded."""

        def count(x: Any) -> Any:
            value = self._value(x) if type(x) is Proxy and x.tracer is self._tracer else x
            sized = value is not x and isinstance(value, Tensor) and value.dim()
            if not sized:
                return original(x)
            size = x.size(0)
            size.node.meta["length"] = True
            return size

        return count

    def uncompiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            python = getattr(function, "_torchdynamo_inline", None)
            if python is None or not self._records(tree_leaves((args, kwargs))):
                return original(function, *args, **kwargs)
            return python(*args, **kwargs)

        return call

    def forward(self, original: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._records(tree_leaves((args, kwargs))):
                return original.__func__(cls, *args, **kwargs)
            if cls.setup_context is torch.autograd.Function.setup_context:
                args = (_Context(len(args)), *args)
            return cls.forward(*args, **kwargs)

        return classmethod(apply)

    def unwrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For ``apply`` of before, which code may have kept: it calls ``forward`` with nodes."""
        return lambda args: args if self._records(args) else original(args)

    def check(self, original: Callable[..., None]) -> Callable[..., None]:
        def decide(error: Any, condition: Any, message: Any) -> None:
            original(error, bool(condition) if type(condition) is Proxy else condition, message)

        return decide

    def asserted(self, original: Callable[..., None]) -> Callable[..., None]:
        """A condition on sizes is guarded; one on values would be a node that nobody reads."""

        def decide(condition: Any, message: str) -> None:
            static = type(condition) is Proxy and condition.node.meta["static"]
            original(bool(condition) if static else condition, message)

        return decide


def _parts(leaf: Any) -> tuple[Any, ...]:
    """A slice's numbers."""
    return (leaf.start, leaf.stop, leaf.step) if type(leaf) is slice else (leaf,)

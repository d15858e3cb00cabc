# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that do not dispatch on what they get, as they are while a model is traced."""

from __future__ import annotations

import builtins
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from torchq.fx.proxy import Proxy
from torchq.fx.tracer import Tracer

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
    take a node for its value; functions that TorchScript compiled take nodes as the Python
    functions that they were, and so do those with a backward pass of their own. Checks of
    conditions on sizes guard them.
    Other threads see the originals do their work; those that trace as well wait.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def factory(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            if tracer.running or not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
                return original(*args, **kwargs)
            return tracer.create_proxy("call_function", original, args, kwargs)

        return factory

    def wrap_method(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            leaves = [part for leaf in tree_leaves((args, kwargs)) for part in _parts(leaf)]
            if tracer.running or not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
                return original(*args, **kwargs)
            if original.__name__ == "__getitem__":
                return tracer.create_proxy("call_function", operator.getitem, args, kwargs)
            return tracer.create_proxy("call_method", original.__name__, args, kwargs)

        return method

    def look(original: Callable[..., Any]) -> Callable[..., Any]:
        def looks(value: Any) -> Any:
            return original(tracer.values[value.node] if isinstance(value, fx.Proxy) else value)

        return looks

    def look_at_call(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_callable(value: Any) -> bool:
            known = type(value) is Proxy and value.tracer is tracer
            return original(tracer.values[value.node] if known else value)

        return is_callable

    def look_at_class(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_instance(value: Any, classes: Any) -> bool:
            if type(value) is Proxy and not original(value, classes):
                return issubclass(value.looks_like(), classes)
            return original(value, classes)

        return is_instance

    def uncompile(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            nodes = any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs)))
            python = getattr(function, "_torchdynamo_inline", None)
            if tracer.running or not nodes or python is None:
                return original(function, *args, **kwargs)
            return python(*args, **kwargs)

        return call

    def keep(original: Callable[..., Any]) -> Callable[..., Any]:
        def as_tensor(data: Any, dtype: Any = None, device: Any = None, **more: Any) -> Any:
            options = {"dtype": dtype, "device": device}
            if tracer.running or not any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(data)):
                return original(data, **options, **more)
            if not (isinstance(data, fx.Proxy) and isinstance(tracer.values[data.node], Tensor)):
                return torch.tensor(data, **options)
            given = {name: option for name, option in options.items() if option is not None}
            return data.to(**given) if given else data

        return as_tensor

    def forward(original: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            nodes = any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs)))
            if tracer.running or not nodes:
                return original.__func__(cls, *args, **kwargs)
            if cls.setup_context is torch.autograd.Function.setup_context:
                args = (_Context(len(args)), *args)
            return cls.forward(*args, **kwargs)

        return classmethod(apply)

    def decide(original: Callable[..., None]) -> Callable[..., None]:
        def check(error: Any, condition: Any, message: Any) -> None:
            original(error, bool(condition) if type(condition) is Proxy else condition, message)

        return check

    with _LOCK:
        patches: list[tuple[Any, str, Any]] = [(torch, name, wrap) for name in _FACTORIES]
        patches += [(Tensor, name, wrap_method) for name in _METHODS]
        patches += [(torch, "is_tensor", look), (F, "_none_or_dtype", look)]
        patches += [(builtins, "callable", look_at_call), (torch, "_check_with", decide)]
        patches += [(torch, "as_tensor", keep), (torch, "asarray", keep)]
        patches += [(builtins, "isinstance", look_at_class)]
        patches += [(torch.jit.ScriptFunction, "__call__", uncompile)]
        patches += [(torch.autograd.Function, "apply", forward)]
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


def _parts(leaf: Any) -> tuple[Any, ...]:
    """A slice's numbers."""
    return (leaf.start, leaf.stop, leaf.step) if type(leaf) is slice else (leaf,)

# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that do not dispatch on what they get, as they are while a model is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._pytree import tree_leaves

from torchq.fx.tracer import Tracer

__all__ = ["traced_factories"]

_FACTORIES = ("zeros", "ones", "full", "empty", "arange", "eye", "linspace", "tensor")
_LOCK = threading.RLock()


@contextmanager
def traced_factories(tracer: Tracer) -> Iterator[None]:
    """Makes torch.zeros(n) and the like nodes where n is one: torch does not dispatch on sizes.

    And functions that ask for the class or dtype of a tensor take a node for its value; functions
    that TorchScript compiled take nodes as the Python functions that they were.
    Other threads see the originals do their work; those that trace as well wait.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def factory(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            if tracer.running or not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
                return original(*args, **kwargs)
            return tracer.create_proxy("call_function", original, args, kwargs)

        return factory

    def look(original: Callable[..., Any]) -> Callable[..., Any]:
        def looks(value: Any) -> Any:
            return original(tracer.values[value.node] if isinstance(value, fx.Proxy) else value)

        return looks

    def uncompile(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            nodes = any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs)))
            python = getattr(function, "_torchdynamo_inline", None)
            if tracer.running or not nodes or python is None:
                return original(function, *args, **kwargs)
            return python(*args, **kwargs)

        return call

    with _LOCK:
        patches: list[tuple[Any, str, Any]] = [(torch, name, wrap) for name in _FACTORIES]
        patches += [(torch, "is_tensor", look), (F, "_none_or_dtype", look)]
        patches += [(torch.jit.ScriptFunction, "__call__", uncompile)]
        originals = [(place, name, getattr(place, name)) for place, name, _ in patches]
        try:
            for place, name, replaced in patches:
                setattr(place, name, replaced(getattr(place, name)))
            yield
        finally:
            for place, name, original in originals:
                setattr(place, name, original)

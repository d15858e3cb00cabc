# SPDX-License-Identifier: Apache-2.0
"""Tracing of the functions that pack and pad sequences: torch.fx would look into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.nn.utils import rnn
from torch.utils._pytree import tree_leaves

__all__ = ["SequenceTracer"]

_PACKING = (rnn.pack_padded_sequence, rnn.pad_packed_sequence, rnn.pack_sequence, rnn.pad_sequence)


class SequenceTracer(fx.Tracer):
    """Records these functions as one call each, imported by name or not."""

    def __init__(self) -> None:
        """As a Tracer."""
        super().__init__(autowrap_functions=_PACKING)  # where they are imported by name

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """As a Tracer's."""
        with _patched(self):
            graph = super().trace(root, concrete_args)
        for node in graph.nodes:
            # With it, the generated code asks fx to wrap a name with dots, which fails there.
            node.meta.pop("is_wrapped", None)
        return graph


@contextmanager
def _patched(tracer: fx.Tracer) -> Iterator[None]:
    """Their names in torch.nn.utils.rnn make nodes."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def packing(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                return tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return packing

    try:
        for function in _PACKING:
            setattr(rnn, function.__name__, wrap(function))
        yield
    finally:
        for function in _PACKING:
            setattr(rnn, function.__name__, function)

# SPDX-License-Identifier: Apache-2.0
"""Functions of numpy on what is traced, as in ``np.sqrt(x.shape[1])`` or ``np.float64(2) * x``.

numpy takes a node for an object: that does for what Python has operators for, but an object has no
logarithm, and what rounds one makes an int of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, fx

from torchq.fx.tracing.recorder import Recorder

__all__ = ["universal"]


def universal(
    tracer: Recorder, function: np.ufunc, method: str, inputs: tuple[Any, ...], more: dict[str, Any]
) -> Any:
    """``function`` of nodes: a node where Python's operators say it, else a guarded constant.

    Raises:
        TraceError: it would be of values in a tensor, or of what is no number.
    """
    values = [tracer.values[x.node] for x in inputs if isinstance(x, fx.Proxy)]
    others = [value for value in values if not isinstance(value, bool | int | float | tuple)]
    # a number of numpy leaves its operators to a tensor beside it
    beside = len(inputs) == 2 and any(isinstance(x, np.generic) for x in inputs)
    if others and not (beside and isinstance(others[0], Tensor)):
        kind = type(others[0]).__name__
        raise fx.proxy.TraceError(f"its Python code gives a {kind} to numpy.{function.__name__}")
    try:
        result = None if "out" in more else getattr(function, method)(*map(_object, inputs), **more)
    except (TypeError, AttributeError, ArithmeticError):
        result = None
    if isinstance(result, fx.Proxy):
        return result
    if len(inputs) == 2 and isinstance(result, bool | int | float | np.generic):
        return np.asarray(result)[()]  # what numpy makes of numbers is one of its own
    known = [tracer.known(x) if isinstance(x, fx.Proxy) else x for x in inputs]
    return getattr(function, method)(*known, **more)


def _object(x: Any) -> Any:
    """A node as numpy takes objects, or the nodes of a shape."""
    if not isinstance(x, fx.Proxy):
        return x
    parts: Any = x
    sizes = isinstance(x.tracer.values[x.node], tuple)  # type: ignore[attr-defined]
    items = list(parts) if sizes else [x]
    array = np.empty(len(items), object)
    for i, item in enumerate(items):
        array[i] = item
    return array if sizes else array.reshape(())

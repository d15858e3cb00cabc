# SPDX-License-Identifier: Apache-2.0
"""Makes functions of graphs, as torch.fx does, and drops their sources with them.

Python and torch.fx keep the source of each graph for good: a service that loads models again and
again lost 20 KB a model. PyTorch has no function that forgets one, so this file reaches into
``torch.fx.graph_module``; no other one does.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch import fx
from torch.fx.graph_module import _forward_from_src, _loader

Function = TypeVar("Function", bound=Callable[..., object])


def function_of(graph: fx.Graph) -> Callable[..., object]:
    """Return ``forward`` of a graph, which tracebacks can read; its first argument is ``self``."""
    code = graph.python_code("self")
    return with_source(_forward_from_src(code.src, code.globals))


def with_source(function: Function) -> Function:
    """Return a function that torch.fx made; its source goes when it goes."""
    weakref.finalize(function, _forget, function.__code__.co_filename)
    return function


def _forget(file: str) -> None:
    linecache.cache.pop(file, None)
    _loader.eval_cache.pop(file, None)

# SPDX-License-Identifier: Apache-2.0
"""Functions of a traced graph: what it checks at run time, and writing without side effects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["expect", "with_item"]


@torch.fx.wrap
def expect(value: int, expected: int) -> None:
    """Raises where a size or truth value that the model's Python code acted on is another one.

    Raises:
        RuntimeError: naming both.
    """
    scripting = torch.jit.is_scripting()  # type: ignore[attr-defined]
    if not scripting and torch._C._get_tracing_state():
        return  # a trace makes constants of conditions
    if value != expected:
        raise RuntimeError(
            f"torchq.fx: the model was traced where a size or condition was {expected}, got "
            f"{value}, and its Python code acted on it. Trace it with example_inputs of such "
            "sizes, or use torchq.eager."
        )


@torch.fx.wrap
def with_item(src: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of a tensor after ``copy[index] = value``."""
    result = src.clone()
    result[index] = value
    return result

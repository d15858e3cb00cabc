# SPDX-License-Identifier: Apache-2.0
"""Compares what a call gives with what the example gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchq.models.trees import opened


@dataclass(frozen=True)
class Argument:
    """A tensor that a graph takes.

    Attributes:
        index: position among the leaves of ``(args, kwargs)``.
        dtype: of the example.
        shape: a size, or None where it is dynamic, for each dimension.
    """

    index: int
    dtype: torch.dtype
    shape: tuple[int | None, ...]


def is_neutral(neutral: Mapping[str, list[object]], name: str, value: object) -> bool:
    """Return whether an option has a value that gives the same results as the example's."""
    return any(value is known for known in neutral.get(name, ()))


def without(neutral: Mapping[str, list[object]], keywords: dict[str, object]) -> dict[str, object]:
    """Return keywords without neutral ones."""
    return {k: v for k, v in keywords.items() if not is_neutral(neutral, k, v)}


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return True for a parameter, and for a tensor of torch.export or torch.compile."""
    if type(value) is nn.Parameter:
        return True
    return isinstance(value, Tensor) and torch.compiler.is_compiling()


def tensors_of(value: object) -> list[Argument]:
    """Return the tensors in what the example gave for one parameter."""
    return [leaf for leaf in pytree.tree_leaves(opened(value)) if isinstance(leaf, Argument)]


def flat(value: object, before: list[object], structure: pytree.TreeSpec) -> list[object] | None:
    """Return the tensors of a value that holds the same as the example's, else None."""
    leaves, spec = pytree.tree_flatten(value)
    if spec != structure:
        leaves, spec = pytree.tree_flatten(opened(value))
        if spec != structure:
            return None
    tensors = []
    for leaf, known in zip(leaves, before, strict=True):
        if isinstance(known, Argument):
            tensors.append(leaf)
        elif not equal(leaf, known):
            return None
    return tensors


def equal(value: object, expected: object) -> bool:
    """Return True where a value that is no tensor is that of the example, and of its class."""
    if value is expected:
        return True
    if type(value) is not type(expected):
        return False
    if isinstance(value, tuple | list) and isinstance(expected, tuple | list):
        return len(value) == len(expected) and all(map(equal, value, expected))
    try:
        return bool(value == expected)
    except Exception:  # of a class that does not compare
        return False

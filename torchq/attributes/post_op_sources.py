# SPDX-License-Identifier: Apache-2.0
"""What post-ops read at run time: the op's sources, in their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

from torch import Tensor

from torchq.attributes.arguments import check_count, selected_dims
from torchq.attributes.post_op_types import Binary, PostOp, PReLU, Sum

CHANNEL_MASKS = (0, 2)
"""Masks whose values are folded; an operand with any other is a source of the op."""


def is_full(op: PostOp) -> TypeGuard[Binary | PReLU]:
    """Whether the operand is a source of the op rather than values per channel."""
    return isinstance(op, Binary | PReLU) and op.mask not in CHANNEL_MASKS


def has_full_values(op: PostOp) -> bool:
    """Whether it is a source that the caller need not supply."""
    return is_full(op) and op.values is not None


def owners_of(ops: Iterable[PostOp]) -> list[PostOp]:
    """The post-op that each source belongs to; a select's operand comes before its condition."""
    owners = list[PostOp]()
    for op in ops:
        owners += [op] * (isinstance(op, Sum) + is_full(op) + selects(op))
    return owners


def merged_sources(
    ops: Iterable[PostOp],
    op_name: str,
    dims: Callable[[], Sequence[int]],
    srcs: Sequence[Tensor],
    every: bool = False,
) -> list[Tensor]:
    """The caller's ``srcs`` and the values of masks other than 0 and 2, or ``every``, in order."""
    rows, remaining, result = op_name in ("linear", "matmul"), iter(srcs), list[Tensor]()
    for op in ops:
        if every and isinstance(op, Binary | PReLU) and not is_full(op):
            if op.values is None:
                raise ValueError(
                    f"torchq.{op_name}: values must be present in {op}, got none. Supply them: "
                    "post_ops.with_values([...])."
                )
            result.append(op.values.reshape(_operand_shape(op_name, op, dims(), rows)))
        elif is_full(op) and op.values is not None:
            result.append(op.values.reshape(_operand_shape(op_name, op, dims(), rows)))
        elif isinstance(op, Sum) or is_full(op):
            result.append(next(remaining))
        if selects(op):
            result.append(next(remaining))
    return result


def selects(op: PostOp) -> bool:
    """Whether the post-op has a condition, which is a source."""
    return isinstance(op, Binary) and op.alg == "select"


def _operand_shape(op_name: str, op: Binary | PReLU, dims: Sequence[int], rows: bool) -> list[int]:
    """The dims of dst that the mask selects, 1 elsewhere; ValueError unless the values fit."""
    logical = (math.prod(dims[:-1]), dims[-1]) if rows else dims
    where = f"torchq.{op_name}: values of {op}"
    check_count(where, op.mask, op.values, selected_dims(where, op.mask, logical), logical)
    bits = [int(d + 1 == len(dims)) if rows else d for d in range(len(dims))]
    return [size if op.mask >> bit & 1 else 1 for size, bit in zip(dims, bits, strict=True)]

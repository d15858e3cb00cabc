# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a decoder's cache, and those of new tokens behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._jit_internal import is_scripting

from torchq.nn.leaf import is_traced
from torchq.nn.module import QModule, Spec

_ROOM = "torchq_room"
"""Attribute of the storage of a result."""
_LEAST_BYTES = 1 << 19
"""Of a result with room behind it. torch.cat copies 0.2 MB in 7 us, in which the room is found, and
leaves the copy in a cache for what reads it: decode steps of SmolLM2-135M gain from 0.8 MB on, and
lose with 0.2 (Zen 4)."""
_FREE = 4
"""As many rows stand in a new result as there is room for behind it, times this."""


class CachedCat(QModule):
    """``torch.cat((cached, more), dim)``, which copies only ``more`` where it can.

    There is room behind a large result. The next call that is given the result, or a slice of it
    up to its end, writes into the room. Only one call may: another one with the same ``cached``
    copies all of it, as it does with tensors that were made elsewhere. So results share memory:
    what is written into one of them in place is in the others, too.

    A decoder reads the keys and values of its encoder's states in each step, and adds none. The
    result is ``cached`` itself then.

    If ``cached`` has rows that :func:`torchq.functional.compress_rows` made, and ``more`` those of
    floats, these are compressed, too.

    Shapes:
        cached, more: of one dtype and one shape except ``dim``; or ``cached`` int8 rows, and
            ``more`` float with four columns fewer.
        dst: of the dtype of ``cached``, and as long as both.
    """

    def __init__(self, dim: int) -> None:
        """``dim`` as in torch.cat."""
        super().__init__()
        self._set_spec(dim=dim)
        self.dim = dim

    @classmethod
    def from_spec(cls, spec: Spec) -> CachedCat:
        """See the base class."""
        return cls(spec["dim"])

    def forward(self, cached: Tensor, more: Tensor) -> Tensor:
        """Concatenate."""
        if more.shape[self.dim] == 0:
            return cached
        if cached.dtype == torch.int8 and more.is_floating_point():
            more = torch.ops.torchq.compress_rows(more)
        if is_scripting():
            return torch.cat((cached, more), self.dim)
        if is_traced() or not _gains(cached, more, self.dim):
            return torch.cat((cached, more), self.dim)
        grown = _written_behind(cached, more, self.dim)
        return _with_room(cached, more, self.dim) if grown is None else grown


@dataclass
class _Room:
    """The whole tensor of a result, and what of it is free.

    Attributes:
        dtype, shape, strides: of the whole tensor; a view may have other ones.
        dim: of its rows; along others there is no room.
        free: the first row that no result has; none while a call writes.
    """

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    dim: int
    free: list[int]


def _gains(cached: Tensor, more: Tensor, dim: int) -> bool:
    """Return whether torch.cat would only copy, and much: it also meets other dtypes and shapes."""
    shape = list(more.shape)
    if len(shape) != cached.dim() or more.dtype != cached.dtype:
        return False
    shape[dim] = cached.shape[dim]
    has_gradients = torch.is_grad_enabled() and (cached.requires_grad or more.requires_grad)
    if list(cached.shape) != shape or has_gradients:
        return False
    return (cached.numel() + more.numel()) * more.element_size() >= _LEAST_BYTES


def _written_behind(cached: Tensor, more: Tensor, dim: int) -> Tensor | None:
    """Return the result in the room behind ``cached``; None if there is none."""
    room: _Room | None = getattr(cached.untyped_storage(), _ROOM, None)
    if room is None or (cached.dtype, cached.stride()) != (room.dtype, room.strides):
        return None
    if dim % cached.dim() != room.dim:
        return None
    if cached.is_inference() and not torch.is_inference_mode_enabled():  # torch would refuse
        return None
    rows, count, stride = cached.shape[dim], more.shape[dim], room.strides[dim]
    offset = cached.storage_offset()
    first, shape = offset // stride + rows, list(cached.shape)
    shape[dim] = room.shape[dim]
    if offset % stride or shape != list(room.shape) or first + count > room.shape[dim]:
        return None
    if _FREE * (rows + count) < room.shape[dim]:  # a window: all before it would be kept
        return None
    try:
        free = room.free.pop()
    except IndexError:  # another thread writes
        return None
    if free != first:
        room.free.append(free)
        return None
    shape[dim] = count
    cached.as_strided(shape, room.strides, offset + rows * stride).copy_(more)
    room.free.append(first + count)
    shape[dim] = rows + count
    return cached.as_strided(shape, room.strides, offset)


def _with_room(cached: Tensor, more: Tensor, dim: int) -> Tensor:
    """Return the result at the front of a new tensor."""
    rows, count, shape = cached.shape[dim], more.shape[dim], list(cached.shape)
    shape[dim] = rows + count + (rows + count) // _FREE
    whole = cached.new_empty(shape)
    whole.narrow(dim, 0, rows).copy_(cached)
    whole.narrow(dim, rows, count).copy_(more)
    whole.narrow(dim, rows + count, (rows + count) // _FREE).zero_()  # a file would have it, too
    room = _Room(whole.dtype, whole.shape, whole.stride(), dim % whole.dim(), [rows + count])
    setattr(whole.untyped_storage(), _ROOM, room)
    return whole.narrow(dim, 0, rows + count)

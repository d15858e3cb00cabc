# SPDX-License-Identifier: Apache-2.0
"""Caches of transformers: keys and values are read from them, and put into them.

Nothing here imports transformers: a call that has a cache has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchq.functional.attentions import compress_rows, decompress_rows

_LIBRARY = "transformers.cache_utils"


class Layer(Protocol):
    """The attributes of a layer of a cache that are read or set."""

    keys: Tensor
    values: Tensor
    is_initialized: bool
    is_sliding: bool
    sliding_window: int
    record_past: bool
    cumulative_length: int

    def get_seq_length(self) -> int:
        """Return how many tokens it has seen."""


class Cache(Protocol):
    """The attributes of a cache that are read; that of an encoder and a decoder has the last 3."""

    layers: list[Layer]
    self_attention_cache: Cache
    cross_attention_cache: Cache
    is_updated: dict[int, bool]

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> object:
        """Put keys and values behind those of a layer."""


def read_cache(
    cache: Cache | None,
    kinds: tuple[tuple[int, int, torch.dtype], ...],
    windows: tuple[int | None, ...],
    batch: int,
) -> tuple[int, list[Tensor]] | None:
    """Return how many tokens a cache has seen, and its keys and values in turn, layer by layer.

    None where it is no plain one with layers of these kinds (heads, elements, dtype) and windows,
    or lacks keys that the model reads. An empty one has tensors of no tokens.
    """
    layers = [] if cache is None else _layers(cache)
    if layers is None:
        return None
    lengths = [layer.get_seq_length() for layer in layers]
    full = layers[: sum(map(bool, lengths))]  # a cache may have more layers than the decoder
    known = {*lengths[: len(full)]}
    if 0 in known or len(known) > 1:
        return None
    if not full:
        return 0, [
            torch.empty(batch, heads, 0, size, dtype=kind, device="cpu")
            for heads, size, kind in kinds
        ]
    (length,) = known
    windows = windows or (None,) * len(full)
    if not 2 * len(full) == len(kinds) == 2 * len(windows):
        return None
    for layer, window in zip(full, windows, strict=True):
        least = length if window is None else min(length, window - 1)
        if not least <= layer.keys.shape[2] <= length:
            return None
    tensors = [tensor for layer in full for tensor in (layer.keys, layer.values)]
    return length, [_as_kind(*pair) for pair in zip(tensors, kinds, strict=True)]


def _as_kind(tensor: Tensor, kind: tuple[int, int, torch.dtype]) -> Tensor:
    """Return keys or values as a graph takes them, compressed or not; others as they are."""
    (_, size, dtype), is_rows = kind, tensor.dtype == torch.int8
    if is_rows == (dtype == torch.int8) or tensor.shape[-1] != size + (4 if is_rows else -4):
        return tensor
    return decompress_rows(tensor).to(dtype) if is_rows else compress_rows(tensor)


def decompress(cache: Cache | None, dtype: torch.dtype) -> None:
    """Make the keys and values of a cache what the model's own code reads."""
    for held in () if cache is None else caches_of(cache):
        for layer in _layers(held) or ():
            if layer.is_initialized and layer.keys.dtype == torch.int8:
                both = layer.keys, layer.values
                layer.keys, layer.values = (decompress_rows(t).to(dtype) for t in both)


def caches_of(cache: Cache) -> list[Cache]:
    """Return a cache, or the two of a decoder: of its own tokens, and of the encoder's states."""
    if type(cache) is vars(sys.modules.get(_LIBRARY, object)).get("EncoderDecoderCache"):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _layers(cache: Cache) -> list[Layer] | None:
    """Return the layers of a cache.

    None for other classes, and for layers that hold anything but keys and values of tokens.
    """
    known = vars(sys.modules.get(_LIBRARY, object))
    if type(cache) is not known.get("DynamicCache") or getattr(cache, "offloading", False):
        return None
    kinds = (known.get("DynamicLayer"), known.get("DynamicSlidingWindowLayer"))
    layers: list[Layer] | None = getattr(cache, "layers", None)
    return layers if layers is not None and all(type(a) in kinds for a in layers) else None


def tensors_of(cache: Cache) -> list[Tensor]:
    """Return keys and values in turn, layer by layer; [] of a class that ``_layers`` refuses."""
    parts = [_layers(held) for held in caches_of(cache)]
    layers = [layer for part in parts for layer in part or () if layer.is_initialized]
    return [] if None in parts else [t for layer in layers for t in (layer.keys, layer.values)]


def new_cache(
    tensors: list[Tensor], windows: Sequence[int | None] = (), crossed: bool = False
) -> Cache:
    """Return a cache with these keys and values, of which windows keep the last ones."""
    known = vars(sys.modules[_LIBRARY])
    if crossed:
        cache: Cache = known["EncoderDecoderCache"](
            known["DynamicCache"](), known["DynamicCache"]()
        )
        fill(cache, tensors, 0)
        return cache
    sizes = [() if w is None else (torch.tensor(w, device="cpu"),) for w in windows]
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
    layers = [(*pair, *size) for pair, size in zip(pairs, sizes or [()] * len(pairs), strict=True)]
    made: Cache = known["DynamicCache"](layers)
    return made


def fill(cache: Cache, tensors: list[Tensor], count: int) -> None:
    """Put keys and values into a cache, with the last ``count`` tokens of which it has grown."""
    caches, pairs = caches_of(cache), [*zip(tensors[::2], tensors[1::2], strict=True)]
    size = len(pairs) // len(caches)
    for n, held in enumerate(caches):
        for i, (keys, values) in enumerate(pairs[n * size : (n + 1) * size]):
            if i >= len(held.layers) or not held.layers[i].is_initialized:
                held.update(keys[:, :, :0], values[:, :, :0], i)
            layer = held.layers[i]
            layer.keys, layer.values = keys, values
            if layer.is_sliding:
                layer.cumulative_length += count
                if not layer.record_past:  # a layer that does keeps all of them until it is cropped
                    layer.keys, layer.values = _last(layer.sliding_window, keys, values)
    if len(caches) > 1:
        cache.is_updated.update(dict.fromkeys(range(size), True))


def _last(window: int, *tensors: Tensor) -> list[Tensor]:
    """Return what a layer with a window keeps of all keys and values."""
    return [tensor[:, :, 1 - window :] for tensor in tensors]


def see_window(layer: Any, length: int) -> None:
    """Let a layer tell that it holds the last keys of so many tokens, as one with a window does.

    Such a layer of transformers would decide by its length, which is not known in a graph.
    """
    before = length - layer.keys.shape[2]
    layer.is_sliding = True
    layer.get_seq_length = lambda: before + layer.keys.shape[2]
    layer.get_mask_sizes = lambda count: (layer.keys.shape[2] + count, before)

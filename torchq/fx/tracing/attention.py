# SPDX-License-Identifier: Apache-2.0
"""Attention as the linears and matrix products it consists of."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["attention"]

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def attention(args: tuple[Any, ...], kwargs: dict[str, Any], rank: int) -> Any:
    """``F.multi_head_attention_forward`` in evaluation, to be traced; None where it does more.

    Args:
        args: of the function, with proxies for tensors.
        kwargs: ditto.
        rank: of the query; 3 with a batch, ``(L, N, E)``.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    more = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn", "training")
    if rank != 3 or any(a[name] is not None and a[name] is not False for name in more):
        return None
    length, batch = a["query"].size(0), a["query"].size(1)
    heads, features = a["num_heads"], a["embed_dim_to_check"]
    q, k, v = (_heads(x, heads, features // heads) for x in _projected(a, features))
    mask = _mask(a, heads, batch)
    if a["need_weights"]:
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(features // heads)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        result = torch.matmul(weights, v)
        weights = weights.mean(1) if a["average_attn_weights"] else weights
    else:
        weights, result = None, F.scaled_dot_product_attention(q, k, v, mask)
    result = result.permute(2, 0, 1, 3).reshape(length, batch, features)
    return F.linear(result, a["out_proj_weight"], a["out_proj_bias"]), weights


def _projected(a: dict[str, Any], features: int) -> list[Any]:
    """Query, key and value behind the linears in front."""
    weight, bias = a["in_proj_weight"], a["in_proj_bias"]
    sources = [a["query"], a["key"], a["value"]]
    if not a["use_separate_proj_weight"] and sources[0] is sources[1] is sources[2]:
        whole = F.linear(sources[0], weight, bias)
        return [whole[..., i * features : (i + 1) * features] for i in range(3)]
    result = []
    for i, name in enumerate(("q", "k", "v")):
        rows = slice(i * features, (i + 1) * features)
        own = a[f"{name}_proj_weight"] if a["use_separate_proj_weight"] else weight[rows]
        result.append(F.linear(sources[i], own, None if bias is None else bias[rows]))
    return result


def _heads(x: Any, heads: int, features: int) -> Any:
    """``(L, N, E)`` to ``(N, heads, L, E / heads)``."""
    return x.reshape(x.size(0), x.size(1), heads, features).permute(1, 2, 0, 3)


def _mask(a: dict[str, Any], heads: int, batch: Any) -> Any:
    """What is added to the scores ``(N, heads, L, S)``, or None."""
    mask, padding = a["attn_mask"], a["key_padding_mask"]
    if mask is not None:
        mask = _added(mask)
        mask = mask.reshape(batch, heads, mask.size(-2), mask.size(-1)) if mask.dim() == 3 else mask
    if padding is None:
        return mask
    padding = _added(padding)
    padding = padding.reshape(batch, 1, 1, padding.size(-1))
    return padding if mask is None else mask + padding


def _added(mask: Any) -> Any:
    """A mask that is true where nothing is to be seen, as one that is added."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -math.inf)

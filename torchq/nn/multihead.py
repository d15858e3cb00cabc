# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention whose projections are layers of their own, which can become int8."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SplitMultiheadAttention(nn.MultiheadAttention):
    """Computes what its base class does by calling its projections.

    The base class reads their weights instead. Without ``need_weights`` it is two layers and
    :func:`torch.nn.functional.scaled_dot_product_attention`.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> "SplitMultiheadAttention":
        """Return a module on the same parameters, with the hooks of ``module``."""
        own = dict(vars(module))
        for name in ("_parameters", "_modules"):
            own[name] = own[name].copy()
        split = cls.__new__(cls)
        split.__setstate__(own)  # type: ignore[no-untyped-call]
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = tuple(module.get_parameter(f"{name}_proj_weight") for name in "qkv")
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            linear = nn.Linear(weight.size(1), weight.size(0), bias is not None, device="meta")
            linear.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
            if bias is not None:
                linear.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
            split.add_module(f"{name}_proj", linear.eval())
            split._parameters[f"{name}_proj_weight"] = None
        split._parameters["in_proj_weight"] = split._parameters["in_proj_bias"] = None
        return split

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results are those of the base class."""
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "torchq.nn.SplitMultiheadAttention: attn_mask must be given with is_causal, got "
                "None. Pass the mask that is_causal describes."
            )
        unbatched = query.dim() == 2
        if unbatched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        _check_lengths(q, k, v)
        mask = self._mask(q.size(0), key_padding_mask, attn_mask, q.dtype)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.size(0), 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.size(0), 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None:
            mask = F.pad(mask, (0, k.size(1) - mask.size(-1)))
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        weights: Tensor | None = None
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            products = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            shares = torch.softmax(products if mask is None else products + mask, -1)
            shares = F.dropout(shares, dropout) if dropout else shares
            dst = shares @ v
            weights = shares.mean(1) if average_attn_weights else shares
            weights = weights.squeeze(0) if unbatched else weights
        else:
            dst = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        dst = self.out_proj(dst.transpose(1, 2).flatten(2))
        if unbatched:
            return dst.squeeze(0), weights
        return (dst if self.batch_first else dst.transpose(0, 1)), weights

    def _heads(self, src: Tensor) -> Tensor:
        rows = src.reshape(src.size(0), src.size(1), self.num_heads, self.head_dim)
        return rows.transpose(1, 2)

    def _mask(
        self, batch: int, padding: Tensor | None, mask: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the sum of both masks, [batch or 1, heads or 1, rows or 1, keys]."""
        result: Tensor | None = None
        if mask is not None:
            if mask.dim() == 3:
                mask = mask.reshape(batch, self.num_heads, mask.size(1), mask.size(2))
            result = self._added(mask, dtype)
        if padding is not None:
            more = self._added(padding.reshape(batch, 1, 1, -1), dtype)
            result = more if result is None else result + more
        if result is not None and result.dim() == 2:
            result = result[None, None]
        return result

    def _added(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what a mask adds to products of a dtype: -inf where a bool one is True."""
        if mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _check_lengths(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless each key has a value: torch would read beyond the values."""
    if k.shape[:2] != v.shape[:2] or k.size(0) != q.size(0):
        raise ValueError(
            "torchq.nn.SplitMultiheadAttention: key and value must have one length, and query "
            f"their batch, got {list(q.shape)}, {list(k.shape)} and {list(v.shape)} (batch first). "
            "Pass a value for each key."
        )

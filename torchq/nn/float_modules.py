# SPDX-License-Identifier: Apache-2.0
"""Float modules to write models with, which conversion knows and makes quantized ones of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Add(nn.Module):
    """``src0 + src1``, as a module: a captured graph computes it in int8."""

    def forward(self, src0: Tensor, src1: Tensor) -> Tensor:
        """Add."""
        return src0 + src1


class Mul(nn.Module):
    """``src0 * src1``, as a module; see :class:`Add`."""

    def forward(self, src0: Tensor, src1: Tensor) -> Tensor:
        """Multiply."""
        return src0 * src1


class Cat(nn.Module):
    """``torch.cat(srcs, dim)``, as a module; see :class:`Add`."""

    def __init__(self, dim: int = 1) -> None:
        """``dim`` as in torch.cat."""
        super().__init__()
        self.dim = dim

    def forward(self, srcs: list[Tensor]) -> Tensor:
        """Concatenate."""
        return torch.cat(srcs, self.dim)


class MatMul(nn.Module):
    """``src0 @ src1``, both given at run time."""

    def forward(self, src0: Tensor, src1: Tensor) -> Tensor:
        """Multiply."""
        return torch.matmul(src0, src1)


class GroupedLinear(nn.Module):
    """Rows in groups, each times a weight of its own; ``weight`` is ``(groups, out, in)``."""

    def __init__(self, weight: Tensor) -> None:
        """Take the weights of all groups."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), False)

    def forward(self, src: Tensor, offsets: Tensor) -> Tensor:
        """Multiply; ``offsets`` are where the rows of each group end."""
        return F.grouped_mm(src, self.weight.mT, offs=offsets)


class Rotary(nn.Module):
    """``src * cos + turned * sin``, where ``turned`` has the halves of each row: -second, first.

    The bits are those of these operations one by one.
    """

    def forward(self, src: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate."""
        dst: Tensor = torch.ops.torchq.rotary(src, cos, sin)
        return dst


class QuantStub(nn.Module):
    """Marks where a float tensor shall become quantized: later a :class:`Quantize`."""

    def forward(self, src: Tensor) -> Tensor:
        """Return ``src``."""
        return src


class DeQuantStub(nn.Module):
    """Marks where a quantized tensor shall become float: later a :class:`Dequantize`."""

    def forward(self, src: Tensor) -> Tensor:
        """Return ``src``."""
        return src


@dataclass(frozen=True)
class AttentionOptions:
    """Options of :func:`torch.nn.functional.scaled_dot_product_attention` beside tensors.

    Attributes:
        is_causal: query i sees keys 0 to i; not with a mask.
        scale: of the scores; None means 1 / sqrt(E).
        enable_gqa: key and value have fewer heads (dim -3), each for several of query's.
        transposed_key: key is ``(..., E, S)``.
    """

    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    transposed_key: bool = False


class Attention(nn.Module):
    """:func:`torch.nn.functional.scaled_dot_product_attention`, as a module."""

    def __init__(self, options: AttentionOptions) -> None:
        """Without dropout."""
        super().__init__()
        self.options = options

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend."""
        o = self.options
        key = key.mT if o.transposed_key else key
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, o.is_causal, scale=o.scale, enable_gqa=o.enable_gqa
        )


_SETTINGS = ("is_transposed", "has_bias", "has_gate")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is such a set of experts: two linear layers each.

    Modules that ``transformers.integrations.moe.use_experts_implementation`` decorates say how
    their weights lie.
    """
    if any(not isinstance(getattr(module, name, None), bool) for name in _SETTINGS):
        return False
    weights = [getattr(module, name, None) for name in expert_weights(module)]
    stacked = all(isinstance(w, Tensor) and w.dim() == 3 for w in weights)
    return stacked and not getattr(module, "has_post_expert_norm", False)


def expert_weights(module: nn.Module) -> tuple[str, str]:
    """Return the names of the weights of experts, in the order of their use."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def other_tensors(module: nn.Module) -> list[str]:
    """Return the names of tensors of experts that are no weights or biases: of an activation."""
    own = {f"{name}{end}" for name in expert_weights(module) for end in ("", "_bias")}
    return [name for name in module.state_dict() if name not in own]

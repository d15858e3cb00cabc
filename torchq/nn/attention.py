# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention: a float module to trace, and the quantized one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.nn.binary import _QCombine
from torchq.nn.module import QModule
from torchq.qparams import QParams


class Attention(nn.Module):
    """:func:`torch.nn.functional.scaled_dot_product_attention`, as a module."""

    def __init__(
        self, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
    ) -> None:
        """Arguments as of the function."""
        super().__init__()
        self.is_causal, self.enable_gqa = bool(is_causal), bool(enable_gqa)
        self.scale = None if scale is None else float(scale)  # TorchScript tells them apart

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attends."""
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, self.is_causal, scale=self.scale,
            enable_gqa=self.enable_gqa,
        )  # fmt: skip


class QAttention(_QCombine):
    """``quantize(softmax(scale * real(query) @ real(key).mT + mask) @ real(value))``.

    The formula is that of :func:`torchq.functional.attention`.

    Shapes:
        query: ``(..., L, E)``, key: ``(..., S, E)``, value: ``(..., S, Ev)``, each of its own
            dtype; float32 is quantized with the source's parameters.
        mask: broadcasts to ``(..., L, S)``, bool (true: seen) or float32 (added); or None.
        dst: ``(..., L, Ev)``, uint8, int8 or float32.

    Raises:
        TypeError: a source has another dtype.
        ValueError: the shapes do not fit, or a mask comes with ``is_causal``.
    """

    def __init__(
        self,
        srcs: list[QParams],
        dst: QParams | None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """``srcs`` has three; ``dst`` None means float32; ``scale`` None means 1 / sqrt(E).

        ``enable_gqa``: key and value have fewer heads (dim -3), each for several of query's.
        """
        options: dict[str, object] = {
            "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa
        }  # fmt: skip
        super().__init__(srcs, dst, **options)
        self.is_causal, self.scale, self.enable_gqa = is_causal, scale, enable_gqa

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> "QAttention":
        """See the base class."""
        options = {name: spec[name] for name in ("is_causal", "scale", "enable_gqa")}
        return cls(**cls._arguments_from_spec(spec), **options)

    @classmethod
    def from_float(
        cls, module: Attention, srcs: list[QParams], dst: QParams | None = None
    ) -> "QAttention":
        """Of the same options."""
        return cls(srcs, dst, module.is_causal, module.scale, module.enable_gqa)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attends."""
        query, key, value = (
            self._quantized(query, 0), self._quantized(key, 1), self._quantized(value, 2)
        )  # fmt: skip
        if self.enable_gqa:
            key, value = _repeated(key, query), _repeated(value, query)
        scales, zero_points = self._hot()
        scale = _scale(self.scale, query)
        dst: Tensor = torch.ops.torchq.attention(
            query, key, value, mask, self.is_causal, scale, scales, zero_points, self.dst_code
        )
        return self._limited(dst)


class DynamicQAttention(QModule):
    """Float in, float out, int8 inside; see :func:`torchq.functional.dynamic_attention`.

    Shapes:
        query: float32 ``(..., L, E)``, key: ``(..., S, E)``, value: ``(..., S, Ev)``.
        mask: broadcasts to ``(..., L, S)``, bool (true: seen) or float32 (added); or None.
        dst: float32 ``(..., L, Ev)``.

    Raises:
        TypeError: a source is not float32.
        ValueError: the shapes do not fit, or a mask comes with ``is_causal``.
    """

    def __init__(
        self, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
    ) -> None:
        """See :class:`QAttention`."""
        super().__init__()
        self._set_spec(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        self.is_causal, self.scale, self.enable_gqa = is_causal, scale, enable_gqa

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> "DynamicQAttention":
        """See the base class."""
        return cls(spec["is_causal"], spec["scale"], spec["enable_gqa"])

    @classmethod
    def from_float(cls, module: Attention) -> "DynamicQAttention":
        """Of the same options."""
        return cls(module.is_causal, module.scale, module.enable_gqa)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attends."""
        if self.enable_gqa:
            key, value = _repeated(key, query), _repeated(value, query)
        dst: Tensor = torch.ops.torchq.dynamic_attention(
            query, key, value, mask, self.is_causal, _scale(self.scale, query)
        )
        return dst


def _scale(scale: float | None, query: Tensor) -> float:
    return float(max(query.shape[-1], 1)) ** -0.5 if scale is None else scale


def _repeated(src: Tensor, query: Tensor) -> Tensor:
    """Each head as often as query has heads for it."""
    return src.repeat_interleave(query.shape[-3] // src.shape[-3], -3)

# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention, quantized."""

from dataclasses import asdict

import torch
from torch import Tensor

from torchq.functional.attentions import score_scale
from torchq.nn.binary import _QCombine
from torchq.nn.float_modules import AttentionOptions
from torchq.nn.module import QModule, Spec
from torchq.quantization.qparams import QParams


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
        ValueError: the shapes do not fit, with ``enable_gqa`` also the numbers of heads, or a mask
            comes with ``is_causal``.
    """

    def __init__(
        self,
        srcs: list[QParams],
        dst: QParams | None,
        options: AttentionOptions | None = None,
    ) -> None:
        """``srcs`` has three; ``dst`` None means float32."""
        options = options or AttentionOptions()
        super().__init__(srcs, dst, options=asdict(options))
        # one by one: TorchScript knows no dataclass
        self.is_causal, self.scale = options.is_causal, options.scale
        self.enable_gqa, self.transposed_key = options.enable_gqa, options.transposed_key

    @classmethod
    def from_spec(cls, spec: Spec) -> "QAttention":
        """See the base class."""
        options = AttentionOptions(**spec["options"])
        return cls(**cls._arguments_from_spec(spec), options=options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend; ``scale`` takes the place of the module's."""
        query, key, value = (
            self._quantized(query, 0), self._quantized(key, 1), self._quantized(value, 2)
        )  # fmt: skip
        if self.transposed_key:
            key = key.mT
        if self.enable_gqa:
            key, value = _repeated(key, query), _repeated(value, query)
        scales, zero_points = self._hot()
        scale = score_scale(query, self.scale if scale is None else scale)
        dst: Tensor = torch.ops.torchq.attention(
            query, key, value, mask, self.is_causal, scale, scales, zero_points, self.dst_code
        )
        return self._limited(dst)


class DynamicQAttention(QModule):
    """Float in, float out, int8 inside; see :func:`torchq.functional.dynamic_attention`.

    Shapes:
        query: float32 or bfloat16 ``(..., L, E)``, key: ``(..., S, E)``, value: ``(..., S, Ev)``.
        mask: broadcasts to ``(..., L, S)``, bool (true: seen) or float (added); or None.
        dst: ``(..., L, Ev)`` of the query's dtype.

    Raises:
        TypeError: a source has another dtype.
        ValueError: the shapes do not fit, with ``enable_gqa`` also the numbers of heads, or a mask
            comes with ``is_causal``.
    """

    def __init__(self, options: AttentionOptions | None = None) -> None:
        """See :class:`QAttention`."""
        super().__init__()
        options = options or AttentionOptions()
        self._set_spec(options=asdict(options))
        self.is_causal, self.scale = options.is_causal, options.scale
        self.enable_gqa, self.transposed_key = options.enable_gqa, options.transposed_key

    @classmethod
    def from_spec(cls, spec: Spec) -> "DynamicQAttention":
        """See the base class."""
        return cls(AttentionOptions(**spec["options"]))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend; ``scale`` takes the place of the module's."""
        if self.transposed_key:
            key = key.mT
        if self.enable_gqa:
            key, value = _repeated(key, query), _repeated(value, query)
        scale = score_scale(query, self.scale if scale is None else scale)
        dst: Tensor = torch.ops.torchq.dynamic_attention(
            query, key, value, mask, self.is_causal, scale
        )
        return dst


def _repeated(src: Tensor, query: Tensor) -> Tensor:
    """Each head as often as query has heads for it."""
    if query.shape[-3] % src.shape[-3] != 0:
        raise ValueError(
            f"torchq.nn.QAttention: query must have a multiple of the heads of key and value, got "
            f"{query.shape[-3]} and {src.shape[-3]} heads (dim -3). Leave out enable_gqa where "
            "they are to broadcast."
        )
    return src.repeat_interleave(query.shape[-3] // src.shape[-3], -3)

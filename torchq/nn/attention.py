# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention, quantized."""

from dataclasses import asdict

import torch
import torch.nn.functional as F
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
        query: float32, bfloat16 or float16 ``(..., L, E)``, key: ``(..., S, E)``, value:
            ``(..., S, Ev)``.
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


class CachedAttention(QModule):
    """Attention in float, with a mask of bools that a model computes for each call.

    As :func:`torch.nn.functional.scaled_dot_product_attention`, which does half the work where it
    is told that each query sees the keys up to its own alone, and needs no mask then. So it is told
    where the mask says this or hides nothing, as for a prompt and for single tokens behind it.

    Shapes:
        query: float32, bfloat16 or float16 ``(..., L, E)``, key: ``(..., S, E)``, value:
            ``(..., S, Ev)``.
        mask: bool (true: seen), ``(..., L, S)``.
        dst: ``(..., L, Ev)`` of the query's dtype.

    Raises:
        TypeError: the mask is not bool.
        ValueError: there is not one value for each key, the mask does not fit, or with
            ``enable_gqa`` the key has no heads.
    """

    def __init__(self, scale: float | None = None, enable_gqa: bool = False) -> None:
        """Take the options of :class:`AttentionOptions` that it has."""
        super().__init__()
        self._set_spec(scale=scale, enable_gqa=enable_gqa)
        self.scale, self.enable_gqa = scale, enable_gqa

    @classmethod
    def from_spec(cls, spec: Spec) -> "CachedAttention":
        """See the base class."""
        return cls(spec["scale"], spec["enable_gqa"])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attend."""
        queries, keys = query.shape[-2], key.shape[-2]
        if mask.dtype != torch.bool:
            raise TypeError(
                "torchq.nn.CachedAttention: mask must be torch.bool (true: seen), got "
                f"{mask.dtype}. Write mask.bool()."
            )
        if value.shape[-2] != keys or list(mask.shape[-2:]) != [queries, keys]:
            raise ValueError(
                "torchq.nn.CachedAttention: mask must be (..., queries, keys), with a value for "
                f"each key, got {list(mask.shape)} for {queries} queries, {keys} keys and "
                f"{value.shape[-2]} values. Check how they were made."
            )
        if self.enable_gqa and key.shape[-3] == 0:  # torch would divide by it
            raise ValueError(
                "torchq.nn.CachedAttention: key must have heads (dim -3) with enable_gqa, got "
                f"{list(key.shape)}. Pass a key with heads, or leave out enable_gqa."
            )
        return _attend(query, key, value, mask, self.scale, self.enable_gqa)


class CompressedAttention(QModule):
    """Attention to keys and values of a cache that :func:`torchq.functional.compress_rows` made.

    If the cache holds only the rows of this call, as for a prompt, attention reads ``new_key`` and
    ``new_value`` in float.

    Shapes:
        query: float32, bfloat16 or float16 ``(N, H, L, E)``.
        key: int8 ``(N, G, S, E + 4)``, value: int8 ``(N, G, S, Ev + 4)``; see
            :func:`torchq.functional.compressed_attention`.
        new_key, new_value: the last M keys and values, uncompressed, of the query's dtype,
            ``(N, G, M, E)`` and ``(N, G, M, Ev)``, with M at most S.
        mask: bool (true: seen) or float32 (added), broadcasts to ``(N, H, L, S)``; or None.
        dst: ``(N, H, L, Ev)`` of the query's dtype.

    Raises:
        TypeError: a source has another dtype.
        ValueError: the shapes do not fit.
    """

    def __init__(self, scale: float | None = None, enable_gqa: bool = False) -> None:
        """Take the options of :class:`AttentionOptions` that it has."""
        super().__init__()
        self._set_spec(scale=scale, enable_gqa=enable_gqa)
        self.scale, self.enable_gqa = scale, enable_gqa

    @classmethod
    def from_spec(cls, spec: Spec) -> "CompressedAttention":
        """See the base class."""
        return cls(spec["scale"], spec["enable_gqa"])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        new_key: Tensor,
        new_value: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend."""
        if new_key.dim() != 4 or new_key.shape[1] == 0 or new_key.shape[:3] != new_value.shape[:3]:
            raise ValueError(
                "torchq.nn.CompressedAttention: new_key and new_value must be (N, G, M, E) and (N, "
                f"G, M, Ev) with heads, got {list(new_key.shape)} and {list(new_value.shape)}. "
                "Pass the rows that were put behind the cached ones."
            )
        if new_key.shape[-2] == key.shape[-2]:
            return _attend(query, new_key, new_value, mask, self.scale, self.enable_gqa)
        dst: Tensor = torch.ops.torchq.compressed_attention(
            query, key, value, mask, score_scale(query, self.scale)
        )
        return dst


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attend in float; a mask of bools for each query is left out where it says nothing more."""
    queries, keys = query.shape[-2], key.shape[-2]
    needed, is_causal = mask is not None, False
    if mask is not None and mask.dtype == torch.bool:
        needed = not bool(mask.all())
        if needed and queries == keys and list(mask.shape[-2:]) == [queries, keys]:
            causal = torch.ones(queries, keys, dtype=torch.bool, device="cpu").tril_()
            is_causal = torch.equal(mask, causal.expand_as(mask))
    return F.scaled_dot_product_attention(
        query, key, value, mask if needed and not is_causal else None, 0.0, is_causal,
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


def _repeated(src: Tensor, query: Tensor) -> Tensor:
    """Each head as often as query has heads for it."""
    # a division by zero ends the process of a script
    if src.shape[-3] == 0 or query.shape[-3] % src.shape[-3] != 0:
        raise ValueError(
            f"torchq.nn.QAttention: query must have a multiple of the heads of key and value, got "
            f"{query.shape[-3]} and {src.shape[-3]} heads (dim -3). Leave out enable_gqa where "
            "they are to broadcast."
        )
    return src.repeat_interleave(query.shape[-3] // src.shape[-3], -3)

# SPDX-License-Identifier: Apache-2.0
"""Quantized fully connected layer."""

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.attributes.options import Granularity
from torchq.attributes.post_ops import PostOps
from torchq.functional.packing import PackedWeight
from torchq.nn.direct_call import NONE, DirectCall, state
from torchq.nn.layer import DESTINATION, SOURCE, QLayer, sources_of
from torchq.nn.module import Spec
from torchq.nn.weight import QuantizedWeight, packed_weight
from torchq.quantization.qparams import QParams

_linear = torch.ops.torchq.linear  # looking it up would cost 0.2 us a call


class QLinear(QLayer):
    """``dst = quantize(post_ops(real(src) @ weight.T + bias))``.

    Shapes:
        src: ``(*, in_features)``, of the source dtype; float32 is quantized with the source's
            parameters.
        residual: ``(*, out_features)``, the source of a ``sum`` post-op.
        post_op_srcs: what else the post-ops read, in their order: see
            :func:`torchq.functional.linear`. With them, ``residual`` is the first or None.
        dst: ``(*, out_features)``, uint8, int8 or float32.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: the last dimension of ``src`` is not ``in_features``.
    """

    _direct = DirectCall(
        "linear", (*SOURCE, *state("in_features"), *DESTINATION, NONE, *state("lookup.table"))
    )

    def __init__(
        self,
        weight: PackedWeight,
        weight_scale: Tensor,
        bias: Tensor | None,
        src: QParams,
        dst: QParams | None = None,
        post_ops: PostOps | None = None,
        weight_zero_point: Tensor | None = None,
    ) -> None:
        """See :class:`~torchq.nn.layer.QLayer`; :meth:`from_float` is the usual way here."""
        super().__init__(weight, weight_scale, bias, src, dst, post_ops, weight_zero_point)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def from_float(
        cls,
        module: nn.Linear,
        src: QParams,
        dst: QParams | None = None,
        *,
        granularity: Granularity = "per_channel",
        bits: int = 8,
        weight_scale: Tensor | None = None,
        affine: bool = False,
        post_ops: PostOps | None = None,
        quantized: QuantizedWeight | None = None,
    ) -> "QLinear":
        """Quantize the weight symmetrically and pack it.

        Args:
            module: the float layer.
            src: parameters of the source.
            dst: parameters of the destination; None for float32.
            granularity: of the weight scale, "per_channel" or "per_tensor".
            bits: of the weight, 8 or 7.
            weight_scale: of the weight, one or one per output channel, instead of chosen ones: what
                it was trained with.
            affine: a uint8 weight with zero points, for ranges far from symmetric, instead of a
                symmetric int8 one. It costs a sum over the source in every call.
            post_ops: applied before the destination is quantized.
            quantized: the weight, quantized and packed already; the arguments of these steps are
                then not read.

        Example:
            >>> src = torchq.QParams.per_tensor(0.05, 128)
            >>> layer = torchq.nn.QLinear.from_float(nn.Linear(16, 4), src)
            >>> layer(torch.randn(2, 16)).shape
            torch.Size([2, 4])
        """
        packed, scale, zero_point = quantized or packed_weight(
            module, granularity, bits, weight_scale, affine
        )
        return cls(packed, scale, module.bias, src, dst, post_ops, zero_point)

    @classmethod
    def from_spec(cls, spec: Spec) -> "QLinear":
        """See the base class."""
        return cls(**cls._arguments_from_spec(spec)).with_recipe(spec.get("recipe", ""))

    def with_recipe(self, note: str) -> Self:
        """Keep what the report says of the source and the weight; return the module."""
        if note:
            self._set_spec(**self.read_spec() | {"recipe": note})
        return self

    def extra_repr(self) -> str:
        """Shapes, dtypes, attributes and the recipe on one line."""
        note = self.read_spec().get("recipe", "")
        return f"{super().extra_repr()}{', ' if note else ''}{note}"

    def forward(
        self,
        src: Tensor,
        residual: Tensor | None = None,
        post_op_srcs: list[Tensor] | None = None,
    ) -> Tensor:
        """Apply the layer."""
        if src.dtype != self.src_dtype:
            src = self._quantized_src(src)
        srcs = sources_of(residual, post_op_srcs)
        weight, compensation, bound, multiplier, offset, zero, params, shift, table = self._hot()
        dst: Tensor = _linear(
            src,
            weight,
            compensation,
            bound,
            multiplier,
            offset,
            None,
            zero,
            self.in_features,
            self.dst_code,
            self.post_ops,
            params,
            srcs,
            shift,
            None,
            table,
        )
        return dst

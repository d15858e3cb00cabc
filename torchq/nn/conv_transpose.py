# SPDX-License-Identifier: Apache-2.0
"""Quantized transposed convolutions."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.attributes.options import Granularity
from torchq.attributes.post_ops import PostOps
from torchq.functional.arguments import conv_transpose_geometry
from torchq.functional.packing import PackedWeight
from torchq.nn.direct_call import DirectCall, state
from torchq.nn.layer import DESTINATION, SOURCE, QLayer, sources_of
from torchq.nn.module import Spec
from torchq.nn.weight import QuantizedWeight, packed_weight
from torchq.quantization.qparams import QParams

_conv_transpose = torch.ops.torchq.conv_transpose  # looking it up would cost 0.2 us a call


class QConvTranspose(QLayer):
    """``dst = quantize(post_ops(conv_transpose(real(src), weight) + bias))``.

    Shapes:
        src: ``(N, C, spatial...)`` of the source dtype; float32 is quantized with the source's
            parameters. Channels-last memory is read in place.
        residual: dst's shape, the source of a ``sum`` post-op.
        post_op_srcs: what else the post-ops read, in their order: see
            :func:`torchq.functional.conv2d`. With them, ``residual`` is the first or None.
        dst: ``(N, OC, spatial...)``, channels-last unless ``contiguous``, uint8, int8 or float32.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: the shape of ``src`` does not fit.
    """

    dims: ClassVar[int] = 0
    _direct = DirectCall(
        "conv_transpose",
        (*SOURCE, *state("geometry"), *DESTINATION, *state("lookup.table")),
        unless=("contiguous",),
    )

    def __init__(
        self,
        weight: PackedWeight,
        weight_scale: Tensor,
        bias: Tensor | None,
        src: QParams,
        dst: QParams | None = None,
        post_ops: PostOps | None = None,
        *,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        contiguous: bool = False,
        weight_zero_point: Tensor | None = None,
    ) -> None:
        """See :class:`~torchq.nn.layer.QLayer`; :meth:`from_float` is the usual way here.

        Groups, stride and dilation are those the weight was packed for; ``contiguous`` makes dst
        contiguous instead of channels-last.
        """
        geometry = conv_transpose_geometry(
            type(self).__name__,
            weight.shape[2:],
            weight.stride,
            padding,
            None,
            weight.dilation,
            output_padding,
            weight.groups,
            weight.in_channels,
        )
        layout = {"contiguous": True} if contiguous else {}
        super().__init__(
            weight,
            weight_scale,
            bias,
            src,
            dst,
            post_ops,
            weight_zero_point,
            stride=list(weight.stride),
            geometry=geometry,
            **layout,
        )
        self.geometry = geometry
        self.contiguous = contiguous

    @classmethod
    def from_float(
        cls,
        module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d,
        src: QParams,
        dst: QParams | None = None,
        *,
        granularity: Granularity = "per_channel",
        bits: int = 8,
        weight_scale: Tensor | None = None,
        affine: bool = False,
        post_ops: PostOps | None = None,
        contiguous: bool = False,
        quantized: QuantizedWeight | None = None,
    ) -> Self:
        """Quantize the weight symmetrically, per output channel, and pack it.

        Output channels are dimension 1 of the float weight, inside of the groups that split its
        dimension 0.

        Args:
            module: the float layer. Its ``output_padding`` is kept; each call may have another,
                the counterpart of ``output_size``.
            src: parameters of the source.
            dst: parameters of the destination; None for float32.
            granularity: of the weight scale, "per_channel" or "per_tensor".
            bits: of the weight, 8 or 7.
            weight_scale: of the weight, one or one per output channel, instead of chosen ones: what
                it was trained with.
            affine: a uint8 weight with zero points, for ranges far from symmetric, instead of a
                symmetric int8 one. It costs a sum over the source in every call.
            post_ops: applied before the destination is quantized.
            contiguous: make dst contiguous instead of channels-last, for code that calls ``view``.
            quantized: the weight, quantized and packed already; the arguments of these steps are
                then not read.
        """
        packed, scale, zero_point = quantized or packed_weight(
            module, granularity, bits, weight_scale, affine
        )
        return cls(
            packed,
            scale,
            module.bias,
            src,
            dst,
            post_ops,
            padding=[int(p) for p in module.padding],
            output_padding=module.output_padding,
            contiguous=contiguous,
            weight_zero_point=zero_point,
        )

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        dims, g = len(spec["dilation"]), spec["geometry"]
        return cls(
            **cls._arguments_from_spec(spec),
            padding=g[2 * dims : 3 * dims],
            output_padding=g[5 * dims : 6 * dims],
            contiguous=spec.get("contiguous", False),
        )

    def forward(
        self,
        src: Tensor,
        residual: Tensor | None = None,
        post_op_srcs: list[Tensor] | None = None,
        output_padding: list[int] | None = None,
    ) -> Tensor:
        """Apply the transposed convolution, with another ``output_padding`` if one is given."""
        if src.dtype != self.src_dtype:
            src = self._quantized_src(src)
        srcs = sources_of(residual, post_op_srcs)
        geometry: list[int] = self.geometry
        if output_padding is not None:
            end = 5 * len(output_padding)
            geometry = geometry[:end] + output_padding + geometry[-2:]
        weight, compensation, bound, multiplier, offset, zero, params, shift, table = self._hot()
        dst: Tensor = _conv_transpose(
            src,
            weight,
            compensation,
            bound,
            multiplier,
            offset,
            None,
            zero,
            geometry,
            self.dst_code,
            self.post_ops,
            params,
            srcs,
            shift,
            table,
        )
        return dst.contiguous() if self.contiguous else dst


class QConvTranspose1d(QConvTranspose):
    """1-D :class:`QConvTranspose`: src ``(N, C, L)``."""

    dims = 1


class QConvTranspose2d(QConvTranspose):
    """2-D :class:`QConvTranspose`: src ``(N, C, H, W)``."""

    dims = 2


class QConvTranspose3d(QConvTranspose):
    """3-D :class:`QConvTranspose`: src ``(N, C, D, H, W)``."""

    dims = 3

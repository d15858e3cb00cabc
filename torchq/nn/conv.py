# SPDX-License-Identifier: Apache-2.0
"""Quantized convolutions."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.attributes.attr import Attr
from torchq.attributes.options import Granularity
from torchq.attributes.post_ops import PostOps
from torchq.functional.arguments import conv_geometry
from torchq.functional.depthwise import join_at_dw_conv
from torchq.functional.packing import PackedWeight
from torchq.nn.direct_call import NONE, DirectCall, state
from torchq.nn.layer import DESTINATION, SOURCE, QLayer, sources_of
from torchq.nn.module import Spec
from torchq.nn.weight import QuantizedWeight, packed_weight
from torchq.quantization.qparams import QParams

FloatConv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_conv = torch.ops.torchq.conv  # looking it up would cost 0.2 us a call


class QConv(QLayer):
    """``dst = quantize(post_ops(conv(real(src), weight) + bias))``; padding is real zero.

    Shapes:
        src: ``(N, C, spatial...)`` of the source dtype; float32 is quantized with the source's
            parameters. Channels-last memory is read in place.
        residual: dst's shape, the source of a ``sum`` post-op.
        post_op_srcs: what else the post-ops read, in their order: see
            :func:`torchq.functional.conv2d`. With them, ``residual`` is the first or None.
        dst: ``(N, OC, spatial...)``, channels-last unless ``contiguous``, uint8, int8 or float32.

    With ``dw``, a depthwise convolution of this one's quantized result, dst is that of ``dw``, and
    so are the residual and the other sources. It is the module for a ``dw_conv`` post-op, which
    :attr:`attr` shows.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: the shape of ``src`` does not fit.
    """

    dims: ClassVar[int] = 0
    _direct = DirectCall(
        "conv",
        (*SOURCE, *state("geometry"), *DESTINATION, NONE, *state("lookup.table")),
        unless=("dw", "contiguous"),
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
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        padding_end: int | Sequence[int] | None = None,
        contiguous: bool = False,
        dw: "QConv | None" = None,
        weight_zero_point: Tensor | None = None,
    ) -> None:
        """See :class:`~torchq.nn.layer.QLayer`; :meth:`from_float` is the usual way here.

        Groups and dilation are those the weight was packed for; ``padding_end`` is ``padding``
        unless given; ``contiguous`` makes dst contiguous instead of channels-last.

        Raises:
            ValueError: ``dw`` takes another source than this module's destination.
            NotImplementedError: ``dw`` is no depthwise convolution of an odd kernel k, the same in
                each dimension, with padding (k - 1) / 2 and dilation 1, or ``post_ops`` has a sum.
        """
        geometry = conv_geometry(
            type(self).__name__,
            weight.shape[2:],
            stride,
            padding,
            padding_end,
            weight.dilation,
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
            geometry=geometry,
            **layout,
        )
        self.geometry = geometry
        self.contiguous = contiguous
        self.dw = dw  # a plain None costs no look-up through nn.Module
        if dw is not None:
            self._check_dw(dw)

    def _check_dw(self, dw: "QConv") -> None:
        kernel, stride, begin, end, gap, (groups, channels) = dw._window()
        k = kernel[0] if kernel else 0
        centered = {*begin, *end} == {k // 2} and {*gap} == {1} and k % 2 == 1
        regular = centered and len({*kernel}) == 1 and len({*stride}) == 1
        outputs: int = self.read_spec()["weight"][0]
        if type(dw) is not type(self) or not regular or groups != channels or dw.dw is not None:
            raise NotImplementedError(
                f"torchq.nn.{type(self).__name__}: dw must be a {type(self).__name__}, depthwise "
                "with an odd kernel k, padding (k - 1) / 2, dilation 1 and one stride, got "
                f"{type(dw).__name__}({dw.extra_repr()}). The nearest supported form is one module "
                "behind the other."
            )
        if PostOps.parse(self.post_ops).num_srcs:
            raise NotImplementedError(
                f"torchq.nn.{type(self).__name__}: post_ops in front of dw must have no sum and no "
                f"operand at run time, got '{self.post_ops}'. torchq.functional.conv2d takes them."
            )
        if channels != outputs or not self._is_source_of(dw):
            raise ValueError(
                f"torchq.nn.{type(self).__name__}: dw must take what this module gives, {outputs} "
                f"channels of {self.dst_dtype} with scale {self.dst_scale.tolist()[:1]} and zero "
                f"point {self.dst_zero_point.tolist()}, got {channels} of {dw.src_dtype} with "
                f"{dw.src_scale.tolist()} and {dw.src_zero_point.tolist()}. Make dw with this "
                "module's dst as its src."
            )

    def _window(self) -> list[list[int]]:
        """Kernel, stride, padding before and after, dilation; groups and channels."""
        g, dims = self.geometry, len(self.geometry) // 5
        return [g[i * dims : (i + 1) * dims] for i in range(5)] + [g[5 * dims :]]

    @property
    def attr(self) -> Attr:
        """Scales, zero points and post-ops; weight scales have mask 3 with groups, else mask 1."""
        attr = self._own_attr()
        if self.dw is None:
            return attr
        _, stride, padding, *_ = self.dw._window()
        chain = PostOps().append_dw_conv(
            self.dw.packed().unpack(),
            self.dw.bias,
            stride=stride[0],
            padding=padding[0],
            dtype=self.dst_dtype,
        )
        return join_at_dw_conv(attr, chain, self.dw.attr)

    @classmethod
    def from_float(
        cls,
        module: FloatConv,
        src: QParams,
        dst: QParams | None = None,
        *,
        granularity: Granularity = "per_channel",
        bits: int = 8,
        weight_scale: Tensor | None = None,
        affine: bool = False,
        post_ops: PostOps | None = None,
        pad: tuple[Sequence[int], Sequence[int]] | None = None,
        contiguous: bool = False,
        dw: "QConv | None" = None,
        quantized: QuantizedWeight | None = None,
    ) -> Self:
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
            pad: more zeros before and after, one per spatial dimension.
            contiguous: make dst contiguous instead of channels-last, for code that calls ``view``.
            dw: a depthwise convolution that takes this one's result.
            quantized: the weight, quantized and packed already; the arguments of these steps are
                then not read.

        Raises:
            NotImplementedError: ``padding_mode`` is not "zeros".

        Example:
            >>> src, dst = torchq.QParams.per_tensor(0.05, 128), torchq.QParams.per_tensor(0.1)
            >>> layer = torchq.nn.QConv2d.from_float(nn.Conv2d(3, 8, 3), src, dst)
            >>> layer(torch.randn(1, 3, 9, 9)).dtype
            torch.uint8
        """
        if module.padding_mode != "zeros":
            raise NotImplementedError(
                f"torchq.nn.{cls.__name__}: padding_mode must be 'zeros', got "
                f"'{module.padding_mode}'. Pad with a separate module in front of the convolution."
            )
        packed, scale, zero_point = quantized or packed_weight(
            module, granularity, bits, weight_scale, affine
        )
        begin, end = paddings(module)
        if pad is not None:
            begin, end = (
                [a + b for a, b in zip(own, more, strict=True)]
                for own, more in zip((begin, end), pad, strict=True)
            )
        return cls(
            packed,
            scale,
            module.bias,
            src,
            dst,
            post_ops,
            stride=module.stride,
            padding=begin,
            padding_end=end,
            contiguous=contiguous,
            dw=dw,
            weight_zero_point=zero_point,
        )

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        dims, g = len(spec["dilation"]), spec["geometry"]
        parts = [g[i * dims : (i + 1) * dims] for i in range(1, 4)]
        arguments = cls._arguments_from_spec(spec)
        return cls(
            **arguments,
            stride=parts[0],
            padding=parts[1],
            padding_end=parts[2],
            contiguous=spec.get("contiguous", False),
        )

    def forward(
        self,
        src: Tensor,
        residual: Tensor | None = None,
        post_op_srcs: list[Tensor] | None = None,
    ) -> Tensor:
        """Apply the convolution."""
        if src.dtype != self.src_dtype:
            src = self._quantized_src(src)
        srcs = sources_of(residual, post_op_srcs) if self.dw is None else None
        weight, compensation, bound, multiplier, offset, zero, params, shift, table = self._hot()
        dst: Tensor = _conv(
            src,
            weight,
            compensation,
            bound,
            multiplier,
            offset,
            None,
            zero,
            self.geometry,
            self.dst_code,
            self.post_ops,
            params,
            srcs,
            shift,
            None,
            table,
        )
        if self.dw is not None:
            dst = self.dw(dst, residual, post_op_srcs)
        return dst.contiguous() if self.contiguous else dst


def paddings(module: FloatConv) -> tuple[list[int], list[int]]:
    """Return the padding before and after, per dimension; "same" may differ by one."""
    if module.padding == "valid":
        zeros = [0] * len(module.kernel_size)
        return zeros, zeros
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [t // 2 for t in totals], [t - t // 2 for t in totals]
    padding = [int(p) for p in module.padding]
    return padding, padding


class QConv1d(QConv):
    """1-D :class:`QConv`: src ``(N, C, L)``."""

    dims = 1


class QConv2d(QConv):
    """2-D :class:`QConv`: src ``(N, C, H, W)``."""

    dims = 2


class QConv3d(QConv):
    """3-D :class:`QConv`: src ``(N, C, D, H, W)``."""

    dims = 3

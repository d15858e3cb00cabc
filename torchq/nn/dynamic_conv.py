# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose source is quantized by the range that each sample has in each call."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from torchq.attributes.options import Granularity
from torchq.functional.arguments import conv_geometry
from torchq.functional.linears import check_signed
from torchq.functional.packing import PackedWeight, empty_packed, pack_conv
from torchq.functional.placeholders import placeholder
from torchq.nn.conv import FloatConv, paddings
from torchq.nn.module import QModule, Spec
from torchq.nn.weight import QuantizedWeight, packed_weight


class DynamicQConv(QModule):
    """Float in, float out, int8 inside; it needs no calibration.

    Each sample becomes uint8, with the scale and zero point of the range from its smallest to its
    largest value, 0 included. ``acc`` is the exact sum of ``(q - zero_point) * weight``, and::

        dst = fma(float(acc), float(src_scale[sample] * weight_scale[channel]), bias[channel])

    A sample depends on nothing but itself: a batch gives the bits of its samples one by one.
    Channels-last sources are faster: a contiguous one costs a copy of the result. On one Zen 4
    thread it takes 0.4 to 0.65 of float's time (3x3 of 64 channels, 1x1 of 256), but 1.5 where a
    result has few products (1x1 of 64 to 256 channels at 56x56) and 1.8 where it is depthwise.

    Buffers:
        weight, compensation, pair_bound: see :class:`~torchq.functional.packing.PackedWeight`.
        weight_scale: float32 ``[OC]``, real units per weight step.
        bias: float32 ``[OC]``, or absent.

    Shapes:
        src: float32, bfloat16 or float16 ``(N, C, spatial...)``, or one sample without N.
        dst: ``(N, OC, spatial...)`` of the source's dtype, contiguous where ``src`` is, else
            channels-last.

    Raises:
        ValueError: the shape of ``src`` does not fit, or it has NaN or inf.
    """

    weight: Tensor
    compensation: Tensor
    pair_bound: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    dims: ClassVar[int] = 0

    def __init__(
        self,
        weight: PackedWeight,
        weight_scale: Tensor,
        bias: Tensor | None,
        *,
        stride: Sequence[int],
        padding: Sequence[int],
        padding_end: Sequence[int],
    ) -> None:
        """``weight_scale`` has one value, or one per channel; :meth:`from_float` is the usual way.

        Groups and dilation are those the weight was packed for; ``padding`` comes before,
        ``padding_end`` after.
        """
        super().__init__()
        op = type(self).__name__
        check_signed(f"nn.{op}", weight)
        self.shape, self.groups, self.dilation = weight.shape, weight.groups, weight.dilation
        channels = weight.groups, weight.in_channels
        self.geometry = conv_geometry(
            op, weight.shape[2:], stride, padding, padding_end, weight.dilation, *channels
        )
        self.rank = len(weight.shape)
        self._add_packed(weight)
        self.register_buffer(
            "weight_scale", weight_scale.reshape(-1).expand(weight.channels).clone()
        )
        self._add_floats("bias", bias)
        self._set_spec(
            weight=list(weight.shape),
            groups=weight.groups,
            dilation=list(weight.dilation),
            stride=list(stride),
            padding=list(padding),
            padding_end=list(padding_end),
            bias=bias is not None,
        )

    @classmethod
    def from_float(
        cls,
        module: FloatConv,
        *,
        granularity: Granularity = "per_channel",
        bits: int = 8,
        weight_scale: Tensor | None = None,
        quantized: QuantizedWeight | None = None,
    ) -> Self:
        """Quantize the weight symmetrically and packs it.

        Args:
            module: the float layer, with zeros as padding.
            granularity: of the weight scale, "per_channel" or "per_tensor".
            bits: of the weight, 8 or 7.
            weight_scale: of the weight, where it is known: one, or one per output channel.
            quantized: the weight, quantized and packed already.

        Raises:
            NotImplementedError: ``padding_mode`` is not "zeros".
        """
        if module.padding_mode != "zeros":
            raise NotImplementedError(
                f"torchq.nn.{cls.__name__}: padding_mode must be 'zeros', got "
                f"'{module.padding_mode}'. Pad with a separate module in front of the convolution."
            )
        made = quantized or packed_weight(module, granularity, bits, weight_scale)
        return cls._of(module, made.packed, made.scale)

    @classmethod
    def from_int8(cls, module: FloatConv, weight: Tensor, weight_scale: Tensor) -> Self:
        """Take the weight as int8, and all else from a float layer, which pads with zeros."""
        return cls._of(module, pack_conv(weight, module.groups, module.dilation), weight_scale)

    @classmethod
    def _of(cls, module: FloatConv, packed: PackedWeight, weight_scale: Tensor) -> Self:
        begin, end = paddings(module)
        sides = {"stride": module.stride, "padding": begin, "padding_end": end}
        return cls(packed, weight_scale, module.bias, **sides)

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        packed = empty_packed(spec["weight"], groups=spec["groups"], dilation=spec["dilation"])
        bias = placeholder(packed.channels) if spec["bias"] else None
        sides = {name: spec[name] for name in ("stride", "padding", "padding_end")}
        return cls(packed, placeholder(1), bias, **sides)

    def packed(self) -> PackedWeight:
        """Return the weight with the shape it was packed from."""
        tensors = self.weight, self.compensation, self.pair_bound
        return PackedWeight(*tensors, self.shape, self.groups, self.dilation)

    def _packed_weights(self) -> dict[str, PackedWeight]:
        return {"": self.packed()}

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer; the argument is called as that of ``torch.nn.Conv2d``."""
        unbatched = input.dim() == self.rank - 1
        dst: Tensor = torch.ops.torchq.dynamic_conv(
            input.unsqueeze(0) if unbatched else input,
            self.weight,
            self.compensation,
            self.pair_bound,
            self.weight_scale,
            self.bias,
            self.geometry,
        )
        return dst.squeeze(0) if unbatched else dst

    def _own_repr(self) -> str:
        spec = self.read_spec()
        names = ("stride", "padding", "dilation", "groups")
        return ", ".join([f"{spec['weight']}", *(f"{name}={spec[name]}" for name in names)])


class DynamicQConv1d(DynamicQConv):
    """1-D :class:`DynamicQConv`: src ``(N, C, L)``."""

    dims = 1


class DynamicQConv2d(DynamicQConv):
    """2-D :class:`DynamicQConv`: src ``(N, C, H, W)``."""

    dims = 2


class DynamicQConv3d(DynamicQConv):
    """3-D :class:`DynamicQConv`: src ``(N, C, D, H, W)``."""

    dims = 3

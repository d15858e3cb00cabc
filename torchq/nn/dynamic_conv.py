# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose source is quantized by the range that each sample has in each call."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from torchq.attributes.arguments import as_float32
from torchq.attributes.options import Granularity
from torchq.functional.arguments import conv_geometry
from torchq.functional.linears import check_signed
from torchq.functional.packing import PackedWeight, empty_packed, pack_conv
from torchq.nn.conv import paddings
from torchq.nn.module import QModule, as_source
from torchq.nn.weight import quantized_weight
from torchq.quantization.ranges import SMALLEST_SCALE
from torchq.runtime.library import dtype_code


class DynamicQConv(QModule):
    """Float in, float out, int8 inside; it needs no calibration.

    Each sample becomes uint8 with :func:`torchq.quantization.qparams.choose_qparams` of its
    smallest and largest value. ``acc`` is the exact sum of ``(q - zero_point) * weight``, and::

        dst = float(acc) * (src_scale[sample] * weight_scale[channel]) + bias[channel]

    A sample depends on nothing but itself: a batch gives the bits of its samples one by one.
    Ranges, padding and scaling are passes of their own, so it may be slower than float: on one
    Zen 4 thread by 1.4 (1x1, 256 channels at 14x14) and 2.2 times (depthwise 3x3, 96 at 56x56).

    Buffers:
        weight, compensation, pair_bound: see :class:`~torchq.functional.packing.PackedWeight`.
        weight_scale: float32 ``[OC]``, real units per weight step.
        bias: float32 ``[OC]``, or absent.

    Shapes:
        src: float32 or bfloat16 ``(N, C, spatial...)``, or one sample without N.
        dst: ``(N, OC, spatial...)`` of the source's dtype, contiguous.

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
        # F.pad begins with the last dimension
        pairs = list(zip(padding, padding_end, strict=True))[::-1]
        self.pad = [side for pair in pairs for side in pair]
        channels = weight.groups, weight.in_channels
        self.geometry = conv_geometry(
            op, weight.shape[2:], stride, 0, None, weight.dilation, *channels
        )
        self.rank, self.least = len(weight.shape), 255 * SMALLEST_SCALE
        self.src_code, self.acc_code = dtype_code(torch.uint8), dtype_code(torch.int32)
        for name, part in weight.tensors().items():
            self.register_buffer(name, part)
        self.register_buffer(
            "weight_scale", weight_scale.reshape(-1).expand(weight.channels).clone()
        )
        self.register_buffer("bias", None if bias is None else as_float32(bias.detach()).clone())
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
        module: nn.Conv1d | nn.Conv2d | nn.Conv3d,
        *,
        granularity: Granularity = "per_channel",
        bits: int = 8,
        weight_scale: Tensor | None = None,
    ) -> Self:
        """Quantize the weight symmetrically and packs it.

        Args:
            module: the float layer, with zeros as padding.
            granularity: of the weight scale, "per_channel" or "per_tensor".
            bits: of the weight, 8 or 7.
            weight_scale: of the weight, where it is known: one, or one per output channel.

        Raises:
            NotImplementedError: ``padding_mode`` is not "zeros".
        """
        if module.padding_mode != "zeros":
            raise NotImplementedError(
                f"torchq.nn.{cls.__name__}: padding_mode must be 'zeros', got "
                f"'{module.padding_mode}'. Pad with a separate module in front of the convolution."
            )
        values = module.weight.detach()
        weight, scale, _ = quantized_weight(values, granularity, bits, weight_scale)
        return cls.from_int8(module, weight, scale)

    @classmethod
    def from_int8(cls, module: Any, weight: Tensor, weight_scale: Tensor) -> Self:
        """Take the weight as int8, and all else from a float layer, which pads with zeros."""
        begin, end = paddings(module)
        sides = {"stride": module.stride, "padding": begin, "padding_end": end}
        packed = pack_conv(weight, module.groups, module.dilation)
        return cls(packed, weight_scale, module.bias, **sides)

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        """See the base class."""
        packed = empty_packed(spec["weight"], groups=spec["groups"], dilation=spec["dilation"])
        bias = (
            torch.zeros(packed.channels, dtype=torch.float32, device="cpu")
            if spec["bias"]
            else None
        )
        sides = {name: spec[name] for name in ("stride", "padding", "padding_end")}
        return cls(packed, torch.ones(1, dtype=torch.float32, device="cpu"), bias, **sides)

    def packed(self) -> PackedWeight:
        """Return the weight with the shape it was packed from."""
        tensors = self.weight, self.compensation, self.pair_bound
        return PackedWeight(*tensors, self.shape, self.groups, self.dilation)

    def _packed_weights(self) -> dict[str, PackedWeight]:
        return {"": self.packed()}

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer; the argument is called as that of ``torch.nn.Conv2d``."""
        src = input.unsqueeze(0) if input.dim() == self.rank - 1 else input
        ones = [-1] + [1] * (self.rank - 1)
        low, high = torch.aminmax(src.flatten(1), dim=1)
        low, high = low.double().clamp(max=0.0), high.double().clamp(min=0.0)
        span = high - low
        span = torch.where(span == 0, 255.0, span.clamp(min=self.least))
        scale = (span / 255).float()
        zero = torch.round(-low * 255 / span).clamp(0, 255).int()
        # padded here, with each sample's own zero point behind it: the sums of weights that the
        # zero points multiply are then the same at borders as elsewhere
        q = torch.ops.torchq.quantize(
            F.pad(src, self.pad), scale.reshape(ones), zero.reshape(ones), self.src_code
        )
        nothing = self.weight_scale[:0]  # an int32 result without scales: the sums themselves
        acc: Tensor = torch.ops.torchq.conv(
            q,
            self.weight,
            self.compensation,
            self.pair_bound,
            nothing,
            nothing,
            None,
            None,
            self.geometry,
            self.acc_code,
            "",
            nothing,
            None,
            None,
            None,
            None,
        )
        channels = [1] + ones[:-1]  # noqa: RUF005 - scripted
        sums = self.compensation.sum(0, dtype=torch.int32).reshape(channels)
        acc = acc - zero.reshape(ones) * sums
        dst: Tensor = acc.contiguous() * (scale.reshape(ones) * self.weight_scale.reshape(channels))
        bias = self.bias
        if bias is not None:
            dst = dst + bias.reshape(channels)
        dst = dst.squeeze(0) if input.dim() == self.rank - 1 else dst
        return as_source(dst, input)

    def extra_repr(self) -> str:
        """Return the shapes on one line."""
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

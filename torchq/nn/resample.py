# SPDX-License-Identifier: Apache-2.0
"""Interpolation of quantized tensors: scale and zero point pass through."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchq.nn.pooling import _QPool
from torchq.quantization.qparams import QParams


class QResample(_QPool):
    """Linear interpolation in one to three dims; see :func:`torchq.functional.resampling`.

    As ``torch.nn.functional.interpolate`` with mode linear, bilinear or trilinear and
    ``align_corners=False``. What lies between two values has a place on their scale.

    Shapes:
        src: ``(N, C, spatial...)`` of the source dtype; float32 is quantized first.
        dst: ``(N, C, *size)``, of the same dtype, channels-last unless ``contiguous``.
    """

    size: list[int]
    factor: list[int]

    def __init__(
        self,
        src: QParams,
        size: Sequence[int] | None = None,
        factor: Sequence[int] | None = None,
        contiguous: bool = False,
    ) -> None:
        """To ``size``, or ``factor`` times the source's; if neither is given, forward takes it."""
        sizes, factors = list(size or []), list(factor or [])  # empty for None
        super().__init__(src, contiguous, size=sizes, factor=factors)
        self.size, self.factor = sizes, factors

    @classmethod
    def from_float(cls, module: nn.Upsample, src: QParams, contiguous: bool = False) -> "QResample":
        """Take one number per spatial dim from ``size`` or ``scale_factor``."""
        size, factor = module.size, module.scale_factor
        sizes = None if size is None else [int(s) for s in size]  # type: ignore[union-attr]
        factors = None if factor is None else [int(f) for f in factor]  # type: ignore[union-attr]
        return cls(src, sizes, factors, contiguous)

    def forward(self, src: Tensor, size: list[int] | None = None) -> Tensor:
        """Resize."""
        target: list[int] = []
        if size is not None:
            target = size
        elif len(self.size) > 0:
            target = self.size
        else:
            target = [src.size(i + 2) * f for i, f in enumerate(self.factor)]
        q = self._quantized_src(src)
        scales = torch.cat([self.src_scale, self.src_scale])
        zero_points = torch.cat([self.src_zero_point, self.src_zero_point])
        dst: Tensor = torch.ops.torchq.resampling(
            q, "linear", target, scales, zero_points, self.src_code, ""
        )
        return dst.contiguous() if self.contiguous else dst

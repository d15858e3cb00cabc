# SPDX-License-Identifier: Apache-2.0
"""Zeros around quantized tensors."""

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from torchq.nn.module import QModule, Spec, dtype_name, placeholder_qparams
from torchq.quantization.qparams import QParams


class QPad(QModule):
    """Pads with zeros, that is with the zero point; scale and zero point pass through.

    In front of a convolution with zero points its own ``padding`` costs nothing.

    Shapes:
        src: any, of the source dtype; float32 is quantized first.
        dst: as :func:`torch.nn.functional.pad` gives it; numbers below 0 crop.
    """

    value: float

    def __init__(self, src: QParams) -> None:
        """``src``: parameters of source and destination."""
        super().__init__()
        self._add_src(src)
        self._set_spec(src=dtype_name(src.dtype), src_bits=src.bits)
        self.refold()

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        return cls(placeholder_qparams(spec["src"], spec["src_bits"]))

    def refold(self) -> None:
        """See the base class."""
        self.value = float(self.src_zero_point)

    def _own_repr(self) -> str:
        return dtype_name(self.src_dtype)

    def forward(self, src: Tensor, padding: list[int]) -> Tensor:
        """Pad; ``padding`` has two numbers a dim, those of the last one first."""
        return F.pad(self._quantized_src(src), padding, "constant", self.value)

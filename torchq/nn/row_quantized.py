# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose source is float, and is quantized in each call."""

from torch import Tensor

from torchq.nn.module import QModule


class RowQuantizedLinear(QModule):
    """Base of dynamic linear layers: the bias, and the factors of the source."""

    bias: Tensor | None
    src_factor: Tensor | None

    def _smoothed(self, src: Tensor) -> Tensor:
        factor = self.src_factor
        return src if factor is None else src * factor.to(src.dtype)  # factors are bfloat16 numbers

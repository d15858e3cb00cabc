# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose source is float, and is quantized in each call."""

from torch import Tensor

from torchq.attributes.arguments import as_float32
from torchq.nn.module import QModule


class RowQuantizedLinear(QModule):
    """Base of dynamic linear layers: the bias, and the factors of the source."""

    bias: Tensor | None
    src_factor: Tensor | None

    def _set_floats(self, bias: Tensor | None, src_factor: Tensor | None) -> None:
        self.register_buffer("bias", None if bias is None else as_float32(bias.detach()).clone())
        self.register_buffer("src_factor", None if src_factor is None else src_factor.clone())

    def _smoothed(self, src: Tensor) -> Tensor:
        factor = self.src_factor
        return src if factor is None else src * factor.to(src.dtype)  # a power of two: exact

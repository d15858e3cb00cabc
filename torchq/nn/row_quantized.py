# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose source is float, and is quantized in each call."""

import torch
from torch import Tensor

from torchq.nn.module import QModule, as_source


class RowQuantizedLinear(QModule):
    """Base of dynamic linear layers: the bias, and the factors of the source."""

    bias: Tensor | None
    src_factor: Tensor | None

    def _smoothed(self, src: Tensor) -> Tensor:
        factor = self.src_factor
        if factor is None:
            return src
        # Factors are bfloat16 numbers, and may be beyond float16: its products are float32.
        return src * (factor.to(src.dtype) if src.dtype == torch.bfloat16 else factor)

    def _as_source(self, dst: Tensor, src: Tensor, post_op_srcs: list[Tensor] | None) -> Tensor:
        """Return the result of what :meth:`_smoothed` made of a float16 source in float16.

        A sum with float32 stays float32, as autocast has it.
        """
        if self.src_factor is None or src.dtype != torch.float16:
            return dst
        if post_op_srcs is not None:
            for operand in post_op_srcs:
                if operand.dtype == torch.float32:
                    return dst
        return as_source(dst, src)

# SPDX-License-Identifier: Apache-2.0
"""A float layer with an observer in front, which becomes a quantized one in the same place."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchq.config import QConfig
from torchq.lowering import matmul_from_float, naming
from torchq.nn.swapped import Standing, Swapped, constants_of, without_padding
from torchq.post_ops import PostOps
from torchq.qparams import QParams


class ObservedLayer(Standing):
    """Computes what the float layer does.

    Attributes:
        layer_name: qualified, of the float module.
        contiguous: whether the destination's strides must be those of the float model.
    """

    def __init__(self, module: nn.Module, name: str, config: QConfig, contiguous: bool) -> None:
        """``config`` tells how to quantize its source and weight."""
        super().__init__()
        self.module, self.layer_name = module, name
        self.config, self.contiguous = config, contiguous
        self.src_observer = config.make_observer(name)
        self._fix(constants_of(module))

    @property
    def weight(self) -> Tensor:
        """The float layer's."""
        return self.module.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """The float layer's."""
        return None if self.module.bias is None else self.module.get_parameter("bias")

    def forward(self, input: Tensor) -> Tensor:
        """Records the source; the argument is called as those of ``torch.nn``."""
        self.src_observer(input)
        dst: Tensor = self.module(input)
        return dst

    def convert(self, src: QParams | None = None) -> Swapped:
        """The quantized layer.

        Raises:
            RuntimeError: it was never calibrated; the message names it.
            ValueError: its weight cannot be quantized; the message names it.
        """
        config, module, observer = self.config, self.module, self.src_observer
        if src is None:
            options_ = config.activation_dtype, config.activation_bits, config.symmetric
            src = observer.qparams(*options_)
        options: dict[str, Any] = {"contiguous": self.contiguous}
        with naming(self.layer_name):
            whole = without_padding(module)
            layer = matmul_from_float(whole, src, None, config, PostOps(), **options)
        return Swapped.of(module, layer)

# SPDX-License-Identifier: Apache-2.0
"""A float layer with an observer in front, which becomes a quantized leaf in the same place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.attributes.post_ops import PostOps
from torchq.nn.from_float import matmul_from_float, naming
from torchq.nn.leaf import Leaf, QuantizedLeaf, constants_of, without_padding
from torchq.nn.module import QModule
from torchq.nn.packed_weights import PackedWeights
from torchq.quantization.config import QConfig
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.rows import RowPowers
from torchq.quantization.recipes.sample import SourceSample


class ObservedLeaf(Leaf):
    """Computes the float layer's values, in the memory format of the quantized one.

    Attributes:
        module: the float layer.
        observer: of its source; None where its rows are quantized one by one.
        sample: of its source, for the recipe of a linear layer; None where there is none.
        rows: of its source, for the row rule; None where that does not apply.
        config: how to quantize source and weight.
        name: qualified, of the float module.
        contiguous: make the result contiguous, for code that calls ``view``.
    """

    def __init__(
        self, module: nn.Module, config: QConfig, name: str = "", contiguous: bool = False
    ) -> None:
        """Start without data."""
        super().__init__()
        self.module, self.config, self.name, self.contiguous = module, config, name, contiguous
        self.observer = None if self.by_rows else config.make_observer(name)
        self.rows = None if self.by_rows else RowPowers.of(module)
        self.sample = None
        if isinstance(module, nn.Linear) and config.samples_rows and module.weight.numel():
            self.sample = SourceSample(module.in_features, name)
        self._fix(constants_of(module))

    @property
    def by_rows(self) -> bool:
        """Return whether its configuration quantizes its source row by row."""
        return self.config.dynamic or (isinstance(self.module, nn.Linear) and self.config.by_rows)

    def be_dynamic(self) -> None:
        """Record no range: its source is quantized row by row, as in the graphs that call it."""
        self.observer = self.rows = None

    def _weight_shape(self) -> torch.Size:
        return self._weight_values().shape

    def _weight_values(self) -> Tensor:
        weight = self.module.get_parameter("weight").detach()
        return weight.t() if vars(self.module).get("_turned", False) else weight

    def _weight_dtype(self) -> torch.dtype:
        return self.module.get_parameter("weight").dtype

    def _bias_values(self) -> Tensor | None:
        bias = self.module.bias
        return bias.detach() if isinstance(bias, Tensor) else None

    def forward(self, input: Tensor, *output_size: Any, **named: Any) -> Tensor:
        """Record the source; the arguments have the names that ``torch.nn`` gives them."""
        for recorder in (self.observer, self.sample, self.rows):
            if recorder is not None:
                recorder(input)
        dst: Tensor = self.module(input, *output_size, **named)
        if self.contiguous or isinstance(self.module, nn.Linear):
            return dst.contiguous()
        return dst.movedim(1, -1).contiguous().movedim(-1, 1)

    @property
    def calibrated(self) -> bool:
        """Return whether its own calls have recorded all that its conversion needs."""
        return all(one is None or one.calibrated for one in (self.observer, self.sample))

    def qparams(self) -> QParams:
        """Return parameters of the source, as observed.

        Raises:
            RuntimeError: it was never calibrated; the message names it.
        """
        assert self.observer is not None
        config = self.config
        return self.observer.qparams(
            config.activation_dtype, config.activation_bits, config.symmetric
        )

    def why_coarse(self) -> str:
        """Return why one scale does not suit its source, by its own calls; "" where it does."""
        known = self.rows is not None and self.observer is not None and self.observer.calibrated
        return self.rows.why_coarse(self.qparams()) if known and self.rows else ""

    def coarse(self, weights: PackedWeights) -> nn.Module:
        """Return what it becomes then: dynamic, or the float layer."""
        if not isinstance(self.module, nn.Linear):
            return self.module
        with naming(self.name):
            return QuantizedLeaf.of(self.module, self._layer(None, None, weights))

    def convert(
        self,
        weights: PackedWeights | None = None,
        src: QParams | None = None,
        factors: Tensor | None = None,
    ) -> QuantizedLeaf:
        """Return the quantized leaf.

        Args:
            weights: of the conversion; None for one of this leaf alone.
            src: parameters of the source; None takes the observer's.
            factors: what the channels of the source are divided by first; None for nothing.

        Raises:
            RuntimeError: it was never calibrated; the message names it.
            ValueError: its weight cannot be quantized; the message names it.
        """
        if src is None and self.observer is not None:
            src = self.qparams()
        with naming(self.name):
            layer = self._layer(src, factors, weights or PackedWeights())
            return QuantizedLeaf.of(self.module, layer, factors)

    def _layer(
        self, src: QParams | None, factors: Tensor | None, weights: PackedWeights
    ) -> QModule:
        module: Any = without_padding(self.module)
        config = self.config
        if src is None:
            return weights.dynamic(self.name, module, config, sample=self.sample)
        pack, contiguous = weights.packing(self.name, factors), self.contiguous
        return matmul_from_float(
            module, src, None, config, PostOps(), contiguous=contiguous, pack=pack
        )

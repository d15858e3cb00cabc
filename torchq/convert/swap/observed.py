# SPDX-License-Identifier: Apache-2.0
"""A float layer with an observer in front, which becomes a quantized leaf in the same place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchq.attributes.post_ops import PostOps
from torchq.convert.watching import KINDS, Watch
from torchq.nn.from_float import matmul_from_float, naming
from torchq.nn.leaf import Leaf, QuantizedLeaf, constants_of, without_padding
from torchq.nn.packed_weights import PackedWeights
from torchq.quantization.config import QConfig
from torchq.quantization.observers import Observer
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.sample import SourceSample


class ObservedLeaf(Leaf):
    """Computes the float layer's values, in the memory format of the quantized one.

    Once it watches, it records of the layer's source what the recipes want. None stands for what
    they do not want.

    Attributes:
        module: the float layer.
        observer: of its source; None where its rows are quantized one by one.
        sample: of its source, for the recipe of a linear layer.
        rows: of its source, for the row rule.
        channels: ranges of its source's channels.
        config: how to quantize source and weight.
        name: qualified, of the float module.
        chosen: whether an override gives the configuration.
        contiguous: make the result contiguous, for code that calls ``view``.
        why_dynamic: why its source is quantized row by row, whatever its configuration; "" where
            the configuration says how.
    """

    observer: Observer | None
    sample: SourceSample | None
    rows: Observer | None
    channels: Observer | None

    def __init__(
        self,
        module: nn.Module,
        config: QConfig,
        name: str = "",
        chosen: bool = False,
        contiguous: bool = False,
        why_dynamic: str = "",
    ) -> None:
        """Start without data."""
        super().__init__()
        self.module, self.config, self.name = module, config, name
        self.chosen, self.contiguous, self.why_dynamic = chosen, contiguous, why_dynamic
        for kind in KINDS:
            setattr(self, kind, None)
        self._fix(constants_of(module))

    @property
    def by_rows(self) -> bool:
        """Return whether its configuration quantizes its source row by row."""
        return self.config.dynamic or (isinstance(self.module, nn.Linear) and self.config.by_rows)

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

    def forward(self, input: Tensor, *output_size: object, **named: object) -> Tensor:
        """Record the source; the arguments have the names that ``torch.nn`` gives them."""
        for kind in KINDS:
            if (recorder := getattr(self, kind)) is not None:
                recorder(input)
        dst: Tensor = self.module(input, *output_size, **named)
        if self.contiguous or isinstance(self.module, nn.Linear):
            return dst.contiguous()
        return dst.movedim(1, -1).contiguous().movedim(-1, 1)

    def watch(self, watches: Iterable[Watch]) -> None:
        """Record what the watches of its plan say."""
        for watch in watches:
            setattr(self, watch.kind, watch.make().eval())

    def recorder(self, watch: Watch) -> Observer | None:
        """Return what records for a watch of its plan; None where nothing does."""
        found: Observer | None = getattr(self, watch.kind)
        return found

    def static(
        self,
        config: QConfig,
        src: QParams,
        factors: Tensor | None,
        weights: PackedWeights,
        note: str,
    ) -> QuantizedLeaf:
        """Return the quantized leaf, whose source has one scale.

        Args:
            config: how to quantize the weight.
            src: parameters of the source.
            factors: what the channels of the source are divided by first; None for nothing.
            weights: of the conversion.
            note: what the report says of it.

        Raises:
            ValueError: its weight cannot be quantized; the message names it.
        """
        with naming(self.name):
            layer: Any = matmul_from_float(
                without_padding(self.module), src, None, config, PostOps(),
                contiguous=self.contiguous, pack=weights.packing(self.name, factors),
            )  # fmt: skip
            if note:
                layer.with_recipe(note)
            return QuantizedLeaf.of(self.module, layer, factors)

    def dynamic(
        self, config: QConfig, weights: PackedWeights, sample: SourceSample | None = None
    ) -> QuantizedLeaf:
        """Return the quantized leaf, whose source is quantized row by row.

        Raises:
            ValueError: its weight cannot be quantized; the message names it.
        """
        module: Any = without_padding(self.module)
        with naming(self.name):
            layer = weights.dynamic(self.name, module, config, sample=sample)
            return QuantizedLeaf.of(self.module, layer, None)

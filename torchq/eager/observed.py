# SPDX-License-Identifier: Apache-2.0
"""The modules of a prepared model: float computation, with observers where quantization will be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.affine import fold_batch_norms
from torchq.config import QConfig
from torchq.eager.fuse import Layer
from torchq.observers import HistogramObserver, Observer
from torchq.qparams import QParams


class ObservedLayer(nn.Module):
    """A float layer, fused as its quantized form will be, between observers.

    Attributes:
        layer_name: qualified name of the float module.
        config: how to quantize it.
        src_from: per source, the site of the layer whose destination it is, or None where the
            source is float and has an observer here. A residual comes last.
        dst_config: how to quantize the destination; None if some reader takes it as float32.
        contiguous: whether the destination's strides must be those of the float model.
        function: that alone reads the destination, as a table: it decides about the range.
    """

    def __init__(
        self,
        layer: Layer,
        config: QConfig,
        src_from: list[str | None],
        dst_config: QConfig | None,
        contiguous: bool,
        function: nn.Module | None = None,
    ) -> None:
        """``src_from`` has one entry per value that ``layer`` reads."""
        super().__init__()
        self.function = (function,)  # in a tuple: it is no submodule
        self.module = fold_batch_norms(layer.module, layer.norms)
        self.layer_name = layer.name
        self.config = config
        self.clip = layer.clip
        self.has_residual = layer.residual is not None
        self.residual_first = layer.residual_first
        self.src_from = src_from
        self.dst_config = dst_config
        self.contiguous = contiguous
        self.src_observers = nn.ModuleDict(
            {
                str(i): config.make_observer(layer.name)
                for i, site in enumerate(src_from)
                if site is None and not (self.has_residual and i == len(src_from) - 1)
            }
        )
        name = f"{layer.name}.dst"  # as in overrides, which the observer's errors propose
        self.dst_observer = None if dst_config is None else dst_config.make_observer(name)

    def src_qparams(self, i: int) -> QParams | None:
        """Parameters of a float source, from the observer here; None for a float residual.

        Raises:
            RuntimeError: it was never calibrated; the message names the module.
        """
        key = str(i)
        return _qparams(self.src_observers[key], self.config) if key in self.src_observers else None

    def dst_qparams(self) -> QParams | None:
        """Parameters of the destination; None if it is float32. See :meth:`src_qparams`."""
        config, observer, function = self.dst_config, self.dst_observer, self.function[0]
        if config is None:
            return None
        if function is not None and isinstance(observer, HistogramObserver):
            options = config.activation_dtype, config.activation_bits, config.symmetric
            return observer.qparams_before(function, *options)
        return _qparams(observer, config)

    def forward(self, *args: Any) -> Tensor:
        """Runs the float layer as fused, and records."""
        if self.has_residual:
            src, residual = args[::-1] if self.residual_first else args
            self._observe([src])
            dst: Tensor = self.module(src) + residual
        else:
            self._observe(list(args[0]) if isinstance(args[0], list | tuple) else list(args))
            dst = self.module(*args)
        if self.clip is not None:
            dst = torch.clamp(dst, *self.clip)
        if self.dst_observer is not None:
            self.dst_observer(dst)
        return dst

    def _observe(self, srcs: list[Tensor]) -> None:
        for key, observer in self.src_observers.items():
            observer(srcs[int(key)])


def _qparams(observer: nn.Module | None, config: QConfig) -> QParams:
    assert isinstance(observer, Observer)
    return observer.qparams(config.activation_dtype, config.activation_bits, config.symmetric)


class ObservedPool(nn.Module):
    """A pool on a tensor that will be int8; it has the parameters of its source."""

    def __init__(self, module: nn.Module, name: str, src_from: str, contiguous: bool) -> None:
        """``src_from`` is the site of the layer whose destination it reads."""
        super().__init__()
        self.module = module
        self.layer_name = name
        self.src_from = src_from
        self.contiguous = contiguous

    def forward(self, src: Tensor) -> Tensor:
        """Pools in float."""
        dst: Tensor = self.module(src)
        return dst

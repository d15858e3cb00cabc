# SPDX-License-Identifier: Apache-2.0
"""The modules of a prepared model: float computation, with observers where quantization will happen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.config import QConfig
from torchq.fuse import Layer
from torchq.observer_base import Observer
from torchq.qparams import QParams


class ObservedLayer(nn.Module):
    """A float layer, fused as its quantized form will be, between observers.

    Attributes:
        layer_name: qualified name of the float module.
        config: how to quantize it.
        src_from: per source, the site of the layer whose destination it is, or None where the source is float and
            has an observer here. A residual comes last.
        emits_int8: whether every reader of the destination takes int8.
    """

    def __init__(
        self, layer: Layer, config: QConfig, src_from: list[str | None], emits_int8: bool
    ) -> None:
        """``src_from`` has one entry per value that ``layer`` reads."""
        super().__init__()
        self.module = layer.module
        self.layer_name = layer.name
        self.config = config
        self.clip = layer.clip
        self.has_residual = layer.residual is not None
        self.residual_first = layer.residual_first
        self.src_from = src_from
        self.emits_int8 = emits_int8
        self.src_observers = nn.ModuleDict(
            {
                str(i): config.make_observer(f"{layer.name} (source {i})")
                for i, site in enumerate(src_from)
                if site is None and not (self.has_residual and i == len(src_from) - 1)
            }
        )
        self.dst_observer = (
            config.make_observer(f"{layer.name} (destination)") if emits_int8 else None
        )

    def src_qparams(self, i: int) -> QParams:
        """Parameters of a float source, from the observer here.

        Raises:
            RuntimeError: it was never calibrated; the message names the module.
        """
        observer = self.src_observers[str(i)]
        assert isinstance(observer, Observer)
        return self._qparams(observer)

    def dst_qparams(self) -> QParams:
        """Parameters of the destination; see :meth:`src_qparams`."""
        assert self.dst_observer is not None
        return self._qparams(self.dst_observer)

    def _qparams(self, observer: Observer) -> QParams:
        config = self.config
        return observer.qparams(config.activation_dtype, config.activation_bits, config.symmetric)

    def _observe(self, srcs: list[Tensor]) -> None:
        for key, observer in self.src_observers.items():
            observer(srcs[int(key)])

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


class ObservedPool(nn.Module):
    """A pool on a tensor that will be int8; it has the parameters of its source."""

    def __init__(self, module: nn.Module, name: str, src_from: str) -> None:
        """``src_from`` is the site of the layer whose destination it reads."""
        super().__init__()
        self.module = module
        self.layer_name = name
        self.src_from = src_from

    def forward(self, src: Tensor) -> Tensor:
        """Pools in float."""
        dst: Tensor = self.module(src)
        return dst

# SPDX-License-Identifier: Apache-2.0
"""Which tensors become int8, and what that makes of each layer.

A layer emits int8 only if every reader of its destination, through calls that merely move values, is a layer that
takes int8, and the model does not return it. All other tensors stay float32, and a layer that reads one quantizes it
with an observer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchq.config import Overrides, QConfig, resolve, unmatched_patterns
from torchq.fuse import COMBINE, MATMUL, POOLS, UNARY, Layer
from torchq.nn.fused import Absorbed, FusedClip
from torchq.nn.quantize import DeQuantStub, QuantStub
from torchq.observed import ObservedLayer, ObservedPool
from torchq.recording import Call, Recording


class Plan:
    """Decisions for one recorded model.

    Attributes:
        layers: in the order of their calls.
        reasons: main module of a layer -> why it stays float; "" where it is quantized.
    """

    def __init__(
        self,
        recording: Recording,
        layers: list[Layer],
        config: QConfig,
        overrides: Overrides | None,
    ) -> None:
        """Decides; nothing is changed yet."""
        self.layers = layers
        self.reasons: dict[str, str] = {}
        self._recording = recording
        self._overrides = overrides
        self._configs = {la.name: resolve(overrides, la.name, config) for la in layers}
        self._parent: dict[int, int] = {}  # union-find: values with the same scale and zero point
        self._producer: dict[int, Layer] = {}  # root value -> the layer that emits it as int8
        self._join_moved_values()
        capable = [layer for layer in layers if self._can_read_int8(layer)]
        wanted = {self._root(value) for layer in capable for value in layer.reads}
        refused = set(self._float_roots(capable))
        for layer in layers:  # a producer comes before its readers
            self.reasons[layer.name] = self._why_float(layer)
            root = self._root(layer.dst)
            if self._can_emit_int8(layer) and root in wanted and root not in refused:
                self._producer[root] = layer

    def config(self, layer: Layer) -> QConfig | None:
        """How to quantize a layer; None if an override keeps it float."""
        return self._configs[layer.name]

    def producer(self, value: int) -> Layer | None:
        """The layer that emits this value as int8, if one does."""
        return self._producer.get(self._root(value))

    def check_patterns(self, model: nn.Module) -> None:
        """Raises ValueError for an override that matches no module."""
        names = [name for name, _ in model.named_modules()]
        names += [f"{name}.dst" for name in self._configs]
        unmatched = unmatched_patterns(self._overrides, names)
        if unmatched:
            raise ValueError(
                f"torchq.prepare: overrides must match module names, but {unmatched} match none. "
                f"The quantizable modules are {sorted(self._configs)}."
            )

    def apply(self, model: nn.Module) -> None:
        """Puts the observed layers into the model."""
        for layer in self.layers:
            config = self.config(layer)
            if self.reasons[layer.name] or config is None:
                continue
            sources = [self.producer(value) for value in layer.reads]
            if isinstance(layer.module, POOLS):
                assert sources[0] is not None
                pool = ObservedPool(layer.module, layer.name, sources[0].site)
                model.set_submodule(layer.site, pool)
                continue
            for name in layer.absorbed:
                model.set_submodule(name, Absorbed())
            for name in layer.activations:
                assert layer.clip is not None
                model.set_submodule(name, FusedClip(*layer.clip))
            src_from = [None if source is None else source.site for source in sources]
            emits_int8 = self.producer(layer.dst) is layer
            model.set_submodule(layer.site, ObservedLayer(layer, config, src_from, emits_int8))

    def _root(self, value: int) -> int:
        while self._parent.get(value, value) != value:
            value = self._parent[value]
        return value

    def _join_moved_values(self) -> None:
        pools = {layer.parts[0] for layer in self.layers if self._keeps_scale(layer)}
        self._moving = {c for c in self._recording.calls if c.is_transparent or c in pools}
        for call in self._recording.calls:
            if call in self._moving and call.inputs:
                for value in call.outputs:
                    self._parent[self._root(value)] = self._root(call.inputs[0])

    def _keeps_scale(self, layer: Layer) -> bool:
        """A pool that can run on int8: scale and zero point pass through."""
        m = layer.module
        special = getattr(m, "return_indices", False) or getattr(m, "divisor_override", None)
        usable = layer.called_once and self.config(layer) is not None
        return isinstance(m, POOLS) and not special and usable

    def _can_read_int8(self, layer: Layer) -> bool:
        m = layer.module
        supported = getattr(m, "padding_mode", "zeros") == "zeros"
        usable = layer.called_once and self.config(layer) is not None
        return usable and supported and not isinstance(m, (QuantStub, *POOLS))

    def _can_emit_int8(self, layer: Layer) -> bool:
        if self.reasons[layer.name] or not layer.called_once:
            return False
        if isinstance(layer.module, (DeQuantStub, *POOLS)):
            return False
        return resolve(self._overrides, f"{layer.name}.dst", self.config(layer)) is not None

    def _float_roots(self, capable: list[Layer]) -> Iterator[int]:
        """Values that someone reads as float: plain operations, float layers, the caller of the model."""
        inside: set[Call] = {call for layer in capable for call in layer.parts}
        for call in self._recording.calls:
            if call not in inside and call not in self._moving:
                yield from map(self._root, call.inputs)
        yield from map(self._root, self._recording.returned)

    def _why_float(self, layer: Layer) -> str:
        m = layer.module
        if self.config(layer) is None:
            return "kept float by an override"
        mode = getattr(m, "padding_mode", "zeros")
        if mode != "zeros":
            return f"padding_mode is '{mode}', only 'zeros' is supported"
        if not layer.called_once and not isinstance(m, MATMUL):
            return "called more than once"
        if isinstance(m, POOLS) and not self._keeps_scale(layer):
            return "its options have no int8 form"
        needs_int8 = isinstance(m, (*COMBINE, *UNARY, *POOLS, DeQuantStub))
        if needs_int8 and not any(self.producer(value) for value in layer.reads):
            return "its sources are float"
        return ""

# SPDX-License-Identifier: Apache-2.0
"""Which tensors become int8, and what that makes of each layer.

A layer emits int8 only if every reader of its destination, through calls that merely move values,
is a layer that takes int8, and the model does not return it. All other tensors stay float32, and a
layer that reads one quantizes it with an observer of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchq.config import Overrides, QConfig, resolve, unmatched_patterns
from torchq.eager.fuse import Layer, clip_bounds, find_layers
from torchq.eager.observed import ObservedLayer, ObservedPool
from torchq.eager.recording import Call, Recording
from torchq.kinds import AVERAGES, COMBINE, POOLS, UNARY
from torchq.nn.fused import Absorbed, FusedClip
from torchq.nn.quantize import DeQuantStub, QuantStub
from torchq.standalone import observed, stands_alone, why_float


class Plan:
    """Decisions for one recorded model.

    Attributes:
        layers: in the order of their calls.
        reasons: main module of a layer -> why it stays float; "" where it is quantized.
        standalone: module that is quantized by itself -> why it stays float; "" where it does not.
    """

    def __init__(
        self,
        recording: Recording,
        config: QConfig,
        overrides: Overrides | None,
        prefix: str = "",
    ) -> None:
        """Decides; nothing is changed yet. Names in overrides begin with ``prefix``."""
        self.recording, self.prefix = recording, prefix
        self._config, self._overrides = config, overrides
        self.standalone = self._stand_alone()
        self.layers = find_layers(recording, self.config, self.standalone)
        self.reasons: dict[str, str] = {}
        self._parent: dict[int, int] = {}  # union-find: values with the same scale and zero point
        self._producer: dict[int, Layer] = {}  # root value -> the layer that emits it as int8
        self._moving = self._join_moved_values()
        self._no_lookup: set[Layer] = set()  # functions whose destination is float
        while not self._decide():
            pass
        for layer in self.layers:
            if isinstance(layer.module, QuantStub) and self.producer(layer.dst) is not layer:
                self.reasons[layer.name] = layer.reason or "its destination is float"
        self._contiguous = self._layout_matters()

    def config(self, name: str) -> QConfig | None:
        """How to quantize a module, or its destination ``<name>.dst``; None keeps it float."""
        return resolve(self._overrides, f"{self.prefix}{name}", self._config)

    def producer(self, value: int) -> Layer | None:
        """The layer that emits this value as int8, if one does."""
        return self._producer.get(self._root(value))

    def check_patterns(self, model: nn.Module) -> None:
        """Raises ValueError for an override that matches no module."""
        layers = [layer.name for layer in self.layers]
        names = [name for name, _ in model.named_modules()]
        names += [f"{name}.dst" for name in layers]
        unmatched = unmatched_patterns(self._overrides, names)
        if unmatched:
            raise ValueError(
                f"torchq.prepare: overrides must match module names, but {unmatched} match none. "
                f"The quantizable modules are {sorted({*layers, *self.standalone})}."
            )

    def differing(self, other: Plan) -> list[str]:
        """Layers that the plan of another run would make something else of."""
        mine, others = self._decisions(), other._decisions()
        return [name for name in mine if name in others and mine[name] != others[name]]

    def leave_float(self, names: list[str]) -> None:
        """Keeps these layers float; only where nothing else reads their destinations as int8."""
        for name in names:
            self.reasons[name] = "a second call of the model does something else with it"

    def _decisions(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {}
        for layer in self.layers:
            sources = [self.producer(value) for value in layer.reads]
            found[layer.name] = (
                layer.site, layer.absorbed, list(layer.activations), layer.clip, layer.called_once,
                [source and source.name for source in sources],
                self.producer(layer.dst) is layer, self.reasons[layer.name],
            )  # fmt: skip
        return found

    def replacements(self) -> dict[str, nn.Module]:
        """Qualified name -> the module to put there."""
        result: dict[str, nn.Module] = {}
        for layer in self.layers:
            if not self.reasons[layer.name]:
                for name in layer.absorbed:
                    result[name] = Absorbed()
                for name, activation in layer.activations.items():
                    bounds = clip_bounds(activation)
                    assert bounds is not None
                    result[name] = FusedClip(*bounds)
                result[layer.site] = self._observed(layer)
        modules = {name: calls[0].module for name, calls in self.recording.calls_of().items()}
        for name, reason in self.standalone.items():
            module, config = modules[name], self.config(name)
            if not reason:
                assert module is not None and config is not None
                result[name] = observed(module, config, f"{self.prefix}{name}")
        return result

    def _stand_alone(self) -> dict[str, str]:
        result: dict[str, str] = {}
        for name, calls in self.recording.calls_of().items():
            module, config = calls[0].module, self.config(name)
            if module is not None and stands_alone(module, config):
                sources = {value for call in calls for value in call.inputs}
                dtypes = {self.recording.values[value].dtype for value in sources}
                dtypes.discard(torch.int64)  # of packed sequences
                exposed = name in self.recording.exposed
                result[name] = why_float(module, config, dtypes, exposed)
        return result

    def _dst_config(self, layer: Layer) -> QConfig | None:
        """How to quantize a destination; None makes it float32."""
        config = self.config(f"{layer.name}.dst")
        return None if config is None or config.dynamic else config

    def _observed(self, layer: Layer) -> nn.Module:
        config = self.config(layer.name)
        assert config is not None
        sources = [self.producer(value) for value in layer.reads]
        contiguous = layer.dst in self._contiguous
        if layer.keeps_scale:
            assert sources[0] is not None
            return ObservedPool(layer.module, layer.name, sources[0].site, contiguous)
        src_from = [None if source is None else source.site for source in sources]
        emits_int8 = self.producer(layer.dst) is layer
        dst_config = self._dst_config(layer) if emits_int8 else None
        return ObservedLayer(
            layer, config, src_from, dst_config, contiguous, self._function_behind(layer)
        )

    def _function_behind(self, layer: Layer) -> nn.Module | None:
        """The function that alone reads an int8 destination, and becomes a table.

        None where averages lie between: what it makes of them says little of what they are made of.
        """
        root = self._root(layer.dst)
        readers = [
            other
            for other in self.layers
            if not self.reasons[other.name] and any(self._root(v) == root for v in other.reads)
        ]
        alone = [other for other in readers if not other.keeps_scale]
        averages = any(isinstance(other.module, AVERAGES) for other in readers)
        single = len(alone) == 1 and isinstance(alone[0].module, UNARY) and not averages
        return alone[0].module if single else None

    def _root(self, value: int) -> int:
        while self._parent.get(value, value) != value:
            value = self._parent[value]
        return value

    def _join_moved_values(self) -> set[Call]:
        """Joins the sources and destinations of what keeps scale and zero point."""
        pools = {layer.parts[0] for layer in self.layers if layer.keeps_scale and not layer.reason}
        moving = {call for call in self.recording.calls if call.moves or call in pools}
        for call in self.recording.calls:
            if call in moving:
                for value in call.outputs:
                    self._parent[self._root(value)] = self._root(call.inputs[0])
        return moving

    def _decide(self) -> bool:
        """One attempt; False if it found functions that must stay float after all."""
        readers = [layer for layer in self.layers if self._can_read_int8(layer)]
        wanted = {self._root(value) for layer in readers for value in layer.reads}
        refused = self._float_roots(readers)
        self._producer.clear()
        for layer in self.layers:  # a producer comes before its readers
            self.reasons[layer.name] = self._why_float(layer)
            root = self._root(layer.dst)
            if self._can_emit_int8(layer) and root in wanted and root not in refused:
                self._producer[root] = layer
        failed = {
            layer
            for layer in self.layers
            if isinstance(layer.module, UNARY)
            and not self.reasons[layer.name]
            and self.producer(layer.dst) is not layer
        }
        self._no_lookup |= failed
        return not failed

    def _can_read_int8(self, layer: Layer) -> bool:
        usable = layer.called_once and not layer.reason and layer not in self._no_lookup
        return usable and not isinstance(layer.module, QuantStub) and not layer.keeps_scale

    def _can_emit_int8(self, layer: Layer) -> bool:
        if self.reasons[layer.name] or not layer.called_once:
            return False
        if isinstance(layer.module, DeQuantStub) or layer.keeps_scale:
            return False
        return self._dst_config(layer) is not None

    def _float_roots(self, readers: list[Layer]) -> set[int]:
        """What someone reads as float: plain operations, float layers, the model's caller."""
        inside: set[Call] = {call for layer in readers for call in layer.parts}
        values = set(self.recording.returned)
        for call in self.recording.calls:
            if call not in inside and call not in self._moving:
                values.update(call.inputs)
        return {self._root(value) for value in values}

    def _why_float(self, layer: Layer) -> str:
        if layer.reason:
            return layer.reason
        needs_int8 = isinstance(layer.module, (*COMBINE, *UNARY, *POOLS, DeQuantStub))
        if needs_int8 and not any(self.producer(value) for value in layer.reads):
            return "its sources are float"
        if layer in self._no_lookup:
            return "its destination is float"
        return ""

    def _layout_matters(self) -> set[int]:
        """Values in front of ``view`` and the like, where the float model has them contiguous.

        Quantized convolutions and pools give channels-last tensors, which ``view`` may refuse.
        """
        values, result = self.recording.values, set[int]()
        by_output = {value: call for call in self.recording.calls for value in call.outputs}
        ends = {
            layer.dst: layer
            for layer in self.layers
            if not self.reasons[layer.name] and _is_channels_last(layer.module)
        }
        waiting, seen = list(self.recording.strided), set[int]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            call = by_output.get(value)
            if value in ends:
                if values[value].contiguous:
                    result.add(value)
            elif call and len(values[value].shape) > 2 and not isinstance(call.module, nn.Linear):
                waiting.extend(call.inputs)
        return result


def _is_channels_last(module: nn.Module) -> bool:
    return isinstance(module, (*POOLS, nn.Conv1d, nn.Conv2d, nn.Conv3d))

# SPDX-License-Identifier: Apache-2.0
"""From a recorded run to layers: which modules become one quantized op.

A layer is a convolution or linear together with the batch norm, residual
:class:`~torchq.nn.Add` and relu, relu6 or hardtanh behind it, or another module that has a
quantized form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import torch
from torch import nn

from torchq.config import QConfig
from torchq.eager.recording import PASSING_MODULES, Call, Recording
from torchq.kinds import (
    AVERAGES,
    BATCH_NORM,
    EXPOSED,
    MATMUL,
    MAX_REDUCTION,
    NO_DYNAMIC_FORM,
    POOLS,
    QUANTIZABLE,
)
from torchq.nn.binary import Add, Mul


@dataclass(eq=False)
class Layer:
    """What becomes one quantized op.

    Attributes:
        name: qualified name of the main module.
        module: the main module.
        site: name of the module whose call computes the layer: ``name``, or that of a fused Add.
        srcs: values it reads, without the residual.
        dst: value it produces.
        reason: why it must stay float; then it fuses nothing.
        norms: batch norms behind it, to be folded into the weight.
        clip: bounds of a fused relu, relu6 or hardtanh.
        residual: value added before the clip.
        residual_first: whether the residual is the Add's first argument.
        absorbed: modules that do nothing any more, the main module included if ``site`` is another.
        activations: fused activation modules, which other calls may share.
        parts: the recorded calls it consists of.
        called_once: if not, it fuses nothing, and reads and writes float32.
        is_mean: whether it is a pool that averages all positions: means lie closer together than
            values, so they get parameters of their own.
    """

    name: str
    module: nn.Module
    site: str
    srcs: list[int]
    dst: int
    parts: list[Call]
    reason: str = ""
    norms: list[nn.Module] = field(default_factory=list)
    clip: tuple[float, float] | None = None
    residual: int | None = None
    residual_first: bool = False
    absorbed: list[str] = field(default_factory=list)
    activations: dict[str, nn.Module] = field(default_factory=dict)
    called_once: bool = True
    is_mean: bool = False

    @property
    def keeps_scale(self) -> bool:
        """Whether it is a pool whose destination has the parameters of its source."""
        return isinstance(self.module, POOLS) and not self.is_mean

    @property
    def reads(self) -> list[int]:
        """All values it reads."""
        return self.srcs if self.residual is None else [*self.srcs, self.residual]


def clip_bounds(module: nn.Module | None) -> tuple[float, float] | None:
    """The bounds of an activation that only clips."""
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one
        return float(module.min_val), float(module.max_val)
    return (0.0, math.inf) if isinstance(module, nn.ReLU) else None


def find_layers(
    recording: Recording, config: Callable[[str], QConfig | None], skip: Container[str]
) -> list[Layer]:
    """Layers in the order of their calls; convolutions and linears take what they can first.

    Args:
        recording: of the model.
        config: of a module, by name; where it is None, the module must not be touched.
        skip: modules that are no layers: they stand alone.
    """
    return _Finder(recording, config, skip).run()


class _Finder:
    def __init__(
        self,
        recording: Recording,
        config: Callable[[str], QConfig | None],
        skip: Container[str],
    ) -> None:
        self.recording, self.config, self.skip = recording, config, skip
        self.calls_of, self.consumers = recording.calls_of(), recording.consumers()
        self.computed = recording.computed()
        self.taken: set[Call] = set()

    def run(self) -> list[Layer]:
        layers = []
        for types in (MATMUL, QUANTIZABLE):
            for call in self.recording.calls:
                free = call not in self.taken and call.name not in self.skip
                if free and isinstance(call.module, types) and call.outputs:
                    layers.append(self._layer(call))
        order = {name: i for i, name in enumerate(self.calls_of)}
        return sorted(layers, key=lambda layer: order[layer.site])

    def _layer(self, call: Call) -> Layer:
        assert call.module is not None
        calls = self.calls_of[call.name]
        layer = Layer(
            call.name, call.module, call.name, call.inputs, call.outputs[0], list(calls)
        )  # fmt: skip
        layer.called_once = len(calls) == 1
        layer.is_mean = self._is_mean(call)
        layer.reason = self._why_float(calls)
        self.taken.update(calls)
        if layer.called_once and not layer.reason:
            self._absorb(layer)
            self.taken.update(layer.parts)
        return layer

    def _is_mean(self, call: Call) -> bool:
        if not isinstance(call.module, AVERAGES) or not call.inputs:
            return False
        sizes = (self.recording.values[v].shape[2:] for v in (call.inputs[0], call.outputs[0]))
        before, after = map(math.prod, sizes)
        return after == 1 < before

    def _why_float(self, calls: list[Call]) -> str:
        name, m = calls[0].name, calls[0].module
        config = self.config(name)
        if config is None:
            return "kept float by an override"
        if config.dynamic and not isinstance(m, POOLS):  # a pool is as static as its source
            return NO_DYNAMIC_FORM
        if name in self.recording.hooked:
            return "it has forward hooks, which would be lost"
        if name in self.recording.exposed:
            return EXPOSED
        if any(call.keywords for call in calls):
            return "called with keyword arguments"
        if any(call.reread for call in calls):
            return "it works in place on a tensor that is read again"
        mode = getattr(m, "padding_mode", "zeros")
        if mode != "zeros":
            return f"padding_mode is '{mode}', only 'zeros' is supported"
        if isinstance(m, MATMUL) and math.prod(m.weight.shape[1:]) > MAX_REDUCTION:
            return f"it sums more than {MAX_REDUCTION} products, which could overflow int32"
        if len(calls) > 1 and not isinstance(m, MATMUL):
            return "called more than once"
        if getattr(m, "return_indices", False) or getattr(m, "divisor_override", None):
            return "its options have no int8 form"
        return self._why_not_these(calls)

    def _why_not_these(self, calls: list[Call]) -> str:
        """Sources that the quantized form does not take."""
        m = calls[0].module
        for call in calls:
            sources = [self.recording.values[v] for v in call.inputs]
            for source in sources:
                if source.dtype != torch.float32:
                    return f"its source is {source.dtype}, not torch.float32"
                dims = _spatial_dims(m)
                if dims is not None and len(source.shape) != dims + 2:
                    return f"its source {list(source.shape)} has no batch dimension"
            if isinstance(m, Add | Mul) and len(sources) != 2:
                return "an operand is not a tensor"
            if not sources:
                return "it has no tensor as source"
        return ""

    def _absorb(self, layer: Layer) -> None:
        """Extends the layer by the calls behind it, while each alone reads the one before."""
        matmul = isinstance(layer.module, MATMUL)
        while (matmul or isinstance(layer.module, Add | Mul)) and not layer.clip:
            call = self._only_reader(layer.dst)
            if call is None or not self._may_take(call):
                break
            bounds = clip_bounds(call.module)
            first = matmul and layer.residual is None and len(self.calls_of[call.name]) == 1
            if isinstance(call.module, PASSING_MODULES):
                pass
            elif first and self._fits_norm(layer, call):
                assert call.module is not None
                layer.norms.append(call.module)
                layer.absorbed.append(call.name)
            elif first and self._fits_sum(layer, call):
                layer.residual_first = call.inputs[1] == layer.dst
                layer.residual = call.inputs[0 if layer.residual_first else 1]
                layer.absorbed.append(layer.name)
                layer.site = call.name
            elif bounds is not None and (matmul or bounds == (0.0, math.inf)):
                assert call.module is not None
                layer.clip = bounds
                layer.activations[call.name] = call.module
            else:
                break
            layer.parts.append(call)
            layer.dst = call.outputs[0]

    def _only_reader(self, value: int) -> Call | None:
        readers = self.consumers[value]
        if len(readers) != 1 or value in self.recording.returned:
            return None
        once = readers[0].inputs.count(value) == 1 and len(readers[0].outputs) == 1
        return readers[0] if once else None

    def _may_take(self, call: Call) -> bool:
        """Whether the module may be replaced, for all of its calls."""
        calls = self.calls_of.get(call.name, []) if call.module is not None else []
        plain = calls and not any(other.keywords or other.reread for other in calls)
        untouched = self.config(call.name) is not None and call.name not in self.recording.hooked
        return bool(plain) and call not in self.taken and untouched

    def _fits_norm(self, layer: Layer, call: Call) -> bool:
        norm, src = call.module, self.recording.values[layer.dst]
        # Behind a linear (N, L, C) or an unbatched source, the channels are not where it looks.
        rank = 2 if isinstance(layer.module, nn.Linear) else (_spatial_dims(layer.module) or 0) + 2
        fits = isinstance(norm, BATCH_NORM) and len(src.shape) == rank
        exposed = call.name in self.recording.exposed
        return fits and not exposed and getattr(norm, "running_mean", None) is not None

    def _fits_sum(self, layer: Layer, call: Call) -> bool:
        if not isinstance(call.module, Add) or len(call.inputs) != 2:
            return False
        values = self.recording.values
        residual = call.inputs[0 if call.inputs[1] == layer.dst else 1]
        src, other = values[layer.dst], values[residual]
        # A constant (a position embedding, say) broadcasts to other batches; a sum would not.
        fits = src.shape == other.shape and other.dtype == torch.float32
        # The layer's call moves to the Add: what is in between must neither see nor change a thing.
        passed = {value for part in layer.parts for value in part.outputs}
        moves = any(self.recording.is_written_between(v, layer.parts[0], call) for v in layer.srcs)
        seen = passed & self.recording.inspected
        return fits and residual in self.computed and not moves and not seen


def _spatial_dims(module: nn.Module | None) -> int | None:
    """Of a convolution or pool, by its name."""
    if isinstance(module, (*POOLS, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        names = [cls.__name__ for cls in type(module).__mro__]
        return next(int(name[-2]) for name in names if name[-2:] in ("1d", "2d", "3d"))
    return None

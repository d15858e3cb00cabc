# SPDX-License-Identifier: Apache-2.0
"""From a recorded run to layers: which modules become one quantized op.

A layer is a convolution or linear together with the batch norm, residual :class:`~torchq.nn.Add` and relu, relu6 or
hardtanh behind it, or another module that has a quantized form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from torchq.nn.binary import Add, Cat, Mul
from torchq.nn.quantize import DeQuantStub, QuantStub
from torchq.recording import Call, Recording

MATMUL = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POOLS = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)
COMBINE = (Add, Mul, Cat)
UNARY = (
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Sigmoid,
    nn.Tanh,
    nn.SiLU,
    nn.Mish,
    nn.GELU,
    nn.ELU,
    nn.LeakyReLU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Softplus,
)
STUBS = (QuantStub, DeQuantStub)
QUANTIZABLE = (*MATMUL, *COMBINE, *UNARY, *POOLS, *STUBS)


@dataclass(eq=False)
class Layer:
    """What becomes one quantized op.

    Attributes:
        name: qualified name of the main module.
        module: the main module.
        site: name of the module whose call computes the layer: ``name``, or that of a fused Add.
        srcs: values it reads, without the residual.
        dst: value it produces.
        clip: bounds of a fused relu, relu6 or hardtanh.
        residual: value added before the clip.
        residual_first: whether the residual is the Add's first argument.
        absorbed: modules that do nothing any more, the main module included if ``site`` is another.
        activations: fused activation modules, which other calls may share.
        parts: the recorded calls it consists of; more than one call of the main module fuses nothing.
    """

    name: str
    module: nn.Module
    site: str
    srcs: list[int]
    dst: int
    clip: tuple[float, float] | None = None
    residual: int | None = None
    residual_first: bool = False
    absorbed: list[str] = field(default_factory=list)
    activations: list[str] = field(default_factory=list)
    parts: list[Call] = field(default_factory=list)
    called_once: bool = True

    @property
    def reads(self) -> list[int]:
        """All values it reads."""
        return self.srcs if self.residual is None else [*self.srcs, self.residual]


def clip_bounds(module: nn.Module) -> tuple[float, float] | None:
    """The bounds of an activation that only clips."""
    if isinstance(module, nn.ReLU6):
        return 0.0, 6.0
    if isinstance(module, nn.ReLU):
        return 0.0, math.inf
    if isinstance(module, nn.Hardtanh):
        return float(module.min_val), float(module.max_val)
    return None


def find_layers(recording: Recording) -> list[Layer]:
    """Layers in the order of their calls; batch norms are written into the weights they follow.

    Convolutions and linears take what they can first; a module that was called several times fuses nothing.
    """
    calls_of, consumers = recording.calls_of(), recording.consumers()
    taken: set[Call] = set()
    layers = []
    for types in (MATMUL, QUANTIZABLE):
        for call in recording.calls:
            if call in taken or not isinstance(call.module, types):
                continue
            calls = calls_of[call.name]
            taken.update(calls)
            layer = Layer(call.name, call.module, call.name, call.inputs, call.outputs[0])
            layer.parts = list(calls)
            layer.called_once = len(calls) == 1
            if layer.called_once:
                _absorb(layer, recording, calls_of, consumers, taken)
                taken.update(layer.parts)
            layers.append(layer)
    order = {name: i for i, name in enumerate(calls_of)}
    return sorted(layers, key=lambda layer: order[layer.site])


def _absorb(
    layer: Layer,
    recording: Recording,
    calls_of: dict[str, list[Call]],
    consumers: dict[int, list[Call]],
    taken: set[Call],
) -> None:
    """Extends the layer by the calls behind it, while each is the only reader of the one before."""
    matmul = isinstance(layer.module, MATMUL)
    while matmul or isinstance(layer.module, Add | Mul):
        if len(consumers[layer.dst]) != 1 or layer.dst in recording.returned or layer.clip:
            break
        call = consumers[layer.dst][0]
        if call.module is None or call in taken or call.inputs.count(layer.dst) > 1:
            break
        bounds = clip_bounds(call.module)
        first = matmul and layer.residual is None and len(calls_of[call.name]) == 1
        if first and isinstance(call.module, BATCH_NORM) and _has_statistics(call.module):
            fold_batch_norm(layer.module, call.module)
            layer.absorbed.append(call.name)
        elif first and isinstance(call.module, Add) and len(call.inputs) == 2:
            _absorb_add(layer, call)
        elif bounds is not None and (matmul or bounds == (0.0, math.inf)):
            layer.clip = bounds
            layer.activations.append(call.name)
        else:
            break
        layer.parts.append(call)
        layer.dst = call.outputs[0]


def _absorb_add(layer: Layer, call: Call) -> None:
    layer.residual_first = call.inputs[1] == layer.dst
    layer.residual = call.inputs[0 if layer.residual_first else 1]
    layer.absorbed.append(layer.name)
    layer.site = call.name


def _has_statistics(norm: nn.Module) -> bool:
    return getattr(norm, "running_mean", None) is not None


def fold_batch_norm(layer: nn.Module, norm: nn.Module) -> None:
    """Writes a batch norm in eval mode into the weight and bias in front of it, in place."""
    fuse = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
    weight, bias = fuse(
        layer.weight,
        layer.bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
    )
    with torch.no_grad():
        layer.weight = weight
        layer.bias = bias

# SPDX-License-Identifier: Apache-2.0
"""Find the layers of a model, and the layer of torch.nn that each of them computes.

Those of torch.nn and torchq.nn without children are, and classes that only inherit from them. Other
classes are where all that their code does is one linear layer or convolution, perhaps with a
transposed weight or one computed from parameters: they become int8 like the torch.nn module that
computes the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from torchq.capture.module_kinds import inherits, is_patched
from torchq.models.inputs import are_close
from torchq.models.state import twin
from torchq.nn.leaf import constants_of

_Layer = nn.Linear | _ConvNd
_ADDS = (operator.add, torch.add, "add")
_RESHAPES = ("view", "reshape", "flatten", torch.reshape, torch.flatten)


def equivalent_layer(module: nn.Module) -> nn.Module | None:
    """Return the module, one of torch.nn that computes the same, or None where it is no leaf."""
    if next(module.children(), None) is not None or is_patched(module):
        return None
    if inherits(type(module)):
        return module
    own_call = type(module).__call__ is not nn.Module.__call__
    if own_call or module._forward_hooks or module._forward_pre_hooks or not module._parameters:
        return None
    try:
        copied = twin(module)
        layer = _Code(copied).run()
        if layer is None or not _agree(copied, layer):
            return None
        own = constants_of(module)
        vars(layer)["_own_constants"] = own
        vars(layer)["_turned"] = _is_turned(module, layer)
        return layer if constants_of(copied) == own else None  # else it keeps state
    except Exception:  # of its code, when it is traced or gets a source of another shape
        return None


def _is_turned(module: nn.Module, layer: _Layer) -> bool:
    """Return True where the module's own ``weight`` is the transpose of the layer's."""
    own = getattr(module, "weight", None)
    if not isinstance(own, Tensor) or own.dim() != 2 or torch.equal(own, layer.weight):
        return False
    return torch.equal(own, layer.weight.t())


class _Code:
    """A forward, node by node: one product of its source, between reshapes.

    What does not depend on the source is computed here. What does is "src" in front of the product
    and "dst" behind it, or a "size" of either.
    """

    def __init__(self, module: nn.Module) -> None:
        self.interpreter = fx.Interpreter(module, graph=fx.Tracer().trace(module))
        self.kinds: dict[fx.Node, str] = {}
        self.layer: _Layer | None = None
        self.reshapes = False

    def run(self) -> _Layer | None:
        """Return the layer of torch.nn that it is; None where it is something else."""
        src, *nodes, output = self.interpreter.graph.nodes
        self.kinds[src] = "src"
        for node in nodes:
            kinds = {self.kinds[n] for n in node.all_input_nodes if n in self.kinds}
            if not kinds:
                self.interpreter.env[node] = self.interpreter.run_node(node)
            elif (kind := self._kind(node, kinds)) is not None:
                self.kinds[node] = kind
            else:
                return None
        result = output.args[0]
        is_product = isinstance(result, fx.Node) and self.kinds.get(result) == "dst"
        shaped = self.reshapes and not isinstance(self.layer, nn.Linear)
        return self.layer if is_product and not shaped else None

    def _kind(self, node: fx.Node, kinds: set[str]) -> str | None:
        if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
            return "size"
        if kinds == {"size"} and node.target in (operator.getitem, operator.add):
            return "size"
        if node.target in _RESHAPES:
            self.reshapes = True
            return next(iter(kinds - {"size"}))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.interpreter.env.get)
        if node.target in _PRODUCTS and kinds == {"src"} and self.layer is None:
            self.layer = _PRODUCTS[node.target](*args, **kwargs)
            return "dst"
        if node.target in _ADDS and kinds == {"dst"} and len(args) == 2 and not kwargs:
            (bias,) = (arg for arg in args if isinstance(arg, Tensor))
            if (
                (layer := self.layer)
                and layer.bias is None
                and bias.shape == layer.weight.shape[:1]
            ):
                layer.bias = nn.Parameter(bias, False)
                return "dst"
        return None


def _with_weights(layer: _Layer, weight: Tensor, bias: Tensor | None) -> _Layer:
    layer.weight = nn.Parameter(weight.detach(), False)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), False))
    return layer.eval()


def _linear(src: None, weight: Tensor, bias: Tensor | None = None) -> _Layer:
    channels, inputs = weight.shape
    return _with_weights(nn.Linear(inputs, channels, device="meta"), weight, bias)


def _conv(cls: Callable[..., _ConvNd]) -> Callable[..., _Layer]:
    def make(
        src: None, weight: Tensor, bias: Tensor | None = None, stride: object = 1,
        padding: object = 0, dilation: object = 1, groups: int = 1,
    ) -> _Layer:  # fmt: skip
        channels, per_group, *size = weight.shape
        layer = cls(
            per_group * groups, channels, size, stride, padding, dilation, groups, device="meta"
        )
        return _with_weights(layer, weight, bias)

    return make


_PRODUCTS: dict[object, Callable[..., _Layer]] = {
    torch.nn.functional.linear: _linear,
    torch.addmm: lambda bias, src, weight: _linear(src, weight.t(), bias),
    **dict.fromkeys(
        (torch.matmul, operator.matmul, torch.mm, "matmul", "mm"),
        lambda src, weight: _linear(src, weight.t()),
    ),
    torch.conv1d: _conv(nn.Conv1d),
    torch.conv2d: _conv(nn.Conv2d),
    torch.conv3d: _conv(nn.Conv3d),
}


def _agree(module: nn.Module, layer: _Layer) -> bool:
    """Return whether both give the same for sources of two shapes."""
    if isinstance(layer, nn.Linear):
        shapes = [(2, layer.in_features), (3, 2, layer.in_features)]
    else:
        sides = [d * (k - 1) + 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        shapes = [(n, layer.in_channels, *(side + n for side in sides)) for n in (1, 2)]
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    sources = [src.to(layer.weight.dtype) for src in sources]
    return all(are_close([module(src)], [layer(src)]) for src in sources)

# SPDX-License-Identifier: Apache-2.0
"""Float modules of the matmuls and norms that a graph calls as functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from torchq.attributes.arguments import FLOATS
from torchq.capture.module_kinds import MAX_REDUCTION, why_sums
from torchq.capture.ops import Arguments, Recognized, Role, Step, is_size, shape_of
from torchq.nn.batch_norm import TRANSPOSED
from torchq.nn.fake_scales import weight_scale
from torchq.nn.float_modules import Attention, AttentionOptions, GroupedLinear, MatMul
from torchq.report import reasons


def batch_norm(a: Arguments) -> Recognized | str:
    """``F.batch_norm`` in evaluation."""
    if why := a.why_varying("input"):
        return why
    if a.training or a.running_mean is None:
        return reasons.BATCH_STATISTICS
    scale = (a.running_var.double() + a.eps).rsqrt()
    scale = scale if a.weight is None else scale * a.weight
    shift = -a.running_mean * scale if a.bias is None else a.bias - a.running_mean * scale
    shape = [-1] + [1] * (len(shape_of(a.input)) - 2)
    return Recognized(
        Role.NORM, None, [a.input], affine=(scale.reshape(shape), shift.reshape(shape))
    )


def _layer(module: nn.Module, src: fx.Node, weight: Tensor, bias: Tensor | None) -> Recognized:
    """Give a module this weight and bias."""
    module.weight = nn.Parameter(weight.detach(), False)
    module.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), False))
    return Recognized(Role.MATMUL, module.eval(), [src], reason=why_sums(module))


def _as_trained(made: Recognized, a: Arguments, axis: int = 0, groups: int = 1) -> Recognized:
    """Take over the scale of a fake-quantized weight; ``axis`` is of the output channels."""
    source = a.nodes["weight"]
    fake = source.meta.get("fake") if isinstance(source, fx.Node) else None
    if fake is not None:
        scale = weight_scale(fake, a.weight, axis, groups)
        if isinstance(scale, str):
            return replace(made, note=f"{scale}: it is quantized anew")
        return replace(made, weight_scale=scale)
    return made


def linear(a: Arguments) -> Recognized | str:
    """``F.linear`` with constant parameters."""
    if why := a.why_varying("input"):
        return why
    if a.weight.dim() != 2:
        return reasons.VECTOR_WEIGHT
    return _as_trained(linear_of(a.input, a.weight, a.bias), a)


def product(a: Arguments) -> Recognized | str:
    """Make a product of two tensors at run time, or a linear layer of a constant matrix."""
    right = "other" if "other" in a else "mat2"  # of bmm and mm
    other = a[right]
    ranks = [x.dim() if isinstance(x, Tensor) else len(shape_of(x)) for x in (a.input, other)]
    if min(ranks) < 2:
        return reasons.VECTOR
    if isinstance(other, Tensor) and ranks[1] == 2:
        return linear_of(a.input, other.t(), None)
    return Recognized(Role.PRODUCT, MatMul(), [a.nodes["input"], a.nodes[right]])


def attention(a: Arguments) -> Recognized | str:
    """F.scaled_dot_product_attention; a mask comes with each call, in float or bool."""
    sources = [a.nodes[name] for name in ("query", "key", "value")]
    sized = isinstance(a.scale, fx.Node) and is_size(a.scale)
    if why := a.why_varying("query", "key", "value", "attn_mask", *(["scale"] if sized else [])):
        return why
    if a.dropout_p != 0:
        return reasons.DROPOUT
    given = 1.0 if sized else a.scale
    if given is not None and not 0 < given < math.inf:
        return reasons.ATTENTION_SCALE.format(scale=given)
    mask = a.nodes["attn_mask"]
    if mask is not None and mask.meta["value"].dtype not in (torch.bool, *FLOATS):
        return reasons.MASK_DTYPE.format(dtype=mask.meta["value"].dtype)
    scale = None if given is None else float(given)  # TorchScript tells them apart
    module = Attention(AttentionOptions(bool(a.is_causal), scale, bool(a.enable_gqa)))
    scaled: list[Step] = [(operator.mul, (None, a.scale))] if sized else []
    masked: list[Step] = [] if mask is None else [(operator.add, (None, mask))]
    return Recognized(Role.PRODUCT, module, sources, steps=(*scaled, *masked))


def grouped(a: Arguments) -> Recognized | str:
    """Rows in groups, each times a constant matrix of its own: experts of a mixture."""
    source = a.nodes["mat2"]  # in the model's dtype
    matrices = source.meta.get("constant") if isinstance(source, fx.Node) else None
    if not isinstance(matrices, Tensor) or matrices.dim() != 3 or not isinstance(a.input, fx.Node):
        return reasons.CHOSEN_MATRIX
    if len(shape_of(a.input)) != 2 or a.offs is None or (a.bias, a.out_dtype) != (None, None):
        return reasons.CHOSEN_MATRIX
    if matrices.shape[1] > MAX_REDUCTION:
        return reasons.TOO_LONG.format(products=MAX_REDUCTION)
    module = GroupedLinear(matrices.mT)
    return Recognized(Role.DYNAMIC, module, [a.input], size=a.nodes["offs"])


def inner(a: Arguments) -> Recognized | str:
    """torch.inner with a constant matrix: a linear layer of it."""
    if not isinstance(a.other, Tensor) or a.other.dim() != 2 or not shape_of(a.input):
        return reasons.INNER
    return linear_of(a.input, a.other, None)


def add_product(a: Arguments) -> Recognized | str:
    """torch.addmm of constants."""
    if why := a.why_varying("mat1"):
        return why
    if not isinstance(a.mat1, fx.Node):
        return reasons.CONSTANT_MATRIX
    bias = a.input * a.beta
    if bias.numel() not in (1, a.mat2.shape[1]) or bias.shape[-1:].numel() != bias.numel():
        return reasons.ADDED_ROWS
    return linear_of(a.mat1, a.mat2.t() * a.alpha, bias.reshape(-1).expand(a.mat2.shape[1]))


def linear_of(src: fx.Node, weight: Tensor, bias: Tensor | None) -> Recognized:
    """Return a linear layer of a constant matrix ``[out, in]``."""
    module = nn.Linear(1, 1, device="meta")
    module.out_features, module.in_features = weight.shape
    return _layer(module, src, weight.contiguous(), bias)


def conv(cls: type[nn.Module]) -> Callable[[Arguments], Recognized | str]:
    """Return the maker of a convolution; transposed ones swap the channels of the weight."""
    transposed = issubclass(cls, TRANSPOSED)

    def make(a: Arguments) -> Recognized | str:
        if why := a.why_varying("input", "output_padding"):
            return why
        sized = transposed and a.varies("output_padding")  # of an output_size
        first, second, *kernel = a.weight.shape
        channels = (first, second * a.groups) if transposed else (second * a.groups, first)
        options = {
            name: _spread(a[name], len(kernel))
            for name in ("stride", "padding", "dilation", "output_padding")
            if name in a and not (sized and name == "output_padding")
        }
        module = cls(*channels, tuple(kernel), groups=a.groups, device="meta", **options)
        made = _layer(module, a.input, a.weight, a.bias)
        made = _as_trained(made, a, *((1, a.groups) if transposed else ()))
        return replace(made, size=list(a.output_padding)) if sized else made

    return make


def _spread(value: object, dims: int) -> object:
    """One value per spatial dim, or a word."""
    if isinstance(value, str):
        return value
    values = list(value) if isinstance(value, tuple | list) else [value]
    return tuple((values * dims)[:dims])

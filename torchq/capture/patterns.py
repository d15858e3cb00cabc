# SPDX-License-Identifier: Apache-2.0
"""The one table of ATen calls that torchq recognises. To add a pattern, add a row.

A row names the calls, without their overloads, and makes the float module that computes them from
the arguments of a call, which have the names of the call's schema (``self`` is ``input``).
Everything behind the table (fusing, planning, lowering) sees that module only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from torchq.attributes.arguments import as_float32
from torchq.capture import makers, matmuls
from torchq.capture.graph import aten_name
from torchq.capture.makers import unary
from torchq.capture.ops import Arguments, Pointwise, Recognized, Role, shape_of
from torchq.nn.float_modules import Add, Mul
from torchq.report import reasons

Maker = Callable[[Arguments], Recognized | str]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        role: see Role.
        names: of ATen calls, without overloads.
        make: from the arguments of a call to what it is, or to the reason why it stays float.
        is_matmul: whether the call multiplies by a weight, also where it has no int8 form.
    """

    role: Role
    names: tuple[str, ...]
    make: Maker
    is_matmul: bool = False


def _row(role: Role, names: str, make: Maker, *, is_matmul: bool = False) -> Row:
    return Row(role, tuple(names.split()), make, is_matmul or role is Role.MATMUL)


def _convolution(a: Arguments) -> Recognized | str:
    """``torch.convolution``, plain or transposed."""
    if why := a.why_varying("input"):
        return why
    dims = a.weight.dim() - 2
    plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    cls = (transposed if a.transposed else plain)[dims - 1]
    if not a.transposed:
        a.pop("output_padding"), a.nodes.pop("output_padding")
    return matmuls.conv(cls)(a)


def _tensordot(a: Arguments) -> Recognized | str:
    """Make a linear layer of a product along the last dim with a constant matrix."""
    if not isinstance(a.other, Tensor) or a.other.dim() != 2 or not isinstance(a.input, fx.Node):
        return reasons.TENSORDOT
    rank, src, matrix = len(shape_of(a.input)), list(a.dims_self), list(a.dims_other)
    if [d % rank for d in src] != [rank - 1] or len(matrix) != 1:
        return reasons.TENSORDOT
    return matmuls.linear_of(a.input, a.other if matrix[0] % 2 else a.other.t(), None)


def _elu(a: Arguments) -> Recognized | str:
    if a.scale != 1 or a.input_scale != 1:
        return reasons.ELU_SCALES
    return unary(lambda a: nn.ELU(a.alpha))(a)


def _by_dims(
    role: Role, name: str, maker: Callable[[type[nn.Module]], Maker], cls: str
) -> list[Row]:
    """Return the rows of a call and its class in one, two and three dimensions."""
    return [_row(role, name.format(d), maker(getattr(nn, cls.format(d)))) for d in (1, 2, 3)]


def _activation(cls: type[nn.Module]) -> Row:
    """Return the row of a function that has a class without options, whose name it has."""
    return _row(Role.UNARY, cls.__name__.lower(), unary(lambda a: cls()))


def _function(name: str) -> Row:
    """Return the row of a function of torch that has no options."""
    function = getattr(torch, name)
    return _row(Role.UNARY, name, unary(lambda a: Pointwise(function)))


def _float(reason: str, names: str, *, is_matmul: bool = False) -> Row:
    """Return a row of what has no int8 form."""
    return _row(Role.OPAQUE, names, lambda a: reason, is_matmul=is_matmul)


def _rsub(a: Arguments) -> Recognized | str:
    """``other - self``."""
    a["input"], a["other"] = a.other, a.input
    a.nodes["input"], a.nodes["other"] = a.nodes["other"], a.nodes["input"]
    return makers.binary(None, torch.sub)(a)


def _shape(a: Arguments) -> Recognized | str:
    return Recognized(Role.SHAPE, None, [])


_MOVED = (
    "flatten permute transpose t swapaxes swapdims moveaxis movedim squeeze unsqueeze contiguous "
    "clone chunk split split_with_sizes tensor_split narrow select slice expand expand_as unbind "
    "view_as repeat tile roll flip reshape_as broadcast_to unflatten repeat_interleave index "
    "index_select pixel_shuffle pixel_unshuffle channel_shuffle reshape view _unsafe_view "
    "numpy_T mT unfold unsafe_split unsafe_chunk upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d"
)

TABLE: list[Row] = [
    # matmuls
    _row(Role.MATMUL, "linear", matmuls.linear),
    *_by_dims(Role.MATMUL, "conv{}d", matmuls.conv, "Conv{}d"),
    *_by_dims(Role.MATMUL, "conv_transpose{}d", matmuls.conv, "ConvTranspose{}d"),
    _row(Role.MATMUL, "convolution", _convolution),
    _row(Role.MATMUL, "addmm", matmuls.add_product),
    _row(Role.PRODUCT, "matmul linalg_matmul bmm mm", matmuls.product),
    _row(Role.PRODUCT, "inner", matmuls.inner),
    _float(reasons.EINSUM, "einsum"),
    _row(Role.PRODUCT, "tensordot", _tensordot),
    _row(Role.PRODUCT, "scaled_dot_product_attention", matmuls.attention),
    _float(reasons.BILINEAR, "bilinear", is_matmul=True),
    _float(reasons.SEVERAL_MATRICES, "linalg_multi_dot", is_matmul=True),
    _row(Role.DYNAMIC, "_grouped_mm", matmuls.grouped, is_matmul=True),
    _float(reasons.TABLE, "embedding embedding_bag"),
    _row(Role.NORM, "batch_norm", matmuls.batch_norm),
    # several tensors
    _row(Role.COMBINE, "add", makers.binary(Add, torch.add)),
    _row(Role.COMBINE, "mul multiply", makers.binary(Mul, torch.mul)),
    _row(Role.COMBINE, "sub subtract", makers.binary(None, torch.sub)),
    _row(Role.COMBINE, "rsub", _rsub),
    _row(Role.COMBINE, "div divide true_divide", makers.binary(None, torch.div)),
    _row(Role.COMBINE, "pow", makers.binary(None, torch.pow)),
    _row(Role.COMBINE, "cat concat concatenate", makers.cat),
    # functions of each element
    _row(Role.UNARY, "hardtanh", unary(lambda a: makers.clip(a.min_val, a.max_val))),
    _row(Role.UNARY, "clamp clip", makers.clamp),
    _row(Role.UNARY, "clamp_min", unary(lambda a: makers.clip(a.min, None))),
    _row(Role.UNARY, "clamp_max", unary(lambda a: makers.clip(None, a.max))),
    _row(Role.UNARY, "gelu", unary(lambda a: nn.GELU(a.approximate))),
    _row(Role.UNARY, "elu", _elu),
    _row(Role.UNARY, "celu", unary(lambda a: nn.CELU(a.alpha))),
    _row(Role.UNARY, "leaky_relu", unary(lambda a: nn.LeakyReLU(a.negative_slope))),
    _row(Role.UNARY, "prelu", makers.prelu),
    _row(Role.UNARY, "softplus", unary(lambda a: nn.Softplus(a.beta, a.threshold))),
    _row(Role.UNARY, "hardshrink", unary(lambda a: nn.Hardshrink(a.lambd))),
    _row(Role.UNARY, "softshrink", unary(lambda a: nn.Softshrink(a.lambd))),
    _row(Role.UNARY, "threshold", unary(lambda a: nn.Threshold(a.threshold, a.value))),
    *map(_activation, (nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.Mish, nn.SELU,
                       nn.Hardswish, nn.Hardsigmoid)),
    _row(Role.UNARY, "log_sigmoid", unary(lambda a: nn.LogSigmoid())),
    *map(_function, ("abs", "exp", "neg", "square", "log1p", "expm1", "sin", "cos", "erf", "sign",
                     "floor", "ceil", "round")),
    # pools
    *_by_dims(Role.POOL, "max_pool{}d", makers.pool, "MaxPool{}d"),
    *_by_dims(Role.POOL, "avg_pool{}d", makers.pool, "AvgPool{}d"),
    *_by_dims(Role.POOL, "adaptive_avg_pool{}d", makers.pool, "AdaptiveAvgPool{}d"),
    _row(Role.POOL, "mean", makers.mean),
    # what moves elements
    _row(Role.MOVE, _MOVED, makers.move),
    _row(Role.MOVE, "upsample_linear1d", makers.interpolate("linear")),
    _row(Role.MOVE, "upsample_bilinear2d", makers.interpolate("bilinear")),
    _row(Role.MOVE, "upsample_trilinear3d", makers.interpolate("trilinear")),
    _row(Role.PAD, "pad constant_pad_nd", makers.pad),
    # what stays float, and why
    _float(reasons.UNFOLD, "im2col"),
    _float(reasons.SCORES, "softmax log_softmax _softmax _safe_softmax"),
    _float(reasons.NEAR_ZERO, "sqrt rsqrt reciprocal log log2 log10"),
    _float(reasons.VARIANCE, "layer_norm group_norm instance_norm rms_norm"),
    # what quantization-aware training leaves
    _row(Role.FAKE, "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine",
         makers.fake),
    _row(Role.SHAPE, "size numel sym_size sym_numel", _shape),
]  # fmt: skip

BY_NAME = {name: row for row in TABLE for name in row.names}
GETITEM = Row(Role.MOVE, ("getitem",), makers.index)


def row_of(node: fx.Node) -> Row | None:
    """Return the row of a call in a captured graph; None for calls that the table lacks."""
    if node.target is operator.getitem and node.meta.get("aten") is None:
        return GETITEM
    return BY_NAME.get(aten_name(node))


def arguments_of(node: fx.Node) -> Arguments:
    """Return the arguments of a call by name; what does not depend on the inputs is its value.

    Values in bfloat16 and float16 become float32, in which quantized layers are made.
    """

    def value_of(node: fx.Node) -> Argument:
        value = node.meta.get("constant", node)
        return as_float32(value) if isinstance(value, Tensor) else value

    arguments = Arguments()
    for name, value in _named_arguments(node).items():
        name = {"self": "input", "exponent": "other"}.get(name, name)
        arguments.nodes[name] = value
        arguments[name] = fx.node.map_arg(value, value_of)
    return arguments


def _named_arguments(node: fx.Node) -> dict[str, Argument]:
    if node.meta.get("aten") is None:
        return {"input": node.args[0], "index": node.args[1]}
    name, _, overload = str(node.meta["aten"]).partition("::")[2].partition(".")
    schema = getattr(getattr(torch.ops.aten, name), overload or "default")._schema
    if node.target in (operator.getitem, "to"):  # a slice or a cast, rewritten
        return {"self": node.args[0]}
    names = [argument.name for argument in schema.arguments]
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return given | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)

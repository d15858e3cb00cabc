# SPDX-License-Identifier: Apache-2.0
"""The one table of what torchq recognises in a graph. To add a pattern, add a row.

A row lists the spellings of one operation (modules, functions, names of methods; overloads of
torch.ops.aten would be further functions) and makes the float module that computes it from the
arguments of a function. Everything behind it (fusing, planning, lowering) sees that module only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchq.affine import TRANSPOSED, reduction
from torchq.fake_quantize import FakeQuantize
from torchq.fx.fake import weight_scale, why_not_fixed
from torchq.fx.ops import Arguments, Made, Pattern, Pointwise, Role
from torchq.nn.binary import Add, Cat, Mul
from torchq.nn.quantize import DeQuantStub, QuantStub

__all__ = ["PATTERNS"]

_MAX_REDUCTION = 65793  # products of 255 * 127 that an int32 surely holds
_FLOAT_MAX = 3.4028234663852886e38


def _shape(node: fx.Node) -> tuple[int, ...]:
    return node.meta["value"].shape or ()


# Matmuls


def _check_matmul(module: Any) -> str:
    mode = getattr(module, "padding_mode", "zeros")
    if mode != "zeros":
        return f"padding_mode is '{mode}', only 'zeros' is supported"
    if reduction(module) > _MAX_REDUCTION:
        return f"it sums more than {_MAX_REDUCTION} products, which could overflow int32"
    return ""


def _check_norm(module: Any) -> str:
    return "it takes the statistics of each batch" if module.running_mean is None else ""


def _batch_norm(a: Arguments) -> Made | str:
    if a.varying("input"):
        return f"its {a.varying('input')[0]} is computed at run time"
    if a.training or a.running_mean is None:
        return "it takes the statistics of each batch"
    scale = (a.running_var.double() + a.eps).rsqrt()
    scale = scale if a.weight is None else scale * a.weight
    shift = -a.running_mean * scale if a.bias is None else a.bias - a.running_mean * scale
    shape = [-1] + [1] * (len(_shape(a.input)) - 2)
    return Made(Role.NORM, None, [a.input], affine=(scale.reshape(shape), shift.reshape(shape)))


def _with_weight(module: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    module.weight = nn.Parameter(weight.detach(), False)
    module.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), False))
    return module.eval()


def _matmul(a: Arguments, module: nn.Module, axis: int = 0, groups: int = 1) -> Made:
    """A module with the weight and bias of the arguments; ``axis`` is of the output channels."""
    made = Made(Role.MATMUL, _with_weight(module, a.weight, a.bias), [a.input])
    made.reason = _check_matmul(module)
    source = a.nodes["weight"]
    fake = source.meta.get("fake") if isinstance(source, fx.Node) else None
    if fake is not None:
        scale = weight_scale(fake, a.weight, axis, groups)
        if isinstance(scale, str):
            made.note = f"{scale}: it is quantized anew"
        else:
            made.weight_scale = scale
    return made


def _linear(a: Arguments) -> Made | str:
    if a.varying("input"):
        return f"its {a.varying('input')[0]} is computed at run time"
    module = nn.Linear(1, 1, device="meta")
    module.out_features, module.in_features = a.weight.shape
    return _matmul(a, module)


def _conv(cls: type[nn.Module]) -> Callable[[Arguments], Made | str]:
    """A convolution; or a transposed one, whose weight has the channels the other way round."""
    transposed = issubclass(cls, TRANSPOSED)

    def make(a: Arguments) -> Made | str:
        if a.varying("input"):
            return f"its {a.varying('input')[0]} is computed at run time"
        first, second, *kernel = a.weight.shape
        channels = (first, second * a.groups) if transposed else (second * a.groups, first)
        options = {
            name: _spread(a[name], len(kernel))
            for name in ("stride", "padding", "dilation", "output_padding")
            if name in a
        }
        module = cls(*channels, tuple(kernel), groups=a.groups, device="meta", **options)
        return _matmul(a, module, *((1, a.groups) if transposed else ()))

    return make


def _spread(value: Any, dims: int) -> Any:
    """One value per spatial dim, or a word."""
    if isinstance(value, str):
        return value
    values = list(value) if isinstance(value, tuple | list) else [value]
    return tuple((values * dims)[:dims])


_CONV = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
_DECONV = "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1"


# Combining


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _binary(
    module: type[nn.Module] | None, function: Callable[..., Any]
) -> Callable[[Arguments], Made | str]:
    """Two tensors combine; a tensor and a number are a function of the tensor."""

    def make(a: Arguments) -> Made | str:
        if a.get("alpha", 1) != 1 or a.get("rounding_mode") is not None:
            return "its options have no int8 form"
        if not all(isinstance(x, fx.Node | Tensor) or _number(x) for x in (a.input, a.other)):
            return "an operand is not a tensor"
        position = 0 if isinstance(a.input, fx.Node) else 1  # of the tensor that varies
        src, other = (a.input, a.other) if position == 0 else (a.other, a.input)
        if isinstance(other, fx.Node):
            if module is None:
                return f"{function.__name__} of two tensors has no int8 form"
            return Made(Role.COMBINE, module(), [a.input, a.other])
        affine = _affine(function, torch.as_tensor(other), position)
        if _number(other) or other.dim() == 0:
            pointwise = Pointwise(function, float(other), position=position)
            return Made(Role.UNARY, pointwise, [src], affine=affine)
        if module is not None:
            return Made(Role.COMBINE, module(), [a.nodes["input"], a.nodes["other"]], affine=affine)
        if affine is None:
            return f"{function.__name__} of two tensors has no int8 form"
        return Made(Role.NORM, Pointwise(function, other, position=position), [src], affine=affine)

    return make


def _affine(
    function: Callable[..., Any], other: Tensor, position: int
) -> tuple[Tensor, Tensor] | None:
    """(scale, shift), if a function of a tensor at ``position`` and a constant is linear."""
    value = other.detach().double()
    one, zero = torch.ones(()).double(), torch.zeros(()).double()
    found = {
        (torch.add, 0): (one, value),
        (torch.add, 1): (one, value),
        (torch.sub, 0): (one, -value),
        (torch.sub, 1): (-one, value),
        (torch.mul, 0): (value, zero),
        (torch.mul, 1): (value, zero),
        (torch.div, 0): (1 / value, zero),
    }.get((function, position))
    finite = found is not None and all(bool(torch.isfinite(v).all()) for v in found)
    return found if finite else None


def _cat(a: Arguments) -> Made | str:
    if isinstance(a.tensors, fx.Node):
        return "its sources are not listed one by one"
    return Made(Role.COMBINE, Cat(a.dim), list(a.nodes["tensors"]))


# Functions of each element


def _unary(make: Callable[[Arguments], nn.Module]) -> Callable[[Arguments], Made | str]:
    def unary(a: Arguments) -> Made | str:
        if a.varying("input"):
            return f"its {a.varying('input')[0]} is computed at run time"
        return Made(Role.UNARY, make(a), [a.input])

    return unary


def _clip(low: float | None, high: float | None) -> nn.Module:
    if low == 0 and high is None:
        return nn.ReLU()
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    return nn.Hardtanh(low, high) if low < high else Pointwise(torch.clamp, low, high)


def _clamp(a: Arguments) -> Made | str:
    if any(isinstance(a[name], Tensor) for name in ("min", "max")):
        return "its bounds are tensors"
    return _unary(lambda a: _clip(a.min, a.max))(a)


def _prelu(a: Arguments) -> Made | str:
    if not isinstance(a.weight, Tensor) or a.weight.numel() != 1:
        return "it has a slope per channel"
    return Made(Role.UNARY, nn.LeakyReLU(float(a.weight)), [a.input])


def _check_prelu(module: nn.PReLU) -> str:
    return "it has a slope per channel" if module.weight.numel() != 1 else ""


def _functions(*names: str) -> list[Pattern]:
    """Functions of torch without further arguments; each is a method, too."""
    rows = []
    for name in names:
        function = getattr(torch, name)
        rows.append(
            Pattern(
                Role.UNARY, functions=(function, name), signature="input",
                make=_unary(lambda a, function=function: Pointwise(function)),  # type: ignore[misc]
            )
        )  # fmt: skip
    return rows


# Pools


def _pool(cls: type[nn.Module]) -> Callable[[Arguments], Made | str]:
    def make(a: Arguments) -> Made | str:
        if a.varying("input"):
            return "its window is computed at run time"
        options = {name: value for name, value in a.items() if name not in ("input", "_stacklevel")}
        if "stride" in options and not options["stride"]:
            options["stride"] = None
        module = cls(**options)
        return Made(Role.POOL, module, [a.input], reason=_check_pool(module))

    return make


def _check_pool(module: Any) -> str:
    if getattr(module, "return_indices", False) or getattr(module, "divisor_override", None):
        return "its options have no int8 form"
    return ""


_MAX = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
_AVG = "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True"
_GLOBAL = {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}


def _mean(a: Arguments) -> Made | str:
    rank = len(_shape(a.input))
    dims = a.dim if isinstance(a.dim, Sequence) else [a.dim]
    if a.dim is None or a.dtype is not None or rank not in _GLOBAL:
        return "a mean other than over all spatial dims has no int8 form"
    if sorted(d % rank for d in dims) != list(range(2, rank)):
        return "a mean other than over all spatial dims has no int8 form"
    return Made(Role.POOL, _GLOBAL[rank](1), [a.input], flatten=not a.keepdim)


# What moves elements


def _move(a: Arguments) -> Made | str:
    return Made(Role.MOVE, None, [a.input])


def _index(a: Arguments) -> Made | str:
    if a.input.meta["value"].shape is None and not a.input.meta["value"].is_sequence:
        return Made(Role.SHAPE, None, [])  # of a size
    return Made(Role.MOVE, None, [a.input])


def _view(a: Arguments) -> Made | str:
    if isinstance(a.get("shape"), torch.dtype):
        return "it looks at the bits of float32 numbers"
    return Made(Role.MOVE, None, [a.input])


def _getattr(a: Arguments) -> Made | str:
    if a.name in ("shape",):
        return Made(Role.SHAPE, None, [])
    if a.name in ("T", "mT"):
        return Made(Role.MOVE, None, [a.input])
    return f"its {a.name} is taken"


def _resample(mode: str | None) -> Made | str:
    if mode not in (None, "nearest", "nearest-exact"):
        return f"interpolation of mode '{mode}' has no int8 form"
    return ""


def _interpolate(a: Arguments) -> Made | str:
    return _resample(a.mode) or Made(Role.MOVE, None, [a.input])


def _pad(a: Arguments) -> Made | str:
    rank, pad = len(_shape(a.input)), a.pad
    if a.mode != "constant" or a.value not in (None, 0, 0.0):
        return "padding with anything but constant zeros has no int8 form"
    if a.varying("input"):
        return Made(Role.PAD, None, [a.input])  # by sizes
    return Made(Role.PAD, None, [a.input], pad=_spatial_pad(rank, pad))


def _spatial_pad(rank: int, pad: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """None where it is not the zero padding of a convolution."""
    dims = rank - 2
    pairs = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)][::-1]  # last dim comes first
    outer, inner = pairs[: -dims or None], pairs[-dims:]
    if dims < 1 or (len(pairs) > dims and any(p != (0, 0) for p in outer)):
        return None
    inner = [(0, 0)] * (dims - len(inner)) + inner
    if any(p < 0 for pair in inner for p in pair):
        return None
    return [p[0] for p in inner], [p[1] for p in inner]


def _fake(a: Arguments) -> Made | str:
    """torch.fake_quantize_per_tensor_affine and torch.fake_quantize_per_channel_affine."""
    if a.varying("input"):
        return f"its {a.varying('input')[0]} is computed at run time"
    fake = FakeQuantize.from_affine(a.scale, a.zero_point, a.quant_min, a.quant_max, a.get("axis"))
    return Made(Role.FAKE, fake, [a.nodes["input"]], reason=why_not_fixed(fake))


def _dropout(a: Arguments) -> Made | str:
    return "it drops at random" if a.training else Made(Role.PASS, None, [a.input])


_MOVING = [
    "flatten", "permute", "transpose", "t", "swapaxes", "swapdims", "moveaxis", "movedim",
    "squeeze", "unsqueeze", "contiguous", "detach", "clone", "chunk", "split", "tensor_split",
    "narrow", "select", "expand", "expand_as", "unbind", "view_as", "repeat", "tile", "roll",
    "flip", "reshape_as", "broadcast_to", "unflatten", "repeat_interleave",
]  # fmt: skip
_BOTH = tuple(getattr(torch, name) for name in _MOVING if hasattr(torch, name))
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout)


PATTERNS: list[Pattern] = [
    # matmuls
    Pattern(Role.MATMUL, (nn.Linear,), (F.linear,), "input weight bias=None", _linear,
            _check_matmul),
    Pattern(Role.MATMUL, (nn.Conv1d,), (F.conv1d,), _CONV, _conv(nn.Conv1d), _check_matmul),
    Pattern(Role.MATMUL, (nn.Conv2d,), (F.conv2d,), _CONV, _conv(nn.Conv2d), _check_matmul),
    Pattern(Role.MATMUL, (nn.Conv3d,), (F.conv3d,), _CONV, _conv(nn.Conv3d), _check_matmul),
    Pattern(Role.MATMUL, (nn.ConvTranspose1d,), (F.conv_transpose1d,), _DECONV,
            _conv(nn.ConvTranspose1d), _check_matmul),
    Pattern(Role.MATMUL, (nn.ConvTranspose2d,), (F.conv_transpose2d,), _DECONV,
            _conv(nn.ConvTranspose2d), _check_matmul),
    Pattern(Role.MATMUL, (nn.ConvTranspose3d,), (F.conv_transpose3d,), _DECONV,
            _conv(nn.ConvTranspose3d), _check_matmul),
    Pattern(Role.NORM, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), (F.batch_norm,),
            "input running_mean running_var weight=None bias=None training=False momentum=0.1 "
            "eps=1e-05", _batch_norm, _check_norm),
    # several tensors
    Pattern(Role.COMBINE, (Add,), (operator.add, operator.iadd, torch.add, "add", "add_"),
            "input other alpha=1", _binary(Add, torch.add)),
    Pattern(Role.COMBINE, (Mul,), (operator.mul, operator.imul, torch.mul, torch.multiply, "mul",
            "mul_", "multiply"), "input other", _binary(Mul, torch.mul)),
    Pattern(Role.COMBINE, (), (operator.sub, operator.isub, torch.sub, "sub", "sub_"),
            "input other alpha=1", _binary(None, torch.sub)),
    Pattern(Role.COMBINE, (), (operator.truediv, operator.itruediv, torch.div, "div", "div_"),
            "input other rounding_mode=None", _binary(None, torch.div)),
    Pattern(Role.COMBINE, (), (operator.pow, torch.pow, "pow"), "input other",
            _binary(None, torch.pow)),
    Pattern(Role.COMBINE, (Cat,), (torch.cat, torch.concat, torch.concatenate),
            "tensors dim=0", _cat),
    # functions of each element
    Pattern(Role.UNARY, (nn.ReLU,), (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"),
            "input inplace=False", _unary(lambda a: nn.ReLU())),
    Pattern(Role.UNARY, (nn.ReLU6,), (F.relu6,), "input inplace=False",
            _unary(lambda a: nn.ReLU6())),
    Pattern(Role.UNARY, (nn.Hardtanh,), (F.hardtanh, F.hardtanh_),
            "input min_val=-1.0 max_val=1.0 inplace=False",
            _unary(lambda a: _clip(a.min_val, a.max_val))),
    Pattern(Role.UNARY, (), (torch.clamp, torch.clip, torch.clamp_, "clamp", "clamp_", "clip"),
            "input min=None max=None", _clamp),
    Pattern(Role.UNARY, (), (torch.clamp_min, "clamp_min"), "input min",
            _unary(lambda a: _clip(a.min, None))),
    Pattern(Role.UNARY, (), (torch.clamp_max, "clamp_max"), "input max",
            _unary(lambda a: _clip(None, a.max))),
    Pattern(Role.UNARY, (nn.Sigmoid,), (F.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid",
            "sigmoid_"), "input", _unary(lambda a: nn.Sigmoid())),
    Pattern(Role.UNARY, (nn.Tanh,), (F.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"), "input",
            _unary(lambda a: nn.Tanh())),
    Pattern(Role.UNARY, (nn.SiLU,), (F.silu,), "input inplace=False", _unary(lambda a: nn.SiLU())),
    Pattern(Role.UNARY, (nn.Mish,), (F.mish,), "input inplace=False", _unary(lambda a: nn.Mish())),
    Pattern(Role.UNARY, (nn.GELU,), (F.gelu,), "input approximate='none'",
            _unary(lambda a: nn.GELU(a.approximate))),
    Pattern(Role.UNARY, (nn.ELU,), (F.elu, F.elu_), "input alpha=1.0 inplace=False",
            _unary(lambda a: nn.ELU(a.alpha))),
    Pattern(Role.UNARY, (nn.SELU,), (F.selu,), "input inplace=False", _unary(lambda a: nn.SELU())),
    Pattern(Role.UNARY, (nn.CELU,), (F.celu,), "input alpha=1.0 inplace=False",
            _unary(lambda a: nn.CELU(a.alpha))),
    Pattern(Role.UNARY, (nn.LeakyReLU,), (F.leaky_relu, F.leaky_relu_),
            "input negative_slope=0.01 inplace=False",
            _unary(lambda a: nn.LeakyReLU(a.negative_slope))),
    Pattern(Role.UNARY, (nn.PReLU,), (F.prelu, torch.prelu), "input weight", _prelu, _check_prelu),
    Pattern(Role.UNARY, (nn.Hardswish,), (F.hardswish,), "input inplace=False",
            _unary(lambda a: nn.Hardswish())),
    Pattern(Role.UNARY, (nn.Hardsigmoid,), (F.hardsigmoid,), "input inplace=False",
            _unary(lambda a: nn.Hardsigmoid())),
    Pattern(Role.UNARY, (nn.Softplus,), (F.softplus,), "input beta=1 threshold=20",
            _unary(lambda a: nn.Softplus(a.beta, a.threshold))),
    Pattern(Role.UNARY, (nn.Softsign,), (F.softsign,), "input", _unary(lambda a: nn.Softsign())),
    Pattern(Role.UNARY, (nn.LogSigmoid,), (F.logsigmoid,), "input",
            _unary(lambda a: nn.LogSigmoid())),
    Pattern(Role.UNARY, (nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold)),
    *_functions("abs", "exp", "neg", "square", "sqrt", "rsqrt", "reciprocal", "log", "log1p",
                "expm1", "sin", "cos", "erf", "sign", "floor", "ceil", "round"),
    Pattern(Role.UNARY, (), (operator.neg,), "input", _unary(lambda a: Pointwise(torch.neg))),
    Pattern(Role.UNARY, (), (operator.abs,), "input", _unary(lambda a: Pointwise(torch.abs))),
    # pools
    Pattern(Role.POOL, (nn.MaxPool1d,), (F.max_pool1d, torch.max_pool1d), _MAX,
            _pool(nn.MaxPool1d), _check_pool),
    Pattern(Role.POOL, (nn.MaxPool2d,), (F.max_pool2d, torch.max_pool2d), _MAX,
            _pool(nn.MaxPool2d), _check_pool),
    Pattern(Role.POOL, (nn.MaxPool3d,), (F.max_pool3d, torch.max_pool3d), _MAX,
            _pool(nn.MaxPool3d), _check_pool),
    Pattern(Role.POOL, (nn.AvgPool1d,), (F.avg_pool1d,), _AVG, _pool(nn.AvgPool1d), _check_pool),
    Pattern(Role.POOL, (nn.AvgPool2d,), (F.avg_pool2d,), _AVG + " divisor_override=None",
            _pool(nn.AvgPool2d), _check_pool),
    Pattern(Role.POOL, (nn.AvgPool3d,), (F.avg_pool3d,), _AVG + " divisor_override=None",
            _pool(nn.AvgPool3d), _check_pool),
    Pattern(Role.POOL, (nn.AdaptiveAvgPool1d,), (F.adaptive_avg_pool1d,), "input output_size",
            _pool(nn.AdaptiveAvgPool1d)),
    Pattern(Role.POOL, (nn.AdaptiveAvgPool2d,), (F.adaptive_avg_pool2d,), "input output_size",
            _pool(nn.AdaptiveAvgPool2d)),
    Pattern(Role.POOL, (nn.AdaptiveAvgPool3d,), (F.adaptive_avg_pool3d,), "input output_size",
            _pool(nn.AdaptiveAvgPool3d)),
    Pattern(Role.POOL, (), (torch.mean, "mean"), "input dim=None keepdim=False dtype=None", _mean),
    # what moves elements
    Pattern(Role.MOVE, (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle),
            (*_BOTH, *_MOVING, F.pixel_shuffle, F.pixel_unshuffle), "input *", _move),
    Pattern(Role.MOVE, (), (torch.reshape, "view", "reshape"), "input shape *", _view),
    Pattern(Role.MOVE, (), (operator.getitem,), "input index", _index),
    Pattern(Role.MOVE, (), (getattr,), "input name", _getattr),
    Pattern(Role.MOVE, (nn.Upsample, nn.UpsamplingNearest2d), (F.interpolate,),
            "input size=None scale_factor=None mode='nearest' align_corners=None "
            "recompute_scale_factor=None antialias=False", _interpolate,
            lambda module: str(_resample(module.mode))),
    Pattern(Role.PAD, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), (F.pad,),
            "input pad mode='constant' value=None", _pad),
    Pattern(Role.PASS, (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
            nn.AlphaDropout, QuantStub, DeQuantStub)),
    Pattern(Role.PASS, (), _DROPOUTS, "input p=0.5 training=True inplace=False", _dropout),
    # what quantization-aware training leaves
    Pattern(Role.FAKE, (FakeQuantize,), (torch.fake_quantize_per_tensor_affine,),
            "input scale zero_point quant_min quant_max", _fake, why_not_fixed),
    Pattern(Role.FAKE, (), (torch.fake_quantize_per_channel_affine,),
            "input scale zero_point axis quant_min quant_max", _fake),
    Pattern(Role.SHAPE, (), ("size", "numel", "nelement", "dim"), "input *",
            lambda a: Made(Role.SHAPE, None, [])),
]  # fmt: skip

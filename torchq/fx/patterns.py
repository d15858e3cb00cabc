# SPDX-License-Identifier: Apache-2.0
"""The one table of what torchq recognises in a graph. To add a pattern, add a row.

A row lists the spellings of one operation (modules, functions, names of methods; overloads of
torch.ops.aten would be further functions) and makes the float module that computes it from the
arguments of a function. Everything behind it (fusing, planning, lowering) sees that module only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchq.fake_quantize import FakeQuantize
from torchq.fx import matmuls, moves
from torchq.fx.ops import NOT_FINITE, Arguments, Made, Pattern, Pointwise, Role
from torchq.fx.tracing.fake import why_not_fixed
from torchq.kinds import BATCH_NORM
from torchq.nn.binary import Add, Cat, Mul
from torchq.nn.quantize import DeQuantStub, QuantStub

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
            if other.meta["value"].shape is None or src.meta["value"].shape is None:
                return "a number that depends on the input's sizes has no int8 form"
            if module is None:
                return f"{function.__name__} of two tensors has no int8 form"
            return Made(Role.COMBINE, module(), [a.input, a.other])
        if isinstance(other, Tensor) and not bool(torch.isfinite(other).all()):
            srcs = [a.nodes["input"], a.nodes["other"]]
            return Made(Role.COMBINE, None if module is None else module(), srcs, reason=NOT_FINITE)
        affine = _affine(function, torch.as_tensor(other, device="cpu"), position)
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
    one, zero = torch.ones((), device="cpu").double(), torch.zeros((), device="cpu").double()
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
    if a.varying("input"):
        return f"its {a.varying('input')[0]} is computed at run time"
    if a.weight.numel() == 1:
        return Made(Role.UNARY, nn.LeakyReLU(float(a.weight)), [a.input])
    module = nn.PReLU(a.weight.numel(), device="cpu")
    module.weight = nn.Parameter(a.weight.detach().reshape(-1), False)
    return Made(Role.SLOPES, module, [a.input])


def _slopes(made: Made) -> None:
    """``nn.PReLU`` with several."""
    assert isinstance(made.module, nn.PReLU)
    if made.module.weight.numel() > 1:
        made.role = Role.SLOPES


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


def _float(reason: str, *spellings: Any, is_matmul: bool = False) -> Pattern:
    """A row of what has no int8 form."""
    modules = tuple(s for s in spellings if isinstance(s, type))
    functions = tuple(s for s in spellings if not isinstance(s, type))
    return Pattern(
        Role.OPAQUE, modules, functions, "input *", lambda a: reason, lambda module: reason,
        is_matmul=is_matmul,
    )  # fmt: skip


PATTERNS: list[Pattern] = [
    # matmuls
    Pattern(Role.MATMUL, (nn.Linear,), (F.linear,), "input weight bias=None", matmuls.linear,
            matmuls.check_matmul),
    Pattern(Role.MATMUL, (nn.Conv1d,), (F.conv1d,), matmuls.CONV,
            matmuls.conv(nn.Conv1d), matmuls.check_matmul),
    Pattern(Role.MATMUL, (nn.Conv2d,), (F.conv2d,), matmuls.CONV,
            matmuls.conv(nn.Conv2d), matmuls.check_matmul),
    Pattern(Role.MATMUL, (nn.Conv3d,), (F.conv3d,), matmuls.CONV,
            matmuls.conv(nn.Conv3d), matmuls.check_matmul),
    Pattern(Role.MATMUL, (nn.ConvTranspose1d,), (F.conv_transpose1d,), matmuls.CONV_TRANSPOSE,
            matmuls.conv(nn.ConvTranspose1d), matmuls.check_matmul),
    Pattern(Role.MATMUL, (nn.ConvTranspose2d,), (F.conv_transpose2d,), matmuls.CONV_TRANSPOSE,
            matmuls.conv(nn.ConvTranspose2d), matmuls.check_matmul),
    Pattern(Role.MATMUL, (nn.ConvTranspose3d,), (F.conv_transpose3d,), matmuls.CONV_TRANSPOSE,
            matmuls.conv(nn.ConvTranspose3d), matmuls.check_matmul),
    Pattern(Role.PRODUCT, (), (torch.matmul, torch.bmm, torch.mm, torch.linalg.matmul,
            operator.matmul, "matmul", "bmm", "mm"), "input other", matmuls.product),
    Pattern(Role.MATMUL, (), (torch.addmm, "addmm"), "input mat1 mat2 beta=1 alpha=1",
            matmuls.add_product),
    Pattern(Role.PRODUCT, (), (torch.inner, "inner"), "input other", matmuls.inner),
    Pattern(Role.PRODUCT, (), (torch.einsum,), "equation input other", matmuls.contraction),
    Pattern(Role.PRODUCT, (), (F.scaled_dot_product_attention,), "query key value attn_mask=None "
            "dropout_p=0.0 is_causal=False scale=None enable_gqa=False", matmuls.attention),
    _float("its weight multiplies two tensors", nn.Bilinear, F.bilinear, is_matmul=True),
    _float("its source has no batch dimension, it has more keys (add_bias_kv), or it trains",
           F.multi_head_attention_forward, is_matmul=True),
    _float("which of its matrices a row is multiplied by is known at run time only",
           torch._grouped_mm, is_matmul=True),
    Pattern(Role.NORM, BATCH_NORM, (F.batch_norm,),
            "input running_mean running_var weight=None bias=None training=False momentum=0.1 "
            "eps=1e-05", matmuls.batch_norm, matmuls.check_norm),
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
    Pattern(Role.UNARY, (nn.PReLU,), (F.prelu, torch.prelu), "input weight", _prelu,
            adapt=_slopes),
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
    Pattern(Role.POOL, (nn.MaxPool1d,), (F.max_pool1d, torch.max_pool1d), moves.MAX,
            moves.pool(nn.MaxPool1d), moves.check_pool),
    Pattern(Role.POOL, (nn.MaxPool2d,), (F.max_pool2d, torch.max_pool2d), moves.MAX,
            moves.pool(nn.MaxPool2d), moves.check_pool),
    Pattern(Role.POOL, (nn.MaxPool3d,), (F.max_pool3d, torch.max_pool3d), moves.MAX,
            moves.pool(nn.MaxPool3d), moves.check_pool),
    Pattern(Role.POOL, (nn.AvgPool1d,), (F.avg_pool1d,), moves.AVG, moves.pool(nn.AvgPool1d),
            moves.check_pool),
    Pattern(Role.POOL, (nn.AvgPool2d,), (F.avg_pool2d,), moves.AVG + " divisor_override=None",
            moves.pool(nn.AvgPool2d), moves.check_pool),
    Pattern(Role.POOL, (nn.AvgPool3d,), (F.avg_pool3d,), moves.AVG + " divisor_override=None",
            moves.pool(nn.AvgPool3d), moves.check_pool),
    Pattern(Role.POOL, (nn.AdaptiveAvgPool1d,), (F.adaptive_avg_pool1d,), "input output_size",
            moves.pool(nn.AdaptiveAvgPool1d)),
    Pattern(Role.POOL, (nn.AdaptiveAvgPool2d,), (F.adaptive_avg_pool2d,), "input output_size",
            moves.pool(nn.AdaptiveAvgPool2d)),
    Pattern(Role.POOL, (nn.AdaptiveAvgPool3d,), (F.adaptive_avg_pool3d,), "input output_size",
            moves.pool(nn.AdaptiveAvgPool3d)),
    Pattern(Role.POOL, (), (torch.mean, "mean"), "input dim=None keepdim=False dtype=None",
            moves.mean),
    # what moves elements
    Pattern(Role.MOVE, (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle),
            (*_BOTH, *_MOVING, F.pixel_shuffle, F.pixel_unshuffle), "input *", moves.move),
    Pattern(Role.MOVE, (), (torch.reshape, "view", "reshape"), "input shape *", moves.view),
    Pattern(Role.MOVE, (), (operator.getitem,), "input index", moves.index),
    Pattern(Role.MOVE, (), (getattr,), "input name", moves.get_attribute),
    Pattern(Role.MOVE, (nn.Upsample,), (F.interpolate,),
            "input size=None scale_factor=None mode='nearest' align_corners=None "
            "recompute_scale_factor=None antialias=False", moves.interpolate,
            adapt=moves.upsample),
    Pattern(Role.MOVE, (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
            nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, nn.CircularPad1d,
            nn.CircularPad2d, nn.CircularPad3d)),
    Pattern(Role.PAD, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), (F.pad,),
            "input pad mode='constant' value=None", moves.pad, adapt=moves.pad_module),
    Pattern(Role.PASS, (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
            nn.AlphaDropout, QuantStub, DeQuantStub)),
    Pattern(Role.PASS, (), _DROPOUTS, "input p=0.5 training=True inplace=False", _dropout),
    # what stays float, and why
    _float("8 bits of the scores are too coarse for their exponentials", nn.Softmax, nn.LogSoftmax,
           F.softmax, torch.softmax, F.log_softmax, torch.log_softmax, "softmax", "log_softmax"),
    _float("8 bits of what it reads, often a sum, are too coarse for its variance", nn.LayerNorm,
           nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, F.layer_norm,
           F.group_norm, F.instance_norm, torch.layer_norm, torch.group_norm),
    # what quantization-aware training leaves
    Pattern(Role.FAKE, (FakeQuantize,), (torch.fake_quantize_per_tensor_affine,),
            "input scale zero_point quant_min quant_max", _fake, why_not_fixed),
    Pattern(Role.FAKE, (), (torch.fake_quantize_per_channel_affine,),
            "input scale zero_point axis quant_min quant_max", _fake),
    Pattern(Role.SHAPE, (), ("size", "numel", "nelement", "dim"), "input *",
            lambda a: Made(Role.SHAPE, None, [])),
]  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""From accumulators to what a quantized module returns, in float64 torch ops.

The kernels do the same in float32, so at rounding ties the two may differ by one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.attributes.post_op import Binary, Eltwise, PostOp, PReLU, Sum
from torchq.nn.layer import QLayer
from torchq.nn.quantize import QLookup

Function = Callable[[Tensor, float, float], Tensor]


def _hardsigmoid(x: Tensor, a: float, b: float) -> Tensor:
    return (a * x + b).clamp(0, 1)


_ELTWISE: dict[str, Function] = {
    "relu": lambda x, a, b: torch.where(x > 0, x, a * x),
    "linear": lambda x, a, b: a * x + b,
    "clip": lambda x, a, b: x.clamp(a, b),
    "abs": lambda x, a, b: x.abs(),
    "elu": lambda x, a, b: torch.where(x > 0, x, a * torch.expm1(x)),
    "exp": lambda x, a, b: x.exp(),
    "gelu_erf": lambda x, a, b: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x, a, b: F.gelu(x, approximate="tanh"),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x, a, b: x * _hardsigmoid(x, a, b),
    "log": lambda x, a, b: x.log(),
    "logistic": lambda x, a, b: x.sigmoid(),
    "mish": lambda x, a, b: F.mish(x),
    "pow": lambda x, a, b: a * x**b,
    "round": lambda x, a, b: x.round(),
    "soft_relu": lambda x, a, b: torch.logaddexp(a * x, torch.zeros_like(x)) / a,
    "sqrt": lambda x, a, b: x.sqrt(),
    "square": lambda x, a, b: x * x,
    "swish": lambda x, a, b: x * torch.sigmoid(a * x),
    "tanh": lambda x, a, b: x.tanh(),
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div},
    **{"max": torch.maximum, "min": torch.minimum, "ge": torch.ge, "gt": torch.gt},
    **{"le": torch.le, "lt": torch.lt, "eq": torch.eq, "ne": torch.ne},
}


def real_result(module: QLayer, acc: Tensor, axis: int, srcs: Sequence[Tensor]) -> Tensor:
    """``post_ops(src_scale * weight_scale * acc + bias)``, float64; channels are ``axis``.

    ``srcs`` are what the post-ops read at run time, in order.
    """
    shape = [1] * acc.dim()
    shape[axis] = -1
    x = acc.double() * (module.src_scale.double() * module.weight_scale.double()).reshape(shape)
    if module.bias is not None:
        x = x + module.bias.double().reshape(shape)
    remaining = iter(srcs)
    chain = module.attr.post_ops
    if len(srcs) != chain.num_srcs:
        raise ValueError(
            f"torchq.saturation: post_op_srcs (and residual) must be {chain.num_srcs} tensors for "
            f"'{chain}', got {len(srcs)}. Pass what the module's forward takes."
        )
    for op in chain:
        x = _apply(op, x, shape, remaining)
    return x


def stored(module: QLayer, x: Tensor, axis: int) -> Tensor:
    """Return the result as stored: quantized with dst's scale and zero point, or float32."""
    if module.dst_dtype == torch.float32:
        return x.float()
    shape = [1] * x.dim()
    shape[axis] = -1
    limits = torch.iinfo(module.dst_dtype)
    scale, zero = module.dst_scale.double(), module.dst_zero_point.double()
    q = torch.round(x / scale.reshape(shape) + zero.reshape(shape))
    dst = q.clamp(limits.min, limits.max).to(module.dst_dtype)
    return dst if module.lookup is None else module.lookup(dst)


def dequantized(module: QLayer, dst: Tensor, axis: int) -> Tensor:
    """Return the real values of what :func:`stored` returns, float64."""
    if module.dst_dtype == torch.float32:
        return dst.double()
    shape = [1] * dst.dim()
    shape[axis] = -1
    last: QLayer | QLookup = module.lookup or module
    zero = last.dst_zero_point.double().reshape(shape)
    return (dst.double() - zero) * last.dst_scale.double().reshape(shape)


def _apply(op: PostOp, x: Tensor, shape: list[int], srcs: Iterator[Tensor]) -> Tensor:
    if isinstance(op, Sum):
        return x + op.scale * (next(srcs).double() - op.zero_point)
    if isinstance(op, Eltwise):
        return op.scale * _ELTWISE[op.alg](x, op.alpha, op.beta)
    assert isinstance(op, Binary | PReLU), "a module's dw_conv is a module of its own"
    values = next(srcs).double() if op.values is None else op.values.double().reshape(shape)
    if isinstance(op, PReLU):
        return torch.where(x >= 0, x, x * values)
    if op.alg == "select":
        return torch.where(next(srcs) != 0, x, values)
    return _BINARY[op.alg](x, values).double()

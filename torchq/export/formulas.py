# SPDX-License-Identifier: Apache-2.0
"""Writes functions of one element in ONNX: activations, post-ops and tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.attributes.post_op import Binary, Eltwise, PReLU, Sum
from torchq.export.onnx_graph import OnnxGraph, UnsupportedError, Value
from torchq.functional.tables import lookup_table
from torchq.nn.quantize import QLookup
from torchq.quantization.qparams import QParams

Formula: TypeAlias = Callable[[OnnxGraph, str, float, float], str]


def _op(name: str) -> Formula:
    return lambda g, x, alpha, beta: g.add(name, x)


def _relu(g: OnnxGraph, x: str, alpha: float, beta: float) -> str:
    return g.add("LeakyRelu", x, alpha=float(alpha)) if alpha else g.add("Relu", x)


def _linear(g: OnnxGraph, x: str, alpha: float, beta: float) -> str:
    x = x if alpha == 1 else g.add("Mul", x, g.constant(float(alpha)))
    return x if beta == 0 else g.add("Add", x, g.constant(float(beta)))


def _swish(g: OnnxGraph, x: str, alpha: float, beta: float) -> str:
    return g.add("Mul", x, g.add("Sigmoid", _linear(g, x, alpha, 0)))


def _gelu_erf(g: OnnxGraph, x: str, alpha: float, beta: float) -> str:
    erf = g.add("Erf", g.add("Div", x, g.constant(math.sqrt(2))))
    return _linear(g, g.add("Mul", x, _linear(g, erf, 1, 1)), 0.5, 0)


def _gelu_tanh(g: OnnxGraph, x: str, alpha: float, beta: float) -> str:
    cube = g.add("Mul", g.add("Mul", x, x), x)
    inner = _linear(g, g.add("Add", x, _linear(g, cube, 0.044715, 0)), math.sqrt(2 / math.pi), 0)
    return _linear(g, g.add("Mul", x, _linear(g, g.add("Tanh", inner), 1, 1)), 0.5, 0)


FORMULAS: dict[str, Formula] = {
    "relu": _relu,
    "linear": _linear,
    "clip": lambda g, x, a, b: g.add("Clip", x, g.constant(float(a)), g.constant(float(b))),
    "swish": _swish,
    "gelu_erf": _gelu_erf,
    "gelu_tanh": _gelu_tanh,
    "logistic": _op("Sigmoid"),
    "tanh": _op("Tanh"),
    "exp": _op("Exp"),
    "abs": _op("Abs"),
    "log": _op("Log"),
    "sqrt": _op("Sqrt"),
    "round": _op("Round"),
    "square": lambda g, x, a, b: g.add("Mul", x, x),
    "elu": lambda g, x, a, b: g.add("Elu", x, alpha=float(a)),
    "hardsigmoid": lambda g, x, a, b: g.add("HardSigmoid", x, alpha=a, beta=b),
    "hardswish": lambda g, x, a, b: g.add("Mul", x, g.add("HardSigmoid", x, alpha=a, beta=b)),
    "soft_relu": lambda g, x, a, b: _linear(g, g.add("Softplus", _linear(g, x, a, 0)), 1 / a, 0),
    "mish": lambda g, x, a, b: g.add("Mul", x, g.add("Tanh", g.add("Softplus", x))),
}
"""Algorithm of a post-op -> its nodes, of a source, alpha and beta."""

_KNOWN: list[tuple[Callable[[Tensor], Tensor], str, float, float]] = [
    (F.relu, "relu", 0, 0),
    (F.leaky_relu, "relu", 0.01, 0),
    (F.silu, "swish", 1, 0),
    (F.gelu, "gelu_erf", 0, 0),
    (partial(F.gelu, approximate="tanh"), "gelu_tanh", 0, 0),
    (torch.sigmoid, "logistic", 0, 0),
    (torch.tanh, "tanh", 0, 0),
    (F.hardswish, "hardswish", 1 / 6, 0.5),
    (F.hardsigmoid, "hardsigmoid", 1 / 6, 0.5),
    (F.elu, "elu", 1, 0),
    (F.mish, "mish", 0, 0),
    (F.softplus, "soft_relu", 1, 0),
    (torch.exp, "exp", 0, 0),
    (torch.square, "square", 0, 0),
]


def post_op(g: OnnxGraph, op: object, x: str, srcs: list[Value], dims: int) -> str:
    """Return the result of a post-op; ``dims`` are those behind the channels."""
    if isinstance(op, Sum) and srcs:
        src = srcs.pop(0)
        if src.params is None and (op.scale, op.dtype) != (1.0, torch.float32):
            raise UnsupportedError(f"its residual must be float32 or 8-bit, for '{op}'")
        return g.add("Add", x, src.name)
    if isinstance(op, Eltwise) and op.alg in FORMULAS:
        return _linear(g, FORMULAS[op.alg](g, x, op.alpha, op.beta), op.scale, 0)
    if isinstance(op, Binary | PReLU) and op.values is not None and op.mask in (0, 2):
        values = g.constant(op.values.float().reshape(-1, *[1] * dims))
        if isinstance(op, PReLU):
            return g.add("PRelu", x, values)
        if op.alg in ("add", "sub", "mul", "div", "max", "min"):
            return g.add(op.alg.capitalize(), x, values)
    raise UnsupportedError(f"its post-op '{op}' has none")


def table(g: OnnxGraph, module: QLookup, x: str) -> str:
    """Return the real results of a table: of the function it was made of, or by its values."""
    src = QParams.per_tensor(module.src_scale, module.src_zero_point, module.src_dtype)
    dst = QParams.per_tensor(module.dst_scale, module.dst_zero_point, module.dst_dtype)
    for function, alg, alpha, beta in _KNOWN:
        if torch.equal(lookup_table(function, src, dst), module.table):
            return FORMULAS[alg](g, x, alpha, beta)
    # an index below 0 counts from the end, so int8 values are indices, too
    values = module.table.roll(128) if module.src_dtype == torch.int8 else module.table
    index = g.add("Cast", g.integers(x, src), to=int(g.onnx.TensorProto.INT32))
    found = g.add("Gather", g.constant(values), index, axis=0)
    return g.real(found, dst.scale, dst.zero_point, dst.dtype)

# SPDX-License-Identifier: Apache-2.0
"""Post-ops of the oracle (reference.py): every step is one float32 operation with one rounding.

Post-ops are tuples, first to last; trailing fields may be left out, and x is the value so far:

    ("sum", scale=1, zero_point=0, dtype=None)   x + scale * (old - zero_point)
    ("relu", alpha=0, scale=1)                   scale * (x > 0 ? x : alpha * x); 0: max(x, 0)
    ("clip", lo, hi, scale=1)                    scale * min(max(x, lo), hi)
    ("linear", alpha, beta, scale=1)             scale * (alpha * x + beta)
    (alg, alpha, beta, scale=1)                  scale * f(x), see ELTWISE
    (alg, v)                                     alg(x, v), see BINARY

`old` is the next of `srcs`, read as dtype. v is a tensor, or a mask as in torchq's text, which
`parse` reads: with mask 0 (one value) or 2 (one per channel) v is the next of `values`, with any
other it broadcasts against the destination and is the next of `srcs`; so is a select's condition.

Transcendental functions are float64 here, rounded once; torchq's have a stated error, which
`bounded_step` follows through a chain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reference_arithmetic import f32, fma32
from torch import Tensor

PostOps = str | Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class PostOp:
    kind: str
    alpha: float = 0.0
    beta: float = 0.0
    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype | None = None
    operand: Tensor | None = None  # sum: old; binary: v
    condition: Tensor | None = None  # select


FIELDS = {
    "sum": ("scale", "zero_point", "dtype"),
    "relu": ("alpha", "scale"),
}
ULP = 2.0**-23
DENORMAL = 2.0**-149


def gelu_erf(x: Tensor) -> Tensor:
    return x * torch.special.erfc(x * -math.sqrt(0.5)) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    z = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-2 * z))


def softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def product(alpha: float, x: Tensor) -> Tensor:
    """alpha x, rounded to float32 as torchq does before the function."""
    return (f32(alpha) * f32(x)).double()


# f(x, alpha, beta) in float64, and torchq's stated error: relative, and absolute per max(1, |x|).
TRANSCENDENTAL: dict[str, tuple[Any, float, float]] = {
    "elu": (lambda x, a, b: torch.where(x > 0, x, a * torch.expm1(x)), 2 * ULP, 0),
    "exp": (lambda x, a, b: torch.exp(x), ULP, DENORMAL),
    "gelu_erf": (lambda x, a, b: gelu_erf(x), 0, 2e-7),
    "gelu_tanh": (lambda x, a, b: gelu_tanh(x), 0, 2e-7),
    "log": (lambda x, a, b: torch.log(x), ULP, 0),
    "logistic": (lambda x, a, b: torch.sigmoid(x), 2 * ULP, 2.0**-126),
    "mish": (lambda x, a, b: x * torch.tanh(softplus(x)), 3 * ULP, 2.0**-100),
    "pow": (lambda x, a, b: a * x**b, 0, 0),  # relative error by exponent, see stated_error
    "soft_relu": (lambda x, a, b: softplus(product(a, x)) / a, 3 * ULP, 2 * DENORMAL),
    "swish": (lambda x, a, b: x / (1 + torch.exp(-product(a, x))), 2 * ULP, 2.0**-110),
    "tanh": (lambda x, a, b: torch.tanh(x), 2 * ULP, 0),
}


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.where(x < low, low, torch.where(x > high, high, x))


# f(x, alpha, beta) on float32, every operation rounded
ELTWISE: dict[str, Any] = {
    "relu": lambda x, a, b: torch.where(x > 0, x, f32(a) * x) if a else torch.where(x < 0, 0.0, x),
    "clip": lambda x, a, b: clip(x, a, b),
    "abs": lambda x, a, b: x.abs(),
    "hardsigmoid": lambda x, a, b: clip(fma32(x, f32(a), f32(b)), 0, 1),
    "hardswish": lambda x, a, b: x * clip(fma32(x, f32(a), f32(b)), 0, 1),
    "round": lambda x, a, b: torch.round(x),
    "sqrt": lambda x, a, b: torch.sqrt(x.double()).float(),
    "square": lambda x, a, b: x * x,
}
BINARY: dict[str, Any] = {
    "add": lambda x, v: x + v,
    "sub": lambda x, v: x - v,
    "mul": lambda x, v: x * v,
    "div": lambda x, v: x / v,
    "max": lambda x, v: torch.where(v > x, v, x),
    "min": lambda x, v: torch.where(v < x, v, x),
    "ge": lambda x, v: (x >= v).float(),
    "gt": lambda x, v: (x > v).float(),
    "le": lambda x, v: (x <= v).float(),
    "lt": lambda x, v: (x < v).float(),
    "eq": lambda x, v: (x == v).float(),
    "ne": lambda x, v: (x != v).float(),
    "prelu": lambda x, v: torch.where(x >= 0, x, x * v),
}
DTYPES = {"u8": torch.uint8, "s8": torch.int8, "s32": torch.int32, "f32": torch.float32}


def parse(text: str) -> list[tuple[Any, ...]]:
    """Post-op text ('sum:0.5+eltwise_clip:0:6+binary_add:2') as tuples."""
    post_ops: list[tuple[Any, ...]] = []
    for part in text.split("+") if text else []:
        name, *fields = part.split(":")
        if name == "sum":
            scale, zero_point, dtype = (fields + ["1", "0", ""][len(fields) :])[:3]
            post_ops.append(("sum", float(scale), int(zero_point), DTYPES.get(dtype)))
        elif name.startswith("eltwise_"):
            alpha, beta, scale = map(float, fields + ["0", "0", "1"][len(fields) :])
            kind = name.removeprefix("eltwise_")
            post_ops.append((kind, alpha, scale) if kind == "relu" else (kind, alpha, beta, scale))
        else:  # binary or prelu
            post_ops.append((name.removeprefix("binary_"), int(fields[0])))
    return post_ops


def bind(
    post_ops: PostOps, values: Sequence[Tensor] = (), srcs: Sequence[Tensor] = ()
) -> list[PostOp]:
    """Reads tuples or text, takes operands in order, rounds coefficients to float32."""
    remaining_values, remaining_srcs = iter(values), iter(srcs)
    chain = []
    for kind, *fields in parse(post_ops) if isinstance(post_ops, str) else post_ops:
        if kind in BINARY or kind == "select":
            operand = fields[0]
            if not isinstance(operand, Tensor):
                operand = next(remaining_values if operand in (0, 2) else remaining_srcs)
            condition = next(remaining_srcs) if kind == "select" else None
            chain.append(PostOp(kind, operand=operand, condition=condition))
            continue
        named = dict(zip(FIELDS.get(kind, ("alpha", "beta", "scale")), fields, strict=False))
        floats = {
            key: f32(value).item()
            for key, value in named.items()
            if key in ("alpha", "beta", "scale")
        }
        operand = next(remaining_srcs, None) if kind == "sum" else None
        if operand is not None and named.get("dtype") is not None:
            operand = operand.view(named["dtype"])
        chain.append(PostOp(kind, operand=operand, **(named | floats)))
    return chain


def foldable(chain: Sequence[PostOp]) -> bool:
    """Returns True if rule 3 applies: affine in x and old, then at most one plain relu or clip."""
    if chain and ((chain[-1].kind == "relu" and chain[-1].alpha == 0) or chain[-1].kind == "clip"):
        if chain[-1].scale != 1:
            return False
        chain = chain[:-1]
    return all(
        op.kind in ("sum", "linear") or (op.kind in ("add", "mul") and op.operand.ndim <= 1)
        for op in chain
    )


def float_step(x: Tensor, op: PostOp) -> Tensor:
    """One post-op of rule 4, on float32 in real units; one rounding per operation."""
    scale = f32(op.scale)
    if op.kind == "sum":
        return fma32(scale, f32(op.operand.double() - op.zero_point), x)
    if op.kind == "linear":
        return fma32(x, f32(op.alpha * op.scale), f32(op.beta * op.scale))
    if op.kind == "select":
        return torch.where(op.condition != 0, x, op.operand.float())
    if op.kind in BINARY:
        return BINARY[op.kind](x, op.operand.float())
    if op.kind in TRANSCENDENTAL:
        x = f32(TRANSCENDENTAL[op.kind][0](x.double(), op.alpha, op.beta))
    else:
        x = ELTWISE[op.kind](x, op.alpha, op.beta)
    return x if op.scale == 1 else x * scale


def stated_error(x: Tensor, op: PostOp) -> Tensor | float:
    """How far torchq's function of x may be from float64's, times the post-op's scale."""
    if op.kind not in TRANSCENDENTAL:
        return 0.0
    function, relative, absolute = TRANSCENDENTAL[op.kind]
    if op.kind == "pow":
        relative = (5 + abs(op.beta)) * ULP / 2
    wanted = function(x.double(), op.alpha, op.beta)
    relative += ULP  # the roundings of the float64 value and of the bound itself
    error = relative * wanted.abs() + absolute * x.double().abs().clamp(min=1)
    return torch.where(wanted.isfinite(), error, 0.0) * abs(op.scale)


def bounded_step(x: Tensor, low: Tensor, high: Tensor, op: PostOp) -> tuple[Tensor, ...]:
    """`float_step` of x, and of the interval [low, high] that x is known to lie in.

    Where the interval holds 0, that too: abs and square have their minimum there.
    """
    nearest = torch.zeros_like(x).clamp(low, high)
    results = torch.stack([float_step(v, op) for v in (x, low, high, nearest)])
    error = stated_error(x, op)
    down = f32(results.double().amin(0) - error)
    return (
        results[0],
        torch.where(results[0].isnan(), results[0], down),
        f32(results.double().amax(0) + error),
    )

# SPDX-License-Identifier: Apache-2.0
"""Float steps after an op, and what the composer made of them, both in float64.

`chain` applies steps as they are written. `result` applies scales, bias, post-ops and destination
as oneDNN defines them for the two conventions. `check` compares, also with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq import PostOps
from torchq.onednn.composition import (
    Binary,
    Clip,
    Composed,
    Eltwise,
    FakeQuantize,
    Linear,
    PReLU,
    Round,
    Scale,
    Shift,
    Step,
    Sum,
)

N, M, K = 5, 48, 19
U8, S8, S32, F32 = torch.uint8, torch.int8, torch.int32, torch.float32

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, a, b: a * x + b,
    "clip": lambda x, a, b: x.clamp(a, b),
    "relu": lambda x, a, b: torch.where(x > 0, x, a * x),
    "abs": lambda x, a, b: x.abs(),
    "round": lambda x, a, b: torch.round(x),
    "square": lambda x, a, b: x * x,
    "tanh": lambda x, a, b: torch.tanh(x),
}
BINARIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "max": torch.maximum,
    "min": torch.minimum,
}


def f64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def fake_quantize(x: Tensor, fq: FakeQuantize) -> Tensor:
    il, ih, ol, oh = fq.input_low, fq.input_high, fq.output_low, fq.output_high
    q = torch.round((x - il) / (ih - il) * (fq.levels - 1))
    inside = q / (fq.levels - 1) * (oh - ol) + ol
    return torch.where(x <= il, ol, torch.where(x > ih, oh, inside))


def chain(x: Tensor, steps: Sequence[Step], srcs: Sequence[Tensor] = ()) -> Tensor:
    left = list(srcs)
    for step in steps:
        if isinstance(step, Scale):
            x = x * f64(step.values)
        elif isinstance(step, Shift):
            x = x + f64(step.values)
        elif isinstance(step, Linear):
            x = x * f64(step.scale) + f64(step.shift)
        elif isinstance(step, Clip):
            x = torch.minimum(torch.maximum(x, f64(step.low)), f64(step.high))
        elif isinstance(step, Round):
            x = torch.round(x)
        elif isinstance(step, Eltwise):
            x = step.scale * FUNCTIONS[step.alg](x, step.alpha, step.beta)
        elif isinstance(step, Binary):
            x = BINARIES[step.alg](x, f64(step.values))
        elif isinstance(step, PReLU):
            x = torch.where(x >= 0, x, x * f64(step.values))
        elif isinstance(step, Sum):
            x = x + step.scale * (left.pop(0).double() - step.zero_point)
        else:
            x = fake_quantize(x, step)
    return x


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == F32:
        return x
    limits = torch.iinfo(dtype)
    return torch.round(x).clamp(limits.min, limits.max)


def start(acc: Tensor, scale: Tensor, bias: Tensor | None, real_bias: bool) -> Tensor:
    """A float bias is added after scaling where it is in real units, else before."""
    if bias is None:
        return acc * scale
    if real_bias and bias.is_floating_point():
        return acc * scale + bias.double()
    return (acc + bias.double()) * scale


def result(made: Composed, acc: Tensor, srcs: Sequence[Tensor]) -> Tensor:
    real = made.convention == "v3" or not made.int8
    x = start(acc, made.scales.double() * made.src_scale, made.bias, real)
    x = chain(x, list(made.post_ops), srcs)
    return x / made.dst_scale + made.dst_zero_point


def rules(made: Composed) -> list[str]:
    """Returns the rule of each decision, in order."""
    return [reason.split(": ")[1] for reason in made.reasons if reason.startswith("step")]


def check(
    steps: Sequence[Step],
    *,
    dst_dtype: torch.dtype = F32,
    convention: str = "v3",
    bias: Tensor | None = None,
    tolerance: float = 1e-3,
    spread: float = 3.0,
    **options: Any,
) -> Composed:
    """Composes, and compares with the float64 chain; returns what was composed.

    Integers are equal where the exact value is not within ``tolerance`` of a tie, and one apart
    there; floats agree to float32. ``spread`` is the standard deviation before the steps.
    """
    draw = torch.Generator().manual_seed(0)  # every call sees the same sums
    src = torch.randint(0, 256, (M, K), dtype=U8, generator=draw)
    weight = torch.randint(-127, 128, (N, K), dtype=S8, generator=draw)
    acc = src.double() @ weight.double().t()
    unit = spread / float(acc.std())
    int8 = options.get("int8", True)
    if int8 and "weight_scale" not in options:
        options |= {"src_scale": 0.25, "weight_scale": unit * 4 * torch.linspace(0.5, 1.5, N)}
    scale = f64(options.get("weight_scale", 1.0)) * options.get("src_scale", 1.0)
    acc = acc if int8 else acc * unit

    made = torchq.compose(
        steps, N, convention=convention, dst_dtype=dst_dtype, bias=bias, **options
    )
    left = [torch.randint(0, 100, (M, N), dtype=S8) for s in steps if isinstance(s, Sum)]
    x = start(acc, scale, bias, convention == "v3" or not int8)
    exact = chain(x, steps, left)
    taken = len([s for s in steps[: len(steps) - len(made.rest)] if isinstance(s, Sum)])
    ours = chain(result(made, acc, left[:taken]), made.rest, left[taken:])
    close(ours, exact, dst_dtype, tolerance)
    if int8 and runs(made.post_ops):
        kernel = TF.linear(
            src, weight, made.bias, made.attr(), made.dst_dtype, post_op_srcs=left[:taken]
        )
        real = kernel.double()
        if made.rest:
            real = chain(real, made.rest, left[taken:])
        close(real, exact, dst_dtype, tolerance)
    return made


def runs(post_ops: PostOps) -> bool:
    """Returns True if there are kernels for the chain."""
    try:
        post_ops.check_supported("linear")
    except NotImplementedError:
        return False
    return True


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype, tolerance: float) -> None:
    if dtype == F32:
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
        return
    distance = (exact - exact.floor() - 0.5).abs()
    difference = (convert(ours, dtype) - convert(exact, dtype)).abs()
    clear = distance > tolerance
    assert clear.float().mean() > 0.95
    assert difference[clear].max() == 0 and difference.max() <= 1

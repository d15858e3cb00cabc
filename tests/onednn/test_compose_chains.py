# SPDX-License-Identifier: Apache-2.0
"""Random chains through the composer, in exact arithmetic.

All constants are dyadic, so float64 holds every step exactly: what was composed must equal the
chain in every bit, ties included.
"""

from __future__ import annotations

import random

import torch
from reference_chain import F32, S8, S32, U8, N, chain, convert, result, rules, start

import torchq
from torchq.onednn.composition import (
    Binary,
    Clip,
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


class Draw(random.Random):
    """Dyadic numbers, one or per channel, and steps made of them."""

    def power(self, signed: bool = False) -> float:
        return 2.0 ** self.randint(-2, 2) * (self.choice((1, -1)) if signed else 1)

    def powers(self) -> float | torch.Tensor:
        signed = self.random() < 0.3
        if self.random() < 0.5:
            return self.power(signed)
        return torch.tensor([self.power(signed) for _ in range(N)])

    def offsets(self) -> float | torch.Tensor:
        if self.random() < 0.5:
            return self.choice((0.0, 7.0, -1.5, 128.0, 0.25))
        return torch.tensor([self.randint(-40, 40) / 4 for _ in range(N)])

    def fake_quantize(self) -> FakeQuantize:
        """257 levels, so that a step is dyadic."""
        step = torch.tensor([self.power() for _ in range(N if self.random() < 0.5 else 1)])
        zero = self.choice((0, 6, 128))
        low, high = -zero * step, (256 - zero) * step
        axis = 1 if len(step) > 1 else None
        if self.random() < 0.6:  # quantize-only; even, since odd shifts differ at ties (F4a)
            shift = self.choice((0, -128))
            return FakeQuantize(low, high, shift, 256.0 + shift, 257, axis)
        return FakeQuantize(low, high, levels=257, axis=axis)

    def step(self) -> Step:
        kind = self.randint(0, 11)
        if kind <= 2:
            return Scale(self.powers())
        if kind == 3:
            return Shift(self.offsets())
        if kind == 4:
            return Linear(self.powers(), self.offsets())
        if kind == 5:
            high = self.offsets()
            high = high + 10 if isinstance(high, float) else high.abs() + 2
            return Clip(self.choice((-20.0, -torch.arange(20.0, 20.0 + N))), high)
        if kind == 6:
            return Round()
        if kind == 7:
            alg = self.choice(("relu", "relu", "abs", "round"))
            return Eltwise(alg, self.choice((0.0, 0.25)), 0.0, self.choice((1.0, 1.0, 2.0)))
        if kind == 8:
            return PReLU(2, torch.tensor([self.power(True) for _ in range(N)]))
        if kind == 9:
            return Sum(self.power(), self.choice((0, 3)), S8)
        if kind == 10:
            alg = self.choice(("add", "mul", "sub", "max"))
            return Binary(alg, 2, values=torch.tensor([self.power(True) for _ in range(N)]))
        return self.fake_quantize()


def test_random_chains_equal_the_float64_chain_exactly() -> None:
    draw, seen = Draw(0), set[str]()
    acc = torch.randint(-4000, 4000, (64, N)).double()
    for _ in range(600):
        steps = [draw.step() for _ in range(draw.randint(1, 6))]
        convention = draw.choice(("v1", "v3"))
        dst_dtype = draw.choice((U8, S8, S32, F32))
        int8 = draw.random() < 0.85
        scale = torch.tensor([draw.power() / 64 for _ in range(N)]) if int8 else torch.ones(1)
        bias = draw.choice(
            (None, torch.randint(-99, 99, (N,)) / 4, torch.randint(-999, 999, (N,), dtype=S32))
        )
        made = torchq.compose(
            steps,
            N,
            convention=convention,
            int8=int8,
            dst_dtype=dst_dtype,
            weight_scale=scale,
            src_scale=0.5 if int8 else 1.0,
            bias=bias,
            bias_is_constant=draw.random() < 0.7,
            takes_bias=draw.random() < 0.8,
            allow_binary=draw.random() < 0.8,
        )
        srcs = [torch.randint(0, 100, (64, N)) for s in steps if isinstance(s, Sum)]
        real_bias = convention == "v3" or not int8
        x = start(acc, scale.double() * (0.5 if int8 else 1.0), bias, real_bias)
        exact = convert(chain(x, steps, srcs), dst_dtype)
        taken = len([s for s in steps[: len(steps) - len(made.rest)] if isinstance(s, Sum)])
        ours = result(made, acc, srcs[:taken])
        if made.rest:
            assert made.refusal and made.dst_dtype == F32
        ours = convert(chain(ours, made.rest, srcs[taken:]), dst_dtype)
        assert torch.equal(ours, exact), (steps, made.reasons, str(made.attr()))
        seen |= {*rules(made)}
    every = {f"C{i}" for i in range(17) if i not in (12, 13, 14)}  # these are no decision's label
    assert every | {"F1", "F3", "F4", "F4, F7"} <= seen

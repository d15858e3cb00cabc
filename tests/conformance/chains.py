# SPDX-License-Identifier: Apache-2.0
"""Random post-op chains: as torchq and the oracle take them, and in float64 with error bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from differential import Exact
from torch import Tensor

from torchq import PostOps


@dataclass(frozen=True)
class Function:
    """An eltwise algorithm: float64, coefficients to draw from, error of its approximations."""

    double: Callable[[Tensor, float, float], Tensor]
    alpha: tuple[float, ...] = (0.0,)
    beta: tuple[float, ...] = (0.0,)
    relative: float = 0.0
    absolute: float = 0.0

    @property
    def approximate(self) -> bool:
        return self.relative > 0 or self.absolute > 0


# oneDNN's own approximations are good to about 1e-5 of the value, and of 1 where it is bounded.
_LOOSE = {"relative": 1e-5, "absolute": 1e-5}
FUNCTIONS = {
    "abs": Function(lambda x, a, b: x.abs()),
    "clip": Function(lambda x, a, b: x.clamp(a, b), (-2.0, 0.0, -0.75), (1.0, 6.0)),
    "elu": Function(lambda x, a, b: torch.where(x > 0, x, a * x.expm1()), (1.0, 0.3), **_LOOSE),
    "exp": Function(lambda x, a, b: x.exp(), **_LOOSE),
    "gelu_erf": Function(lambda x, a, b: F.gelu(x), **_LOOSE),
    "gelu_tanh": Function(lambda x, a, b: F.gelu(x, approximate="tanh"), **_LOOSE),
    "hardsigmoid": Function(lambda x, a, b: (a * x + b).clamp(0, 1), (1 / 6, 0.2), (0.5,)),
    "hardswish": Function(lambda x, a, b: x * (a * x + b).clamp(0, 1), (1 / 6,), (0.5, 0.4)),
    "linear": Function(lambda x, a, b: a * x + b, (0.5, -1.25, 2.0), (0.0, 0.75, -3.0)),
    "logistic": Function(lambda x, a, b: x.sigmoid(), **_LOOSE),
    "mish": Function(lambda x, a, b: x * F.softplus(x, threshold=80).tanh(), **_LOOSE),
    "relu": Function(lambda x, a, b: torch.where(x > 0, x, a * x), (0.0, 0.0, 0.1, -0.5)),
    "round": Function(lambda x, a, b: x.round()),
    "soft_relu": Function(
        lambda x, a, b: F.softplus(x, beta=a, threshold=80), (1.0, 2.0), **_LOOSE
    ),
    "square": Function(lambda x, a, b: x * x),
    "swish": Function(lambda x, a, b: x * (a * x).sigmoid(), (1.0, 1.7), **_LOOSE),
    "tanh": Function(lambda x, a, b: x.tanh(), **_LOOSE),
}
PARTIAL = {  # defined on part of the line only: behind an abs
    "log": Function(lambda x, a, b: x.log(), **_LOOSE),
    "sqrt": Function(lambda x, a, b: x.sqrt()),
    "pow": Function(lambda x, a, b: a * x**b, (1.0, 0.5), (0.5, 1.5, 2.0), **_LOOSE),
}
_NEW = ("hardsigmoid", "hardswish", "soft_relu")
BINARIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "ge": lambda x, v: (x >= v).double(),
    "gt": lambda x, v: (x > v).double(),
    "le": lambda x, v: (x <= v).double(),
    "lt": lambda x, v: (x < v).double(),
}


@dataclass
class Chain:
    """`values` are the operands of binary and prelu, `olds` the sources of sums, in order."""

    words: list[str] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    olds: list[Tensor] = field(default_factory=list)
    steps: list[Callable[[Exact], Exact]] = field(default_factory=list)
    approximate: bool = False

    @property
    def text(self) -> str:
        return "+".join(self.words)

    def post_ops(self, text: str | None = None) -> PostOps:
        return PostOps.parse(self.text if text is None else text).with_values(self.values)

    def exact(self, x: Exact) -> Exact:
        for step in self.steps:
            x = step(x)
        return x


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


class ChainMaker:
    """Draws chains for a destination of one shape.

    Args:
        rng: Decides structure; ``data`` fills operands.
        shape: Of dst; dimension 1 is the channel.
        old_dtype: Of the destination's previous content; None for no sums.
        channel_axis: The dimension one value per channel stands for.
        eltwise_scale: Of every eltwise post-op; oneDNN 3 knows 1 only.
    """

    def __init__(
        self,
        rng: random.Random,
        data: torch.Generator,
        shape: Sequence[int],
        old_dtype: torch.dtype | None,
        old_scale: float,
        channel_axis: int = 1,
        eltwise_scale: float = 1.0,
    ) -> None:
        self.rng, self.data, self.shape = rng, data, tuple(shape)
        self.old_dtype, self.old_scale, self.axis = old_dtype, old_scale, channel_axis
        self.eltwise_scale = eltwise_scale

    def chain(self, most: int = 3) -> Chain:
        chain = Chain()
        kinds = ["eltwise"] * 5 + ["binary"] * 2 + ["prelu"] + ["sum"] * 2
        for _ in range(self.rng.choice([0, 1, 1, *range(2, most + 1)])):
            kind = self.rng.choice(kinds)
            if kind == "sum" and (self.old_dtype is None or chain.olds):
                kind = "eltwise"  # oneDNN has one destination to read
            getattr(self, f"_{kind}")(chain)
        return chain

    def _eltwise(self, chain: Chain) -> None:
        if self.rng.random() < 0.15:
            self._append_eltwise(chain, "abs", FUNCTIONS["abs"])
            name = self.rng.choice(list(PARTIAL))
            self._append_eltwise(chain, name, PARTIAL[name])
        else:
            # oneDNN 2 gave these no coefficients
            names = [name for name in FUNCTIONS if self.eltwise_scale == 1 or name not in _NEW]
            name = self.rng.choice(names)
            self._append_eltwise(chain, name, FUNCTIONS[name])

    def _append_eltwise(self, chain: Chain, name: str, f: Function) -> None:
        alpha, beta = float32(self.rng.choice(f.alpha)), float32(self.rng.choice(f.beta))
        scale = self.eltwise_scale
        word = f"eltwise_{name}"
        if alpha or beta or scale != 1:
            word += f":{alpha}:{beta}"
        chain.words.append(word + (f":{scale}" if scale != 1 else ""))
        chain.approximate |= f.approximate
        chain.steps.append(
            lambda x: x.step(
                lambda v: scale * f.double(v, alpha, beta),
                relative=f.relative,
                absolute=f.absolute * abs(scale),
            )
        )

    def _values(self, mask: int, low: float, high: float) -> Tensor:
        count = self.shape[self.axis] if mask else 1
        return low + (high - low) * torch.rand(count, generator=self.data)

    def _spread(self, values: Tensor) -> Tensor:
        dims = [-1 if d == self.axis else 1 for d in range(len(self.shape))]
        return values.double().reshape(dims if values.numel() > 1 else [1] * len(dims))

    def _binary(self, chain: Chain) -> None:
        name = self.rng.choice(list(BINARIES))
        mask = self.rng.choice((0, 1 << self.axis))
        values = self._values(mask, 0.5, 2.0)
        if name not in ("mul", "div") and self.rng.random() < 0.5:
            values = -values
        operand, function = self._spread(values), BINARIES[name]
        chain.words.append(f"binary_{name}:{mask}")
        chain.values.append(values)
        chain.steps.append(lambda x: x.step(lambda v: function(v, operand)))

    def _prelu(self, chain: Chain) -> None:
        mask = self.rng.choice((0, 1 << self.axis))
        slope = self._values(mask, -0.5, 0.5)
        operand = self._spread(slope)
        chain.words.append(f"prelu:{mask}")
        chain.values.append(slope)
        chain.steps.append(lambda x: x.step(lambda v: torch.where(v >= 0, v, v * operand)))

    def _sum(self, chain: Chain) -> None:
        dtype = self.old_dtype
        assert dtype is not None
        scale = float32(self.rng.choice((1.0, 0.5, 1.75)) * self.old_scale)
        zero_point = 0
        if dtype == torch.float32:
            old = torch.randn(self.shape, generator=self.data)
        else:
            low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
            old = torch.randint(low, high, self.shape, generator=self.data).to(dtype)
            zero_point = self.rng.choice((0, 0, 7)) if dtype != torch.int32 else 0
        chain.words.append(f"sum:{scale}" + (f":{zero_point}" if zero_point else ""))
        chain.olds.append(old)
        addend = scale * (old.double() - zero_point)
        chain.steps.append(lambda x: x.plus(addend))

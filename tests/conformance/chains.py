# SPDX-License-Identifier: Apache-2.0
"""Random post-op chains: as torchq and the oracle take them, and in float64 with error bounds."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from differential import Exact
from torch import Tensor

from torchq import PostOps

COMPARISON = re.compile("binary_(ge|gt|le|lt|eq|ne):")  # in the text of a chain


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
    "eq": lambda x, v: (x == v).double(),
    "ne": lambda x, v: (x != v).double(),
}
SUFFIX = {torch.float32: "", torch.uint8: ":u8", torch.int8: ":s8", torch.int32: ":s32"}


@dataclass
class Chain:
    """A chain of post-ops, in the words of each side.

    Attributes:
        words: The post-ops as the oracle has them: masks of a matmul index (rows, columns).
        theirs: The same with the masks of torchq and oneDNN, which index all dims of dst.
        values: Operands of binary and prelu, 1-D, in order.
        olds: Sources of sums, in order.
        oracle_values: The operands that the oracle wants as values.
        oracle_srcs: The sources of sums, and the other operands, in order.
    """

    words: list[str] = field(default_factory=list)
    theirs: list[str] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    olds: list[Tensor] = field(default_factory=list)
    oracle_values: list[Tensor] = field(default_factory=list)
    oracle_srcs: list[Tensor] = field(default_factory=list)
    steps: list[Callable[[Exact], Exact]] = field(default_factory=list)
    approximate: bool = False

    @property
    def text(self) -> str:
        return "+".join(self.words)

    def add(self, word: str, step: Callable[[Exact], Exact], theirs: str = "") -> None:
        self.words.append(word)
        self.theirs.append(theirs or word)
        self.steps.append(step)

    def post_ops(self) -> PostOps:
        return PostOps.parse("+".join(self.theirs)).with_values(self.values)

    def oracle(self) -> dict[str, Any]:
        return {
            "post_ops": self.text,
            "post_op_values": self.oracle_values,
            "post_op_srcs": self.oracle_srcs,
        }

    def onednn(self, dst_dtype: torch.dtype) -> dict[str, Any]:
        return {
            "post_ops": "+".join(self.theirs),
            "post_op_tensors": self.values,
            "dst": self.olds[0].view(dst_dtype) if self.olds else None,
        }

    def exact(self, x: Exact) -> Exact:
        for step in self.steps:
            x = step(x)
        return x


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


KINDS = ("eltwise",) * 5 + ("binary",) * 2 + ("prelu",) + ("sum",) * 2


class ChainMaker:
    """Draws chains for a destination of one shape.

    Args:
        rng: Decides structure; ``data`` fills operands.
        shape: Of dst; dimension 1 is the channel.
        old_dtype: Of the destination's previous content; None for no sums.
        channel_axis: The dimension one value per channel stands for.
        eltwise_scale: Of every eltwise post-op; oneDNN 3 knows 1 only.
        broadcasts: What an operand may cover: "one" value, "channel", "full", "some" other dims.
        kinds: Of post-ops, each as often as it shall come.
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
        broadcasts: Sequence[str] = ("one", "one", "channel", "channel", "full", "some"),
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self.rng, self.data, self.shape = rng, data, tuple(shape)
        self.broadcasts, self.kinds = broadcasts, kinds
        self.old_dtype, self.old_scale, self.axis = old_dtype, old_scale, channel_axis
        self.eltwise_scale = eltwise_scale

    def chain(self, most: int = 3) -> Chain:
        chain = Chain()
        for _ in range(self.rng.choice([0, 1, 1, *range(2, most + 1)])):
            kind = self.rng.choice(self.kinds)
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
        chain.approximate |= f.approximate
        chain.add(
            word + (f":{scale}" if scale != 1 else ""),
            lambda x: x.step(
                lambda v: scale * f.double(v, alpha, beta),
                relative=f.relative,
                absolute=f.absolute * abs(scale),
            ),
        )

    def _masks(self) -> tuple[int, int]:
        """Returns an operand's mask for the oracle, and its mask for torchq and oneDNN."""
        dims, channel = len(self.shape), 1 << self.axis
        full = (1 << dims) - 1
        rows = dims > 2 and self.axis + 1 == dims  # the oracle's index (rows, columns) of a matmul
        some = (full ^ channel,) if self.axis + 1 == dims else (1, full ^ 3, full ^ 1)
        theirs = {"one": 0, "channel": channel, "full": full, "some": self.rng.choice(some)}
        mask = theirs[self.rng.choice(self.broadcasts)]
        return ({0: 0, channel: 2, full: 3}.get(mask, 1) if rows else mask), mask

    def _operand(self, chain: Chain, values: Callable[[int], Tensor]) -> tuple[Tensor, int, int]:
        """An operand that broadcasts, and its masks; the chain gets it."""
        ours, theirs = self._masks()
        shape = [size if theirs >> d & 1 else 1 for d, size in enumerate(self.shape)]
        operand = values(math.prod(shape))
        chain.values.append(operand)
        if ours in (0, 2):
            chain.oracle_values.append(operand)
        else:
            chain.oracle_srcs.append(operand.reshape(shape))
        return operand.double().reshape(shape), ours, theirs

    def _between(self, count: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=self.data)

    def _binary(self, chain: Chain) -> None:
        name = self.rng.choice(list(BINARIES))
        dtype = self.rng.choice([torch.float32] * 3 + [torch.uint8, torch.int8, torch.int32])
        negative = name not in ("mul", "div") and self.rng.random() < 0.5

        def values(count: int) -> Tensor:
            if dtype == torch.float32:
                return self._between(count, 0.5, 2.0) * (-1 if negative else 1)
            drawn = torch.randint(1, 4, (count,), generator=self.data)
            return (drawn * (-1 if negative and dtype != torch.uint8 else 1)).to(dtype)

        operand, ours, theirs = self._operand(chain, values)
        function, suffix = BINARIES[name], SUFFIX[dtype]

        def step(x: Exact) -> Exact:
            result = x.step(lambda v: function(v, operand))
            if name not in ("eq", "ne"):
                return result
            close = ((x.y - operand).abs() <= x.error).double()
            return replace(result, error=torch.maximum(result.error, close))

        chain.add(f"binary_{name}:{ours}{suffix}", step, f"binary_{name}:{theirs}{suffix}")

    def _prelu(self, chain: Chain) -> None:
        slope, ours, theirs = self._operand(chain, lambda n: self._between(n, -0.5, 0.5))
        chain.add(
            f"prelu:{ours}",
            lambda x: x.step(lambda v: torch.where(v >= 0, v, v * slope)),
            f"prelu:{theirs}",
        )

    def _sum(self, chain: Chain) -> None:
        dtype = self.old_dtype
        assert dtype is not None
        scale = float32(self.rng.choice((1.0, 0.5, 1.75)) * self.old_scale)
        zero_point, suffix = 0, ""
        if dtype == torch.float32:
            old = torch.randn(self.shape, generator=self.data)
        elif dtype == torch.int32:
            old = torch.randint(-128, 128, self.shape, generator=self.data).to(dtype)
        else:
            if self.rng.random() < 0.3:  # the same bytes, read as another type
                dtype = torch.uint8 if dtype == torch.int8 else torch.int8
                suffix = SUFFIX[dtype]
            low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
            old = torch.randint(low, high, self.shape, generator=self.data).to(dtype)
            zero_point = self.rng.choice((0, 0, 7))
        chain.olds.append(old)
        chain.oracle_srcs.append(old)
        addend = scale * (old.double() - zero_point)
        fields = f":{zero_point}{suffix}" if zero_point or suffix else ""
        chain.add(f"sum:{scale}{fields}", lambda x: x.plus(addend))

# SPDX-License-Identifier: Apache-2.0
"""One generated case, computed by torchq on every tier, by the oracle, and by oneDNN.

torchq must have the oracle's bits. Where oneDNN's result differs, a rule has to say why:

    tie            the exact value lies within 1e-3 of halfway between two integers
    float steps    within the error of float32 steps in another order, by a reciprocal, or of other
                   approximations of a function; `Exact.error` bounds it for each element
    large sums     |acc| > 2^24, which float32 does not hold exactly
    s32 bound      oneDNN saturates to 2147483520, the largest float32 below 2^31
    NaN            a conversion of NaN to an integer has no defined result in oneDNN
    defect         oneDNN is wrong about all cases of a kind (`Case.defect`), and a test shows it

An element that no rule explains is a failure. Float32 results agree within 4 ulp or 1e-5 relative;
cancellation beyond that needs a rule as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import torchq
from benchmarks.onednn import Peer, RefusedError

EPSILON = 2.0**-24  # of one float32 rounding
TIE = 1e-3
ONEDNN_S32_BOUND = 2147483520


@dataclass(frozen=True)
class Exact:
    """The float64 result in steps of dst, before it is rounded and saturated.

    Attributes:
        y: Real units for a float32 destination.
        error: How far float32 computations of it, by either side, can be from y.
        acc: Integer accumulators, where there are any.
    """

    y: Tensor
    error: Tensor
    acc: Tensor | None = None

    def step(
        self, function: Callable[[Tensor], Tensor], *, relative: float = 0, absolute: float = 0
    ) -> Exact:
        """``function`` applied; its own approximations are wrong by ``relative`` and ``absolute``.

        The error so far becomes what it makes of the function's value, so discontinuities (round,
        comparisons) close to an argument show as an error of a whole step.
        """
        y = function(self.y)
        spread = torch.maximum(
            (function(self.y + self.error) - y).abs(), (function(self.y - self.error) - y).abs()
        )
        spread = spread.nan_to_num(nan=torch.inf)
        # every function ends in one or two roundings of its value
        return Exact(y, spread + (4 * EPSILON + relative) * y.abs() + absolute, self.acc)

    def plus(self, addend: Tensor) -> Exact:
        """``addend`` is exact up to one rounding of its own."""
        y = self.y + addend
        return Exact(y, self.error + 2 * EPSILON * (addend.abs() + y.abs()), self.acc)

    def times(self, factor: Tensor | float) -> Exact:
        factor = torch.as_tensor(factor, dtype=torch.float64)
        y = self.y * factor
        return Exact(y, self.error * factor.abs() + 2 * EPSILON * y.abs(), self.acc)


@dataclass(frozen=True)
class Case:
    """One computation by all three.

    Attributes:
        torchq: Runs under each tier.
        reference: The oracle.
        approximate: Whether the chain has a function that the oracle computes in float64.
        sided: Whether `reference` takes -1 and 1: the least and greatest results within the
            functions' stated errors.
        defect: How the name of the implementation of oneDNN begins that is known to be wrong
            about such cases.
    """

    text: str
    torchq: Callable[[], Tensor]
    reference: Callable[..., Tensor]
    onednn: Callable[[Peer], Tensor]
    exact: Callable[[], Exact]
    approximate: bool = False
    sided: bool = False
    defect: str | tuple[str, ...] = ""
    zero_points: bool = False
    padding: bool = False


@dataclass
class Tally:
    """Counts a primitive's cases by their outcome."""

    run: int = 0
    zero_points: int = 0
    padding: int = 0
    refused_by_torchq: int = 0
    refused_by_onednn: int = 0
    compared: int = 0
    equal: int = 0  # in every element
    elements: Counter[str] = field(default_factory=Counter)  # by rule
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Opponent:
    """A oneDNN that is started again where a request has broken it.

    oneDNN 3.2 ends with a segmentation fault on some chains of binary post-ops; and once its code
    generator has failed on one primitive, it fails on all later ones of the process.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self.peer = Peer(threads=1, version=version)

    def __enter__(self) -> Opponent:
        return self

    def __exit__(self, *exception: object) -> None:
        self.peer.close()

    def compute(self, case: Case) -> Tensor:
        """Raises RefusedError also where oneDNN crashes."""
        try:
            return self._attempt(case)
        except RefusedError as refusal:
            if "(runtime_error)" not in str(refusal):
                raise
            self._restart()
            return self._attempt(case)

    def _attempt(self, case: Case) -> Tensor:
        try:
            return case.onednn(self.peer)
        except RefusedError:
            raise
        except RuntimeError as death:
            self._restart()
            raise RefusedError(f"oneDNN crashes: segmentation fault. Asked: {death}") from None

    def _restart(self) -> None:
        self.peer.close()
        self.peer = Peer(threads=1, version=self.version)


def run_case(case: Case, opponent: Opponent, tally: Tally) -> None:
    tally.run += 1
    tally.zero_points += case.zero_points
    tally.padding += case.padding
    try:
        results = {isa: _on_tier(case, isa) for isa in torchq.supported_isas()}
    except NotImplementedError as refusal:
        tally.refused_by_torchq += 1
        tally.reasons["torchq: " + str(refusal).splitlines()[0]] += 1
        return
    dst = results["reference"]
    for isa, result in results.items():
        if not _same_bits(result, dst):
            tally.failures.append(f"{case.text}: {isa} differs from the reference tier")
            return
    exact = case.exact()
    if complaint := _against_oracle(case, dst, exact):
        tally.failures.append(f"{case.text}: {complaint}")
        return
    try:
        theirs = opponent.compute(case)
    except RefusedError as refusal:
        tally.refused_by_onednn += 1
        tally.reasons["oneDNN: " + str(refusal).split(": ", 1)[1].split(". Asked")[0]] += 1
        return
    tally.compared += 1
    rules = classify(dst, theirs, exact)
    wrong = case.defect and opponent.peer.implementation.startswith(case.defect)
    if wrong and "unexplained" in rules:
        rules["defect"] = rules.pop("unexplained")
    if not rules:
        tally.equal += 1
    elif "unexplained" in rules:
        tally.failures.append(f"{case.text}: {describe(dst, theirs, exact)}")
    tally.elements.update(rules)


def _on_tier(case: Case, isa: str) -> Tensor:
    with torchq.use_isa(isa):
        return case.torchq()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.dtype != torch.float32:
        return torch.equal(a, b)
    bits = a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)
    return bool((bits | (a.isnan() & b.isnan())).all())


def _against_oracle(case: Case, dst: Tensor, exact: Exact) -> str:
    """Bits; behind an approximated function, within its stated error."""
    expected = case.reference()
    if _same_bits(dst, expected):
        return ""
    if not case.approximate or dst.dtype != expected.dtype or dst.shape != expected.shape:
        wrong = int((dst != expected).sum()) if dst.shape == expected.shape else dst.numel()
        return f"{wrong} of {dst.numel()} values differ from the oracle"
    if case.sided:
        low, high = case.reference(-1), case.reference(1)
        outside = int((~((low <= dst) & (dst <= high) | dst.isnan() & expected.isnan())).sum())
        return f"{outside} values are beyond the stated error" if outside else ""
    unexplained = classify(dst, expected, exact).get("unexplained", 0)
    return f"{unexplained} values differ from the oracle beyond the error" if unexplained else ""


def classify(ours: Tensor, theirs: Tensor, exact: Exact) -> dict[str, int]:
    """Elements that differ, by the rule that explains them. Equal results give {}."""
    masks = _float_rules(ours, theirs, exact) if ours.is_floating_point() else None
    masks = masks or _integer_rules(ours, theirs, exact)
    open_ = masks.pop("different")
    counts = {}
    for rule, mask in masks.items():
        explained = open_ & mask
        open_ = open_ & ~mask
        if explained.any():
            counts[rule] = int(explained.sum())
    if open_.any():
        counts["unexplained"] = int(open_.sum())
    return counts


def _float_rules(ours: Tensor, theirs: Tensor, exact: Exact) -> dict[str, Tensor]:
    difference = (ours.double() - theirs.double()).abs()
    largest = torch.maximum(ours.abs(), theirs.abs()).double()
    close = difference <= torch.maximum(8 * EPSILON * largest, 1e-5 * largest)
    both_nan = ours.isnan() & theirs.isnan()
    return {
        "different": ~(close | (ours == theirs) | both_nan),
        "float steps": difference <= 2 * exact.error,
    }


def _integer_rules(ours: Tensor, theirs: Tensor, exact: Exact) -> dict[str, Tensor]:
    difference = (ours.double() - theirs.double()).abs()
    y = exact.y
    to_tie = (y - y.floor() - 0.5).abs()
    near = difference <= torch.maximum(torch.ones_like(y), (2 * exact.error).ceil())
    rules = {
        "different": difference != 0,
        "NaN": y.isnan(),
        "tie": (difference <= 1) & (to_tie < TIE),
    }
    if exact.acc is not None:
        rules["large sums"] = near & (exact.acc.abs() > 2**24)
    if ours.dtype == torch.int32:
        rules["s32 bound"] = (y >= ONEDNN_S32_BOUND - 1) & (theirs == ONEDNN_S32_BOUND)
    rules["float steps"] = near & ((to_tie <= exact.error) | (exact.error >= 0.5))
    return rules


def describe(ours: Tensor, theirs: Tensor, exact: Exact) -> str:
    """The first few elements that differ."""
    where = (ours.double() != theirs.double()).nonzero()[:4]
    values = [
        f"{tuple(i.tolist())}: torchq {ours[tuple(i)].item()}, oneDNN {theirs[tuple(i)].item()}, "
        f"exact {exact.y[tuple(i)].item():.9g} +- {exact.error[tuple(i)].item():.2g}"
        for i in where
    ]
    return "; ".join(values)

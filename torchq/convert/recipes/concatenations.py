# SPDX-License-Identifier: Apache-2.0
"""Sources of concatenations that take the parameters of the result, though others read them, too.

Sources that nobody else reads have its parameters already, by :mod:`torchq.planning.groups`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from torchq.convert.settled import Seen, Settled
from torchq.convert.watching import Watch
from torchq.planning.plan import Plan
from torchq.quantization.qparams import QParams

_CLIPPED = 1 / 8  # of the source's range, at most


class Concatenations:
    """Gives sources of concatenations the parameters of the result where that costs less."""

    def watch(self, plan: Plan) -> Iterator[Watch]:
        """Yield nothing: the ranges of all groups are known."""
        yield from ()

    def apply(self, settled: Settled) -> Settled:
        """Return the plan with the parameters of such sources."""
        return replace(settled, adjusted={**settled.adjusted, **_shared(settled.seen)})


def _shared(seen: Seen) -> dict[fx.Node, QParams]:
    """Return by root of a group that a concatenation reads: what it takes from the result.

    A value that passes twenty concatenations, each with parameters of its own, is rounded twenty
    times; with the same parameters they copy bytes. But what else reads the source then gets the
    steps of the concatenation. Let ``s`` be the source's own step, ``c`` that of the concatenation,
    and ``S`` and ``C`` how many other operations read each; a rounding adds the square of its step,
    over 12. To share costs less if ``(S + C) c^2 < S s^2 + C (s^2 + c^2)``, that is,
    ``S c^2 < (S + C) s^2``.

    The last concatenation of a chain decides. Parameters of fake quantizers stay.

    Raises:
        RuntimeError: as :meth:`Seen.qparams`.
    """
    plan, found = seen.plan, dict[fx.Node, QParams]()
    layers = [layer for layer in plan.concatenations if not layer.reason]
    copies = {layer.op.node for layer in layers}
    readers = {root: len(users - copies) for root, users in plan.users.items()}
    beyond: dict[fx.Node, int] = {}  # readers of what a group's values are copied to
    for layer in reversed(layers):
        root = plan.root(layer.dst)
        if not plan.emits_int8(layer) or plan.fixed(root) is not None:
            continue
        dst = found.get(root) or seen.qparams(root)
        count = readers.get(root, 0) + beyond.get(root, 0)
        for src in dict.fromkeys(plan.root(src) for src in layer.srcs):
            if src is root or src in found or plan.fixed(src) is not None:
                continue
            own = seen.qparams(src)
            step, other = float(own.scale), float(dst.scale)
            if _covers(dst, own) and readers[src] * other**2 < (readers[src] + count) * step**2:
                found[src], beyond[src] = dst, count
    return found


def _covers(dst: QParams, src: QParams) -> bool:
    """Return whether ``dst`` covers what ``src`` covers, but for a little at the ends."""
    (low, high), (other_low, other_high) = src.range, dst.range
    alike = (src.dtype, src.bits) == (dst.dtype, dst.bits)
    return alike and max(other_low - low, high - other_high) <= _CLIPPED * (high - low)

# SPDX-License-Identifier: Apache-2.0
"""The recipes: what calibration records for them, and what they make of it, in order.

A new recipe is a class with two methods, in a file of its own, and a line in the list here; its
arithmetic is in :mod:`torchq.quantization.recipes`. What an override could say, too, goes into the
plan: graphs, leaves and the report follow it. A new kind of adjustment is a field of
:class:`~torchq.convert.settled.Settled`, which ``lower.py`` reads for graphs, and
``converted_leaves.py`` for leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Protocol

from torchq.convert.recipes.concatenations import Concatenations
from torchq.convert.recipes.equalization import Equalization
from torchq.convert.recipes.mixed_bits import MixedBits
from torchq.convert.recipes.outliers import Outliers
from torchq.convert.recipes.rows import RowRule
from torchq.convert.recipes.samples import Samples
from torchq.convert.settled import Seen, Settled
from torchq.convert.watching import Watch, watched_ranges
from torchq.planning.plan import Plan


class Recipe(Protocol):
    """A way to lose less accuracy."""

    def watch(self, plan: Plan) -> Iterator[Watch]:
        """Yield what has to be recorded of the values of a graph."""

    def apply(self, settled: Settled) -> Settled:
        """Return the calibrated plan with the adjustments of this recipe."""


RECIPES: tuple[Recipe, ...] = (
    RowRule(),  # finds what one scale does not suit; planning/coarse.py makes it dynamic or float
    MixedBits(),  # 8 bits for layers that lose too much with 4
    Samples(),  # weights of dynamic linear layers, rounded for their sources
    Concatenations(),  # sources that others read, too: which take the parameters of the result
    Outliers(),  # a few large channels: smoothed, or computed apart
    Equalization(),  # one scale per channel between two layers
)


def watches(plan: Plan) -> Iterator[Watch]:
    """Yield all that calibration is to record for a plan."""
    for watch, _ in watched_ranges(plan).values():
        yield watch
    for recipe in RECIPES:
        yield from recipe.watch(plan)


def settle(seen: Seen) -> Settled:
    """Return a calibrated plan with what the recipes adjust."""
    return reduce(lambda settled, recipe: recipe.apply(settled), RECIPES, Settled(seen))

# SPDX-License-Identifier: Apache-2.0
"""Samples of what dynamic linear layers read, by which a recipe rounds their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import nn

from torchq.capture.ops import Role
from torchq.convert.settled import Settled
from torchq.convert.watching import Watch
from torchq.planning.plan import Plan
from torchq.quantization.config import QConfig
from torchq.quantization.recipes.sample import SourceSample


class Samples:
    """Gives dynamic linear layers a sample of their source, where a configuration asks for it."""

    def watch(self, plan: Plan) -> Iterator[Watch]:
        """Yield the source of each such layer, in all its calls."""
        yield from sampled_sources(plan, _rounds_by_rows).values()

    def apply(self, settled: Settled) -> Settled:
        """Return the plan with the samples."""
        watched = sampled_sources(settled.plan, _rounds_by_rows)
        found = {name: settled.seen.recorder(watch) for name, watch in watched.items()}
        samples = {name: one for name, one in found.items() if isinstance(one, SourceSample)}
        return replace(settled, samples=samples)


def _rounds_by_rows(config: QConfig) -> bool:
    return config.samples_rows


def sampled_sources(plan: Plan, wants: Callable[[QConfig], bool]) -> dict[str, Watch]:
    """Return by name of a layer what samples its source; the layer's own calls share it.

    ``wants`` tells of a layer's configuration whether it takes a sample.
    """
    dynamic = [op for op in plan.ops.values() if op.role is Role.DYNAMIC]
    found: dict[str, Watch] = {}
    for op in dynamic:
        config, linear = plan.config(op.base), op.module
        if config is None or not wants(config) or not isinstance(linear, nn.Linear):
            continue
        if op.base not in found and linear.weight.numel():
            name = f"{plan.prefix}{op.base}"
            nodes = tuple(each.srcs[0] for each in dynamic if each.base == op.base)
            make = partial(SourceSample, linear.in_features, name)
            found[op.base] = Watch("sample", nodes, op.base, make, leaf=name)
    return found

# SPDX-License-Identifier: Apache-2.0
"""A calibrated plan: what was recorded of its values, and what recipes adjust."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor, fx

from torchq.convert.watching import Watch, watched_channels, watched_ranges
from torchq.planning.layers import Layer
from torchq.planning.plan import Plan
from torchq.quantization.config import QConfig
from torchq.quantization.observers import HistogramObserver, Observer, PerChannelMinMaxObserver
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.sample import SourceSample

_VALUES = 64  # of a channel, at least: a range of fewer may be far from that of other data
_T = TypeVar("_T")


class Seen:
    """Records of a calibrated graph, as one of its plans needs them.

    Attributes:
        recorder: watch -> what has recorded; None where nothing has.
        watched: the plan that recorders were made for.
        plan: of the same graph; less may be static in it.
    """

    def __init__(
        self,
        recorder: Callable[[Watch], Observer | None],
        plan: Plan,
        searches: dict[Hashable, object] | None = None,
    ) -> None:
        """Take the records.

        Args:
            recorder: of a calibrated graph, which records no more.
            plan: of that graph; what the plan needs was watched.
            searches: what other plans of the graph have found, and this one adds to.
        """
        self.recorder, self.watched, self.plan = recorder, plan, plan
        self._ranges = watched_ranges(plan)
        self._searches: dict[Hashable, object] = {} if searches is None else searches
        self._known: dict[tuple[fx.Node, tuple[float, float] | None], QParams] = {}

    def with_plan(self, plan: Plan) -> Seen:
        """Return the same records for a plan of the graph in which less is static."""
        other = copy.copy(self)
        other.plan, other._known = plan, {}
        return other

    def qparams(self, node: fx.Node, within: tuple[float, float] | None = None) -> QParams:
        """Return scale and zero point of a value, by its values ``within`` a range.

        Raises:
            RuntimeError: it was never calibrated; the message names the module.
        """
        fixed = self.plan.fixed(node)
        if fixed is not None:
            return fixed.dequantize
        root = self.plan.root(node)
        if (root, within) not in self._known:
            self._known[root, within] = self._searched(root, within)
        return self._known[root, within]

    def _searched(self, root: fx.Node, within: tuple[float, float] | None) -> QParams:
        (watch, config), function = self._ranges[root], self.plan.function_of(root)
        observer = self.recorder(watch)
        table = None if function is None else function.function

        def search() -> QParams:
            assert observer is not None
            return _search(observer, config, within, table)

        name = None if function is None else function.dst.name
        return self.once((watch.key, within, name), search)

    def once(self, key: Hashable, search: Callable[[], _T]) -> _T:
        """Return what a search gives, which runs once for all plans of the graph."""
        if key not in self._searches:
            self._searches[key] = search()
        return self._searches[key]  # type: ignore[return-value]

    def config(self, root: fx.Node) -> QConfig:
        """Return how a group is quantized."""
        return self._ranges[root][1]

    def channels(self, node: fx.Node, axis: int, count: int) -> PerChannelMinMaxObserver | None:
        """Return the ranges of the channels of a value; None where too little was recorded.

        Raises:
            ValueError: there are others than ``count`` of them: a file was changed.
        """
        seen = self.recorder(watched_channels(self.plan, node, axis))
        root = self.plan.root(node)
        if seen is None or root not in self._ranges:
            return None
        of_all = self.recorder(self._ranges[root][0])
        assert isinstance(seen, PerChannelMinMaxObserver)
        if not seen.calibrated or not isinstance(of_all, HistogramObserver):
            return None
        if len(seen.min_value) != count:
            raise ValueError(
                f"torchq.convert: {seen.name!r} must have been calibrated with {count} channels, "
                f"got {len(seen.min_value)}. Was its file changed? Calibrate anew."
            )
        return seen if of_all.counts.sum() >= _VALUES * len(seen.min_value) else None


def _search(
    observer: Observer,
    config: QConfig,
    within: tuple[float, float] | None,
    function: Callable[[Tensor], Tensor] | None,
) -> QParams:
    if within is not None and isinstance(observer, HistogramObserver):
        observer = observer.within(*within)
    options = config.activation_dtype, config.activation_bits, config.symmetric
    if function is not None and isinstance(observer, HistogramObserver):
        return observer.qparams_before(function, *options)
    return observer.qparams(*options)


class Source(NamedTuple):
    """How a layer reads its first source.

    Attributes:
        qparams: parameters of what is divided by the factors.
        whole: of the source as it is.
        fixed: the model itself says them.
        factors: of its channels; None for none.
    """

    qparams: QParams
    whole: QParams
    fixed: bool
    factors: Tensor | None


@dataclass(frozen=True)
class Apart:
    """Layers for a few source channels of a layer: ``second(function(first(src)))``.

    Attributes:
        first: gives these channels.
        function: what becomes of them.
        second: multiplies them; its products are added to the layer's residual.
        qparams: of what is between these.
    """

    first: Layer
    function: Layer
    second: Layer
    qparams: Mapping[fx.Node, QParams]


@dataclass(frozen=True, eq=False)
class Settled:
    """Parameters, factors and notes by which a calibrated graph is lowered.

    Attributes:
        seen: what was recorded, with the plan.
        adjusted: root of a group -> parameters in place of those that its records give.
        results: result of a layer -> one scale per channel, by which the layer quantizes it.
        factors: root of a group -> what the channels of its values are divided by.
        shared: values that several layers read after one quantization.
        apart: result of a layer -> layers for some of its source channels.
        samples: name of a dynamic linear layer -> sample of its source.
        notes: result of a layer -> what the report says of it.
    """

    seen: Seen
    adjusted: Mapping[fx.Node, QParams] = field(default_factory=dict)
    results: Mapping[fx.Node, QParams] = field(default_factory=dict)
    factors: Mapping[fx.Node, Tensor] = field(default_factory=dict)
    shared: frozenset[fx.Node] = frozenset()
    apart: Mapping[fx.Node, Apart] = field(default_factory=dict)
    samples: Mapping[str, SourceSample] = field(default_factory=dict)
    notes: Mapping[fx.Node, str] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """Return the plan, which recipes may have replaced."""
        return self.seen.plan

    def qparams(self, node: fx.Node) -> QParams:
        """Return scale and zero point of a value's group."""
        root = self.plan.root(node)
        return self.adjusted[root] if root in self.adjusted else self.seen.qparams(root)

    def source(self, layer: Layer) -> Source:
        """Return how a layer reads its first source."""
        node, fixed = layer.srcs[0], self.plan.fixed(layer.srcs[0]) is not None
        factors = self.factors.get(self.plan.root(node))
        return Source(self.qparams(node), self.seen.qparams(node), fixed, factors)

# SPDX-License-Identifier: Apache-2.0
"""Names the values that calibration records; graphs (``prepared.py``) and leaves record them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from torch import fx

from torchq.planning.plan import Plan
from torchq.quantization.config import QConfig
from torchq.quantization.observers import Observer, PerChannelMinMaxObserver

KINDS = {"observer": "observers", "sample": "samples", "channels": "channels", "rows": "rows"}
"""Kinds of recorders, each an attribute of a leaf -> where a graph has its own."""


@dataclass(frozen=True)
class Watch:
    """One thing to record. Watches with the same key share their recorder.

    Attributes:
        kind: of KINDS.
        nodes: of the plan's graph; their values are recorded together.
        settings: what the recorder depends on beside these.
        make: returns the recorder.
        leaf: layer whose own recorder of this kind is shared, if it is alike.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    settings: Hashable
    make: Callable[[], Observer]
    leaf: str = ""

    def __post_init__(self) -> None:
        """Refuse a kind that leaves and graphs would not record."""
        if self.kind not in KINDS:
            raise ValueError(
                f"torchq.convert.watching.Watch: kind must be one of {', '.join(KINDS)}, got "
                f"{self.kind!r}. Add it to KINDS: leaves and graphs then record it."
            )

    @property
    def key(self) -> tuple[str, Hashable, tuple[str, ...]]:
        """Return the same for watches of which one recorder suffices."""
        return self.kind, self.settings, tuple(node.name for node in self.nodes)


class Itself:
    """A key that equals itself alone: a QConfig with an observer of the user's may have no hash."""

    def __init__(self, value: object) -> None:
        """Keep the value alive, whose identity counts."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Return whether both hold the same object."""
        return isinstance(other, Itself) and other.value is self.value

    def __hash__(self) -> int:
        """Return the same for the same object."""
        return id(self.value)

    def __deepcopy__(self, memo: dict[int, object]) -> Itself:
        """Return itself: copies of a plan share its configurations."""
        return self


def watched_ranges(plan: Plan) -> dict[fx.Node, tuple[Watch, QConfig]]:
    """Return by root of a group what chooses its scale and zero point, and its configuration."""
    found = {}
    for root, producers in plan.groups.items():
        name, config = plan.group_config(producers)
        make = partial(config.make_observer, name)
        found[root] = Watch("observer", tuple(producers), Itself(config), make), config
    return found


def watched_channels(plan: Plan, node: fx.Node, axis: int) -> Watch:
    """Return what records the range of each channel of a value."""

    def make() -> PerChannelMinMaxObserver:
        observer = PerChannelMinMaxObserver(axis)
        observer.name = f"{plan.prefix}{node.name}"
        return observer

    return Watch("channels", (node,), axis, make)

# SPDX-License-Identifier: Apache-2.0
"""The converted model: a torch.fx GraphModule that keeps its report when copied or pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from torchq.explain import Row

__all__ = ["QuantizedGraph"]


class QuantizedGraph(fx.GraphModule):
    """A graph of quantized modules and torch functions.

    Attributes:
        torchq_report: what was decided for each module; empty if it was loaded from a file.
    """

    # A function of its own: TorchScript reads its source, and GraphModule's gives a warning there.
    def __init__(
        self, root: nn.Module | dict[str, Any], graph: fx.Graph, class_name: str = "QuantizedGraph"
    ) -> None:
        """As a GraphModule; in eval mode, without gradients."""
        super().__init__(root, graph, class_name)
        self.torchq_report = getattr(root, "torchq_report", None)
        self.eval().requires_grad_(False)

    def with_report(self, rows: list[Row] | None) -> QuantizedGraph:
        """Sets the report; returns self."""
        self.torchq_report = rows
        return self

    def _deepcopy_init(self) -> Callable[..., None]:
        return QuantizedGraph.__init__

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedGraph:
        """A copy with the report."""
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, QuantizedGraph)
        return copied.with_report(self.torchq_report)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what a GraphModule pickles, and the report."""
        sources = {n.name: n.meta["source"] for n in self.graph.nodes if "source" in n.meta}
        return _rebuild, (*super().__reduce__(), type(self).__name__, sources, self.torchq_report)


def _rebuild(
    make: Callable[..., fx.GraphModule],
    args: tuple[Any, ...],
    name: str,
    sources: dict[str, str],
    rows: list[Row] | None,
) -> QuantizedGraph:
    plain = make(*args)
    for node in plain.graph.nodes:
        if node.name in sources:
            node.meta["source"] = sources[node.name]
    return QuantizedGraph(plain, plain.graph, name).with_report(rows)

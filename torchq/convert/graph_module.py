# SPDX-License-Identifier: Apache-2.0
"""The converted model: a torch.fx GraphModule that keeps its report when copied or pickled."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from torchq.convert.direct import direct_and_forward
from torchq.convert.graph_data import graph_of, plain_nodes
from torchq.convert.rows import Row
from torchq.nn.inputs import without_gradients


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
        without_gradients(self.eval())

    def recompile(self) -> fx.graph.PythonCode:
        """As a GraphModule; in eager mode the code calls its modules faster."""
        code, cls = super().recompile(), type(self)
        called = {str(node.target) for node in self.graph.find_nodes(op="call_module")}
        given = [str(node.target) for node in self.graph.find_nodes(op="placeholder")]
        cls._plain = cls.forward  # type: ignore[attr-defined]
        direct, cls.forward = direct_and_forward(code.src, code.globals, called, given)
        cls._direct = direct  # type: ignore[attr-defined]
        return code

    def with_report(self, rows: list[Row] | None) -> QuantizedGraph:
        """Set the report; return self."""
        self.torchq_report = rows
        return self

    def _deepcopy_init(self) -> Callable[..., None]:
        return QuantizedGraph.__init__

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedGraph:
        """Return a copy with the report."""
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, QuantizedGraph)
        return copied.with_report(self.torchq_report)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the modules, the graph as data, and the report.

        A GraphModule pickles its code, which torch.fx would trace anew: without example values, so
        that code that acts on sizes fails.
        """
        nodes = plain_nodes(self.graph, ())
        owned = {
            str(n.target): operator.attrgetter(str(n.target))(self)
            for n in self.graph.nodes
            if n.op in ("call_module", "get_attr")
        }
        return _rebuild, (nodes, owned, type(self).__name__, self.torchq_report)


def _rebuild(
    plain: list[tuple[Any, ...]], owned: dict[str, Any], name: str, rows: list[Row] | None
) -> QuantizedGraph:
    return QuantizedGraph(owned, graph_of(plain), name).with_report(rows)

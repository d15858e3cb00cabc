# SPDX-License-Identifier: Apache-2.0
"""Graphs that compute a module's calls in place of its own code, and are not its submodules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchq.nn.leaf import QuantizedLeaf


class Attachment:
    """Base of what stands in ``vars(module)["forward"]``, as a bound method.

    Attributes:
        module: whose calls it takes.
        graph: computes them.
        name: qualified name of the module in the model.
        graph_calls, own_calls: how many calls the graph and the module's own code took.
    """

    module: nn.Module
    graph: nn.Module
    name: str
    graph_calls: int
    own_calls: int

    def conditions(self) -> list[str]:
        """Return what a call must meet to take the graph, as text."""
        raise NotImplementedError


def attachment_of(module: nn.Module) -> Attachment | None:
    """Return what takes the calls of a module; None for a module without a graph."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, Attachment) else None


def graphs_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the graphs of a model by the names of their modules."""
    for name, module in model.named_modules():
        attachment = attachment_of(module)
        if attachment is not None:
            yield name, attachment.graph


def computing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that compute a model's calls, by their names in the float model.

    Those of graphs come first; of the model's own modules only those that no graph has. A
    quantized leaf counts as the layer in it.
    """
    found: dict[str, nn.Module] = {}
    for prefix, graph in graphs_of(model):
        for name, module in graph.named_modules():
            if name:
                found.setdefault(f"{prefix}.{name}" if prefix else name, module)
    layers = {id(m.layer) for m in model.modules() if isinstance(m, QuantizedLeaf)}
    for name, module in model.named_modules():
        if id(module) not in layers:
            own = module.layer if isinstance(module, QuantizedLeaf) else module
            found.setdefault(name, own)
    return found

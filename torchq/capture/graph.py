# SPDX-License-Identifier: Apache-2.0
"""A captured module as a plain graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class Meta:
    """Facts about the value of a node on the example inputs.

    Attributes:
        shape: of a tensor; None for any other value.
        dtype: of a tensor, or of the first one in a sequence.
        is_sequence: whether it is a tuple or list that holds tensors.
        is_number: whether it is an int, a float or a bool.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    is_sequence: bool = False
    is_number: bool = False

    @classmethod
    def of(cls, value: object) -> Meta:
        """Return the facts about a value."""
        if isinstance(value, Tensor):
            return cls(tuple(value.shape), value.dtype)
        if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
            first = next(v for v in value if isinstance(v, Tensor))
            return cls(None, first.dtype, is_sequence=True)
        return cls(is_number=isinstance(value, bool | int | float))


@dataclass
class Captured:
    """A captured module.

    Attributes:
        graph: its nodes have, in ``meta``:

            - "value": a Meta.
            - "aten": name of the ATen call, ``aten::add.Tensor``; None for Python's operators.
            - "owner": qualified name of the leaf module that the call stands for, or "".
            - "scope": qualified name of the module around that.
            - "varying": whether it depends on the inputs, by values or sizes.
            - "static": whether it depends on sizes alone.
            - "positional": whether it depends on sizes and integer inputs alone, as positions do.
            - "sizes": of a tensor, as text, where equal texts mean equal sizes in every call.
            - "phase": of a sine or cosine of data, the largest argument in the example.
            - "line": of the model's code; the same for what one line calls again and again.
            - "constant": the value of what does not vary.
            - "parameters": names of those that this value is made of.
            - "fake": of a constant, the fake quantizer that gives it; ``recognize`` adds this.
        model: owns the modules and parameters that the graph refers to.
        prefix: of what is a submodule of another model, its name there with a dot behind it.
        has_cache: whether its results include keys and values for the caller's cache.
        once: modules that are called with constants only, and whose results the graph holds.
    """

    graph: fx.Graph
    model: nn.Module
    prefix: str = ""
    has_cache: bool = False
    once: set[str] = field(default_factory=set)


def aten_name(node: fx.Node) -> str:
    """Return the name of an ATen call, without its overload; "" of anything else."""
    return str(node.meta.get("aten")).partition("::")[2].partition(".")[0]


def function_name(node: fx.Node) -> str:
    """Return the name of the function that a node calls."""
    return aten_name(node) or str(getattr(node.target, "__name__", node.target))


def parameters_of(node: fx.Node) -> frozenset[str]:
    """Return the parameters that the constants which a node reads are made of."""
    return frozenset().union(*(n.meta.get("parameters", ()) for n in node.all_input_nodes))


def is_reserved(name: str) -> bool:
    """Return whether a qualified name begins with an attribute of every GraphModule."""
    return hasattr(fx.GraphModule, name.partition(".")[0])


def has_tensor(model: nn.Module, name: str) -> bool:
    """Return whether a qualified name is that of a tensor."""
    try:
        return isinstance(operator.attrgetter(name)(model), Tensor)
    except AttributeError:
        return False


def remove_unused(graph: fx.Graph) -> None:
    """Erase nodes that nobody reads."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)

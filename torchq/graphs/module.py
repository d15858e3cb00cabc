# SPDX-License-Identifier: Apache-2.0
"""The converted graph: a torch.fx GraphModule with code of its own for eager mode."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from typing_extensions import Self

from torchq.graphs.data import graph_of, plain_nodes, with_overloads
from torchq.graphs.direct import checks_of, direct_graph, holds, is_check, with_packets
from torchq.graphs.generated import function_of, with_source
from torchq.models.conversions import check_conversions
from torchq.models.inputs import without_gradients
from torchq.models.trees import Args, Kwargs
from torchq.nn.packed_proof import with_proof


def _choosing(plain: Callable[..., object]) -> Callable[..., object]:
    """Return ``forward`` of a graph, with the signature of ``plain``, which is torch.fx's own."""

    @functools.wraps(plain)
    def forward(self: QuantizedGraph, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        # torch.jit.trace would take sizes for tensors
        if self._check is not None and torch._C._get_tracing_state() is None:
            self._check(*args, **kwargs)
        return self._direct(*args, **kwargs)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    return forward


class _Steps(fx.Interpreter):
    """Runs a graph without its checks, and remembers at which node it is."""

    node: fx.Node

    def run_node(self, n: fx.Node) -> object:
        self.node = n
        return None if is_check(n) else super().run_node(n)


class _Scripted(fx.GraphModule):
    """Holds a graph in the form that TorchScript compiles."""

    # A function of its own: TorchScript reads its source, and GraphModule's gives a warning there.
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph, type(root).__name__)
        self.eval()

    def recompile(self) -> fx.graph.PythonCode:
        code = super().recompile()
        with_source(type(self).forward)
        return code


class QuantizedGraph(fx.GraphModule):
    """A graph of quantized modules and torch functions.

    Each graph has a class of its own, as in torch.fx, with functions that are made of it.

    Attributes:
        _plain: runs it as torch.fx does.
        _run: runs it in eager mode, past its modules (direct.py).
        _check: raises for arguments that do not meet its guards; None where it has no checks.
    """

    _plain: Callable[..., object]
    _run: Callable[..., object]
    _check: Callable[..., object] | None

    def __init__(
        self,
        root: nn.Module | dict[str, object],
        graph: fx.Graph,
        class_name: str = "QuantizedGraph",
    ) -> None:
        """As a GraphModule; in eval mode, without gradients."""
        super().__init__(root, with_overloads(graph), class_name)
        without_gradients(self.eval())

    def recompile(self) -> fx.graph.PythonCode:
        """As a GraphModule; in eager mode the code calls its modules faster."""
        code, cls = super().recompile(), type(self)
        read = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        tensors = {
            n: held for held in ("_buffers", "_parameters") for n in read & vars(self)[held].keys()
        }
        checks = checks_of(self.graph)
        cls._plain = with_source(cls.forward)
        cls._run = function_of(direct_graph(self.graph, tensors))
        cls._check = None if checks is None else function_of(checks)
        cls.forward = _choosing(cls._plain)
        return code

    def _direct(self, *args: object, **kwargs: object) -> object:
        """Run the graph in eager mode, for a call that meets its guards."""
        try:
            return self._run(*args, **kwargs)
        except KeyError:
            called = {str(node.target) for node in self.graph.find_nodes(op="call_module")}
            if holds(self, called):
                raise
            return self._plain(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if name := self._failing(error, args, kwargs):
                raise type(error)(f"{error} The module is '{name}'.") from None
            raise

    def _failing(self, error: Exception, args: Args, kwargs: Kwargs) -> str:
        """Return the name of the module that an op's error comes from, or "".

        The graph runs once more, node by node: calls that do not fail cost nothing more. State
        that the call changes is changed again.
        """
        if not str(error).startswith("torchq."):
            return ""
        steps = _Steps(self)
        try:
            steps.run(*inspect.signature(self.forward).bind(*args, **kwargs).args)
        except Exception:  # the first error is the one to tell
            node = getattr(steps, "node", None)
            return str(node.target) if node is not None and node.op == "call_module" else ""
        return ""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if recurse:
            check_conversions(self, fn)
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what TorchScript compiles, which checks packed weights when it is loaded."""
        return with_proof(_Scripted(self, with_packets(self.graph)))

    def _deepcopy_init(self) -> Callable[..., None]:
        return QuantizedGraph.__init__

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the modules, and the graph as data.

        A GraphModule pickles its code, which torch.fx would trace anew: without example values, so
        that code that acts on sizes fails.
        """
        nodes = plain_nodes(self.graph, ())
        owned = {
            str(n.target): operator.attrgetter(str(n.target))(self)
            for n in self.graph.nodes
            if n.op in ("call_module", "get_attr")
        }
        return _rebuild, (nodes, owned, type(self).__name__)


def _rebuild(
    plain: list[tuple[object, ...]], owned: dict[str, object], name: str
) -> QuantizedGraph:
    return QuantizedGraph(owned, graph_of(plain), name)

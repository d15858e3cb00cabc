# SPDX-License-Identifier: Apache-2.0
"""A user's graph as a plain module: copies and pickles of a GraphModule drop what is attached."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, cast, overload

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from torchq.graphs.data import graph_of, plain_nodes
from torchq.models.inputs import Model


def is_exported(module: nn.Module) -> bool:
    """Return whether a module is that of an exported program, which has no other mode."""
    return any(cls.__name__ == "_StatefulGraphModule" for cls in type(module).__mro__)


class GraphCode(nn.Module):
    """Runs the graph of a GraphModule on modules, parameters and buffers of the same names."""

    def __init__(self, source: fx.GraphModule) -> None:
        """Take the parts of ``source`` themselves."""
        super().__init__()
        internal = vars(fx.GraphModule(nn.Module(), fx.Graph())).keys() - vars(self).keys()
        vars(self).update({k: v for k, v in vars(source).items() if k not in internal})
        self._code, self._sizes = source.graph, list[dict[int, int]]()
        self._call = inspect.signature(source.forward)
        if is_exported(source):
            self._take_checks()
        self.eval()

    def _take_checks(self) -> None:
        """Check fixed sizes here: the functions that an exported program checks with are local."""
        for hooks in (self._forward_hooks, self._forward_pre_hooks):
            hooks.clear()
        self._forward_hooks_always_called.clear()
        self._forward_pre_hooks_with_kwargs.clear()
        for node in self._code.find_nodes(op="call_module", target="_guards_fn"):
            self._code.erase_node(node)
        self._modules.pop("_guards_fn", None)
        for node in self._code.find_nodes(op="placeholder"):
            shape = enumerate(getattr(node.meta.get("val"), "shape", ()))
            self._sizes.append({d: size for d, size in shape if isinstance(size, int)})

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the graph.

        Raises:
            RuntimeError: a size differs from the one that a program was exported for.
        """
        bound = self._call.bind(*args, **kwargs)
        bound.apply_defaults()
        given = [*bound.args, *bound.kwargs.values()]
        for i, (value, sizes) in enumerate(zip(tree_leaves(given), self._sizes, strict=False)):
            for d, size in sizes.items():
                message = f"torchq: dim {d} of input {i} must be {size}: it was exported for that"
                torch._check(value.shape[d] == size, lambda message=message: message)
        return fx.Interpreter(self, graph=self._code).run(*given)

    def __getstate__(self) -> dict[str, object]:
        """Keep the graph as data, which pickle takes."""
        code = plain_nodes(self._code, ()), self._code._codegen
        return {**vars(self), "_code": code}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the graph again."""
        nodes, codegen = state["_code"]
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._code = graph_of(nodes)
        self._code.set_codegen(codegen)


P = ParamSpec("P")


class TakesPrograms(Protocol[P]):
    """A function of a model, or of an exported program; what it returns of one is a module."""

    @overload
    def __call__(self, model: Model, *args: P.args, **kwargs: P.kwargs) -> Model: ...
    @overload
    def __call__(self, model: ExportedProgram, *args: P.args, **kwargs: P.kwargs) -> nn.Module: ...


def takes_programs(function: Callable[Concatenate[Model, P], Model]) -> TakesPrograms[P]:
    """Return a function itself, which type checkers then let take exported programs."""
    return cast("TakesPrograms[P]", function)


def as_module(model: object) -> Any:
    """Return the module of an exported program; anything else as it is."""
    return model.module() if isinstance(model, ExportedProgram) else model


def with_code(model: nn.Module) -> nn.Module:
    """Return a copy of a model with a :class:`GraphCode` for each GraphModule in it."""
    if isinstance(model, fx.GraphModule):
        return GraphCode(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, fx.GraphModule):
            model.set_submodule(name, GraphCode(module))
    return model

# SPDX-License-Identifier: Apache-2.0
"""A user's graph as a plain module: copies and pickles of a GraphModule drop what is attached."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from torchq.convert.graph_data import graph_of, plain_nodes


class GraphCode(nn.Module):
    """Runs the graph of a GraphModule on modules, parameters and buffers of the same names."""

    def __init__(self, source: fx.GraphModule) -> None:
        """Takes the parts of ``source`` themselves."""
        super().__init__()
        internal = vars(fx.GraphModule(nn.Module(), fx.Graph())).keys() - vars(self).keys()
        given = {key: value for key, value in vars(source).items() if key not in internal}
        vars(self).update(given, training=False)
        for name in ("eval", "train"):
            vars(self).pop(name, None)
        self._code = source.graph
        self._parameters_of_call = inspect.signature(source.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph."""
        bound = self._parameters_of_call.bind(*args, **kwargs)
        bound.apply_defaults()
        return fx.Interpreter(self, graph=self._code).run(*bound.args, *bound.kwargs.values())

    def __getstate__(self) -> dict[str, Any]:
        """Keeps the graph as data, which pickle takes."""
        code = plain_nodes(self._code, ()), self._code._codegen
        return {**vars(self), "_code": code}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the graph again."""
        nodes, codegen = state["_code"]
        super().__setstate__(state)
        self._code = graph_of(nodes)
        self._code.set_codegen(codegen)


def as_module(model: Any) -> Any:
    """Returns the module of an exported program; anything else as it is."""
    return model.module() if isinstance(model, ExportedProgram) else model


def with_code(model: nn.Module) -> nn.Module:
    """Returns a copy of a model with a :class:`GraphCode` for each GraphModule in it."""
    if isinstance(model, fx.GraphModule):
        return GraphCode(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, fx.GraphModule):
            model.set_submodule(name, GraphCode(module))
    return model

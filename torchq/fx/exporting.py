# SPDX-License-Identifier: Apache-2.0
"""Arguments that ``torch.export`` was given by keyword reach the ones of their names.

It does not call a GraphModule but interprets its graph, with the values of the keywords behind the
positional arguments, in the order of the call: another one of the same shape would pass unseen.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import fx


class ByName(fx.graph.CodeGen):
    """What an Interpreter asks for the inputs of a graph."""

    def process_inputs(self, *args: Any) -> Any:
        """The arguments of ``forward`` in their order, with its defaults.

        Raises:
            RuntimeError: it cannot be seen which argument is which.
            TypeError: they are not those of ``forward``.
        """
        if not torch.compiler.is_exporting():
            return args
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("torch.fx.") and frame.f_back:
            frame = frame.f_back
        model: Any = frame.f_locals.get("mod")
        named: Any = frame.f_locals.get("kwargs")
        known = isinstance(model, fx.GraphModule) and isinstance(named, dict)
        if known and model.graph._codegen is self and len(named) <= len(args):
            count = len(args) - len(named)
            if all(a is b for a, b in zip(args[count:], named.values(), strict=True)):
                bound = inspect.signature(model.forward).bind(*args[:count], **named)
                bound.apply_defaults()
                return bound.args
        raise RuntimeError(
            "torchq: torch.export interprets a converted model's graph in a way that does not tell "
            "which argument is which. Call torch.export.export(..., strict=True)."
        )

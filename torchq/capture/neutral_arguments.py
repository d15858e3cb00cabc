# SPDX-License-Identifier: Apache-2.0
"""Finds options of a call that leave its result as it is, such as ``return_dict=True``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchq.capture.exported import Exported
from torchq.models.state import same_numbers, twin
from torchq.models.trees import Args, Kwargs, copied

_OPTIONS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
"""Options of models of transformers. ``generate`` gives them to the encoder in each call."""
_Flat = tuple[list[object], pytree.TreeSpec]


def neutral_options(
    module: nn.Module, exported: Exported, calls: Iterable[Sequence[Tensor]]
) -> dict[str, list[object]]:
    """Return options, and values of them that change nothing in a captured call.

    The module itself decides: it is called with the usual values of all, and with None for all.

    Args:
        module: the module that was captured.
        exported: its example.
        calls: tensors of calls that are like the example, smaller ones first. The first call that
            the module takes is used.
    """
    parameters = inspect.signature(type(module).forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    usual = {
        name: value
        for name, value in _OPTIONS.items()
        if (takes_all or name in parameters)
        and any(exported.kwargs.get(name) is known for known in (None, value))
    }
    for tensors in calls if usual else ():
        args, kwargs = exported.call(tensors)
        found: dict[str, list[object]] = {}
        with contextlib.suppress(Exception):  # of the module's own code
            expected = _result(module, args, kwargs)
            others = {name: value for name, value in kwargs.items() if name not in usual}
            if len(others) < len(kwargs) and not _is_same(_result(module, args, others), expected):
                return {}  # a call without them is another one
            for options in (usual, dict.fromkeys(usual)):
                with contextlib.suppress(Exception):
                    if _is_same(_result(module, args, others | options), expected):
                        for name, value in options.items():
                            found.setdefault(name, []).append(value)
            return found
    return {}


def _result(module: nn.Module, args: Args, kwargs: Kwargs) -> _Flat:
    args, kwargs = copied(args, kwargs)
    with torch.no_grad(), same_numbers():
        return pytree.tree_flatten(twin(module)(*args, **kwargs))


def _is_same(first: _Flat, second: _Flat) -> bool:
    """Return whether results have the same structure and the same values."""
    (leaves, spec), (others, structure) = first, second
    return bool(spec == structure) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )

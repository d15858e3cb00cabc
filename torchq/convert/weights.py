# SPDX-License-Identifier: Apache-2.0
"""Parameters that a model multiplies its data by, whatever code does so, and what of them is int8.

Layers are known by their class, and products by the table of ATen calls. Code that is neither, as
experts of a mixture with weights of their own, is counted here all the same: the run of the float
model that :mod:`torchq.convert.swap.calls` records tells which parameters its products read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchq.models.trees import Args, Kwargs
from torchq.nn.float_weight import written
from torchq.report.rows import Row

_OPERANDS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), (1, 2)),
    "convolution": (0, 1),
    "_trilinear": (0, 1, 2),
    "mkldnn_rnn_layer": (0, 1, 2),
    "_native_multi_head_attention": (0, 5, 7),
}
"""ATen calls that multiply -> which of their arguments."""
_CHOOSE = ("index", "index_select")
"""Calls that choose some of several matrices by data."""


class ParameterWritten(RuntimeError):
    """A model writes to its parameters when it is called; raised before the first write."""


def with_names(rows: Iterable[Row], first: Callable[[str], str]) -> list[Row]:
    """Return rows whose weights have the first of their names."""
    return [replace(row, weights=tuple(dict.fromkeys(map(first, row.weights)))) for row in rows]


def first_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that gives the first of several names of one parameter.

    Names of projections that an attention module was split into are those of what was split.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    firsts = {id(p): name for name, p in model.named_parameters()}

    def first(name: str) -> str:
        if name not in every and (match := re.fullmatch(r"(.+\.|)([qkv]_proj)\.weight", name)):
            joined = f"{match[1]}in_proj_weight"
            name = joined if joined in every else f"{match[1]}{match[2]}_weight"
        return firsts[id(every[name])] if name in every else name

    return first


class Products(TorchDispatchMode):
    """Counts multiplications of values that depend on the inputs by those of parameters.

    Tensors are known by their memory. What several parameters give without a product is counted
    for each of them: the two of a weight norm, say.

    Attributes:
        macs: parameter -> multiplications by it.
        wrote: whether the model was about to write to its parameters.
    """

    def __init__(self, model: nn.Module, inputs: object, keep: bool) -> None:
        """``keep``: raise before the first write to the memory of a parameter."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.wrote = False
        self._kept = {_memory(p) for p in model.parameters()} if keep else set()
        self.macs: Counter[str] = Counter()
        self._names: dict[int, frozenset[str]] = {}
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # biases are in constants that data is multiplied by
                key = _memory(parameter)
                self._names[key] = self._names.get(key, frozenset()) | {name}
        self._varying = {_memory(leaf) for leaf in _tensors(inputs)}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run a call and count."""
        kwargs = kwargs or {}
        outs = list(written(func, args, kwargs)) if self._kept else []
        if any(_memory(x) in self._kept for x in _tensors(outs)):
            self.wrote = True
            raise ParameterWritten
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        inputs, at = list(_tensors((args, kwargs))), _OPERANDS.get(name)
        if at is not None:
            self._count(name, [args[i] for i in at], tree_leaves(result)[0], args)
        chosen = (
            self._names.get(_memory(args[0])) if name in _CHOOSE and args[0].dim() > 2 else None
        )
        varying = chosen is None and any(_memory(x) in self._varying for x in inputs)
        origins = [] if at else [self._names.get(_memory(x), frozenset()) for x in inputs]
        for out in _tensors(result):
            key = _memory(out)
            (self._varying.add if varying else self._varying.discard)(key)
            self._names.pop(key, None)
            if not varying:
                self._names[key] = chosen or frozenset().union(*origins)
        return result

    def _count(self, name: str, operands: list[Tensor], dst: Tensor, args: Args) -> None:
        if not any(_memory(x) in self._varying for x in operands):
            return
        for operand in operands:
            for parameter in self._names.get(_memory(operand), ()):
                self.macs[parameter] += _macs(name, operands, operand, dst, args)


def _macs(name: str, operands: list[Tensor], weight: Tensor, dst: Tensor, args: Args) -> int:
    """Return how often a call multiplies."""
    src = operands[0]
    if name == "convolution":
        transposed = bool(args[6])
        return (src if transposed else dst).numel() * weight[0].numel()
    if name in ("_trilinear", "mkldnn_rnn_layer", "_native_multi_head_attention"):
        return weight.numel() * (src.numel() // src.shape[-1])
    return dst.numel() * src.shape[-1]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: object) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))

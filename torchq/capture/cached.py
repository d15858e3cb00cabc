# SPDX-License-Identifier: Apache-2.0
"""Calls of language models with a cache of keys and values, as ``generate`` of transformers makes.

A graph takes tensors and gives tensors. So a call becomes one that leaves nothing out: a mask of
all tokens, positions, indices of the logits to keep, and the keys and values of the cache, which
have no tokens where it is empty. One graph takes the prompt, each step behind it, and chunks of
several tokens. The keys and values that it gives are put into the cache of the caller.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchq.capture.exported import Exported
from torchq.capture.guards import Example, Restore
from torchq.models.inputs import are_close, float_tensors
from torchq.models.state import same_numbers, twin
from torchq.models.trees import Args, Call, Kwargs

_IDS, _MASK, _POSITIONS, _KEEP = "input_ids", "attention_mask", "position_ids", "logits_to_keep"
_CACHES = ("cache", "past_key_values")
"""The parameter for the cache, and the field of results, in newer and older transformers."""
_COUNT, _PAST = 4, 5
"""Tokens of the captured call, and of its cache: few, since the float model runs some 20 times."""
_LIBRARY = "transformers.cache_utils"
_Given = dict[str, Any]
"""Arguments of a call by their names."""


@dataclass(frozen=True)
class _Form:
    """How a language model takes a cache.

    Attributes:
        parameters: those of its forward, without self.
        cache: the one that takes the cache.
        kinds: heads, elements and dtype, of keys and values in turn, layer by layer.
    """

    parameters: tuple[str, ...]
    cache: str
    kinds: tuple[tuple[int, int, torch.dtype], ...]

    def named(self, args: Args, kwargs: Kwargs) -> _Given:
        """Return the arguments of a call by their names.

        Raises:
            TypeError: there are too many of them, or one is given twice.
        """
        given = dict(zip(self.parameters, args, strict=False))
        for name, value in kwargs.items():
            known = self.cache if name in _CACHES else name  # transformers takes both names
            if known in given:
                raise TypeError(f"its argument '{known}' is given twice")
            given[known] = value
        if len(args) > len(self.parameters):
            raise TypeError("it has more arguments than the model has parameters")
        return given

    def tensors(self, given: _Given) -> _Given | None:
        """Return the call with tensors in place of the cache and of what it leaves out.

        None where the cache or a tensor is none that a graph takes.
        """
        ids, mask, positions = (given.get(name) for name in (_IDS, _MASK, _POSITIONS))
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return None
        cache, (batch, count) = given.get(self.cache), ids.shape
        past = self._past(cache, batch)
        if past is None:
            return None
        length = past[0].shape[2]
        if mask is None:
            if cache is None and positions is not None:  # they may tell sequences in a row apart
                return None
            mask = ids.new_ones(batch, length + count)
        if positions is None:
            positions = torch.arange(length, length + count, device="cpu").expand(batch, count)
        for tensor, rows, size in ((mask, {batch}, length + count), (positions, {1, batch}, count)):
            if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.dim() != 2:
                return None
            if tensor.shape[0] not in rows or tensor.shape[1] != size:
                return None
        found = {name: value for name, value in given.items() if name != "use_cache"}
        found |= {_MASK: mask.long(), _POSITIONS: positions.expand(batch, count), self.cache: past}
        if _KEEP in self.parameters:
            keep = given.get(_KEEP, 0)
            found[_KEEP] = torch.arange(count, device="cpu")[-keep:] if type(keep) is int else keep
        return found

    def _past(self, cache: object, batch: int) -> list[Tensor] | None:
        """Return the keys and values of a cache; None where it is no plain one of this model."""
        tensors = [] if cache is None else _tensors(cache)
        if tensors is None or len(tensors) not in (0, len(self.kinds)):
            return None
        if tensors:
            return tensors
        return [
            torch.empty(batch, heads, 0, size, dtype=kind, device="cpu")
            for heads, size, kind in self.kinds
        ]

    def results(self, output: Any, tensors: list[Tensor], given: _Given) -> object:
        """Return what the model gives, once its keys and values are in the cache of the caller."""
        cache = given.get(self.cache)
        if cache is None and given.get("use_cache") is False:
            return output
        if cache is None:
            cache = vars(sys.modules[_LIBRARY])["DynamicCache"]()
        for i, (keys, values) in enumerate(zip(tensors[::2], tensors[1::2], strict=True)):
            layer = cache.layers[i] if i < len(cache.layers) else None
            if layer is not None and layer.is_initialized:
                layer.keys, layer.values = keys, values
            else:
                cache.update(keys, values, i)
        return type(output)(**output, **{self.cache: cache})


def _tensors(cache: Any) -> list[Tensor] | None:
    """Return keys and values in turn, layer by layer; [] for an empty cache.

    None for other classes, and for layers that hold anything but the keys and values of all tokens.
    """
    known = vars(sys.modules.get(_LIBRARY, object))
    if type(cache) is not known.get("DynamicCache") or getattr(cache, "offloading", False):
        return None
    layers = getattr(cache, "layers", None)
    if layers is None or any(type(layer) is not known.get("DynamicLayer") for layer in layers):
        return None
    full = [layer for layer in layers if layer.get_seq_length()]
    if full and len(full) < len(layers):
        return None
    return [tensor for layer in full for tensor in (layer.keys, layer.values)]


@dataclass
class CachedExample(Example):
    """Conditions for a call of a language model to take the graph: see the module.

    Raises:
        ValueError: no parameter of the model has keys and values: a file was changed.
    """

    traceable = False  # the positions that it makes would stay those of the traced sizes

    def __post_init__(self) -> None:
        """Check what a file may have changed."""
        names = [name for name in _CACHES if name in self.signature.parameters]
        tensors = self.values.get(names[0]) if names else None
        ranks = [len(a.shape) for a in tensors] if isinstance(tensors, list) else []
        if not ranks or len(ranks) % 2 or {*ranks} != {4} or self.structure is None:
            raise ValueError(
                f"torchq.load: {self.cls.__name__} must take the keys and values of a cache, got "
                "other arguments. Was the file written by torchq.save?"
            )

    def _form(self) -> _Form:
        names = tuple(self.signature.parameters)[1:]
        cache = next(name for name in _CACHES if name in names)
        tensors: Any = self.values[cache]
        kinds = [(a.shape[1], a.shape[3], a.dtype) for a in tensors]
        return _Form(names, cache, tuple(kinds))

    def chooser(self, traced: bool = False) -> Callable[..., tuple[Tensor, ...] | None]:
        """Return a function with the module's signature: the graph's tensors, or None."""
        choose, form = super().chooser(traced), self._form()

        def of_tensors(*args: object, **kwargs: object) -> tuple[Tensor, ...] | None:
            call = form.tensors(form.named(args, kwargs))
            return None if call is None else choose(**call)

        return of_tensors

    def restore(self) -> Restore:
        """Return the function that puts keys and values into the cache of a call."""
        restore, form = super().restore(), self._form()

        def of_call(result: object, args: Args, kwargs: Kwargs) -> object:
            output, tensors = cast(Any, restore(result, args, kwargs))
            return form.results(output, tensors, form.named(args, kwargs))

        return of_call

    def why(self, args: Args, kwargs: Kwargs) -> str:
        """Return what of a call does not meet the guards."""
        form = self._form()
        try:
            call = form.tensors(form.named(args, kwargs))
        except TypeError as error:
            return str(error)
        if call is None:
            return "its cache, mask or positions are of other kinds than those of generate"
        return super().why((), call)


def cached_call(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[nn.Module, Call] | None:
    """Return a language model as a module that takes tensors alone, and a call of that.

    None where a call of the model gives no plain cache, and where the module gives other results.
    """
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    cache = next((name for name in _CACHES if name in names), None)
    if cache is None or any(name not in names for name in (_IDS, _MASK, _POSITIONS)):
        return None
    try:
        with torch.no_grad(), same_numbers():
            return _taken(module, _Form(names, cache, ()), args, kwargs)
    except Exception:  # of the model's own code, or it is no such model
        return None


def _taken(
    module: nn.Module, form: _Form, args: Args, kwargs: Kwargs
) -> tuple[nn.Module, Call] | None:
    """Return what :func:`cached_call` returns; where a model is no language model, this fails."""
    model, given, cache = twin(module), form.named(args, kwargs), form.cache
    known = {_IDS, _MASK, _POSITIONS, _KEEP, cache, "use_cache"}
    options = {name: value for name, value in given.items() if name not in known}
    ids: Tensor = given[_IDS]
    if ids.dim() != 2 or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(options)):
        return None
    tokens = ids.tile(2, _PAST)[:2]  # no two sizes of the example are equal
    first = {**options, _IDS: tokens[:, :_COUNT]}
    padded = torch.ones_like(tokens[:, :_COUNT])
    padded[0, 0] = 0  # of which a model may make other positions
    asked = {"use_cache": given["use_cache"]} if "use_cache" in given else {}
    own, tensors = _without(model(**first, **asked, **{_MASK: padded}), cache)
    form = replace(form, kinds=tuple((t.shape[1], t.shape[3], t.dtype) for t in tensors))
    before = model(**{_IDS: tokens[:, :_PAST], "use_cache": True})[cache]
    example, same = form.tensors({**first, cache: before}), form.tensors({**first, _MASK: padded})
    taker = _taker(model, cache)
    if example is None or same is None:
        return None
    found = float_tensors(twin(taker)(**same))
    return (taker, ((), example)) if are_close(found, [*float_tensors(own), *tensors]) else None


def _without(output: Any, cache: str) -> tuple[object, list[Tensor]]:
    """Return what a model gives without its cache, and the keys and values in that.

    Raises:
        TypeError: it gives no plain cache.
    """
    tensors = _tensors(output[cache])
    if not tensors:
        raise TypeError("no plain cache")
    return type(output)(**{k: v for k, v in output.items() if k != cache}), tensors


def _taker(model: nn.Module, cache: str) -> nn.Module:
    """Return a model with the same parts that takes and gives keys and values, and no cache.

    Its class is one of its own, so that all its parts have the names that they have in the model.
    """
    cls = type(model)

    def forward(self: nn.Module, **call: Any) -> tuple[object, list[Tensor]]:
        pairs = zip(call[cache][::2], call[cache][1::2], strict=True)
        held = vars(sys.modules[_LIBRARY])["DynamicCache"](list(pairs))
        given = {**call, cache: held, "use_cache": True}
        return _without(cls.forward(self, **given), cache)

    kind: type[nn.Module] = type(cls.__name__, (cls,), {"forward": forward})
    made = kind.__new__(kind)
    vars(made).update(vars(model))
    return made


def fix_kinds(exported: Exported) -> None:
    """Note that heads and elements of keys and values are fixed, which torch.export has guards for.

    An empty cache has tensors of these sizes.
    """
    tensors = exported.tensors
    for i, argument in enumerate(exported.arguments):
        if len(argument.shape) == 4:
            (_, heads, _, size) = tensors[i].shape
            exported.arguments[i] = replace(argument, shape=(None, heads, None, size))


def smaller_calls(exported: Exported) -> Iterator[list[Tensor]]:
    """Yield calls of sizes that torch.export does not vouch for: of one, and of no cached token."""
    given = exported.kwargs
    cache: Any = next(name for name in _CACHES if name in given)
    every, past = cast(Any, given[_IDS]), cast(Any, given[cache])
    for batch, length, count, kept in (
        *((1, 0, every.shape[1], 1), (1, 0, 1, 1), (1, 1, 1, 1), (1, 3, 1, 1)),
        *((2, 3, 1, 1), (1, 3, 2, 2)),
    ):
        call = given | {
            _IDS: every[:batch, :count],
            _MASK: every.new_ones(batch, length + count),
            _POSITIONS: torch.arange(length, length + count, device="cpu").expand(batch, count),
            cache: [t[:batch, :, :length] for t in past],
        }
        if _KEEP in given:
            call[_KEEP] = torch.arange(count, device="cpu")[-kept:]
        leaves = pytree.tree_leaves(((), call))
        yield [leaves[argument.index].contiguous() for argument in exported.arguments]

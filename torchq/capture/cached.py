# SPDX-License-Identifier: Apache-2.0
"""Calls of language models with a cache of keys and values, as ``generate`` of transformers makes.

A graph takes tensors and gives tensors. So a call becomes one that leaves nothing out: a mask of
all tokens, positions, indices of the logits to keep, and the keys and values of the cache, which
have no tokens where it is empty. One graph takes the prompt, each step behind it, and chunks of
several tokens. The keys and values that it gives are put into the cache of the caller.

A layer with a sliding window keeps only its last keys and values. So a graph may take fewer of them
than there were tokens; the difference is the position of the first.

A decoder that attends to the states of an encoder has keys and values of them in its cache, too.
Its graph puts those of the states that it is given behind the cached ones. So the first call gives
all states, and a later one none, which leaves the cached ones as they are.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchq.capture.caches import (
    Cache,
    caches_of,
    decompress,
    fill,
    new_cache,
    read_cache,
    see_window,
    tensors_of,
)
from torchq.capture.exported import Exported
from torchq.capture.graph import aten_name
from torchq.capture.guards import Example, Restore
from torchq.capture.likeness import Argument
from torchq.capture.terms import Size
from torchq.models.inputs import are_close, float_tensors
from torchq.models.state import same_numbers, twin
from torchq.models.trees import Args, Call, Kwargs

_IDS, _MASK, _POSITIONS, _KEEP = "input_ids", "attention_mask", "position_ids", "logits_to_keep"
_STATES, _STATES_MASK = "encoder_hidden_states", "encoder_attention_mask"
_CACHES = ("cache", "past_key_values")
"""The parameter for the cache, and the field of results, in newer and older transformers."""
_COUNT, _PAST = 4, 5
"""Tokens of the captured call, and of its cache: few, since the float model runs some 20 times."""
_SEEN, _ALL = 3, 10
"""States of the encoder in the cache of the captured call, and all of them."""
_Given = dict[str, Any]
"""Arguments of a call by their names."""


@dataclass(frozen=True)
class _Form:
    """How a language model takes a cache.

    Attributes:
        parameters: those of its forward, without self.
        cache: the one that takes the cache.
        kinds: heads, elements and dtype, of keys and values in turn, layer by layer.
        windows: how many tokens each one sees, layer by layer, None for all; () if all do so.
        crossed: whether it attends to the states of an encoder. The cache has keys and values of
            them, too, and ``kinds`` those behind all others.
    """

    parameters: tuple[str, ...]
    cache: str
    kinds: tuple[tuple[int, int, torch.dtype], ...] = ()
    windows: tuple[int | None, ...] = ()
    crossed: bool = False

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
        if past is None or (self.crossed and cache is not None and given.get("use_cache") is False):
            return None
        length, tensors = past
        if mask is None:
            if cache is None and positions is not None:  # they may tell sequences in a row apart
                return None
            mask = ids.new_ones(batch, length + count)
        if not _fits(mask, {batch}, length + count):
            return None
        found = {name: value for name, value in given.items() if name != "use_cache"}
        found |= {_MASK: mask.long(), self.cache: [*tensors, *self.windows]}
        if _POSITIONS in self.parameters:
            if positions is None:
                positions = torch.arange(length, length + count, device="cpu").expand(batch, count)
            if not _fits(positions, {1, batch}, count):
                return None
            found[_POSITIONS] = positions.expand(batch, count)
        if _KEEP in self.parameters:
            keep = given.get(_KEEP, 0)
            found[_KEEP] = torch.arange(count, device="cpu")[-keep:] if type(keep) is int else keep
        return self._with_states(found, tensors[-1].shape[2]) if self.crossed else found

    def _with_states(self, found: _Given, cached: int) -> _Given | None:
        """Return the call with those states of the encoder that are not in the cache."""
        states, mask = found.get(_STATES), found.get(_STATES_MASK)
        if not isinstance(states, Tensor) or states.dim() != 3:
            return None
        batch, length, _ = states.shape
        if length == 0 or cached not in (0, length):
            return None
        if _STATES_MASK in self.parameters:
            mask = found[_IDS].new_ones(batch, length) if mask is None else mask
            if not _fits(mask, {batch}, length):
                return None
            found[_STATES_MASK] = mask.long()
        return found | {_STATES: states[:, cached:]}

    def _past(self, cache: Cache | None, batch: int) -> tuple[int, list[Tensor]] | None:
        """Return how many tokens a cache has seen, and its keys and values.

        None where it is no plain one of this model, or lacks keys that the model reads.
        """
        caches: Sequence[Cache | None] = [None] * (1 + self.crossed)
        if cache is not None:
            caches = caches_of(cache)
        if len(caches) != 1 + self.crossed:
            return None
        size = len(self.kinds) // len(caches)
        own = read_cache(caches[0], self.kinds[:size], self.windows, batch)
        if own is None or not self.crossed:
            return own
        cross = read_cache(caches[1], self.kinds[size:], (), batch)
        if cross is None:
            return None
        if cache is not None:
            updated = {bool(cache.is_updated.get(i)) for i in range(size // 2)}
            if updated != {cross[0] > 0}:
                return None
        return own[0], [*own[1], *cross[1]]

    def results(self, output: dict[str, object], tensors: list[Tensor], given: _Given) -> object:
        """Return what the model gives, once its keys and values are in the cache of the caller."""
        cache = given.get(self.cache)
        if cache is None and given.get("use_cache") is False:
            return output
        if cache is None:
            cache = new_cache(tensors, self.windows, self.crossed)
        else:
            fill(cache, tensors, given[_IDS].shape[1])
        return type(output)(**output, **{self.cache: cache})


def _fits(tensor: object, rows: set[int], size: int) -> bool:
    """Return whether a value is a mask or positions, with a row for each sequence."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.dim() != 2:
        return False
    return tensor.shape[0] in rows and tensor.shape[1] == size


def _split(past: Sequence[object]) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the keys and values that a graph takes for a cache, and the windows behind them."""
    tensors = [part for part in past if isinstance(part, Tensor | Argument)]
    return tensors, tuple(past[len(tensors) :])


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
        past = self.values.get(names[0]) if names else None
        tensors, windows = _split(past if isinstance(past, list) else [])
        ranks = [len(a.shape) for a in tensors]
        known = all(w is None or (type(w) is int and w > 0) for w in windows)
        parts = 4 if isinstance(self.values.get(_STATES), Argument) else 2
        known = known and len(windows) in (0, len(ranks) / 2) and len(ranks) % parts == 0
        if not known or {*ranks} != {4} or self.structure is None:
            raise ValueError(
                f"torchq.load: {self.cls.__name__} must take the keys and values of a cache, got "
                "other arguments. Was the file written by torchq.save?"
            )

    def _form(self) -> _Form:
        names = tuple(self.signature.parameters)[1:]
        cache = next(name for name in _CACHES if name in names)
        tensors, windows = _split(cast(Any, self.values[cache]))
        kinds = tuple((a.shape[1], a.shape[3], a.dtype) for a in tensors)
        crossed = isinstance(self.values.get(_STATES), Argument)
        return _Form(names, cache, kinds, windows, crossed)

    def chooser(self, traced: bool = False) -> Callable[..., tuple[Tensor, ...] | None]:
        """Return a function with the module's signature: the graph's tensors, or None."""
        choose, form = super().chooser(traced), self._form()

        def of_tensors(*args: object, **kwargs: object) -> tuple[Tensor, ...] | None:
            call = form.tensors(form.named(args, kwargs))
            return None if call is None else choose(**call)

        return of_tensors

    def before_own_code(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Decompress the cache of a call."""
        form = self._form()
        with contextlib.suppress(TypeError):  # of a call that the own code refuses
            dtype: torch.dtype = getattr(module, "dtype", torch.float32)
            decompress(form.named(args, kwargs).get(form.cache), dtype)

    def compressed(self, places: Sequence[int]) -> CachedExample:
        """Return the same for a graph that takes some of its tensors as compressed rows."""
        rows: dict[object, Argument] = {}
        for argument in (self.arguments[i] for i in places):
            size = cast(int, argument.shape[3]) + 4
            rows[argument] = replace(argument, dtype=torch.int8, shape=(*argument.shape[:3], size))
        cache = self._form().cache
        past = [rows.get(part, part) for part in cast(Any, self.values[cache])]
        fixed = {Size(i, 3) for i in places}  # as the shapes say
        return replace(
            self,
            arguments=[rows.get(argument, argument) for argument in self.arguments],
            values={**self.values, cache: past},
            guards=[g for g in self.guards if not (g.sizes and fixed.issuperset(g.sizes))],
        )

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
            kinds = "mask, positions or encoder states" if form.crossed else "mask or positions"
            return f"its cache, {kinds} are of other kinds than those of generate"
        return super().why((), call)


def cached_call(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[nn.Module, Call] | None:
    """Return a language model as a module that takes tensors alone, and a call of that.

    None where a call of the model gives no plain cache, and where the module gives other results.
    """
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    cache = next((name for name in _CACHES if name in names), None)
    if cache is None or any(name not in names for name in (_IDS, _MASK)):
        return None
    try:
        with torch.no_grad(), same_numbers():
            return _taken(module, _Form(names, cache), args, kwargs)
    except Exception:  # of the model's own code, or it is no such model
        return None


def _taken(
    module: nn.Module, form: _Form, args: Args, kwargs: Kwargs
) -> tuple[nn.Module, Call] | None:
    """Return what :func:`cached_call` returns; where a model is no language model, this fails."""
    model, given, cache = twin(module), form.named(args, kwargs), form.cache
    form = replace(form, crossed=isinstance(given.get(_STATES), Tensor))
    known = {_IDS, _MASK, _POSITIONS, _KEEP, _STATES, _STATES_MASK, cache, "use_cache"}
    options = {name: value for name, value in given.items() if name not in known}
    ids: Tensor = given[_IDS]
    if ids.dim() != 2 or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(options)):
        return None
    if not form.crossed and _POSITIONS not in form.parameters:
        return None
    tokens = ids.tile(2, _PAST)[:2]  # no two sizes of the example are equal
    padded = torch.ones_like(tokens[:, :_COUNT])
    padded[0, 0] = 0  # of which a model may make other positions
    source = _source(form, given)
    first = {**options, **source, _IDS: tokens[:, :_COUNT]}
    asked = {"use_cache": given["use_cache"]} if "use_cache" in given else {}
    output = model(**first, **asked, **{_MASK: padded})
    layers = caches_of(output[cache])[0].layers
    windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
    own, kept = _without(output, cache)
    kinds = tuple((t.shape[1], t.shape[3], t.dtype) for t in kept)
    form = replace(form, kinds=kinds, windows=windows if any(windows) else ())
    empty = new_cache([], crossed=form.crossed)
    before = model(**source, **{_IDS: tokens[:, :_PAST], "use_cache": True, cache: empty})[cache]
    example, same = form.tensors({**first, cache: before}), form.tensors({**first, _MASK: padded})
    taker = _taker(model, form)
    if example is None or same is None:
        return None
    if 1 in windows or (form.crossed and form.windows):  # of one token, transformers keeps all
        return None
    found, every = twin(taker)(**same)
    held = tensors_of(new_cache(every, form.windows, form.crossed))
    if not are_close([*float_tensors(own), *kept], [*float_tensors(found), *held]):
        return None
    if form.crossed:
        found, every = twin(taker)(**example)
        own, kept = _without(model(**first, **{cache: before, "use_cache": True}), cache)
        if not are_close([*float_tensors(own), *kept], [*float_tensors(found), *every]):
            return None
        seen, size = example[cache], len(kept) // 2
        example[cache] = [*seen[:size], *(t[:, :, :_SEEN] for t in seen[size:])]
        example[_STATES] = source[_STATES][:, _SEEN:]
    if form.windows:  # fewer keys than tokens before, as where a window is full
        past = zip(tensors_of(before), [w for w in form.windows for _ in "kv"], strict=True)
        example[cache] = [*(t if w is None else t[:, :, 2:] for t, w in past), *form.windows]
    return taker, ((), example)


def _source(form: _Form, given: _Given) -> _Given:
    """Return some states of the encoder of a call, and a mask of them."""
    if not form.crossed:
        return {}
    states = given[_STATES][:, :_ALL].tile(2, _ALL, 1)[:2, :_ALL].contiguous()
    if _STATES_MASK not in form.parameters:
        return {_STATES: states}
    mask = given[_IDS].new_ones(2, _ALL)
    mask[0, -2:] = 0
    return {_STATES: states, _STATES_MASK: mask}


def _without(output: Any, cache: str) -> tuple[object, list[Tensor]]:
    """Return what a model gives without its cache, and the keys and values in that.

    Raises:
        TypeError: it gives no plain cache.
    """
    tensors = tensors_of(output[cache])
    if not tensors:
        raise TypeError("no plain cache")
    return type(output)(**{k: v for k, v in output.items() if k != cache}), tensors


def _taker(model: nn.Module, form: _Form) -> nn.Module:
    """Return a model with the same parts that takes and gives keys and values, and no cache.

    Its class is one of its own, so that all its parts have the names that they have in the model.
    Keys and values of an encoder's states depend on nothing else: a call with an empty cache makes
    them, of which a graph keeps no more than they need. All else reads no states but their size.
    """
    cls, cache = type(model), form.cache

    def forward(self: nn.Module, **call: Any) -> tuple[object, list[Tensor]]:
        (tensors, windows), given = _split(call[cache]), {**call, "use_cache": True}
        if form.crossed:
            own, cross = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
            states = call[_STATES]
            count: object = states.shape[1]
            if type(count) is not int or count:  # models fail without; a symbolic size may be any
                masks = _MASK, _POSITIONS, _STATES_MASK
                left = {k: v for k, v in given.items() if k not in masks}
                held = new_cache([], crossed=True)
                cls.forward(self, **{**left, cache: held})
                made = tensors_of(held.cross_attention_cache)
                cross = [torch.cat(pair, -2) for pair in zip(cross, made, strict=True)]
            tensors, size = [*own, *cross], (states.shape[0], cross[0].shape[2], states.shape[2])
            given[_STATES] = states.new_zeros(1).expand(size)
        held = new_cache(tensors, crossed=form.crossed)
        for layer, window in zip(caches_of(held)[0].layers, windows, strict=False):
            if window is not None:
                see_window(layer, call[_MASK].shape[1] - call[_IDS].shape[1])
        return _without(cls.forward(self, **{**given, cache: held}), cache)

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


def count_all(graph: fx.Graph) -> None:
    """Replace -1 in reshapes by its size.

    torch cannot infer it for an empty tensor, such as the encoder's states in later steps.
    """
    for node in graph.nodes:
        sizes = node.meta.get("sizes")
        if aten_name(node) not in ("view", "reshape", "_unsafe_view") or not sizes:
            continue
        given = node.args[1]
        if isinstance(given, list | tuple) and -1 in given and sizes[given.index(-1)].isdigit():
            at = given.index(-1)
            node.update_arg(1, [*given[:at], int(sizes[at]), *given[at + 1 :]])


def smaller_calls(exported: Exported) -> Iterator[list[Tensor]]:
    """Yield calls of sizes that torch.export does not vouch for: of one, and of no cached token."""
    given: Any = exported.kwargs
    cache = next(name for name in _CACHES if name in given)
    every, (past, windows) = given[_IDS], _split(given[cache])
    own = len(past) // 2 if _STATES in given else len(past)
    for batch, length, count, kept, seen, states in (
        (1, 0, every.shape[1], 1, 0, 7), (1, 0, 1, 1, 0, 1), (1, 1, 1, 1, 1, 0),
        (1, _PAST, 1, 1, 3, 0), (2, 3, 1, 1, 3, 0), (1, 3, 2, 2, 0, 7),
    ):  # fmt: skip
        tensors = [t[:batch, :, :length] for t in past[:own]]
        tensors += [t[:batch, :, :seen] for t in past[own:]]
        call = given | {
            _IDS: every[:batch, :count],
            _MASK: every.new_ones(batch, length + count),
            cache: [*tensors, *windows],
        }
        if _POSITIONS in given:
            positions = torch.arange(length, length + count, device="cpu")
            call[_POSITIONS] = positions.expand(batch, count)
        if _KEEP in given:
            call[_KEEP] = torch.arange(count, device="cpu")[-kept:]
        if _STATES in given:
            call[_STATES] = given[_STATES][:batch, :states]
        if _STATES_MASK in given:
            call[_STATES_MASK] = every.new_ones(batch, seen + states)
        leaves = pytree.tree_leaves(((), call))
        yield [leaves[argument.index].contiguous() for argument in exported.arguments]

# SPDX-License-Identifier: Apache-2.0
"""One recorded run of a model: which module or function consumes what another one produced."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchq.eager.leaves import stand_in


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that move values without changing them; they work on uint8 and int8 as well.
MOVING_FUNCTIONS = _words(
    "view reshape flatten unflatten permute transpose t swapaxes movedim squeeze unsqueeze "
    "contiguous detach clone chunk split narrow select expand expand_as __getitem__ unbind view_as "
    "dropout dropout1d dropout2d dropout3d feature_dropout alias"
)
# Modules that return the elements of their source as they are, in its shape.
PASSING_MODULES = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    nn.Sequential,  # a call of one is recorded only where it is empty
)
MOVING_MODULES = (*PASSING_MODULES, nn.Flatten, nn.Unflatten)

# What can be asked about a tensor without looking at its values. Its dtype is not among it: code
# that asks for it may act on the answer, so it counts as a reader.
_SHAPE = _words("size shape dim ndim ndimension numel nelement __len__")
_STRIDES = _words("stride is_contiguous storage_offset data_ptr")
_HARMLESS = _words(
    "device get_device layout requires_grad grad grad_fn is_leaf names is_cpu is_cuda is_sparse "
    "is_meta is_nested is_quantized is_mkldnn is_inference"
)
_VIEWS = _words("view view_as unflatten")


@dataclass(eq=False)
class Call:
    """A call of a leaf module, or of a torch function outside of any.

    Attributes:
        name: qualified name of the module, or name of the function.
        module: None for a function; else the layer it stands for (:func:`stand_in`).
        inputs: values it reads. Values are numbers: a tensor written in place is a new value.
        outputs: values it produces.
        index: its position among all calls.
        moves: whether it only moves values, so that a quantized source stays what it was.
        keywords: whether a module was called with keyword arguments.
        reread: whether it wrote into a tensor that someone reads other than as its result.
    """

    name: str
    module: nn.Module | None
    inputs: list[int]
    outputs: list[int]
    index: int
    moves: bool = False
    keywords: bool = False
    reread: bool = False


@dataclass(frozen=True)
class Value:
    """What is known about a value; ``storage`` is its address."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    contiguous: bool


@dataclass
class Recording:
    """All calls in order, and how else the model treats its values and modules.

    Attributes:
        leaves: modules whose calls are recorded, by name, as the layers that they stand for.
        calls: in order.
        values: number -> shape and dtype.
        inputs: values the model was given.
        returned: values it returned, or keeps somewhere.
        inspected: values whose shape was asked for.
        strided: values whose strides matter, such as the source of ``view``.
        exposed: modules whose parameters are read outside of their own forward.
        hooked: modules with forward hooks of the user.
        writes: (index of the call, storage) for each write in place.
    """

    leaves: dict[str, nn.Module] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    inspected: set[int] = field(default_factory=set)
    strided: set[int] = field(default_factory=set)
    exposed: set[str] = field(default_factory=set)
    hooked: set[str] = field(default_factory=set)
    writes: list[tuple[int, int]] = field(default_factory=list)

    def consumers(self) -> dict[int, list[Call]]:
        """Value -> calls that read it."""
        result: dict[int, list[Call]] = defaultdict(list)
        for call in self.calls:
            for value in dict.fromkeys(call.inputs):
                result[value].append(call)
        return result

    def calls_of(self) -> dict[str, list[Call]]:
        """Qualified module name -> its calls."""
        result: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls:
            if call.module is not None:
                result[call.name].append(call)
        return result

    def computed(self) -> set[int]:
        """Values that depend on the model's inputs; the others are the same in every run."""
        result = set(self.inputs)
        for call in self.calls:
            if result.intersection(call.inputs):
                result.update(call.outputs)
        return result

    def is_written_between(self, value: int, first: Call, last: Call) -> bool:
        """Whether the memory of ``value`` changes after ``first`` and before ``last``."""
        storage = self.values[value].storage
        return any(first.index < i < last.index and storage == s for i, s in self.writes)


def record(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Recording:
    """Runs ``model(*args, **kwargs)`` once, without grad, and records it.

    A module that is registered under several names is recorded under the first.
    """
    with torch.inference_mode(False), torch.no_grad():
        args, kwargs = tree_map(_normal, (tuple(args), dict(kwargs or {})))
        recorder = _Recorder(model)
        recorder.recording.inputs = {recorder.read(t) for t in _tensors((args, kwargs))}
        with recorder.hooks(), _Unseen(recorder), recorder:
            result = model(*args, **kwargs)
        recorder.finish(result)
    return recorder.recording


def _normal(leaf: Any) -> Any:
    """Inference tensors have no version counter, which tells who writes in place."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _describe(tensor: Tensor) -> Value:
    try:
        storage, contiguous = tensor.untyped_storage().data_ptr(), tensor.is_contiguous()
    except (NotImplementedError, RuntimeError):  # sparse and the like
        storage, contiguous = 0, False
    return Value(tuple(tensor.shape), tensor.dtype, storage, contiguous)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        found = [(n, m, stand_in(m)) for n, m in model.named_modules()]
        self._leaves = {n: m for n, m, layer in found if layer is not None}
        self.recording.leaves = {n: layer for n, _, layer in found if layer is not None}
        self._owners: dict[int, list[str]] = defaultdict(list)  # id(parameter) -> leaf modules
        for name, leaf in self._leaves.items():
            for tensor in (*leaf.parameters(), *leaf.buffers()):
                self._owners[id(tensor)].append(name)
            if leaf._forward_hooks or leaf._forward_pre_hooks:
                self.recording.hooked.add(name)
        self._numbers: dict[int, int] = {}  # id(tensor) -> value
        self._alive: list[Tensor] = []  # each once, so that no id is used twice
        self._overwrites: list[tuple[int, int, Call]] = []  # (storage, value, call of a module)
        self._overwritten: dict[int, list[Call]] = defaultdict(list)  # id(tensor) -> calls
        self._versions: list[list[int]] = []  # of the sources of the calls in progress
        self.depth = 0  # of leaf modules and functions

    def hooks(self) -> ExitStack:
        """Registers hooks, which leaving removes."""
        stack = ExitStack()
        for name, leaf in self._leaves.items():
            before = leaf.register_forward_pre_hook(self._enter, with_kwargs=True)
            stack.callback(before.remove)
            hook = self._leave(name, self.recording.leaves[name])
            after = leaf.register_forward_hook(hook, with_kwargs=True, always_call=True)
            stack.callback(after.remove)
        return stack

    def read(self, tensor: Tensor) -> int:
        """The value of a tensor that someone reads."""
        number = self._numbers.get(id(tensor)) or self._new_value(tensor)
        for call in self._overwritten.get(id(tensor), ()):
            call.reread = True
        storage = self.recording.values[number].storage
        for written, result, call in self._overwrites:
            call.reread |= written == storage and number < result
        self.recording.exposed.update(self._owners.get(id(tensor), ()))
        return number

    def _new_value(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._alive.append(tensor)
        number = self._numbers[id(tensor)] = len(self.recording.values) + 1
        self.recording.values[number] = _describe(tensor)
        return number

    def add(self, name: str, module: nn.Module | None, args: Iterable[Tensor], result: Any) -> Call:
        read = [self.read(t) for t in args]
        written = [self._new_value(t) for t in _tensors(result)]
        call = Call(name, module, read, written, len(self.recording.calls))
        known = name in MOVING_FUNCTIONS if module is None else isinstance(module, MOVING_MODULES)
        if known and read and written:
            values = self.recording.values
            source = values[read[0]]
            same_type = all(values[v].dtype == source.dtype for v in written)
            # dropout that drops makes a new tensor
            drops = "dropout" in name and values[written[0]].storage != source.storage
            call.moves = same_type and not (module is None and drops)
        self.recording.calls.append(call)
        return call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.depth:
            return func(*args, **kwargs)
        sources = _tensors((args, kwargs))
        versions = [t._version for t in sources]
        self.depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.depth -= 1
        name = (resolve_name(func) or getattr(func, "__name__", str(func))).rsplit(".", 1)[-1]
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if sources and not self._inspects(name, sources):
            self._add_function(name, sources, versions, result)
        return result

    def _inspects(self, name: str, sources: list[Tensor]) -> bool:
        if name in _VIEWS:
            self.recording.strided.add(self.read(sources[0]))
        if name not in _SHAPE | _STRIDES | _HARMLESS:
            return False
        numbers = {self.read(t) for t in sources}
        if name in _SHAPE:
            self.recording.inspected |= numbers
        elif name in _STRIDES:
            self.recording.strided |= numbers
        return True

    def _add_function(
        self, name: str, sources: list[Tensor], versions: list[int], result: Any
    ) -> None:
        call = self.add(name, None, sources, result)
        for tensor in _written(sources, versions):
            self.recording.writes.append((call.index, _describe(tensor).storage))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.depth += 1
        self._versions.append([t._version for t in _tensors((args, kwargs))])

    def _leave(self, name: str, layer: nn.Module) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
            versions, sources = self._versions.pop(), _tensors((args, kwargs))
            if self.depth == 1:
                written = _written(sources, versions)
                if any(t is result for t in sources):
                    result = result.detach()  # another object: who reads which one is then seen
                call = self.add(name, layer, sources, result)
                call.keywords = bool(kwargs)
                if isinstance(module, nn.Unflatten):
                    self.recording.strided.update(call.inputs)
                for tensor in written:
                    self._overwrite(tensor, call)
            self.depth -= 1
            return result

        return hook

    def _overwrite(self, tensor: Tensor, call: Call) -> None:
        storage = _describe(tensor).storage
        self.recording.writes.append((call.index, storage))
        result = call.outputs[0] if call.outputs else self._new_value(tensor)
        self._overwrites.append((storage, result, call))
        self._overwritten[id(tensor)].append(call)
        self._numbers[id(tensor)] = result

    def finish(self, result: Any) -> None:
        """Finds what leaves the model: returned, or kept by anyone."""
        produced = {value for call in self.recording.calls for value in call.outputs}
        kept = _kept_by_others(self._alive)
        if kept:  # perhaps only by garbage
            gc.collect()
            kept = _kept_by_others(self._alive)
        outside = [self._alive[i] for i in kept]
        numbers = {self.read(t) for t in outside if self._numbers[id(t)] in produced}
        self.recording.returned = numbers | {self.read(t) for t in _tensors(result)}


def _written(tensors: list[Tensor], versions: list[int]) -> list[Tensor]:
    return [t for t, old in zip(tensors, versions, strict=True) if t._version != old]


def _kept_by_others(tensors: list[Tensor]) -> list[int]:
    """Indices of the tensors that this list and their views are not the only ones to refer to."""
    example = torch.empty(1)
    view = example.view(1)
    with_view, alone = _references([view._base, torch.empty(0)])
    with_view -= 1  # the name
    bases = {id(t._base) for t in tensors if t._is_view()}
    expected = [with_view if id(t) in bases else alone for t in tensors]
    counts = zip(_references(tensors), expected, strict=True)
    return [i for i, (count, limit) in enumerate(counts) if count > limit]


def _references(tensors: list[Any]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors]


class _Unseen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what ``__torch_function__`` does not: TorchScript and the like."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        recorder = self._recorder
        if recorder.depth:
            return func(*args, **(kwargs or {}))
        recorder.depth += 1
        try:
            result = func(*args, **(kwargs or {}))
            recorder.add(str(func), None, _tensors((args, kwargs)), result)
        finally:
            recorder.depth -= 1
        return result

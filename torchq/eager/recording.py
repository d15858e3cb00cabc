# SPDX-License-Identifier: Apache-2.0
"""Recorded runs of a model: how it calls its modules, and how else it uses them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchq.eager.leaves import stand_in
from torchq.kinds import MATMUL, is_patched


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What asks for the strides of its first argument, or depends on them.
_STRIDES = _words(
    "stride is_contiguous storage_offset data_ptr view view_as unflatten as_strided numpy "
    "view_as_complex as_strided_copy as_strided_scatter"
)
# What returns its argument itself, or a view of it, for some strides, and for others a copy.
_MAY_COPY = _words("contiguous reshape reshape_as flatten ravel to")
# What can be asked of a weight without its values: ``nn.standing.Described`` answers.
_DESCRIBED = _words("dtype device shape ndim requires_grad size dim numel is_floating_point")
_PRODUCTS = _words(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul mm bmm "
    "addmm baddbmm __matmul__ __rmatmul__ einsum"
)


@dataclass(eq=False)
class Call:
    """A call of a module, or of a torch function outside of any leaf module.

    Attributes:
        name: qualified name of the module, or name of the function.
        module: None for a function; else what it is, or the layer that it stands for
            (:func:`stand_in`).
        inputs: values it reads, as numbers.
        outputs: values it gives; a tensor written in place is the same value.
        within: the sequences whose calls it was made in, outermost first.
        source: of a sequence: a copy of its one positional argument, None if it got others.
        more: whether it got others than ``input``, as the parameter is called in torch.nn.
        writes: whether it wrote to what it was given.
        first: whether it was made in the first run.
    """

    name: str
    module: nn.Module | None
    inputs: list[int]
    outputs: list[int]
    within: tuple[str, ...] = ()
    source: Tensor | None = None
    more: bool = False
    writes: bool = False
    first: bool = True


@dataclass(frozen=True)
class Value:
    """What is known about a value; ``is_free``: a parameter of no layer with a row of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool
    is_free: bool


@dataclass
class Recording:
    """All calls in order, and how else the model treats its values and modules.

    Attributes:
        leaves: modules whose calls are recorded, by name, as the layers that they stand for.
        calls: of leaf modules and functions, in order.
        values: number -> shape and dtype.
        strided: values whose strides matter, such as the source of ``view``.
        exposed: modules whose parameters are read outside of their own forward.
        hooked: modules with hooks of the user.
        sequences: qualified name of a plain ``nn.Sequential`` -> its calls.
    """

    leaves: dict[str, nn.Module] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    strided: set[int] = field(default_factory=set)
    exposed: set[str] = field(default_factory=set)
    hooked: set[str] = field(default_factory=set)
    sequences: dict[str, list[Call]] = field(default_factory=dict)

    def products_with_weights(self) -> list[Call]:
        """Functions of the first run that multiply by free parameters, or what is made of them."""
        weights, result = {n for n, value in self.values.items() if value.is_free}, []
        for call in self.calls:
            if call.module is None and call.inputs and weights.issuperset(call.inputs):
                weights.update(call.outputs)
            elif call.module is None and call.first and call.name in _PRODUCTS:
                matrices = [n for n in call.inputs if len(self.values[n].shape) > 1]
                if not weights.isdisjoint(matrices):
                    result.append(call)
        return result

    def calls_of(self) -> dict[str, list[Call]]:
        """Qualified module name -> its calls."""
        result: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls:
            if call.module is not None:
                result[call.name].append(call)
        return result


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of it is more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or is_patched(module)


def record(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording:
    """Runs ``model(*args, **kwargs)`` without grad, and records it.

    It is run twice, for it may keep something that leads the second call another way; what a
    second call raises is not looked at. A module that is registered under several names is recorded
    under the first.
    """
    with torch.inference_mode(False), torch.no_grad():
        recorder = _Recorder(model)
        runs = [copied(args, kwargs) for _ in range(2)]
        for i, (own_args, own_kwargs) in enumerate(runs):
            try:
                with recorder.hooks(), _Unseen(recorder), recorder:
                    model(*own_args, **own_kwargs)
            except Exception:  # of the model's own code
                if i == 0:
                    raise
            recorder.first = False
    recorder.end()
    return recorder.recording


def copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """A model may write to its inputs, and inference tensors have no version counter."""
    given: tuple[Any, Any] = tree_map(_copied, (tuple(args), dict(kwargs)))
    return given


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recording, self.first = Recording(), True
        found = [(n, m, stand_in(m)) for n, m in model.named_modules()]
        self._leaves = {n: m for n, m, layer in found if layer is not None}
        self.recording.leaves = {n: layer for n, _, layer in found if layer is not None}
        self._sequences = {n: m for n, m, _ in found if type(m) is nn.Sequential}
        self._owners: dict[int, list[str]] = defaultdict(list)  # id(parameter) -> leaf modules
        for name, module in (self._leaves | self._sequences).items():
            for tensor in (*module.parameters(False), *module.buffers(False)):
                self._owners[id(tensor)].append(name)
            if is_hooked(module):
                self.recording.hooked.add(name)
        layers = [m for _, m, layer in found if isinstance(layer or m, MATMUL)]
        self._embedded = {id(m.weight) for _, m, _ in found if isinstance(m, nn.Embedding)}
        self._of_layers = {id(p) for m in layers for p in m.parameters(False)}
        self._numbers: dict[int, int] = {}  # id(tensor) -> value
        self._alive: list[Tensor] = []  # each once, so that no id is used twice
        self._maybe_copied: list[tuple[list[Tensor], list[int | None]]] = []  # and their versions
        self._open: list[tuple[str, Tensor | None, list[Tensor], list[int | None]]] = []  # calls
        self.depth = 0  # of leaf modules and functions

    def hooks(self) -> ExitStack:
        """Registers hooks, which leaving removes."""
        stack = ExitStack()
        self._open.clear()
        self.depth = 0
        for name, module in (self._leaves | self._sequences).items():
            before = module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            stack.callback(before.remove)
            after = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            stack.callback(after.remove)
            if isinstance(module, nn.RNNBase):  # reads the weights, only for CUDA
                vars(module)["flatten_parameters"] = lambda: None
                stack.callback(vars(module).pop, "flatten_parameters", None)
        return stack

    def read(self, tensor: Tensor) -> int:
        """The value of a tensor that someone reads."""
        self.recording.exposed.update(self._owners.get(id(tensor), ()))
        return self._number(tensor)

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._alive.append(tensor)
            number = self._numbers[id(tensor)] = len(self._alive)
            try:
                contiguous = tensor.is_contiguous()
            except (NotImplementedError, RuntimeError):  # sparse and the like
                contiguous = False
            is_free = isinstance(tensor, nn.Parameter) and id(tensor) not in self._of_layers
            self.recording.values[number] = Value(
                tuple(tensor.shape), tensor.dtype, contiguous, is_free
            )
        return self._numbers[id(tensor)]

    def add(self, name: str, module: nn.Module | None, args: Iterable[Tensor], result: Any) -> Call:
        looked_up = self._embedded if name == "embedding" else ()  # not through the layer
        read = [self._number(t) if id(t) in looked_up else self.read(t) for t in args]
        written = [self._number(t) for t in _tensors(result)]
        within = tuple(open_name for open_name, *_ in self._open if open_name in self._sequences)
        call = Call(name, module, read, written, within, first=self.first)
        if name in self._sequences and module is not None:
            self.recording.sequences.setdefault(name, []).append(call)
        else:
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
        self.depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.depth -= 1
        sources = _tensors((args, kwargs))
        name = (resolve_name(func) or getattr(func, "__name__", str(func))).rsplit(".", 1)[-1]
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name in _DESCRIBED and all(id(t) in self._of_layers for t in sources):
            return result
        if sources and name in _STRIDES:
            self.recording.strided.add(self._number(sources[0]))
        if sources and name in _MAY_COPY:
            self._note_copy(sources[0], result)
        if sources:
            self.add(name, None, sources, result)
        return result

    def _note_copy(self, source: Tensor, result: Any) -> None:
        """What shares memory here may be a copy for other strides, and the other way round."""
        if isinstance(result, Tensor):
            both = [source, result]
            self._maybe_copied.append((both, _versions(both)))

    def end(self) -> None:
        """Of all runs: strides matter where somebody wrote to such a tensor afterwards."""
        for both, versions in self._maybe_copied:
            if _versions(both) != versions:
                self.recording.strided.add(self._number(both[0]))

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            with self._quiet():
                tensors = _tensors((args, kwargs))
                alone = name in self._sequences and len(args) == 1 and not kwargs
                source = (
                    _copied(tensors[0]) if alone and tensors and args[0] is tensors[0] else None
                )
                self._open.append((name, source, tensors, _versions(tensors)))
            self.depth += name in self._leaves

        return hook

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        name, source, tensors, versions = self._open.pop()
        self.depth -= name in self._leaves
        if self.depth:
            return
        with self._quiet():
            call = self.add(name, self.recording.leaves.get(name, module), tensors, result)
            call.source, call.more = source, len(args) > 1 or bool(kwargs.keys() - {"input"})
            call.writes = None in versions or _versions(tensors) != versions
            if isinstance(module, nn.Unflatten):
                self.recording.strided.update(call.inputs)
            if isinstance(module, nn.Flatten):
                self._note_copy(tensors[0], result)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


def _versions(tensors: list[Tensor]) -> list[int | None]:
    """Which tell whether somebody wrote in place; inference tensors have none."""
    return [None if t.is_inference() else t._version for t in tensors]


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

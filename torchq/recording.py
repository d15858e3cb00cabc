# SPDX-License-Identifier: Apache-2.0
"""One recorded run of a model: which module or function consumes what another one produced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

# Functions that move values without changing them; they work on uint8 and int8 as well.
TRANSPARENT_FUNCTIONS = frozenset(
    "view reshape flatten unflatten permute transpose t swapaxes movedim squeeze unsqueeze contiguous "
    "detach clone chunk split narrow select expand expand_as __getitem__ unbind dropout view_as "
    "dropout1d dropout2d dropout3d feature_dropout identity alias".split()
)
TRANSPARENT_MODULES = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
# Questions about a tensor that do not look at its values.
_METADATA = frozenset(
    "size dim stride numel nelement ndimension is_contiguous element_size storage_offset __len__ get_device "
    "is_floating_point is_complex data_ptr".split()
)


@dataclass(eq=False)
class Call:
    """A call of a leaf module or of a torch function outside of any.

    Values are numbers: a tensor that is written in place becomes a new value.
    """

    name: str
    module: nn.Module | None
    inputs: list[int]
    outputs: list[int]

    @property
    def is_transparent(self) -> bool:
        """Whether it only moves values."""
        if self.module is not None:
            return isinstance(self.module, TRANSPARENT_MODULES)
        return self.name in TRANSPARENT_FUNCTIONS


@dataclass
class Recording:
    """All calls in order, and the values the model returned."""

    calls: list[Call] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)

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


def is_leaf(module: nn.Module) -> bool:
    """Modules of torch and torchq without children are recorded as one call; all others are looked into."""
    library = type(module).__module__.startswith(("torch.nn.", "torchq."))
    return library and next(module.children(), None) is None


def record(model: nn.Module, example_inputs: Sequence[Any]) -> Recording:
    """Runs ``model(*example_inputs)`` once, without grad, and records it.

    A module that is registered under several names is recorded under the first.
    """
    recorder = _Recorder()
    handles = []
    for name, module in model.named_modules():
        if is_leaf(module):
            handles.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            hook = recorder.leave(name)
            handles.append(module.register_forward_hook(hook, with_kwargs=True, always_call=True))
    try:
        with torch.no_grad(), recorder:
            result = model(*example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    recorder.recording.returned = {recorder.value_of(t) for t in _tensors(result)}
    return recorder.recording


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._values: dict[int, int] = {}  # id(tensor) -> value
        self._alive: list[Tensor] = []  # so that no id is used twice
        self._depth = 0  # of leaf modules

    def value_of(self, tensor: Tensor) -> int:
        if id(tensor) not in self._values:
            self._new_value(tensor)
        return self._values[id(tensor)]

    def _new_value(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        self._values[id(tensor)] = len(self._alive)
        return len(self._alive)

    def _add(
        self, name: str, module: nn.Module | None, inputs: Iterable[Tensor], result: Any
    ) -> None:
        read = [self.value_of(t) for t in inputs]
        written = [self._new_value(t) for t in _tensors(result)]
        self.recording.calls.append(Call(name, module, read, written))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        if self._depth == 0 and inputs:
            name = (resolve_name(func) or getattr(func, "__name__", str(func))).rsplit(".", 1)[-1]
            getter = name in ("__get__", "__set__")
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            metadata = name in _METADATA or (getter and attribute not in ("T", "mT", "H", "data"))
            if not metadata:
                self._add(name, None, inputs, result)
        return result

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                self._add(name, module, _tensors((args, kwargs)), result)

        return hook

# SPDX-License-Identifier: Apache-2.0
"""Forward hooks of a model's parts: which are new, and which only look.

PyTorch tells nobody that a hook was registered. So each call looks into the dicts of hooks, which
takes 30 ns a dict: two for each module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn.modules import module as everywhere
from torch.utils.hooks import RemovableHandle

_CAPTURING = "transformers.utils.output_capturing"
_ALL = "*"
"""Stands for the name of a module in what hooks of all modules are known by."""

_watching: set[int] = set()
"""Ids of hooks that only look: calls of a module that has them still take its graph."""


@contextmanager
def watching(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Let calls take their graph while a measurement has these hooks; remove them afterwards."""
    handles = list(handles)
    ids = {handle.id for handle in handles}
    _watching.update(ids)
    try:
        yield
    finally:
        _watching.difference_update(ids)
        for handle in handles:
            handle.remove()


def hooks_inside(module: nn.Module) -> set[tuple[str, int]]:
    """Return the hooks of a module's parts, as names and ids, and those of all modules.

    The module's own ones run whatever a call takes. Those that only look are left out.
    """
    return {(name, key) for name, hooks in _dicts(module) for key in hooks if key not in _watching}


def _dicts(module: nn.Module) -> Iterator[tuple[str, Mapping[int, Callable[..., object]]]]:
    """Yield the dicts of hooks of a module's parts, and those of all modules."""
    for name, part in module.named_modules():
        if part is not module:
            yield from ((name, part._forward_hooks), (name, part._forward_pre_hooks))
    yield _ALL, everywhere._global_forward_hooks
    yield _ALL, everywhere._global_forward_pre_hooks


class HookWatch:
    """Tells whether a module's parts have hooks that act and were not there at first.

    Modules that take the places of parts later are not looked at: finding them would cost each call
    more than a small graph takes.
    """

    def __init__(self, module: nn.Module, known: Collection[tuple[str, int]]) -> None:
        """Take the hooks that were there, from :func:`hooks_inside`."""
        ids: dict[str, set[int]] = {}
        for name, key in known:
            ids.setdefault(name, set()).add(key)
        self._hooks = [(hooks, ids.get(name, set())) for name, hooks in _dicts(module)]
        self._empty = [hooks for hooks, old in self._hooks if not old]
        self._filled = [(hooks, old) for hooks, old in self._hooks if old]
        self._all = [module._forward_hooks, *(hooks for hooks, _ in self._hooks)]

    def is_clean(self) -> bool:
        """Return whether no new hook acts in the call at work."""
        if not any(self._empty) and all(hooks.keys() <= old for hooks, old in self._filled):
            return True
        new = [
            hook
            for hooks, old in self._hooks
            if hooks
            for key, hook in hooks.items()
            if key not in old and key not in _watching
        ]
        return not new or (all(map(_is_capturing, new)) and not _collects())

    def ids(self) -> set[int]:
        """Return the ids of all hooks, those of the module itself, too."""
        return set().union(*self._all) if any(self._all) else set()


def without_capturing_hooks(model: nn.Module, besides: Collection[int] = ()) -> None:
    """Remove the hooks with which transformers collects hidden states.

    They are local functions, which pickle refuses. Without the flag of the model, the next call
    that needs them installs them again.

    Args:
        model: changed in its places.
        besides: ids of hooks to leave.
    """
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if key not in besides and _is_capturing(hook):
                del module._forward_hooks[key]
        vars(module).pop("_output_capturing_hooks_installed", None)


def _is_capturing(hook: Callable[..., object]) -> bool:
    """Return whether transformers collects hidden states with a hook."""
    return getattr(hook, "__module__", "") == _CAPTURING


def _collects() -> bool:
    """Return whether the call at work collects hidden states; True where that is not known."""
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return collector is None or bool(collector.get())

# SPDX-License-Identifier: Apache-2.0
"""Running a user's model on a user's data: what inputs look like, and progress on the way."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm
from torch.utils._pytree import tree_leaves

from torchq.models.trees import Args, Call, Kwargs, copied, detached

Inputs = Tensor | Sequence[object] | Mapping[str, object]
"""One input of a model, a sequence of its inputs, or a mapping of keyword arguments."""
Model = TypeVar("Model", bound=nn.Module)
Item = TypeVar("Item")


def split_inputs(inputs: Inputs) -> Call:
    """Return the arguments of one call.

    Raises:
        TypeError: ``inputs`` is neither a tensor nor a tuple, list or dict.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor | PackedSequence):
        return (inputs,), {}
    if isinstance(inputs, np.ndarray | str | Set) or not isinstance(inputs, Iterable):
        raise TypeError(
            "torchq: inputs of a model must be a tensor, a tuple or list of its positional inputs "
            f"or a dict of its keywords, got {type(inputs).__name__}. Convert arrays with "
            "torch.from_numpy, and wrap what is no tensor: (input,)."
        )
    return tuple(inputs), {}


def working_copy(
    model: Model, memo: Mapping[int, object] = MappingProxyType({}), caller: str = "prepare"
) -> Model:
    """Return a deep copy; weights that hooks compute before each call are computed once.

    These are of ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune``. ``memo``: as
    ``deepcopy`` takes it, what to have instead of a copy.

    Raises:
        TypeError: something in the model refuses to be copied; the message names it.
    """
    try:
        copied = copy.deepcopy(model, detached(model) | dict(memo))
    except Exception as error:
        raise TypeError(
            f"torchq.{caller}: model must allow copy.deepcopy, got {_uncopied(model)}: {error}. "
            "Give its class a __deepcopy__, or take it out of the model first."
        ) from error
    for module in copied.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, WeightNorm):
                remove_weight_norm(module, hook.name)
            elif isinstance(hook, SpectralNorm):
                remove_spectral_norm(module, hook.name)
            elif isinstance(hook, prune.BasePruningMethod):
                prune.remove(module, hook._tensor_name)
    return copied


def _uncopied(model: nn.Module) -> str:
    """Return a description of what in the model refuses to be copied."""
    modules = {id(module): module for module in model.modules()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            try:
                copy.deepcopy(value, detached(model) | modules)
            except Exception:
                return f"{type(value).__name__} in '{f'{name}.{key}'.lstrip('.')}'"
    return "one that does not"


def without_gradients(model: Model) -> Model:
    """Return the model; its parameters do not require grad any more."""
    for parameter in model.parameters():
        if parameter.is_leaf:
            parameter.requires_grad_(False)
        else:  # as copies of modules that TorchScript compiled
            parameter.detach_()
    return model


def call(model: nn.Module, inputs: Inputs) -> object:
    """Return the model's result for copies of the inputs, to which it may write.

    Raises:
        TypeError: the inputs are not those of the model's forward.
    """
    return call_with(model, *copied(*split_inputs(inputs)))


def call_with(model: nn.Module, args: Args, kwargs: Kwargs) -> object:
    """Return the model's result for these arguments themselves; see :func:`call`."""
    try:
        return model(*args, **kwargs)
    except TypeError:
        check_fit(model, args, kwargs)
        raise


def check_fit(model: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Raise TypeError if the forward of ``model`` does not take such a call.

    For a call that failed: what changes the arguments on the way, as hooks do, is not looked at.
    """
    if type(model).__module__.startswith("torchq."):
        model = getattr(model, "graph_module", model)
    own = type(model).__call__ is not nn.Module.__call__ and not isinstance(model, fx.GraphModule)
    if own or model._forward_pre_hooks:
        return
    try:
        signature = inspect.signature(model.forward, follow_wrapped=False)
    except ValueError:  # of what is not written in Python
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        got = f"{len(args)} positional" + "".join(f", {name}=" for name in kwargs)
        raise TypeError(
            f"torchq: inputs must be those of the model's forward{signature}, got {got}: {error}. "
            "A batch that is a tuple or list holds the positional inputs: leave labels out, as in "
            "[x for x, label in data]."
        ) from None


def float_tensors(result: object) -> list[Tensor]:
    """Return the floating-point tensors in what a model returns, in order."""
    found: list[Tensor] = []
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            found.extend([leaf] if leaf.is_floating_point() else [])
        elif isinstance(leaf, Mapping):
            found.extend(float_tensors(list(leaf.values())))
        elif is_dataclass(leaf):
            found.extend(float_tensors([getattr(leaf, field.name) for field in fields(leaf)]))
    return found


def are_close(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return whether two lists hold the same shapes and dtypes, and nearly the same values.

    Values may differ by 1e-4 of the largest, in dtypes with few bits by 8 of their steps.
    """

    def close(a: Tensor, b: Tensor) -> bool:
        share = max(1e-4, 8 * torch.finfo(a.dtype).eps)
        return torch.allclose(a, b, share, share * _largest(a), equal_nan=True)

    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and close(a, b)
        for a, b in zip(first, second, strict=True)
    )


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def batches(
    op: str, data: Iterable[Inputs], progress: bool | None = None, may_be_empty: bool = False
) -> Iterable[Inputs]:
    """Return the batches of ``data``, with a progress bar named ``op`` where there is a terminal.

    Args:
        op: name of the caller, such as "calibrate".
        data: batches.
        progress: show the bar (needs tqdm); None shows one where tqdm is installed and the output
            is a terminal.
        may_be_empty: take data without batches.

    Raises:
        TypeError: ``data`` is one tensor or dict, or no iterable, instead of batches.
        ValueError: ``data`` has no batches and must; raised when it was used up.
        ImportError: ``progress`` is True without tqdm.
    """
    gives = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if isinstance(data, Tensor | Mapping) or not gives:
        raise TypeError(
            f"torchq.{op}: data must be batches, got one {type(data).__name__}. Pass a list "
            "of them, such as [batch], or a DataLoader."
        )
    shown = with_progress(op, data, progress)
    return shown if may_be_empty else _checked(op, shown)


def _checked(op: str, data: Iterable[Inputs]) -> Iterable[Inputs]:
    count = 0
    for batch in data:
        yield batch
        count += 1
    if count == 0:
        raise ValueError(
            f"torchq.{op}: data must have at least one batch, got none. A generator "
            "that was used up already yields nothing."
        )


def with_progress(op: str, items: Iterable[Item], progress: bool | None) -> Iterable[Item]:
    """``items`` behind a progress bar; see :func:`batches`."""
    if progress is False:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if progress:
            raise ImportError(
                f"torchq.{op}: progress=True needs tqdm. Run `pip install tqdm`."
            ) from None
        return items
    # disable=None means: only on a terminal
    bar: Iterable[Item] = tqdm(items, desc=op, disable=None if progress is None else False)
    return bar


def decibels(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)`` of sums of squares."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf

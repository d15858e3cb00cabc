# SPDX-License-Identifier: Apache-2.0
"""What stands in a float module's place answers a model's own code as that did, or raises.

The code of a model whose modules are swapped may go ways that the example did not take, and ask
there for a module's class, walk over ``children()``, or count ``parameters()``. While it runs, in a
call of a module of its own, it gets what the float model had: the class, modules that stand for the
parts, and tensors without values, which nobody can compute with (:class:`Described`). Whoever else
asks (``state_dict()``, an optimizer, ``pickle``, TorchScript) gets what is really there.

What cannot be seen is ``type(module)`` itself, and what ``torch.compile`` traces: the example must
take such ways.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import Self

_REMEDY = "Keep it float: name it in overrides with None."
_CALL = nn.Module._call_impl.__code__


def _by_model_code(frame: FrameType | None) -> bool:
    """Whether a model's own code asks, perhaps through methods of ``nn.Module``, in a call."""
    while frame is not None and (
        frame.f_code.co_name in ("__getattr__", "__setattr__")
        or frame.f_globals.get("__name__", "").startswith("torch.nn.")
    ):
        frame = frame.f_back
    # code that torch.fx generated has no name
    asker = "" if frame is None else frame.f_globals.get("__name__", "")
    if asker.partition(".")[0] in ("", "torch", "torchq"):
        return False
    return _in_call(frame)


def _in_call(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame is not None


class NoAnswer(RuntimeError):
    """A model's own code asks a layer for what is not there any more.

    No AttributeError, so that ``hasattr`` does not answer False.
    """


class Described:
    """A float tensor that is not there any more: what can be asked of it without its values.

    It is no tensor, so that whoever computes with it fails; all else raises.
    """

    requires_grad = False

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        """On the CPU."""
        self.shape, self.dtype = torch.Size(shape), dtype
        self.device = torch.device("cpu")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Raises NoAnswer in a call. Were it a tensor's, torch's C++ would believe it."""
        if _in_call(sys._getframe(1)):
            raise NoAnswer(_message("its class"))
        return Described

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """All sizes, or one."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Whether the dtype is one of floats."""
        return self.dtype.is_floating_point

    def __eq__(self, other: object) -> bool:
        """Raises, as ``bool()`` does."""
        _refuse("comparing its values")

    def __bool__(self) -> bool:
        """Raises: a value is asked for."""
        _refuse("the truth of its values")

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        """Raises NoAnswer for what a tensor has, AttributeError for all else."""
        error = NoAnswer if hasattr(Tensor, name) and name[:2] != "__" else AttributeError
        raise error(_message(name))


def _message(what: str) -> str:
    return (
        "torchq.nn: code of a model whose modules are swapped must not use the values of a layer's "
        f"weights, which are int8 now, got {what}. {_REMEDY}"
    )


def _refuse(what: str) -> NoReturn:
    raise TypeError(_message(what))


class Fixed(dict[Any, Any]):
    """What code asks for but cannot change."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NoAnswer."""
        raise NoAnswer(changed("what a layer has"))

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def changed(name: str) -> str:
    """The message where ``name`` is."""
    return (
        f"torchq.nn: {name} must be what it was in torchq.prepare, got another in a model whose "
        "modules are swapped. Keep the layer float: name it in overrides with None."
    )


@dataclass(frozen=True, eq=False)
class FloatModule:
    """What a float module was, for those who ask what stands in its place.

    Attributes:
        kind: its class.
        parameters, buffers, children, constants: its own, by name.
        names: all that could be asked of it, and not of every module.
    """

    kind: type
    parameters: dict[str, Described | None]
    buffers: dict[str, Described | None]
    children: dict[str, nn.Module | None]
    constants: dict[str, Any]
    names: frozenset[str]
    known: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """``known``: all of them."""
        known = self.constants | self.buffers | self.parameters | self.children
        object.__setattr__(self, "known", known)

    def has(self, name: str, other: Any) -> bool:
        """Whether it has this attribute with another value than ``other``."""
        if name == "training":
            return bool(other)
        if name in self.constants:
            value = self.constants[name]
            return type(value) is not type(other) or value != other
        return name in self.known or name in self.names

    def __deepcopy__(self, memo: dict[int, Any]) -> FloatModule:
        """Itself: nothing changes it."""
        return self


class _Answer:
    """An attribute that a model's own code sees as the float module's.

    No ``property``: TorchScript would compile it.
    """

    def __init__(self, name: str, answer: Callable[[FloatModule], Any]) -> None:
        self._name, self._answer = name, answer

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        stood = module.__dict__.get("_stood")
        if stood is not None and _by_model_code(sys._getframe(1)):
            return self._answer(stood)
        if self._name == "__class__":
            return type(module)
        try:
            return module.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, module: nn.Module, value: Any) -> None:
        if self._name == "__class__":
            vars(object)["__class__"].__set__(module, value)
        else:
            module.__dict__[self._name] = value


class Stands(nn.Module):
    """Base of what may stand in a float module's place, once :func:`put` told which."""

    __class__ = _Answer("__class__", lambda stood: stood.kind)
    _parameters = _Answer("_parameters", lambda stood: Fixed(stood.parameters))
    _buffers = _Answer("_buffers", lambda stood: Fixed(stood.buffers))
    _modules = _Answer("_modules", lambda stood: Fixed(stood.children))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """For ``to()`` and the like: of what is really there, whoever asks."""
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Raises NoAnswer where a model's own code loads something."""
        if "_stood" in self.__dict__ and _by_model_code(sys._getframe(1)):
            raise NoAnswer(changed("the state of a layer"))
        super()._load_from_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError where a model's own code changes what the float module had.

        But for the mode: leaving training mode, in which it is not, is no change.
        """
        stood = self.__dict__.get("_stood")
        if stood is not None and stood.has(name, value) and _by_model_code(sys._getframe(1)):
            raise AttributeError(changed(f"{name} of a layer"))
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """What the float module had.

        Raises:
            NoAnswer: this module has it no more.
        """
        stood = self.__dict__.get("_stood")
        if stood is None or torch.compiler.is_compiling():
            return super().__getattr__(name)
        if name in stood.known and _by_model_code(sys._getframe(1)):
            return stood.known[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in stood.names or not _by_model_code(sys._getframe(1)):
                raise
        raise NoAnswer(
            f"torchq.nn: code of a model whose modules are swapped must ask a layer only for what "
            f"is known of it, got '{name}' of a {stood.kind.__name__}. {_REMEDY}"
        )


def put(module: nn.Module, stood: FloatModule | None) -> nn.Module:
    """The module, in the place of a float one."""
    if isinstance(module, Stands) and stood is not None:
        module.__dict__["_stood"] = stood
    return module

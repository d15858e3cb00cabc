# SPDX-License-Identifier: Apache-2.0
"""Functions of a traced graph: what it checks at run time, and what TorchScript has no name for."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from torchq._arguments import kind_text

__all__ = [
    "GUARDS",
    "OPTIONAL",
    "expect",
    "expect_dtype",
    "expect_float",
    "expect_given",
    "expect_key",
    "expect_keys",
    "expect_kind",
    "expect_nan",
    "expect_none",
    "expect_number",
    "expect_real",
    "expect_same",
    "expect_tensor",
    "expect_text",
    "given",
    "have_shapes",
    "rounded",
    "with_condition",
    "with_indices",
    "with_item",
    "with_view",
    "with_view_filled",
]


@torch.fx.wrap
def expect(value: int, expected: int, where: str = "") -> None:
    """Raises where a size or truth value that the model's Python code acted on is another one.

    ``where`` is that code.

    Raises:
        RuntimeError: naming both.
    """
    scripting = torch.jit.is_scripting()  # type: ignore[attr-defined]
    if not scripting and torch._C._get_tracing_state():
        return  # a trace makes constants of conditions
    differs = value != expected
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        differs = differs or _is_other_number(value, expected)
    if differs:
        _raise_size(f"{expected}", f"{value}", where)


def _is_other_number(value: Any, expected: Any) -> bool:
    """Whether code that asks for the class finds another one: 2 is no 2.0, and 1 is not True."""
    return type(value) in (bool, int, float) and type(value) is not type(expected)


def _is_same(value: Any, expected: Any) -> bool:
    """Equal, with numbers of the same classes inside."""
    if value != expected or _is_other_number(value, expected):
        return False
    if isinstance(expected, list | tuple):
        return all(map(_is_same, value, expected))
    if isinstance(expected, dict):
        return all(_is_same(value[key], expected[key]) for key in expected)
    return True


@torch.fx.wrap
def expect_real(value: float, expected: float, where: str = "") -> None:
    """The same of a float that was computed from sizes.

    Raises:
        RuntimeError: naming both.
    """
    scripting = torch.jit.is_scripting()  # type: ignore[attr-defined]
    if not scripting and torch._C._get_tracing_state():
        return
    if value != expected:
        _raise_size(f"{expected}", f"{value}", where)


@torch.fx.wrap
def have_shapes(tensors: list[Tensor], shapes: list[list[int]]) -> bool:
    """Whether every tensor has its shape."""
    for tensor, shape in zip(tensors, shapes):  # noqa: B905  TorchScript knows no strict
        if tensor.dim() != len(shape):
            return False
        for i, size in enumerate(shape):
            if tensor.size(i) != size:
                return False
    return True


def _raise_size(expected: str, got: str, where: str) -> None:
    raise RuntimeError(
        f"torchq.fx: the model was traced where a size or condition was {expected}, got {got}, and "
        f"its Python code acted on it{where}. Trace it with example_inputs of such sizes, or use "
        "torchq.eager."
    )


@torch.fx.wrap
def expect_float(value: Tensor) -> None:
    """Raises where an input that int8 modules quantize is no float32 tensor.

    They would take uint8, as images come in, for values that are quantized already.

    Raises:
        TypeError: naming what it is.
    """
    if not isinstance(value, Tensor):
        _raise_input(kind_text(value))
    if value.dtype != torch.float32:
        _raise_input(f"{value.dtype}")


def _raise_input(got: str) -> None:
    raise TypeError(
        f"torchq.fx: the model's input must be torch.float32, as in example_inputs, got "
        f"{_short(got)}. Give it what the float model takes, such as input.float()."
    )


@torch.fx.wrap
def expect_dtype(value: Tensor, expected: torch.dtype) -> None:
    """Raises where the model's Python code asked for the dtype of an input, which is another one.

    Raises:
        RuntimeError: naming both.
    """
    if value.dtype != expected:
        _raise_other(f"a tensor of {expected}", f"one of {value.dtype}")


@torch.fx.wrap
def expect_number(value: float, expected: float) -> None:
    """The same of a float argument, which the graph holds as it was in example_inputs.

    Raises:
        RuntimeError: naming both.
    """
    differs = value != expected
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        differs = differs or _is_other_number(value, expected)
    if differs:
        _raise_other(f"{expected}", f"{value}")


@torch.fx.wrap
def expect_nan(value: float) -> None:
    """The same of a float argument that was NaN: TorchScript knows no literal of it.

    Raises:
        RuntimeError: naming both.
    """
    if not math.isnan(value):
        _raise_other("nan", f"{value}")


@torch.fx.wrap
def expect_same(value: Any, expected: Any) -> None:
    """The same of an argument of another class, as a tuple or a dtype, which TorchScript refuses.

    Raises:
        RuntimeError: naming both.
    """
    if not _is_same(value, expected):
        _raise_other(f"{expected}", kind_text(value))


@torch.fx.wrap
def expect_text(value: str, expected: str) -> None:
    """The same of a str argument.

    Raises:
        RuntimeError: naming both.
    """
    if value != expected:
        _raise_other(f"{expected}", f"{value}")


@torch.fx.wrap
def expect_none(value: Tensor | None) -> None:
    """The same of an argument that was None.

    Raises:
        RuntimeError: it is something else, which the graph would not look at.
    """
    if value is not None:
        _raise_other("None", "a tensor" if isinstance(value, Tensor) else f"{value}")


@torch.fx.wrap
def expect_tensor(value: Tensor) -> None:
    """The same of a tensor: the graph may not read it, as code does that asks for None.

    Raises:
        RuntimeError: it is none.
    """
    if not isinstance(value, Tensor):
        _raise_other("a tensor", kind_text(value))


@torch.fx.wrap
def expect_kind(value: Any, kind: str) -> None:
    """The same of the class of what holds tensors, of which TorchScript knows the type.

    Raises:
        RuntimeError: naming both.
    """
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        if kind == "dict":
            fits = isinstance(value, dict)
        elif kind == "tuple or list":
            fits = isinstance(value, tuple | list)
        else:
            fits = type(value).__name__ == kind
        if not fits:
            _raise_other(f"a {kind}", f"a {type(value).__name__}")


@torch.fx.wrap
def expect_given(value: Any, expected: Any) -> None:
    """The same of a number or a str that may be left out as :func:`given` says.

    Raises:
        RuntimeError: naming both.
    """
    same = False
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        same = _is_same(value, expected) or (value != value and expected != expected)
    elif isinstance(value, str) and isinstance(expected, str):  # noqa: SIM114 - it narrows
        same = value == expected
    elif isinstance(value, bool) and isinstance(expected, bool):  # noqa: SIM114 - one class at a time
        same = value == expected
    elif isinstance(value, int) and isinstance(expected, int):
        same = value == expected
    elif isinstance(value, float) and isinstance(expected, float):
        same = value == expected or (math.isnan(value) and math.isnan(expected))
    if not same:
        _raise_other(f"{expected}", f"{value}")


@torch.fx.wrap
def given(value: Optional[Tensor], name: str) -> Tensor:  # noqa: UP045 - as TorchScript takes it
    """An argument that may be left out only because one in front of it may.

    Raises:
        RuntimeError: it was.
    """
    if value is None:
        raise RuntimeError(
            f"torchq.fx: the model was traced with '{name}', and the converted model needs it, got "
            "None. Pass example_inputs without it to convert the model for such calls."
        )
    return value


@torch.fx.wrap
def expect_keys(values: dict[str, Tensor], expected: list[str]) -> None:
    """The same of the keys of a dict that the model's Python code went through, in their order.

    Raises:
        RuntimeError: naming both.
    """
    keys = list(values.keys())
    if keys != expected:
        _raise_other(f"a dict of {expected}", f"one of {keys}")


@torch.fx.wrap
def expect_key(values: dict[str, Tensor], key: str, present: bool) -> None:
    """The same of one key that the code asked for.

    Raises:
        RuntimeError: naming it.
    """
    if (key in values) != present:
        known = "with" if present else "without"
        _raise_other(f"a dict {known} '{key}'", f"one of {list(values.keys())}")


def _raise_other(expected: str, got: str) -> None:
    raise RuntimeError(
        f"torchq.fx: the model was traced with an argument that was {expected}, got {_short(got)}, "
        "and the converted model knows no other. Pass example_inputs with the argument as it will "
        "be."
    )


def _short(text: str) -> str:
    """Of what may be a whole array."""
    return text if len(text) < 200 else text[:200] + "..."


OPTIONAL: Any = Optional[Tensor]  # noqa: UP045 - torch.fx cannot write ``Tensor | None``
"""The type of an argument that expect_none checks."""

GUARDS = (
    *(expect, expect_real, expect_number, expect_nan, expect_text, expect_none, expect_same),
    *(expect_dtype, expect_float, expect_given, expect_keys, expect_key),
    *(expect_tensor, expect_kind),
)
for _guard in GUARDS:
    torch.fx.node.has_side_effect(_guard)  # or eliminate_dead_code takes it for unused


@torch.fx.wrap
def rounded(value: float) -> int:
    """``round(value)``, which is a float in TorchScript."""
    return int(round(value))  # noqa: RUF046 - there it is one


@torch.fx.wrap
def with_item(src: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of a tensor after ``copy[index] = value``."""
    result = src.clone()
    result[index] = value
    return result


# The same as TorchScript takes it. What is written is read: nothing removes it as unused.


@torch.fx.wrap
def with_view(whole: Tensor, view: Tensor, value: Tensor) -> Tensor:
    """``whole`` after ``view[...] = value``, in place."""
    view.copy_(_fitted(value, view.dim()))
    return whole


@torch.fx.wrap
def with_view_filled(whole: Tensor, filled: Tensor) -> Tensor:
    """``whole`` after a view of it was filled."""
    return whole


@torch.fx.wrap
def with_indices(src: Tensor, indices: list[Tensor], value: Tensor, first: int = 0) -> Tensor:
    """``with_item`` for tensors of indices and masks of one dim and more, from dim ``first`` on."""
    whole: list[Optional[Tensor]] = []  # noqa: UP045 - as TorchScript takes it
    for _ in range(first):
        whole.append(None)
    for index in indices:
        whole.append(index)
    gathered, left = 0, src.dim()
    for index in indices:
        is_mask = index.dtype == torch.bool or index.dtype == torch.uint8
        gathered = max(gathered, 1 if is_mask else index.dim())
        left -= index.dim() if is_mask else 1
    value = _fitted(value, gathered + left)
    # torch.index_put takes no None in Python
    result: Tensor = torch.ops.aten.index_put(src, whole, value)
    return result


@torch.fx.wrap
def with_condition(src: Tensor, condition: Tensor, value: Tensor) -> Tensor:
    """``with_item`` for a mask without dims."""
    return torch.where(condition, _fitted(value, src.dim()), src)


def _fitted(value: Tensor, rank: int) -> Tensor:
    """Without leading dims of 1 beyond ``rank``, which an assignment ignores."""
    while value.dim() > rank and value.size(0) == 1:
        value = value.squeeze(0)
    return value

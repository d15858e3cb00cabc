# SPDX-License-Identifier: Apache-2.0
"""Writes the function that decides whether a call takes a graph, as Python source.

The one place where torchq runs source that it wrote. Only ``def`` makes a function with the
parameters and defaults of a module's forward, which Python binds in a fiftieth of the time of
``inspect.Signature.bind``: the standard library writes source for dataclasses for the same reason.
PyTorch has nothing for it: graphs of torch.fx neither stop at the first condition that fails nor
take keyword-only parameters. The source holds names of parameters, numbers, and conditions of the
grammar of ``terms.py``; all else comes as objects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from torchq.capture.condition import NAMES, Condition
from torchq.capture.likeness import Argument, equal, flat, is_tensor, tensors_of, without
from torchq.capture.terms import Size
from torchq.models.trees import opened


class Accepted(Protocol):
    """The calls that take a graph: see :class:`~torchq.capture.guards.Example`."""

    arguments: list[Argument]
    guards: list[Condition]
    values: dict[str, object]
    neutral: dict[str, list[object]]

    @property
    def signature(self) -> inspect.Signature:
        """That of the module's forward, with self."""

    def options(self, name: str, value: object) -> object:
        """Return keywords without neutral ones, if ``name`` is ``**kwargs``; else the value."""

    def kind(self, name: str) -> object:
        """Return the kind of a parameter."""


def chooser(example: Accepted) -> Callable[..., tuple[Tensor, ...] | None]:
    """Return a function with the signature of forward: the graph's tensors, or None."""
    source, names = _source(example)
    exec(compile(source, "<torchq guards>", "exec", dont_inherit=True), names)
    choose: Callable[..., tuple[Tensor, ...] | None] = names["choose"]
    return choose


def _source(example: Accepted) -> tuple[str, dict[str, Any]]:
    """Return the source of the function, and what the source refers to."""
    # with underscores: a parameter may be named s1 or max
    names: dict[str, object] = {
        **NAMES,
        "_Tensor": Tensor,
        "_len": len,
        "_ArithmeticError": ArithmeticError,
    }
    names |= {"_flat": flat, "_equal": equal, "_is_tensor": is_tensor}
    head, parts, others = _parameters(example, names), [], []
    given: dict[Argument, str] = {}
    for name, value in example.values.items():
        expected = names[f"_expected_{name}"] = example.options(name, value)
        found = tensors_of(expected)
        text, kind = name, example.kind(name)
        if example.neutral and kind is inspect.Parameter.VAR_KEYWORD:
            names[f"_without_{name}"] = functools.partial(without, example.neutral)
            text = f"({name} and _without_{name}({name}))"
        if isinstance(expected, Argument):
            given[expected] = name
        elif found:
            names[f"_expected_{name}"] = pytree.tree_flatten(opened(expected))
            parts.append(f"(_f_{name} := _flat({text}, *_expected_{name})) is not None")
            given |= {argument: f"_f_{name}[{i}]" for i, argument in enumerate(found)}
        elif not expected and kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            others.append(f"not {text}")
        else:
            plain = expected is None or isinstance(expected, bool)
            first = f"{name} is {expected}" if plain else f"_equal({text}, _expected_{name})"
            neutral = [f"{name} is {value}" for value in example.neutral.get(name, ())]
            others.append(f"({' or '.join([first, *neutral])})")
    texts = [given[argument] for argument in example.arguments]
    conditions = [*others, *parts, *_on_tensors(example, texts, names)]
    return (
        f"def choose({head}):\n"
        "    try:\n"
        f"        if {' and '.join(conditions)}:\n"
        f"            return ({', '.join(texts)},)\n"
        "    except _ArithmeticError:\n"  # of a condition that cannot be computed: 5 % 0
        "        pass\n"
    ), names


def _parameters(example: Accepted, names: dict[str, object]) -> str:
    """Return the parameters of the module's forward, whose defaults are ``names`` then."""
    head = []
    parameters = list(example.signature.parameters.values())[1:]
    star = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not star:
            head.append("*")
            star = True
        stars = "*" * (p.kind is p.VAR_POSITIONAL) + "**" * (p.kind is p.VAR_KEYWORD)
        default = "" if p.default is p.empty else f"=_default_{p.name}"
        names[f"_default_{p.name}"] = p.default
        head.append(f"{stars}{p.name}{default}")
    return ", ".join(head)


def _on_tensors(example: Accepted, texts: list[str], names: dict[str, object]) -> list[str]:
    """Conditions on class, shape and dtype of the tensors ``texts``, and torch's guards.

    Whole shapes that are equal in every call are compared at once: reading one size takes as long.
    """
    first, conditions = leaders(example), []

    def name(size: Size) -> str:
        return f"_s{first[size.tensor]}[{size.dim}]"

    for i, (text, argument) in enumerate(zip(texts, example.arguments, strict=True)):
        conditions.append(f"({text}.__class__ is _Tensor or _is_tensor({text}))")
        if first[i] != i:
            conditions.append(f"{text}.shape == _s{first[i]}")
        else:
            conditions.append(f"_len(_s{i} := {text}.shape) == {len(argument.shape)}")
            sizes = enumerate(argument.shape)
            conditions += [f"_s{i}[{d}] == {size}" for d, size in sizes if size is not None]
        names[f"_dtype_{i}"] = argument.dtype
        conditions.append(f"{text}.dtype is _dtype_{i}")
    guards = [f"({g.source(name)})" for g in example.guards if not is_led(g, first)]
    return [*conditions, *dict.fromkeys(guards)]


def leaders(example: Accepted) -> list[int]:
    """Return, for each tensor, the first one that has the same shape in every call."""
    same: dict[Size, Size] = {}

    def first(size: Size) -> Size:
        passed = []
        while size in same:
            passed.append(size)
            size = same[size]
        same.update(dict.fromkeys(passed, size))  # a chain is walked once
        return size

    for guard in example.guards:
        if (pair := guard.equal_sizes) is not None:
            a, b = sorted(map(first, pair))
            if a != b:
                same[b] = a
    shapes = [
        tuple(first(Size(i, d)) if size is None else size for d, size in enumerate(argument.shape))
        for i, argument in enumerate(example.arguments)
    ]
    found: dict[tuple[Size | int, ...], int] = {}
    return [found.setdefault(shape, i) for i, shape in enumerate(shapes)]


def is_led(guard: Condition, first: list[int]) -> bool:
    """Return whether a guard says of two shapes that are equal in every call that they are."""
    pair = guard.equal_sizes
    if pair is None:
        return False
    return first[pair[0].tensor] == first[pair[1].tensor] and pair[0].dim == pair[1].dim

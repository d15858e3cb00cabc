# SPDX-License-Identifier: Apache-2.0
"""Decides which calls of a module take its graph: conditions on arguments, made into a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchq.capture.condition import NAMES, Condition, by_size
from torchq.capture.exported import Argument, Exported
from torchq.capture.terms import Size
from torchq.models.trees import opened


@dataclass
class Example:
    """Conditions for a call to take the graph: it is like the example, but for dynamic sizes.

    Attributes:
        cls: of the module, whose forward has the signature.
        arguments: the tensors that the graph takes.
        guards: conditions on their sizes.
        values: parameter of ``forward`` -> what the example gave; tensors are Arguments.
        structure: spec of results that are more than tuples, lists and dicts; None of others.
        limits: more such conditions, of calls that are not traced: ops raise beyond them.
        lines: size -> the line of the module's code that fixes it.
        neutral: option -> values that give the same results as the example, such as None.
    """

    cls: type[nn.Module]
    arguments: list[Argument]
    guards: list[Condition]
    values: dict[str, Any]
    structure: Any
    limits: list[Condition] = field(default_factory=list)
    lines: dict[Size, str] = field(default_factory=dict)
    neutral: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, exported: Exported, limits: list[Condition]) -> Example:
        """Return the example of a captured call."""
        leaves, spec = pytree.tree_flatten(opened((exported.args, exported.kwargs)))
        for argument in exported.arguments:
            leaves[argument.index] = argument
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        bound = inspect.signature(type(module).forward).bind(None, *args, **kwargs)
        bound.apply_defaults()
        values = dict(list(bound.arguments.items())[1:])
        result = exported.program.call_spec.out_spec
        structure = None if _is_plain(result) else result
        more = exported.guards, values, structure, limits, exported.lines, exported.neutral
        return cls(type(module), exported.arguments, *more)

    def __deepcopy__(self, memo: dict[int, Any]) -> Example:
        """Return itself: nothing changes it."""
        return self

    @property
    def signature(self) -> inspect.Signature:
        """That of the module's forward, with self."""
        return inspect.signature(self.cls.forward)

    def options(self, name: str, value: Any) -> Any:
        """Return keywords without neutral ones, if ``name`` is ``**kwargs``; else the value."""
        keywords = self._kind(name) is inspect.Parameter.VAR_KEYWORD
        return _without(self.neutral, value) if keywords else value

    def _kind(self, name: str) -> Any:
        return self.signature.parameters[name].kind

    def restore(self) -> Callable[[Any], Any]:
        """Return the function that gives results the structure that the module gives them."""
        spec = self.structure
        if spec is None:
            return lambda result: result
        return lambda result: pytree.tree_unflatten(pytree.tree_leaves(result), spec)

    def chooser(self, traced: bool = False) -> Callable[..., tuple[Tensor, ...] | None]:
        """Return a function with the module's signature: the graph's tensors, or None."""
        guards = self.guards if traced else [*self.guards, *self.limits]
        source, names = _source(replace(self, guards=guards))
        exec(compile(source, "<torchq guards>", "exec", dont_inherit=True), names)
        return names["choose"]  # type: ignore[no-any-return]

    def describe(self) -> list[str]:
        """Return the conditions as text, as ``x is float32 of shape [any, 8]``."""
        labels, leaders = self._labels(), _leaders(self)
        ranges, several = by_size((*self.guards, *self.limits))
        tensors = []
        for i, (label, argument) in enumerate(zip(labels, self.arguments, strict=True)):
            known = [size if size is not None else ranges.get(Size(i, d), "any")
                     for d, size in enumerate(argument.shape)]  # fmt: skip
            same = leaders[i] != i
            shape = f"the shape of {labels[leaders[i]]}" if same else f"shape {_sizes(known)}"
            tensors.append(f"{label} is {str(argument.dtype).removeprefix('torch.')} of {shape}")
        sizes = [guard.words(_label(labels)) for guard in several if not _is_led(guard, leaders)]
        others = [
            f"{name} is {_brief(value)}"
            for name, value in self.values.items()
            if value and not _tensors_of(value)
        ]
        return [*tensors, *others, *dict.fromkeys(sizes)]

    def why(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return what of a call does not meet the guards."""
        try:
            bound = self.signature.bind(None, *args, **kwargs)
        except TypeError as error:
            return str(error)
        bound.apply_defaults()
        shapes: dict[int, Any] = {}
        for name, value in list(bound.arguments.items())[1:]:
            if _is_neutral(self.neutral, name, value):
                continue
            expected = self.options(name, self.values[name])
            if reason := self._why_other(name, expected, self.options(name, value), shapes):
                return reason
        labels = self._labels()
        for guard in (*self.guards, *self.limits):
            if not guard.holds(shapes):
                used = dict.fromkeys(size.tensor for size in guard.sizes)
                got = " and ".join(f"{labels[i]} has {list(shapes[i])}" for i in used)
                wanted, line = guard.words(_label(labels)), self._line(guard.sizes)
                return f"the graph takes calls where {wanted}, but {got}{line}"
        return "its arguments are of other kinds than those of the example inputs"

    def why_array(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the mistake where a call gave an array in place of a tensor, or ""."""
        try:
            bound = self.signature.bind(None, *args, **kwargs)
        except TypeError:
            return ""
        for name, value in bound.arguments.items():
            if isinstance(value, np.ndarray) and isinstance(self.values[name], Argument):
                return (
                    f"torchq: {name} must be a tensor, got {_brief(value)}. Convert arrays with "
                    "torch.from_numpy."
                )
        return ""

    def _why_other(self, name: str, expected: Any, value: Any, shapes: dict[int, Any]) -> str:
        if not isinstance(expected, Argument):
            return self._why_constant(name, expected, value, shapes)
        if type(value) is not Tensor and not _is_tensor(value):
            return f"its argument '{name}' is {_brief(value)}, not a plain tensor"
        index = self.arguments.index(expected)
        shapes[index] = value.shape
        if value.dtype != expected.dtype:
            return f"its argument '{name}' is {value.dtype}, not {expected.dtype}"
        sizes = enumerate(zip(value.shape, expected.shape, strict=False))
        others = [Size(index, d) for d, (s, e) in sizes if e not in (None, s)]
        if value.dim() != len(expected.shape) or others:
            wanted, line = _sizes(expected.shape), self._line(others)
            return f"its argument '{name}' has shape {list(value.shape)}, not {wanted}{line}"
        return ""

    def _line(self, sizes: Iterable[Size]) -> str:
        """Return the line that fixes one of the sizes, as an end of a sentence."""
        line = next((self.lines[size] for size in sizes if size in self.lines), "")
        return f"; {line} fixes this size" if line else ""

    def _why_constant(self, name: str, expected: Any, value: Any, shapes: dict[int, Any]) -> str:
        before, structure = pytree.tree_flatten(opened(expected))
        if not any(isinstance(leaf, Argument) for leaf in before):
            if _equal(value, expected):
                return ""
            if type(value) is type(expected) is dict:
                return self._why_entry(name, expected, value)
            return f"its argument '{name}' is {_brief(value)}, not {_brief(expected)}"
        leaves, spec = pytree.tree_flatten(opened(value))
        if spec != structure:
            return f"its argument '{name}' holds other parts than the example's"
        pairs = zip(before, leaves, strict=True)
        return next((r for a, b in pairs if (r := self._why_other(name, a, b, shapes))), "")

    def _why_entry(self, name: str, expected: dict[Any, Any], value: dict[Any, Any]) -> str:
        """Return which entry of a dict, such as that of ``**kwargs``, is not the example's."""
        keys = [k for k in value if k not in expected or not _equal(value[k], expected[k])]
        key = (keys or [k for k in expected if k not in value])[0]
        star = self._kind(name) is inspect.Parameter.VAR_KEYWORD
        label = f"its argument '{key}'" if star else f"{key!r} of its argument '{name}'"
        if key not in value:
            return f"{label} is missing"
        wanted = f"not {_brief(expected[key])}" if key in expected else "which the example left out"
        return f"{label} is {_brief(value[key])}, {wanted}"

    def _labels(self) -> list[str]:
        """Return how the caller names each tensor: ``input_ids``, ``batch['x']``."""
        found: dict[Any, str] = {}
        for name, value in self.values.items():
            try:
                pairs = pytree.tree_flatten_with_path(opened(value))[0]
            except ValueError:  # a class of others, whose parts have no names
                pairs = [((), leaf) for leaf in pytree.tree_leaves(opened(value))]
            for path, leaf in pairs:
                if isinstance(leaf, Argument):
                    found[leaf] = f"{name}{pytree.keystr(path)}"
        return [found[argument] for argument in self.arguments]


def _source(example: Example) -> tuple[str, dict[str, Any]]:
    """Return the source of :meth:`Example.chooser`, and what the source refers to."""
    # with underscores: a parameter may be named s1 or max
    names: dict[str, Any] = {
        **NAMES,
        "_Tensor": Tensor,
        "_len": len,
        "_ArithmeticError": ArithmeticError,
    }
    names |= {"_flat": _flat, "_equal": _equal, "_is_tensor": _is_tensor}
    head, parts, others = _parameters(example, names), [], []
    given: dict[Argument, str] = {}
    for name, value in example.values.items():
        expected = names[f"_expected_{name}"] = example.options(name, value)
        found = _tensors_of(expected)
        text, kind = name, example._kind(name)
        if example.neutral and kind is inspect.Parameter.VAR_KEYWORD:
            names[f"_without_{name}"] = functools.partial(_without, example.neutral)
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


def _parameters(example: Example, names: dict[str, Any]) -> str:
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


def _on_tensors(example: Example, texts: list[str], names: dict[str, Any]) -> list[str]:
    """Conditions on class, shape and dtype of the tensors ``texts``, and torch's guards.

    Whole shapes that are equal in every call are compared at once: reading one size takes as long.
    """
    leaders, conditions = _leaders(example), []

    def name(size: Size) -> str:
        return f"_s{leaders[size.tensor]}[{size.dim}]"

    for i, (text, argument) in enumerate(zip(texts, example.arguments, strict=True)):
        conditions.append(f"({text}.__class__ is _Tensor or _is_tensor({text}))")
        if leaders[i] != i:
            conditions.append(f"{text}.shape == _s{leaders[i]}")
        else:
            conditions.append(f"_len(_s{i} := {text}.shape) == {len(argument.shape)}")
            sizes = enumerate(argument.shape)
            conditions += [f"_s{i}[{d}] == {size}" for d, size in sizes if size is not None]
        names[f"_dtype_{i}"] = argument.dtype
        conditions.append(f"{text}.dtype is _dtype_{i}")
    for guard in example.guards:
        text = f"({guard.source(name)})"
        if text not in conditions and not _is_led(guard, leaders):
            conditions.append(text)
    return conditions


def _leaders(example: Example) -> list[int]:
    """Return, for each tensor, the first one that has the same shape in every call."""
    same: dict[Size, Size] = {}

    def first(size: Size) -> Size:
        while size in same:
            size = same[size]
        return size

    for guard in example.guards:
        if (pair := guard.equal_sizes) is not None:
            a, b = sorted(map(first, pair))
            if a != b:
                same[b] = a
    shapes = [
        [first(Size(i, d)) if size is None else size for d, size in enumerate(argument.shape)]
        for i, argument in enumerate(example.arguments)
    ]
    return [shapes.index(shape) for shape in shapes]


def _is_led(guard: Condition, leaders: list[int]) -> bool:
    """Return whether a guard says of two shapes that are equal in every call that they are."""
    pair = guard.equal_sizes
    if pair is None:
        return False
    return leaders[pair[0].tensor] == leaders[pair[1].tensor] and pair[0].dim == pair[1].dim


def _is_neutral(neutral: Mapping[str, list[Any]], name: str, value: Any) -> bool:
    return any(value is known for known in neutral.get(name, ()))


def _without(neutral: Mapping[str, list[Any]], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return keywords without neutral ones."""
    return {k: v for k, v in keywords.items() if not _is_neutral(neutral, k, v)}


def _is_tensor(value: Any) -> bool:
    """Return True for a parameter, and for a tensor of torch.export or torch.compile."""
    if type(value) is nn.Parameter:
        return True
    return isinstance(value, Tensor) and torch.compiler.is_compiling()


def _tensors_of(value: Any) -> list[Argument]:
    """Return the tensors in what the example gave for one parameter."""
    return [leaf for leaf in pytree.tree_leaves(opened(value)) if isinstance(leaf, Argument)]


def _flat(value: Any, before: list[Any], structure: Any) -> list[Any] | None:
    """Return the tensors of a value that holds the same as the example's, else None."""
    leaves, spec = pytree.tree_flatten(value)
    if spec != structure:
        leaves, spec = pytree.tree_flatten(opened(value))
        if spec != structure:
            return None
    tensors = []
    for leaf, known in zip(leaves, before, strict=True):
        if isinstance(known, Argument):
            tensors.append(leaf)
        elif not _equal(leaf, known):
            return None
    return tensors


def _equal(value: Any, expected: Any) -> bool:
    """Return True where a value that is no tensor is that of the example, and of its class."""
    if value is expected:
        return True
    if type(value) is not type(expected):
        return False
    if isinstance(value, tuple | list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    try:
        return bool(value == expected)
    except Exception:  # of a class that does not compare
        return False


def _is_plain(spec: Any) -> bool:
    """Return whether results are tuples, lists and dicts of tensors, as graphs give them."""
    if spec.is_leaf():
        return True
    return spec.type in (tuple, list, dict) and all(map(_is_plain, spec.children()))


def _label(labels: list[str]) -> Callable[[Size], str]:
    """Return the function that names a size in the caller's words: ``x.shape[1]``."""
    return lambda size: f"{labels[size.tensor]}.shape[{size.dim}]"


def _sizes(shape: Sequence[Any]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "tensor" if type(value) is Tensor else type(value).__name__
        return f"a {kind} of {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"a numpy array of {value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"

# SPDX-License-Identifier: Apache-2.0
"""Tells which calls of a module take its graph, and why another one does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchq.capture.chooser import chooser, is_led, leaders
from torchq.capture.condition import Condition, by_size
from torchq.capture.exported import Exported
from torchq.capture.likeness import Argument, equal, is_neutral, is_tensor, tensors_of, without
from torchq.capture.terms import Size
from torchq.models.trees import Args, Kwargs, opened

_Dict = dict[object, object]
Restore = Callable[[object, Args, Kwargs], object]
"""Makes of a graph's result, and the call, what the module gives."""
_Shapes = dict[int, torch.Size]


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

    traceable: ClassVar[bool] = True
    """Whether torch.jit.trace and torch.compile record how a call becomes tensors."""

    cls: type[nn.Module]
    arguments: list[Argument]
    guards: list[Condition]
    values: dict[str, object]
    structure: pytree.TreeSpec | None
    limits: list[Condition] = field(default_factory=list)
    lines: dict[Size, str] = field(default_factory=dict)
    neutral: dict[str, list[object]] = field(default_factory=dict)

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

    def __deepcopy__(self, memo: dict[int, object]) -> Example:
        """Return itself: nothing changes it."""
        return self

    @property
    def signature(self) -> inspect.Signature:
        """That of the module's forward, with self."""
        return inspect.signature(self.cls.forward)

    def options(self, name: str, value: object) -> object:
        """Return keywords without neutral ones, if ``name`` is ``**kwargs``; else the value."""
        if self.kind(name) is inspect.Parameter.VAR_KEYWORD and isinstance(value, dict):
            return without(self.neutral, value)
        return value

    def kind(self, name: str) -> object:
        """Return the kind of a parameter."""
        return self.signature.parameters[name].kind

    def restore(self) -> Restore:
        """Return the function that gives results the structure that the module gives them."""
        spec = self.structure
        if spec is None:
            return lambda result, args, kwargs: result
        return lambda result, args, kwargs: pytree.tree_unflatten(pytree.tree_leaves(result), spec)

    def before_own_code(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Make the arguments of a call what the module's own code reads."""

    def chooser(self, traced: bool = False) -> Callable[..., tuple[Tensor, ...] | None]:
        """Return a function with the module's signature: the graph's tensors, or None."""
        guards = self.guards if traced else [*self.guards, *self.limits]
        return chooser(replace(self, guards=guards))

    def describe(self) -> list[str]:
        """Return the conditions as text, as ``x is float32 of shape [any, 8]``."""
        labels, first = self._labels(), leaders(self)
        ranges, several = by_size((*self.guards, *self.limits))
        tensors = []
        for i, (label, argument) in enumerate(zip(labels, self.arguments, strict=True)):
            known = [size if size is not None else ranges.get(Size(i, d), "any")
                     for d, size in enumerate(argument.shape)]  # fmt: skip
            same = first[i] != i
            shape = f"the shape of {labels[first[i]]}" if same else f"shape {_sizes(known)}"
            tensors.append(f"{label} is {str(argument.dtype).removeprefix('torch.')} of {shape}")
        sizes = [guard.words(_label(labels)) for guard in several if not is_led(guard, first)]
        others = [
            f"{name} is {_brief(value)}"
            for name, value in self.values.items()
            if value and not tensors_of(value)
        ]
        return [*tensors, *others, *dict.fromkeys(sizes)]

    def why(self, args: Args, kwargs: Kwargs) -> str:
        """Return what of a call does not meet the guards."""
        try:
            bound = self.signature.bind(None, *args, **kwargs)
        except TypeError as error:
            return str(error)
        bound.apply_defaults()
        shapes: _Shapes = {}
        for name, value in list(bound.arguments.items())[1:]:
            if is_neutral(self.neutral, name, value):
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

    def why_array(self, args: Args, kwargs: Kwargs) -> str:
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

    def _why_other(self, name: str, expected: object, value: object, shapes: _Shapes) -> str:
        if not isinstance(expected, Argument):
            return self._why_constant(name, expected, value, shapes)
        if type(value) is not Tensor and not is_tensor(value):
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

    def _why_constant(self, name: str, expected: object, value: object, shapes: _Shapes) -> str:
        before, structure = pytree.tree_flatten(opened(expected))
        if not any(isinstance(leaf, Argument) for leaf in before):
            if equal(value, expected):
                return ""
            if type(value) is dict and type(expected) is dict:
                return self._why_entry(name, expected, value)
            return f"its argument '{name}' is {_brief(value)}, not {_brief(expected)}"
        leaves, spec = pytree.tree_flatten(opened(value))
        if spec != structure:
            return f"its argument '{name}' holds other parts than the example's"
        pairs = zip(before, leaves, strict=True)
        return next((r for a, b in pairs if (r := self._why_other(name, a, b, shapes))), "")

    def _why_entry(self, name: str, expected: _Dict, value: _Dict) -> str:
        """Return which entry of a dict, such as that of ``**kwargs``, is not the example's."""
        keys = [k for k in value if k not in expected or not equal(value[k], expected[k])]
        key = (keys or [k for k in expected if k not in value])[0]
        star = self.kind(name) is inspect.Parameter.VAR_KEYWORD
        label = f"its argument '{key}'" if star else f"{key!r} of its argument '{name}'"
        if key not in value:
            return f"{label} is missing"
        wanted = f"not {_brief(expected[key])}" if key in expected else "which the example left out"
        return f"{label} is {_brief(value[key])}, {wanted}"

    def _labels(self) -> list[str]:
        """Return how the caller names each tensor: ``input_ids``, ``batch['x']``."""
        found: dict[object, str] = {}
        for name, value in self.values.items():
            try:
                pairs = pytree.tree_flatten_with_path(opened(value))[0]
            except ValueError:  # a class of others, whose parts have no names
                pairs = [((), leaf) for leaf in pytree.tree_leaves(opened(value))]
            for path, leaf in pairs:
                if isinstance(leaf, Argument):
                    found[leaf] = f"{name}{pytree.keystr(path)}"
        return [found[argument] for argument in self.arguments]


def _is_plain(spec: pytree.TreeSpec) -> bool:
    """Return whether results are tuples, lists and dicts of tensors, as graphs give them."""
    if spec.is_leaf():
        return True
    return spec.type in (tuple, list, dict) and all(map(_is_plain, spec.children()))


def _label(labels: list[str]) -> Callable[[Size], str]:
    """Return the function that names a size in the caller's words: ``x.shape[1]``."""
    return lambda size: f"{labels[size.tensor]}.shape[{size.dim}]"


def _sizes(shape: Sequence[object]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def _brief(value: object) -> str:
    if isinstance(value, Tensor):
        kind = "tensor" if type(value) is Tensor else type(value).__name__
        return f"a {kind} of {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"a numpy array of {value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"

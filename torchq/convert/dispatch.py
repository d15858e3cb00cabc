# SPDX-License-Identifier: Apache-2.0
"""Chooses for each call of a module: its graph, or the module's own code.

A :class:`Dispatch` stands in ``vars(module)["forward"]`` as a bound method. Calls whose arguments meet
the guards run the graph; all others run the code of the module's class, on its quantized parts. The
first of those warns and names the guard.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from torchq.convert.capture import Argument, Exported
from torchq.nn.attached import Attachment, attachment_of

_KEY = "torchq_graph."
"""Begins the names of a graph's tensors in the state of its module."""


class Dispatch(Attachment):
    """A module's graph beside the module's own code.

    Attributes:
        module: owns the code; the graph is not one of its submodules.
        graph: takes the tensors of a call, in the order of the leaves of ``(args, kwargs)``.
        name: qualified name of the module in the model.
        strict: raise where a call does not meet the guards.
        graph_calls, own_calls: how many calls took which way.
    """

    def __init__(
        self, module: nn.Module, graph: nn.Module, example: Example, name: str, strict: bool
    ) -> None:
        """``example``: which calls take the graph."""
        self.module, self.graph, self.name, self.strict = module, graph, name, strict
        self.example = example
        self.graph_calls = self.own_calls = 0
        self._warned = False
        self._seen = -1
        self._known = _hook_ids(module)

    @property
    def forward(self) -> Callable[..., Any]:
        """The method that calls of the module reach; pickle asks for this name, too."""
        own = type(self.module).forward
        signature = inspect.signature(own)
        choose = self.example.chooser()
        restore = self.example.restore()

        def forward(self: Dispatch, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                found = choose(*args, **kwargs)
                if found is None or _hook_ids(self.module) - self._known:
                    return own(self.module, *args, **kwargs)
                return restore(self.graph(*found))
            found = choose(*args, **kwargs) if _tracing() is None else _untraced(choose, args, kwargs)
            if found is not None and (RemovableHandle.next_id == self._seen or self._is_clean()):
                self.graph_calls += 1
                return restore(self.graph(*found))
            self._miss(found, args, kwargs)
            first = RemovableHandle.next_id
            try:
                return own(self.module, *args, **kwargs)
            finally:
                if RemovableHandle.next_id != first:
                    self._remove_hooks(first)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        forward.__doc__, forward.__name__ = own.__doc__, "forward"
        return MethodType(forward, self)

    def _remove_hooks(self, first: int) -> None:
        """Removes hooks that the code itself installed in a call, as transformers does.

        Its hooks for hidden states are local functions, which pickle refuses. Without its flag the
        next call that needs them installs them again.
        """
        for part in self.module.modules():
            for key in [key for key in part._forward_hooks if key >= first]:
                del part._forward_hooks[key]
            vars(part).pop("_output_capturing_hooks_installed", None)

    def _is_clean(self) -> bool:
        """Returns whether no submodule has hooks that are newer than the graph."""
        if _hook_ids(self.module) - self._known:
            return False
        self._seen = RemovableHandle.next_id
        return True

    def _miss(self, found: Any, args: Any, kwargs: Any) -> None:
        """Counts a call of the module's own code; the first one warns.

        Raises:
            RuntimeError: ``strict`` is set.
        """
        self.own_calls += 1
        if self._warned and not self.strict:
            return
        reason = (
            "a submodule has a new hook" if found is not None else self.example.why(args, kwargs)
        )
        where = f"'{self.name}'" if self.name else type(self.module).__name__
        text = f"torchq: this call of {where} does not run its int8 graph: {reason}."
        if self.strict:
            raise RuntimeError(
                f"{text} Quantize with example inputs that are called so, or without strict=True."
            )
        self._warned = True
        warnings.warn(
            f"{text} The module's own code runs instead, with int8 layers but float32 between them. "
            "Example inputs that are called so make a graph of such calls; torchq.explain counts "
            "the calls of either kind.",
            stacklevel=5,  # the call of the module
        )

    def scriptable(self) -> nn.Module:
        """What ``torch.jit.script`` compiles in place of the module."""
        return self.graph

    # The state of the graph goes with that of the module

    def save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Adds the graph's tensors to a state_dict of the module."""
        for name, value in self.graph.state_dict(keep_vars=True).items():
            state[f"{prefix}{_KEY}{name}"] = value

    def load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Takes the graph's tensors out of a state that is being loaded."""
        start = f"{prefix}{_KEY}"
        own = {name: state.pop(name) for name in list(state) if name.startswith(start)}
        own = {name[len(start) :]: value for name, value in own.items()}
        try:
            lacks, more = self.graph.load_state_dict(own, strict=False)
        except RuntimeError as error:
            errors.append(str(error))
            return
        missing.extend(f"{start}{name}" for name in lacks)
        unexpected.extend(f"{start}{name}" for name in more)


_tracing = torch._C._get_tracing_state


def _untraced(choose: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns what ``choose`` does, within ``torch.jit.trace``: its conditions are no part of a trace."""
    state = _tracing()
    torch._C._set_tracing_state(None)
    try:
        return choose(*args, **kwargs)
    finally:
        torch._C._set_tracing_state(state)


def attach(dispatch: Dispatch) -> None:
    """Makes calls of a module go through its dispatch."""
    module = dispatch.module
    vars(module)["forward"] = dispatch.forward
    vars(module)["__prepare_scriptable__"] = dispatch.scriptable
    module.register_state_dict_post_hook(functools.partial(Dispatch.save, dispatch))
    module.register_load_state_dict_pre_hook(dispatch.load)


def dispatch_of(module: nn.Module) -> Dispatch | None:
    """Returns what a module's calls go through; None for a module without a graph."""
    owner = attachment_of(module)
    return owner if isinstance(owner, Dispatch) else None


def dispatches(model: nn.Module) -> list[Dispatch]:
    """Returns all of them in a model, in the order of its modules."""
    found = (dispatch_of(module) for module in model.modules())
    return [dispatch for dispatch in found if dispatch is not None]


def _hook_ids(module: nn.Module) -> set[int]:
    """Returns the hooks of a module's parts; its own ones run whatever a call takes."""
    return {
        key
        for part in module.modules()
        if part is not module
        for hooks in (part._forward_hooks, part._forward_pre_hooks)
        for key in hooks
    }


@dataclass
class Structure:
    """How a module's results are built, where they are more than tuples, lists and dicts."""

    spec: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        """Returns itself: nothing changes it."""
        return self


@dataclass
class Example:
    """What a call must be like to take the graph: that of the example, but for dynamic sizes.

    Attributes:
        cls: of the module, whose forward has the signature.
        arguments: the tensors that the graph takes.
        guards: conditions on their shapes ``s0``, ``s1``, ...
        values: parameter of ``forward`` -> what the example gave; tensors are Arguments.
        structure: of the results; None where the graph gives them as they are.
    """

    cls: type[nn.Module]
    arguments: list[Argument]
    guards: list[str]
    values: dict[str, Any]
    structure: Structure | None

    @classmethod
    def of(cls, module: nn.Module, exported: Exported) -> Example:
        """Returns that of a captured call."""
        leaves, spec = pytree.tree_flatten((exported.args, exported.kwargs))
        for argument in exported.arguments:
            leaves[argument.index] = argument
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        bound = inspect.signature(type(module).forward).bind(None, *args, **kwargs)
        bound.apply_defaults()
        values = dict(list(bound.arguments.items())[1:])
        result = exported.program.call_spec.out_spec
        structure = None if _is_plain(result) else Structure(result)
        return cls(type(module), exported.arguments, exported.guards, values, structure)

    @property
    def signature(self) -> inspect.Signature:
        """That of the module's forward, with self."""
        return inspect.signature(self.cls.forward)

    def restore(self) -> Callable[[Any], Any]:
        """Returns the function that gives results the structure that the module gives them."""
        if self.structure is None:
            return _same
        spec = self.structure.spec
        return lambda result: pytree.tree_unflatten(pytree.tree_leaves(result), spec)

    def chooser(self) -> Callable[..., tuple[Tensor, ...] | None]:
        """Returns a function with the module's signature: the graph's tensors, or None."""
        source, names = _source(self)
        exec(compile(source, "<torchq guards>", "exec", dont_inherit=True), names)
        return names["choose"]  # type: ignore[no-any-return]

    def why(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Returns what of a call does not meet the guards."""
        try:
            bound = self.signature.bind(None, *args, **kwargs)
        except TypeError as error:
            return str(error)
        bound.apply_defaults()
        shapes: dict[str, Any] = {}
        for name, value in list(bound.arguments.items())[1:]:
            if reason := self._why_other(name, self.values[name], value, shapes):
                return reason
        for guard in self.guards:
            if not _holds(guard, shapes):
                return f"{_readable(guard, shapes)} does not hold, as it did for the example inputs"
        return "its arguments are of other kinds than those of the example inputs"

    def _why_other(self, name: str, expected: Any, value: Any, shapes: dict[str, Any]) -> str:
        if not isinstance(expected, Argument):
            leaves, spec = pytree.tree_flatten(value)
            before, structure = pytree.tree_flatten(expected)
            if not any(isinstance(leaf, Argument) for leaf in before):
                same = type(value) is type(expected) and _equal(value, expected)
                return (
                    ""
                    if same
                    else f"its argument '{name}' is {_brief(value)}, not {_brief(expected)}"
                )
            if spec != structure:
                return f"its argument '{name}' holds other parts than the example's"
            pairs = zip(before, leaves, strict=True)
            return next((r for a, b in pairs if (r := self._why_other(name, a, b, shapes))), "")
        if type(value) is not Tensor:
            return f"its argument '{name}' is {_brief(value)}, not a tensor"
        shapes[f"s{self.arguments.index(expected)}"] = value.shape
        if value.dtype != expected.dtype:
            return f"its argument '{name}' is {value.dtype}, not {expected.dtype}"
        sizes = zip(value.shape, expected.shape, strict=False)
        if value.dim() != len(expected.shape) or any(e not in (None, s) for s, e in sizes):
            wanted = [n if n is not None else "any" for n in expected.shape]
            return f"its argument '{name}' has shape {list(value.shape)}, not {wanted}".replace(
                "'any'", "any"
            )
        return ""


def _source(example: Example) -> tuple[str, dict[str, Any]]:
    """Returns the source of :meth:`Example.chooser`, and what the source refers to."""
    names: dict[str, Any] = {"Tensor": Tensor, "torch": torch, "math": math, "flat": _flat}
    names["traced"] = _is_traced
    parameters = list(example.signature.parameters.values())[1:]
    head, conditions, tensors = [], [], {}
    star = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for parameter in parameters:
        name, kind = parameter.name, parameter.kind
        if kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            head.append(("*" if kind is parameter.VAR_POSITIONAL else "**") + name)
        else:
            if kind is parameter.KEYWORD_ONLY and not star:
                head.append("*")
                star = True
            default = "" if parameter.default is parameter.empty else f"=default_{name}"
            names[f"default_{name}"] = parameter.default
            head.append(name + default)
        expected = example.values[name]
        leaves = pytree.tree_leaves(expected)
        if isinstance(expected, Argument):
            tensors[expected] = name
            conditions += _tensor_conditions(example, expected, name)
        elif any(isinstance(leaf, Argument) for leaf in leaves):
            names[f"expected_{name}"] = expected
            conditions.append(f"(f_{name} := flat({name}, expected_{name})) is not None")
            found = [leaf for leaf in leaves if isinstance(leaf, Argument)]
            for i, argument in enumerate(found):
                tensors[argument] = f"f_{name}[{i}]"
                conditions += _tensor_conditions(example, argument, f"f_{name}[{i}]")
        elif kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and not expected:
            conditions.append(f"not {name}")
        elif expected is None or isinstance(expected, bool):
            conditions.append(f"{name} is {expected}")
        else:
            names[f"expected_{name}"], names["equal"] = expected, _equal
            conditions.append(f"equal({name}, expected_{name})")
    given = [tensors[argument] for argument in example.arguments]
    condition = " and ".join([*conditions, *(f"({guard})" for guard in example.guards)]) or "True"
    return (
        f"def choose({', '.join(head)}):\n"
        f"    if {condition}:\n"
        f"        return ({', '.join(given)},)\n"
    ), names


def _tensor_conditions(example: Example, argument: Argument, text: str) -> list[str]:
    """Conditions on a tensor's class, dtype, rank and constant sizes."""
    i = example.arguments.index(argument)
    conditions = [
        f"({text}.__class__ is Tensor or traced({text}))",
        f"len(s{i} := {text}.shape) == {len(argument.shape)}",
        f"{text}.dtype is {argument.dtype}",
    ]
    sizes = enumerate(argument.shape)
    return conditions + [f"s{i}[{d}] == {size}" for d, size in sizes if size is not None]


def _is_traced(value: Any) -> bool:
    """Returns whether a value is a tensor of torch.export or torch.compile, without data."""
    return isinstance(value, Tensor) and torch.compiler.is_compiling()


def _flat(value: Any, expected: Any) -> list[Any] | None:
    """Returns the tensors of a value that holds the same as the example's, else None."""
    leaves, spec = pytree.tree_flatten(value)
    before, structure = pytree.tree_flatten(expected)
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
    """Returns whether a value that is no tensor is that of the example."""
    if value is expected:
        return True
    try:
        return type(value) is type(expected) and bool(value == expected)
    except Exception:  # of a class that does not compare
        return False


def _same(result: Any) -> Any:
    return result


def _is_plain(spec: Any) -> bool:
    """Returns whether results are tuples, lists and dicts of tensors, as graphs give them."""
    if spec.is_leaf():
        return True
    return spec.type in (tuple, list, dict) and all(map(_is_plain, spec.children()))


def _holds(guard: str, shapes: dict[str, Any]) -> bool:
    try:
        return bool(eval(guard, {"torch": torch, "math": math}, shapes))
    except Exception:
        return False


def _readable(guard: str, shapes: dict[str, Any]) -> str:
    """Returns a guard with the sizes that it met: ``s1[1] == s0[1]`` (s0 is [2, 12], ...)."""
    named = ", ".join(f"{n} is {list(s)}" for n, s in shapes.items() if f"{n}[" in guard)
    return f"{guard} ({named})"


def _brief(value: Any) -> str:
    text = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"

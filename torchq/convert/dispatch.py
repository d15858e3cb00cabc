# SPDX-License-Identifier: Apache-2.0
"""Chooses for each call of a module: its graph, or the module's own code.

A :class:`Dispatch` is in ``vars(module)["forward"]``, as a bound method. Calls whose arguments meet
the guards run the graph. All others run the code of the module's class on its quantized parts, and
the first of them warns and names the guard.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state, _set_tracing_state  # type: ignore[attr-defined]
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map_only

from torchq.attributes.arguments import as_float32
from torchq.capture.guards import Example
from torchq.graphs.loading import load_each
from torchq.graphs.module import QuantizedGraph
from torchq.models.attached import Attachment, attachment_of
from torchq.models.hooks import HookWatch, hooks_inside, without_capturing_hooks
from torchq.models.trees import Args, Kwargs, copied, opened
from torchq.nn.leaf import failing_leaf
from torchq.nn.packed_proof import with_proof
from torchq.runtime.library import refuse_onnx_export

_KEY = "torchq_graph."
"""Begins the names of a graph's tensors in the state of its module."""
_PACKED = ("weight", "compensation", "pair_bound")
_State = dict[str, Tensor]
_Choose = Callable[..., tuple[Tensor, ...] | None]
_Arguments = TypeVar("_Arguments")


class Dispatch(Attachment):
    """A module's graph beside the module's own code.

    Attributes:
        module: owns the code; the graph is not one of its submodules.
        graph: takes the tensors of a call, in the order of the leaves of ``(args, kwargs)``.
        name: qualified name of the module in the model.
        strict: raise where a call does not meet the guards.
        graph_calls, own_calls: how many calls took the graph, or ran the own code.
        runs_both: run the own code, too, for observers of leaves that the graph does not call.
    """

    def __init__(
        self, module: nn.Module, graph: nn.Module, example: Example, name: str, strict: bool
    ) -> None:
        """Take the graph for calls that are like ``example``."""
        self.module, self.graph, self.name, self.strict = module, graph, name, strict
        self.example = example
        self.graph_calls = self.own_calls = 0
        self.runs_both = self._warned = False
        self._known = hooks_inside(module)
        self._watch: HookWatch | None = None

    @property
    def forward(self) -> Callable[..., object]:
        """The method that calls of the module reach; pickle asks for this name, too."""
        own = type(self.module).forward
        signature = inspect.signature(own)
        choose, choose_traced = self.example.chooser(), self.example.chooser(traced=True)
        untraced, restore = self._untraced(choose), self.example.restore()

        def forward(self: Dispatch, *args: object, **kwargs: object) -> object:
            if is_compiling():
                return self._compiled(choose_traced, restore, args, kwargs)
            pick = choose if _get_tracing_state() is None else untraced
            try:
                found = pick(*args, **kwargs)
                if found is None and torch.is_autocast_enabled("cpu"):
                    found = pick(*_widened(args), **_widened(kwargs))
            except TypeError:  # own code takes the call otherwise, or says what is wrong with it
                found = None
            clean = (self._watch or self._watched()).is_clean()
            if found is not None and clean and not self.module.training:
                self.graph_calls += 1
                if self.runs_both:
                    self._run_own(*copied(args, kwargs))
                run = getattr(self.graph, "_direct", self.graph)  # without its own checks
                return restore(run(*found), args, kwargs)
            reason = "" if self._warned and not self.strict else self._why(found, args, kwargs)
            if self.strict:
                raise RuntimeError(reason)
            try:
                result = self._run_own(args, kwargs)
            except (TypeError, ValueError, RuntimeError) as error:
                if told := self.example.why_array(args, kwargs):
                    raise TypeError(told) from error
                if name := self._failed(error):
                    raise type(error)(f"{error} The module is '{name}'.") from error
                raise
            self._count(reason)
            return result

        forward.__signature__ = signature  # type: ignore[attr-defined]
        forward.__doc__, forward.__name__ = own.__doc__, "forward"
        return MethodType(forward, self)

    def _untraced(self, choose: _Choose) -> _Choose:
        """Return the function that chooses as a call that torch.jit.trace does not record."""

        def untraced(*args: object, **kwargs: object) -> tuple[Tensor, ...] | None:
            refuse_onnx_export()
            if not self.example.traceable:
                return None
            state = _get_tracing_state()
            _set_tracing_state(None)
            try:
                return choose(*args, **kwargs)
            finally:
                _set_tracing_state(state)

        return untraced

    def _run_own(self, args: Args, kwargs: Kwargs) -> object:
        """Run the module's own code; hooks that transformers adds in such a call do not stay."""
        watch = self._watch or self._watched()
        before = watch.ids()
        self.example.before_own_code(self.module, args, kwargs)
        try:
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            if watch.ids() != before:
                without_capturing_hooks(self.module, before)

    def _failed(self, error: Exception) -> str:
        """Return the name of the quantized layer that an op's error comes from, or ""."""
        leaf = failing_leaf(error)
        if leaf is None or not str(error).startswith("torchq."):
            return ""
        names = {part: name for name, part in self.module.named_modules()}
        return f"{self.name}.{names[leaf]}".lstrip(".") if leaf in names else ""

    def _compiled(
        self,
        choose: _Choose,
        restore: Callable[[object, Args, Kwargs], object],
        args: Args,
        kwargs: Kwargs,
    ) -> object:
        """Take a call within torch.compile or export; a count would compile each call anew."""
        try:
            found = choose(*args, **kwargs) if self.example.traceable else None
        except TypeError:
            found = None
        if found is None or self.module.training or hooks_inside(self.module) - self._known:
            if self.strict:
                raise RuntimeError(self._why(found, args, kwargs))
            self.example.before_own_code(self.module, args, kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)
        return restore(self.graph(*found), args, kwargs)

    def _watched(self) -> HookWatch:
        self._watch = HookWatch(self.module, self._known)
        return self._watch

    def _why(self, found: object, args: Args, kwargs: Kwargs) -> str:
        """Return why a call does not take the graph, and what would avoid that."""
        remedy = "Quantize with example inputs that are called so to have a graph of such calls."
        if found is None:
            reason = self.example.why(args, kwargs)
        elif self.module.training:
            reason, remedy = "it is in training mode", "Call eval() on the converted model."
        else:
            reason = "a submodule has a hook that is newer than the graph"
            remedy = "Remove the hook where it is not needed any more."
        where = f"'{self.name}'" if self.name else type(self.module).__name__
        text = f"torchq: this call of {where} does not run its int8 graph: {reason}. {remedy}"
        return f"{text} With strict=True this is an error." if self.strict else text

    def _count(self, reason: str) -> None:
        """Count a call of the module's own code; the first one warns."""
        self.own_calls += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{reason} The module's own code ran instead, with int8 layers but float32 between "
                "them. torchq.explain counts the calls of either kind.",
                stacklevel=5,
            )

    def begin(self, strict: bool) -> None:
        """Forget the calls of calibration."""
        self.graph_calls = self.own_calls = 0
        self._warned, self.strict = False, self.strict or strict
        self.runs_both = False

    def __getstate__(self) -> dict[str, object]:
        """Leave out the watch: copies watch the hooks of their own module."""
        return {**vars(self), "_watch": None}

    def conditions(self) -> list[str]:
        """Return what a call must meet to take the graph, as text."""
        return self.example.describe()

    def scriptable(self) -> nn.Module:
        """Return what ``torch.jit.script`` compiles in place of the module."""
        graph = self.graph
        if isinstance(graph, QuantizedGraph):
            return graph.__prepare_scriptable__()
        return with_proof(graph)

    # The state of the graph goes with that of the module

    def save(self, module: nn.Module, state: _State, prefix: str, metadata: object) -> None:
        """Add the graph's tensors to a state_dict of the module, but for those of its leaves."""
        of_leaf = self._shared()
        for name, value in self.graph.state_dict(keep_vars=True).items():
            leaf = of_leaf.get(name)
            if leaf is None or f"{prefix}{leaf}" not in state:
                state[f"{prefix}{_KEY}{name}"] = value

    def _shared(self) -> dict[str, str]:
        """Return names of the graph's tensors that leaves have too, and the leaves' names."""
        leaves: dict[tuple[object, ...], str] = {}
        for name, layer in self.module.named_modules(remove_duplicate=False):
            for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if tensor is not None:
                    leaves[memory(tensor)] = f"{name}.{key}".lstrip(".")
        graph = self.graph.state_dict(keep_vars=True)
        return {name: leaves[memory(t)] for name, t in graph.items() if memory(t) in leaves}

    def load(
        self, module: nn.Module, state: _State, prefix: str, metadata: Kwargs, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Take the graph's tensors out of a state that is being loaded."""
        start = f"{prefix}{_KEY}"
        own = {name: state.pop(name) for name in list(state) if name.startswith(start)}
        own = {name[len(start) :]: value for name, value in own.items()}
        of_leaf = self._shared()
        for name in self.graph.state_dict(keep_vars=True).keys() - own.keys():
            layer, _, key = name.rpartition(".")
            same = f"{layer}.layer.{key}" if key in (*_PACKED, "params") else name
            leaf = f"{prefix}{of_leaf.get(name, same)}"
            if leaf in state:
                own[name] = state[leaf]
        try:
            assign = bool(metadata.get("assign_to_params_buffers"))
            lacks, more = load_each(self.graph, own, assign)
        except RuntimeError as error:
            errors.append(str(error))
            return
        missing.extend(f"{start}{name}" for name in lacks)
        unexpected.extend(f"{start}{name}" for name in more)


def attach(dispatch: Dispatch) -> None:
    """Make calls of a module go through its dispatch."""
    module = dispatch.module
    vars(module)["forward"] = dispatch.forward
    vars(module)["__prepare_scriptable__"] = dispatch.scriptable
    module.register_state_dict_post_hook(functools.partial(Dispatch.save, dispatch))
    module.register_load_state_dict_pre_hook(dispatch.load)


def memory(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells whether two tensors are the same values in the same memory."""
    address = id(tensor) if tensor.is_meta or tensor.numel() == 0 else tensor.data_ptr()
    return address, tensor.dtype, tensor.shape, tensor.stride()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of leaves and graphs, each under all of its names."""
    state = nn.Module.state_dict(model, keep_vars=True)
    for name, module in model.named_modules(remove_duplicate=False):
        if (owner := dispatch_of(module)) is not None:
            prefix = f"{name}.{_KEY}".removeprefix(".")
            graph = owner.graph.state_dict(keep_vars=True)
            state |= {f"{prefix}{key}": value for key, value in graph.items()}
    return state


def dispatch_of(module: nn.Module) -> Dispatch | None:
    """Return what a module's calls go through; None for a module without a graph."""
    owner = attachment_of(module)
    return owner if isinstance(owner, Dispatch) else None


def dispatches(model: nn.Module) -> list[Dispatch]:
    """Return all of them in a model, in the order of its modules."""
    found = (dispatch_of(module) for module in model.modules())
    return [dispatch for dispatch in found if dispatch is not None]


def _widened(arguments: _Arguments) -> _Arguments:
    """Return the arguments with the half dtypes that autocast makes of float32 as float32."""
    widened: _Arguments = tree_map_only(Tensor, as_float32, opened(arguments))
    return widened

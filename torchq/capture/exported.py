# SPDX-License-Identifier: Apache-2.0
"""Captures a module as a graph of ATen calls, with ``torch.export``.

This file alone knows which release of torch runs. Every dimension of an input is dynamic unless the
module's code decides otherwise; such decisions come back as guards, conditions on sizes.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import itertools
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from torchq.capture.condition import Condition
from torchq.capture.likeness import Argument
from torchq.capture.module_kinds import MATMUL
from torchq.capture.one_call import FakeFunctions, as_fake_calls, as_one_call
from torchq.capture.rewrites import base_name
from torchq.capture.terms import Size
from torchq.models.inputs import float_tensors
from torchq.models.state import changed, same_numbers, state_of, twin
from torchq.models.trees import Args, Call, Kwargs, copied, opened

_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
_SIZE = re.compile(r"L\['(?:tensors'|args'\]\[0)\]\[(\d+)\]\.size\(\)")
_SOURCE = re.compile(rf"{_SIZE.pattern}\[(\d+)\]")
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LONG = 60  # parts of an expression; wav2vec2's seven convolutions make 45 of a length
_FIXED = "the capture, which takes minutes where it is free,"
_MUTATIONS = ("BUFFER_MUTATION", "USER_INPUT_MUTATION", "PARAMETER_MUTATION")


class CaptureError(ValueError):
    """The module cannot be captured; the message says why."""


@dataclass
class Exported:
    """A captured call.

    Attributes:
        program: the graph of ATen calls; its inputs are the tensors of the call, in order.
        args, kwargs: of the example, perhaps with a larger batch.
        arguments: the tensors that the graph takes.
        guards: conditions on the sizes of the tensors.
        lines: size -> the line of the module's code that fixes it.
        neutral: name of an option -> values of it that give the same results as the example.
        results: float tensors that the module gave for the example, where it ran on that.
    """

    program: ExportedProgram
    args: tuple[object, ...]
    kwargs: dict[str, object]
    arguments: list[Argument]
    guards: list[Condition] = field(default_factory=list)
    lines: dict[Size, str] = field(default_factory=dict)
    neutral: dict[str, list[object]] = field(default_factory=dict)
    results: list[Tensor] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The example's tensors, in the order of the graph's inputs."""
        leaves = pytree.tree_leaves(opened((self.args, self.kwargs)))
        return [leaves[argument.index] for argument in self.arguments]

    def call(self, tensors: Sequence[Tensor]) -> Call:
        """Return the arguments of the example with other tensors."""
        leaves, spec = pytree.tree_flatten(opened((self.args, self.kwargs)))
        for argument, tensor in zip(self.arguments, tensors, strict=True):
            leaves[argument.index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return args, kwargs

    def takes(self, args: Args, kwargs: Kwargs) -> bool:
        """Return whether the graph takes tensors of these sizes."""
        leaves = pytree.tree_leaves(opened((tuple(args), dict(kwargs))))
        tensors = [leaves[argument.index] for argument in self.arguments]
        pairs = zip(self.arguments, tensors, strict=True)
        sizes = (pair for a, t in pairs for pair in zip(a.shape, t.shape, strict=True))
        shapes = shapes_of(tensors)
        return all(a in (None, b) for a, b in sizes) and all(g.holds(shapes) for g in self.guards)


class _Adapter(nn.Module):
    """Takes tensors alone: everything else in a call is bound here."""

    def __init__(self, module: nn.Module, leaves: Sequence[object], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.module, self.spec = module, spec
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> object:
        leaves = list(self.constants)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.module(*args, **kwargs)


PREFIX = "module."
"""Begins the names of the module's own parameters in a captured program."""


def export(module: nn.Module, args: Args, kwargs: Kwargs, widen: bool = True) -> Exported:
    """Capture ``module(*args, **kwargs)``; the module itself is not changed.

    ``widen`` gives an example with a batch of one a batch of two, so that the batch is dynamic.

    Raises:
        CaptureError: torch.export does not capture the call, or the module keeps what it computes.
    """
    if why := _why_not(module, args, kwargs) or _why_unknown("takes", opened((args, kwargs))):
        raise CaptureError(why)
    # contiguous, since other strides would become guards
    call = _mapped(lambda t: t.detach().clone().contiguous(), (tuple(args), dict(kwargs)))
    module, fakes, results = _warm(module, call)
    wider = _widened(module, call) if widen else None
    if wider is not None:
        with contextlib.suppress(CaptureError):
            return _export(module, wider[0], fakes, None if results is None else wider[1])
    return _export(module, call, fakes, results)


def _why_not(module: nn.Module, args: Args, kwargs: Kwargs) -> str:
    """Return why a graph cannot stand for calls of the module's ``forward``, or ""."""
    own = type(module).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule)
    if own or "forward" in vars(module):
        return f"its {'__call__' if own else 'forward'} was replaced"
    try:
        inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    except TypeError as error:  # of a decorator that takes more, and names the forward inside
        return f"its forward says that it does not take such calls: {error}"
    for name, part in module.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if part is not module and any(map(_is_users, hooks)):
            return f"'{name}' has a forward hook, which runs with its own code"
    return ""


def _is_users(hook: object) -> bool:
    """Return False for hooks that a library makes in its models, and that a graph does without."""
    module = getattr(hook, "__module__", None) or ""
    return not module.startswith(("torch.", "transformers.", "torchq.qat."))


def _why_unknown(does: str, values: object) -> str:
    """Return why a graph cannot take or return such values, or ""."""
    for leaf in pytree.tree_leaves(values):
        kind = type(leaf).__name__
        if is_dataclass(leaf):
            return f"it {does} a {kind}. Call torch.export.register_dataclass({kind}) first"
        if not _is_constant(leaf):
            return f"it {does} a {kind}, which is no tensor and no constant"
    return ""


def _is_constant(leaf: object) -> bool:
    """Return whether a graph may hold a value that is no tensor as a constant."""
    numbers = (bool, int, float, torch.Size)
    kinds = (Tensor, *numbers, str, torch.dtype, torch.device, enum.Enum, type(None))
    return isinstance(leaf, kinds)


def _mapped(function: Callable[[Tensor], Tensor], call: Call) -> Call:
    """Return the same call with other tensors."""
    args, kwargs = pytree.tree_map_only(Tensor, function, opened(call))
    return args, kwargs


def _warm(module: nn.Module, call: Call) -> tuple[nn.Module, bool, list[Tensor] | None]:
    """Return the module, or a copy that keeps what its first call has worked out for the sizes.

    The second result tells whether its code calls ``torch.fake_quantize_*``. The third one has the
    float tensors that it gave, unless it is a copy.

    Raises:
        CaptureError: each call changes what it keeps, the values of the first one decide, the code
            changes what its arguments hold, or it returns what no graph holds.
    """
    warm, given = twin(module), copied(*call)
    before, (leaves, spec) = state_of(warm), pytree.tree_flatten(opened(given))
    with torch.no_grad(), same_numbers(), FakeFunctions(replace=False) as functions:
        result = warm(*given[0], **given[1])
    now = pytree.tree_flatten(opened(given))
    if now[1] != spec or any(a is not b for a, b in zip(leaves, now[0], strict=True)):
        raise CaptureError("its code changes what its arguments hold")
    if why := _why_unknown("returns", result):
        raise CaptureError(why)
    first = state_of(warm)
    if not changed(before, first):
        return module, functions.seen, float_tensors(result)
    again = twin(module)
    with torch.no_grad(), contextlib.suppress(Exception):  # of values that the code refuses
        given = copied(*call)
        warm(*given[0], **given[1])
        args, kwargs = _mapped(_other_values, call)
        again(*args, **kwargs)
    found = changed(first, state_of(warm)) or changed(first, state_of(again))
    for name, keys in found.items():
        where = f"'{name}.{keys[0]}'" if name else f"'{keys[0]}'"
        raise CaptureError(f"its code changes {where} in each call")
    return warm, functions.seen, None


def _other_values(tensor: Tensor) -> Tensor:
    return tensor / 2 if tensor.is_floating_point() else tensor.flip(0) if tensor.dim() else tensor


def _widened(module: nn.Module, call: Call) -> tuple[Call, list[Tensor]] | None:
    """Return the example with a batch of two, if its batch is one, and its float results.

    torch.export takes a size of one for a constant. None if the module does not take two.
    """
    leaves = pytree.tree_leaves(opened(call))
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.dim()]
    if not tensors or any(t.shape[0] != 1 for t in tensors):
        return None

    def twice(t: Tensor) -> Tensor:
        return torch.cat([t, t]) if t.dim() else t

    wide = _mapped(twice, call)
    given = copied(*wide)
    with torch.no_grad(), same_numbers():
        try:
            results = twin(module)(*given[0], **given[1])
        except Exception:  # of the model's own code
            return None
    found = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    takes_two = any(t.dim() and t.shape[0] == 2 for t in found)
    return (wide, float_tensors(results)) if takes_two else None


def _export(module: nn.Module, call: Call, fakes: bool, results: list[Tensor] | None) -> Exported:
    leaves, spec = pytree.tree_flatten(opened(call))
    adapter = _Adapter(as_fake_calls(as_one_call(twin(module))), leaves, spec).eval()
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    if not tensors:
        raise CaptureError("it takes no tensor")
    lines: dict[Size, str] = {}
    with _quiet(), torch.no_grad(), FakeFunctions() if fakes else contextlib.nullcontext():
        try:
            try:
                program = _program(adapter, tensors, range(max(t.dim() for t in tensors)))
            except _LongSizesError:
                program = _program(adapter, tensors, range(1))
                for i, tensor in enumerate(tensors):
                    lines |= {Size(i, d): _FIXED for d in range(1, tensor.dim())}
            with contextlib.suppress(AttributeError, KeyError):  # private names of torch
                lines |= _lines(program)
            if needs_functions(program):
                program = program.run_decompositions({})
        except Exception as error:
            raise CaptureError(_first(error)) from error
    kinds = {spec.kind.name for spec in program.graph_signature.output_specs}
    if mutated := kinds.intersection(_MUTATIONS):
        raise CaptureError(f"its code writes to its arguments or buffers ({mutated.pop()})")
    arguments = _arguments(program, dict(zip(adapter.positions, tensors, strict=True)))
    exported = Exported(program, *call, arguments, _guards(program), lines, results=results)
    if failed := [guard for guard in exported.guards if not guard.holds(shapes_of(tensors))]:
        raise CaptureError(f"a guard of torch.export cannot be checked: {failed[0]}")
    return exported


def _program(adapter: nn.Module, tensors: tuple[Tensor, ...], free: range) -> ExportedProgram:
    """Capture with these dimensions of all tensors dynamic; all others keep their sizes.

    Raises:
        _LongSizesError: several dimensions are free, and sizes become long expressions of them.
    """
    dims = tuple({d: Dim.AUTO for d in free if d < t.dim() and t.shape[d] > 1} for t in tensors)
    with contextlib.ExitStack() as stack:
        for module in adapter.modules() if len(free) > 1 else ():
            if isinstance(module, MATMUL):
                stack.callback(module.register_forward_pre_hook(_refuse_long_sizes).remove)
        return torch.export.export(adapter, tensors, dynamic_shapes=(dims,), strict=False)


class _LongSizesError(Exception):
    """Sizes are long expressions of those of the inputs."""


def _refuse_long_sizes(module: nn.Module, args: tuple[object, ...]) -> None:
    """Raise where a layer gets a size that is a long expression.

    torch takes minutes to compare such sizes, which come of windows that are padded to whole ones:
    the capture of Swin takes 12 s of CPU time up to 93 parts, 24 s up to 181, then minutes.
    """
    for tensor in args:
        for size in tensor.shape if isinstance(tensor, Tensor) else ():
            parts = _parts(size.node.expr) if isinstance(size, torch.SymInt) else ()
            if len([*itertools.islice(parts, _LONG)]) == _LONG:
                raise _LongSizesError


def _parts(expression: Any) -> Iterator[object]:
    """Yield an expression of sympy, and all that it is made of."""
    yield expression
    for part in expression.args:
        yield from _parts(part)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch.export prints and logs of graphs that fail."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def _first(error: Exception) -> str:
    """Return the first line of a message that may be pages long, or plain words for it."""
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return "its code acts on the values of a tensor"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return f"torch.export does not capture it: {text[:300]}"


def _arguments(program: ExportedProgram, tensors: Mapping[int, Tensor]) -> list[Argument]:
    names = [s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    values = {n.name: n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")}
    result = []
    for (position, tensor), name in zip(tensors.items(), names, strict=True):
        shape = tuple(size if isinstance(size, int) else None for size in values[name].shape)
        result.append(Argument(position, tensor.dtype, shape))
    return result


def _lines(program: ExportedProgram) -> dict[Size, str]:
    """Return the lines of code outside torch that fix sizes, as ``len(x)`` does."""
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    env: Any = next((v.fake_mode.shape_env for v in values if isinstance(v, FakeTensor)), None)
    found: dict[Size, str] = {}
    for symbol, place in env.replacements_slocs.items() if env else ():
        frame = place.framework_loc
        own = isinstance(frame, FrameSummary) and not frame.filename.startswith(_TORCH)
        if own and env.replacements[symbol].is_number:
            line = f"{Path(frame.filename).name}:{frame.lineno} ({frame.line})"
            for source in env.var_to_sources.get(symbol, ()):
                if match := _SOURCE.fullmatch(source.name):
                    found[Size(*map(int, match.groups()))] = line
    return found


def _guards(program: ExportedProgram) -> list[Condition]:
    """Return torch's guards as conditions on the sizes of the tensors.

    Raises:
        CaptureError: a guard is none.
    """
    texts = [_SIZE.sub(r"s\1", text) for text in getattr(program, "_guards_code", None) or []]
    try:
        return [Condition.parse(text) for text in dict.fromkeys(texts)]
    except ValueError as error:
        raise CaptureError(f"a guard of torch.export cannot be checked: {error}") from error


def shapes_of(tensors: Sequence[Tensor]) -> dict[int, torch.Size]:
    """Return the shapes of a graph's tensors, by the numbers that conditions have for them."""
    return {i: tensor.shape for i, tensor in enumerate(tensors)}


def needs_functions(program: ExportedProgram) -> bool:
    """Return whether a program writes to memory that something still reads as it was.

    ``run_decompositions({})`` makes such a program functional, at the price of tracing it anew.
    """
    inner = [m for m in program.graph_module.modules() if m is not program.graph_module]
    graphs = [m.graph for m in inner if isinstance(m, fx.GraphModule)]
    if any(_is_mutable(node.target) for graph in graphs for node in graph.nodes):
        return True
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    aliases: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if _is_mutable(node.target) and not _is_simple(node, aliases, position):
            return True
        if (memory := _memory(node)) is not None:
            aliases.setdefault(memory, []).append(node)
    return False


def functional(target: object) -> torch._ops.OpOverload | None:
    """Return the call that makes a new tensor: ``add.Tensor`` for ``add_.Tensor``; else None."""
    name = base_name(target)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name[-1] == "_" else None
    return getattr(packet, getattr(target, "_overloadname", ""), None)


def _is_mutable(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _is_simple(
    node: fx.Node, aliases: dict[int, list[fx.Node]], position: dict[fx.Node, int]
) -> bool:
    """Return whether nothing behind a call reads what the call writes over."""
    if functional(node.target) is None or not isinstance(node.args[0], fx.Node):
        return False
    memory = _memory(node.args[0])
    before = [] if memory is None else aliases.get(memory, [])
    if not before or before[0].op != "call_function":  # of the caller, or of the module
        return False
    return all(position[user] <= position[node] for alias in before for user in alias.users)


def _memory(node: fx.Node) -> int | None:
    """Return what identifies the memory of a tensor; None for anything else."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None

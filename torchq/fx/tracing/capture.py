# SPDX-License-Identifier: Apache-2.0
"""A model as a torch.fx graph, traced with example values at hand.

Every node is computed on the example inputs while it is recorded. So Python code that asks for a
rank, a dtype or a length gets an answer, and conditions on sizes can be followed: the graph then
holds a guard (``guards.py``) that raises where another input would go another way.

A submodule that still cannot be traced becomes one opaque call, and so does one whose results
depend on what it keeps from earlier calls (``memory.py``). A model whose own forward cannot be
traced, or whose graph does not compute what the model computes, raises CaptureError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.fx.tracing.aliases import join, memory
from torchq.fx.tracing.batches import free_batch, note_shapes
from torchq.fx.tracing.containers import is_given, is_part
from torchq.fx.tracing.factories import traced_factories
from torchq.fx.tracing.guards import GUARDS, expect, expect_dtype, with_item
from torchq.fx.tracing.memory import DIFFERS, Calls, why_other, with_constants
from torchq.fx.tracing.nodes import phase
from torchq.fx.tracing.overwritten import spare_readers
from torchq.fx.tracing.place import why
from torchq.fx.tracing.tracer import Tracer
from torchq.state import twin

__all__ = ["CaptureError", "Captured", "Meta", "capture", "remove_unused"]


class CaptureError(ValueError):
    """The model as a whole cannot be traced; the message says why."""


@dataclass(frozen=True)
class Meta:
    """What is known about the value of a node on the example inputs.

    Attributes:
        shape: of a tensor; None for any other value.
        dtype: of a tensor.
        storage: address of a tensor's memory, 0 if unknown.
        is_ordered: whether it is a contiguous tensor of more than two dimensions at the start of
            its memory, so that a layer that gives channels-last ones changes its strides.
        is_sequence: whether it is a tuple or list that holds tensors.
        length: of a sequence.
        is_number: whether it is an int, a float or a bool.
        is_int: whether it is an int, and no bool.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    storage: int = 0
    is_ordered: bool = False
    is_sequence: bool = False
    length: int = 0
    is_number: bool = False
    is_int: bool = False


@dataclass
class Captured:
    """A traced model.

    Attributes:
        graph: its nodes have, in ``meta``: "value" (a Meta), "scope" (qualified name of the module
            whose forward made the call), "writes" (nodes whose memory it changes), "varying"
            (whether it depends on the model's inputs), "doubled" (its shape where dimension 0 of
            inputs is 2, if the example's is 1), "phase" (of a sine, how far it goes) and,
            where it does not vary, "constant" (what it is).
        model: owns the modules and parameters that the graph refers to.
        untraceable: qualified name of an opaque submodule -> why it could not be traced.
        examples: the same name -> the positional and keyword arguments of its first call.
        entered: qualified names of the modules whose forward was traced.
        called: of those that were called as one operation, used or not.
        prefix: of what is a submodule of another model, its name there with a dot behind it.
        contiguous: whether its result must have the strides of a contiguous tensor.
        once: modules that are called with constants only, and whose results the graph holds.
    """

    graph: fx.Graph
    model: nn.Module
    untraceable: dict[str, str] = field(default_factory=dict)
    examples: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    prefix: str = ""
    contiguous: bool = False
    once: set[str] = field(default_factory=set)


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Traces ``model(*args, **kwargs)``; copies of the model are run, which share its parameters.

    A submodule whose results depend on what it keeps between calls becomes an opaque call.

    Raises:
        CaptureError: its forward cannot be traced, or the model itself keeps such a thing.
    """
    if type(model).forward is nn.Module.forward or isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(f"{type(model).__name__} has no forward to trace")
    opaque: dict[str, str] = {}
    calls = Calls(model)
    with torch.inference_mode(False), torch.no_grad(), _slow_paths():
        while True:
            captured, inputs = _trace(model, args, kwargs, opaque)
            try:
                fx.GraphModule(captured.model, captured.graph)
            except Exception as error:  # a submodule's name may be no name in Python code
                raise CaptureError(why(error)) from error
            found = why_other(calls, captured.model, captured.graph, inputs, captured.untraceable)
            if not found:
                free_batch(model, captured.model, captured.graph, inputs)
                note_shapes(model, captured.model, captured.graph, inputs)
                remove_unused(captured.graph)
                return captured
            if "" in found or found.keys() <= opaque.keys():
                raise CaptureError(found.get("", DIFFERS))
            opaque |= found


def _trace(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], opaque: Mapping[str, str]
) -> tuple[Captured, Any]:
    """What one attempt found, and what the model is called with."""
    traced = twin(model)
    tracer = Tracer(traced, args, kwargs, opaque)
    failed = ""
    with traced_factories(tracer):
        try:
            graph = tracer.trace(traced)
        except Exception as error:
            failed = why(error)
        tracer.release()
    if failed:
        raise CaptureError(failed)
    try:
        _join_copies(graph, tracer)
        spare_readers(graph, tracer)
    except fx.proxy.TraceError as error:
        raise CaptureError(str(error)) from error
    _write_back(graph, tracer)
    _check_dtypes(graph, tracer)
    remove_unused(graph)
    _copy_results(graph, tracer)
    if tracer.asked_rank:
        _check_ranks(graph, tracer)
    for node in graph.nodes:
        value = tracer.values.get(node)
        node.meta["value"] = _meta(value)
        node.meta["phase"] = phase(node, tracer.values)
        if node.op not in ("placeholder", "output") and not node.meta["varying"]:
            node.meta["constant"] = value
    captured = Captured(
        graph, with_constants(twin(model), traced), tracer.untraceable, tracer.examples,
        tracer.entered, tracer.called,
    )  # fmt: skip
    return captured, tracer.called_with


@contextmanager
def _slow_paths() -> Iterator[None]:
    """Attention as the operations it consists of, instead of one that is all float."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _meta(value: Any) -> Meta:
    if isinstance(value, Tensor):
        try:
            storage = value.untyped_storage().data_ptr()
            is_ordered = value.dim() > 2 and value.is_contiguous() and not value.storage_offset()
        except (NotImplementedError, RuntimeError):  # sparse and the like
            storage, is_ordered = 0, False
        return Meta(tuple(value.shape), value.dtype, storage, is_ordered)
    if isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value):
        tensors = [v for v in value if isinstance(v, Tensor)]
        storage = _meta(tensors[0]).storage
        return Meta(None, tensors[0].dtype, storage, is_sequence=True, length=len(value))
    return Meta(is_number=isinstance(value, (bool, int, float)), is_int=type(value) is int)


def _join_copies(graph: fx.Graph, tracer: Tracer) -> None:
    """Where a copy is none for other strides, a write to it is one to both.

    Raises:
        TraceError: the graph assigns items to one of them, which it makes a new tensor of, and
            reads the other one behind that.
    """
    values, position = tracer.values, {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=with_item):
        own = memory(values[node.args[0]])
        others = tracer.one_memory(node.args[0]) - {own}
        names = (name for name in position if memory(values.get(name)) in others)
        if any(position[user] > position[node] for name in names for user in name.users):
            raise fx.proxy.TraceError(
                "its Python code assigns items of what is a copy for some sizes or strides only, "
                "and reads the other one afterwards"
            )
    for node in graph.nodes:
        for target in node.meta.get("writes", ()):
            while pair := tracer.copied({memory(values[target])} - {0}):
                join(values, *pair)


def _write_back(graph: fx.Graph, tracer: Tracer) -> None:
    """Arguments that the code wrote to, of which the graph made new tensors, get these values."""
    (output,) = graph.find_nodes(op="output")
    for node in list(graph.nodes):
        latest = tracer.latest(node)
        value, written = tracer.values.get(node), tracer.values.get(latest)
        if isinstance(value, Tensor) and value is not written and is_part(tracer, node):
            with graph.inserting_before(output):
                copied = graph.call_method("copy_", (node, latest))
            copied.meta.update(scope="", varying=True, writes=[node], static=False)
            tracer.values[copied] = value


def _copy_results(graph: fx.Graph, tracer: Tracer) -> None:
    """Copies what is returned of constants: the model makes them anew in each call."""

    def storage(node: fx.Node) -> int:
        value = tracer.values[node]
        strided = isinstance(value, Tensor) and value.layout == torch.strided
        return value.untyped_storage().data_ptr() if strided else 0

    made = {storage(node) for node in graph.nodes if not node.meta.get("varying", True)} - {0}
    kept = [*tracer.root.parameters(), *tracer.root.buffers()]
    made -= {x.untyped_storage().data_ptr() for x in kept if x.layout == torch.strided}
    readers = list(graph.find_nodes(op="output"))
    for reader in readers:
        for node in reader.all_input_nodes:
            if isinstance(node.target, type):  # a class of results
                readers.append(node)
            elif storage(node) in made:
                with graph.inserting_before(reader):
                    copied = graph.call_method("clone", (node,))
                copied.meta.update(scope="", varying=True, writes=[], static=False)
                tracer.values[copied] = tracer.values[node].clone()
                reader.replace_input_with(node, copied)


def remove_unused(graph: fx.Graph) -> None:
    """Nodes without readers that neither check nor write nor are inputs."""
    for node in reversed(list(graph.nodes)):
        idle = node.op not in ("placeholder", "output") and node.target not in GUARDS
        if idle and not node.users and not node.meta["writes"]:
            graph.erase_node(node)


def _check_dtypes(graph: fx.Graph, tracer: Tracer) -> None:
    """Adds guards: what the code did with a dtype holds for inputs of theirs.

    Where it asked for that of floats made of integers, as by an embedding, any integers will do.
    """
    expected = dict[tuple[fx.Node, bool], None]()  # what is given, and whether as integers only
    for asked in tracer.asked_dtype & set(graph.nodes):
        is_float, seen, left = tracer.values[asked].is_floating_point(), set[fx.Node](), [asked]
        while left:
            node = left.pop()
            value, sources = tracer.values[node], node.all_input_nodes
            held = any(isinstance(tracer.values[n], dict | list | tuple) for n in sources)
            if isinstance(value, Tensor) and (is_given(tracer, node) or held):
                expected[node, is_float and not value.is_floating_point()] = None
            elif node not in seen:
                left.extend(sources)
            seen.add(node)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    known = {"scope": "", "writes": [], "static": True}
    for node, any_integers in expected:
        with graph.inserting_after(inputs[-1] if node.op == "placeholder" else node):
            if any_integers:
                asks = graph.call_method("is_floating_point", (node,))
                asks.meta.update(known, varying=True)
                tracer.values[asks] = False
                with graph.inserting_after(asks):
                    guard = graph.call_function(expect, (asks, False, " (its dtype)"))
            else:
                guard = graph.call_function(expect_dtype, (node, tracer.values[node].dtype))
            guard.meta.update(known, varying=False)
            tracer.values[guard] = None


def _check_ranks(graph: fx.Graph, tracer: Tracer) -> None:
    """Adds guards: what the code did with a rank or a number of arguments holds for such inputs."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        for node in inputs:
            value = tracer.values[node]
            if isinstance(value, Tensor):
                rank = graph.call_method("dim", (node,))
                where = f" (the number of dims of '{node.name}')"
                known = {"scope": "", "writes": [], "static": True}
                rank.meta.update(known, varying=True)
                tracer.values[rank] = value.dim()
                with graph.inserting_after(rank):
                    guard = graph.call_function(expect, (rank, value.dim(), where))
                    guard.meta.update(known, varying=False)

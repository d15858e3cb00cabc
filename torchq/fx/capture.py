# SPDX-License-Identifier: Apache-2.0
"""A model as a torch.fx graph, traced with example values at hand.

Every node is computed on the example inputs while it is recorded. So Python code that asks for a
rank, a dtype or a length gets an answer, and conditions on sizes can be followed: the graph then
holds a guard (:mod:`torchq.fx.guards`) that raises where another input would go another way.

A submodule that still cannot be traced becomes one opaque call. A model whose own forward cannot
be traced, or whose graph does not compute what the model computes, raises CaptureError.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.attention import attention
from torchq.fx.fake import fake_quantizer, is_watcher
from torchq.fx.guards import expect
from torchq.fx.sequences import SequenceTracer

__all__ = ["CaptureError", "Captured", "Meta", "capture"]

# Modules of torch that are one operation although they have children or look like several.
_WHOLE = (nn.RNNBase, nn.RNNCellBase)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CONSTANT_METHODS = _words(
    "dim ndimension is_floating_point is_complex element_size get_device is_inference"
)
_CONSTANT_ATTRIBUTES = _words(
    "dtype device ndim layout requires_grad is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_mkldnn is_nested itemsize grad_fn grad is_leaf names"
)
_SHAPE_METHODS = _words("size shape numel nelement stride storage_offset is_contiguous")
_FACTORIES = ("zeros", "ones", "full", "empty", "arange", "eye", "linspace")


class CaptureError(ValueError):
    """The model as a whole cannot be traced; the message says why."""


@dataclass(frozen=True)
class Meta:
    """What is known about the value of a node on the example inputs.

    Attributes:
        shape: of a tensor; None for any other value.
        dtype: of a tensor.
        storage: address of a tensor's memory, 0 if unknown.
        is_sequence: whether it is a tuple or list that holds tensors.
        length: of a sequence.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    storage: int = 0
    is_sequence: bool = False
    length: int = 0


@dataclass
class Captured:
    """A traced model.

    Attributes:
        graph: its nodes have, in ``meta``: "value" (a Meta), "scope" (qualified name of the module
            whose forward made the call), "writes" (nodes whose memory it changes), "varying"
            (whether it depends on the model's inputs) and, where it does not, "constant" (what it
            is).
        model: owns the modules and parameters that the graph refers to.
        untraceable: qualified name of an opaque submodule -> why it could not be traced.
        examples: the same name -> the positional and keyword arguments of its first call.
        entered: qualified names of the modules whose forward was traced.
    """

    graph: fx.Graph
    model: nn.Module
    untraceable: dict[str, str] = field(default_factory=dict)
    examples: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Traces ``model(*args, **kwargs)``; the model is used, and changed only as a call would.

    Raises:
        CaptureError: its forward cannot be traced.
    """
    if type(model).forward is nn.Module.forward or isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(f"{type(model).__name__} has no forward to trace")
    tracer = _Tracer(model, args, kwargs)
    with torch.inference_mode(False), torch.no_grad(), _traced_factories(tracer), _slow_paths():
        try:
            graph = tracer.trace(model)
        except Exception as error:
            raise CaptureError(_short(error)) from error
        _remove_unused(graph)
        if tracer.asked_rank:
            _check_ranks(graph, tracer)
        _check_same(fx.GraphModule(model, graph), model, tracer)
    for node in graph.nodes:
        value = tracer.values.get(node)
        node.meta["value"] = _meta(value)
        if node.op not in ("placeholder", "output") and not node.meta["varying"]:
            node.meta["constant"] = value
    return Captured(graph, model, tracer.untraceable, tracer.examples, tracer.entered)


class _Proxy(fx.Proxy):
    """A node that knows its value on the example inputs."""

    tracer: _Tracer

    def __getattr__(self, name: str) -> Any:
        value = self.tracer.values[self.node]
        found = getattr(value, name)  # AttributeError as the value would raise it
        if isinstance(value, Tensor) and name in _CONSTANT_ATTRIBUTES:
            self.tracer.asked_rank |= name == "ndim"
            return found
        if callable(found):
            return fx.proxy.Attribute(self, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __len__(self) -> int:
        value = self.tracer.values[self.node]
        if isinstance(value, Tensor):
            return int(self.tracer.known(self.size(0)))
        self.tracer.asked_rank = True
        return len(value)

    def __contains__(self, item: Any) -> bool:
        return item in self.tracer.known(self)

    def __index__(self) -> int:
        return int(self.tracer.known(self))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.tracer.known(self))

    def __hash__(self) -> int:
        return id(self)


class _Tracer(SequenceTracer):
    """See the module."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self.values: dict[fx.Node, Any] = {}
        self.untraceable: dict[str, str] = {}
        self.examples: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.entered: set[str] = set()
        self.asked_rank = False
        self.running = False
        self._cache: dict[str, fx.Proxy] = {}
        # Inference tensors have no version counter, which tells who writes in place.
        self.inputs = tree_map(_normal, (tuple(args), dict(kwargs)))
        self.called_with = copy.deepcopy(self.inputs)
        self._state = [
            (tensor, tensor.clone()) for tensor in model.state_dict(keep_vars=True).values()
            if isinstance(tensor, Tensor)
        ]  # fmt: skip

    # Values

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> Any:
        if kind == "call_method" and target in _CONSTANT_METHODS and isinstance(args[0], fx.Proxy):
            value = self.values[args[0].node]
            if isinstance(value, Tensor):
                self.asked_rank |= "dim" in target
                return getattr(value, target)()
        if target is F.multi_head_attention_forward and not self.running:
            rank = self.values[args[0].node].dim() if isinstance(args[0], fx.Proxy) else 0
            whole = attention(args, kwargs, rank)
            if whole is not None:
                return whole
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        if kind not in ("placeholder", "get_attr"):
            self._run(proxy.node)
        return proxy

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **more)
        if kind == "get_attr":  # of a tensor constant, too, which has no proxy
            self._run(node)
        return node

    def _run(self, node: fx.Node) -> None:
        """Computes a node, and notes what it depends on and writes to."""
        sources = [n for n in node.all_input_nodes if isinstance(self.values[n], Tensor)]
        versions = [self.values[n]._version for n in sources]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        before, self.running = self.running, True
        try:
            self.values[node] = _compute(self.root, node, args, kwargs)
        finally:
            self.running = before
        node.meta["scope"] = self.scope.module_path
        node.meta["varying"] = any(n.meta["varying"] for n in node.all_input_nodes)
        node.meta["writes"] = [
            n for n, version in zip(sources, versions, strict=True)
            if self.values[n]._version != version
        ]  # fmt: skip
        asks = node.target in _SHAPE_METHODS or (
            node.target is getattr and node.args[1] in _SHAPE_METHODS
        )
        static = all(n.meta["static"] for n in node.all_input_nodes)
        node.meta["static"] = node.op != "get_attr" and (asks or static)

    def known(self, proxy: fx.Proxy) -> Any:
        """The value of a size or of a condition on sizes, guarded.

        Raises:
            TraceError: it depends on the values in a tensor.
        """
        value, node = self.values[proxy.node], proxy.node
        if isinstance(value, Tensor) or not node.meta["static"]:
            raise fx.proxy.TraceError(f"its Python code acts on values in a tensor ({node.name})")
        if isinstance(value, (bool, int)) and node.meta["varying"]:
            guard = self.create_node("call_function", expect, (node, value), {})
            guard.meta.update(scope="", varying=False, writes=[], static=True)
            self.values[guard] = None
        return value

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self.values[obj.node]
        return bool(value if isinstance(value, (tuple, list, dict, str)) else self.known(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self.values[obj.node]
        if isinstance(value, (dict, set)):
            return iter(value)
        if not isinstance(value, (tuple, list, Tensor)):
            raise fx.proxy.TraceError(f"its Python code iterates over a {type(value).__name__}")
        indexable: Any = obj
        return (indexable[i] for i in range(len(indexable)))

    def keys(self, obj: fx.Proxy) -> Any:
        return self.values[obj.node].keys()

    # Modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, torch.jit.ScriptModule):
            return True
        before, self.running = self.running, True  # or attributes of m would be nodes
        try:
            if fake_quantizer(m) is not None or is_watcher(m):
                return True
            if is_watcher(getattr(m, "activation_post_process", None)):
                return False  # torch.ao's hook on its result is part of the model
        finally:
            self.running = before
        library = type(m).__module__.startswith(("torch.nn.", "torchq."))
        return library and (isinstance(m, _WHOLE) or next(m.children(), None) is None)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.running:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        mark, stack = len(self.graph.nodes), dict(self.module_stack)
        if not self.is_leaf_module(m, name):
            self.entered.add(name)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            if self.is_leaf_module(m, name):
                raise
            self._roll_back(mark)
            self.module_stack.clear()
            self.module_stack.update(stack)
            self.untraceable.setdefault(name, _short(error))
            self.entered.discard(name)
        inside = [other for other in self.untraceable if other.startswith(f"{name}.")]
        for other in inside:
            del self.untraceable[other]
            self.examples.pop(other, None)
        proxy = self.create_proxy("call_module", name, args, kwargs)
        node = proxy.node
        self.examples.setdefault(
            name, fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        )
        return proxy

    def _roll_back(self, mark: int) -> None:
        nodes = list(self.graph.nodes)
        for node in reversed(nodes[mark:]):
            self.graph.erase_node(node)
            del self.values[node]
        gone = set(nodes[mark:])
        for name in [n for n, proxy in self._cache.items() if proxy.node in gone]:
            del self._cache[name]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if self.running:
            return attr_val
        self._cache = parameter_proxy_cache
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """One placeholder per argument with tensors in it; the others are constants."""
        args, kwargs = self.inputs
        signature = inspect.signature(root_fn)
        bound = signature.bind(self.root, *args, **kwargs)
        values: list[Any] = []
        for name, value in list(bound.arguments.items())[1:]:
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                values.append(
                    tuple(self._argument(f"{name}_{i}", v) for i, v in enumerate(value))
                )  # fmt: skip
            elif kind is inspect.Parameter.VAR_KEYWORD:
                values.append({key: self._argument(key, v) for key, v in value.items()})
            else:
                values.append(self._argument(name, value))
        for name, value in zip(list(bound.arguments)[1:], values, strict=True):
            bound.arguments[name] = value
        called = bound.args[1:], bound.kwargs
        return (lambda: root_fn(self.root, *called[0], **called[1])), ()

    def _argument(self, name: str, value: Any) -> Any:
        tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        default = () if tensors else (value,)
        proxy = super().create_proxy("placeholder", name, default, {})
        proxy.node.meta.update(scope="", varying=tensors, writes=[], static=not tensors)
        self.values[proxy.node] = value
        if tensors:
            return proxy
        proxy.node.type = type(value) if isinstance(value, (bool, int, float, str)) else None
        if isinstance(value, (bool, int)):
            proxy.node.meta["varying"] = True
            return self.known(proxy)
        return value


def _compute(root: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(root)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _normal(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@contextmanager
def _slow_paths() -> Iterator[None]:
    """Attention as the operations it consists of, instead of one that is all float."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _traced_factories(tracer: _Tracer) -> Iterator[None]:
    """Makes torch.zeros(n) and the like nodes where n is one: torch does not dispatch on sizes."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def factory(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            if tracer.running or not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
                return original(*args, **kwargs)
            return tracer.create_proxy("call_function", original, args, kwargs)

        return factory

    try:
        for name, original in originals.items():
            setattr(torch, name, wrap(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _meta(value: Any) -> Meta:
    if isinstance(value, Tensor):
        try:
            storage = value.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # sparse and the like
            storage = 0
        return Meta(tuple(value.shape), value.dtype, storage)
    if isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value):
        tensors = [v for v in value if isinstance(v, Tensor)]
        return Meta(None, tensors[0].dtype, _meta(tensors[0]).storage, True, len(value))
    return Meta()


def _remove_unused(graph: fx.Graph) -> None:
    """Nodes without readers that neither check nor write nor are inputs."""
    for node in reversed(list(graph.nodes)):
        idle = node.op not in ("placeholder", "output") and node.target is not expect
        if idle and not node.users and not node.meta["writes"]:
            graph.erase_node(node)


def _check_ranks(graph: fx.Graph, tracer: _Tracer) -> None:
    """Adds guards: what the code did with a rank or a number of arguments holds for such inputs."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        for node in inputs:
            value = tracer.values[node]
            if isinstance(value, Tensor):
                rank = graph.call_method("dim", (node,))
                known = {"scope": "", "writes": [], "static": True}
                rank.meta.update(known, varying=True)
                tracer.values[rank] = value.dim()
                with graph.inserting_after(rank):
                    guard = graph.call_function(expect, (rank, value.dim()))
                    guard.meta.update(known, varying=False)


def _check_same(traced: nn.Module, model: nn.Module, tracer: _Tracer) -> None:
    """Raises CaptureError if the graph computes something else than the model."""
    args, kwargs = tracer.called_with
    results = []
    for run in (model, traced):
        with torch.no_grad():
            for tensor, value in tracer._state:
                tensor.copy_(value)  # a run may change buffers
        inputs = copy.deepcopy((args, kwargs))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            results.append(tree_leaves(run(*inputs[0], **inputs[1])))
    if len(results[0]) != len(results[1]) or not all(map(_same, *results)):
        raise CaptureError(
            "its graph computes something else than the model (perhaps its code asks "
            "`isinstance(x, torch.Tensor)`)"
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_kind = a.shape == b.shape and a.dtype == b.dtype
        return same_kind and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    return type(a) is type(b) or not isinstance(a, Tensor)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__

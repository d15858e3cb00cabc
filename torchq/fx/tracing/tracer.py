# SPDX-License-Identifier: Apache-2.0
"""The tracer of :mod:`torchq.fx.tracing.capture`: every node is computed while it is recorded."""

from __future__ import annotations

import copy
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from torchq.fx.tracing import containers
from torchq.fx.tracing.arguments import collection, holds_tensors, part, returned, with_defaults
from torchq.fx.tracing.fake import fake_quantizer, is_watcher
from torchq.fx.tracing.guards import OPTIONAL, expect_given, expect_none, given
from torchq.fx.tracing.place import why
from torchq.fx.tracing.proxy import Proxy, release
from torchq.fx.tracing.recorder import Recorder
from torchq.fx.tracing.respelled import UNSCRIPTED, instead, settle_filter
from torchq.fx.tracing.results import is_like, no_place_for
from torchq.fx.tracing.written import Written, writes_to_constant
from torchq.kinds import is_patched
from torchq.state import put_back, state_of

__all__ = ["Tracer"]

# Modules of torch that are one operation although they have children or look like several.
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WHOLE = (nn.RNNBase, nn.RNNCellBase)
_HINTS = (
    (nn.TransformerEncoder, "is_causal", 3),
    (nn.TransformerDecoder, "tgt_is_causal", 6),
)


class Tracer(Recorder):
    """See the module."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        opaque: Mapping[str, str],
    ) -> None:
        """To trace ``model(*args, **kwargs)``, but not into ``opaque`` (name -> why)."""
        super().__init__()
        self.proxy_buffer_attributes = True
        self.examples: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.entered, self.called = set[str](), set[str]()
        self._cache: dict[str, fx.Proxy] = {}
        self.inputs = _normal((tuple(args), dict(kwargs)))
        self.called_with = copy.deepcopy(self.inputs)
        self._opaque, self._state, self._known = opaque, state_of(model), set(model.modules())
        self._proxies: list[weakref.ref[Proxy]] = []

    def release(self) -> None:
        """Puts values where the code that was traced left nodes, beside its modules."""
        self._cache.clear()
        self.asked.clear()
        self.older.clear()
        self.released = True
        for constant in self.constants:
            read = constant in self.tensor_attrs  # before the first write, as it was
            node = self.latest(constant.torchq_proxy.node)
            constant.settle(None if read else self.values[node])
        release([proxy for ref in self._proxies if (proxy := ref()) is not None], self.values)

    # Values

    def create_arg(self, a: Any) -> Any:
        """A node, or values with nodes in them; what a model returns keeps its class.

        What was written in place is from then on the result of the operation that wrote.
        """
        if isinstance(a, Written):
            a = a.torchq_proxy
        if isinstance(a, fx.Proxy):
            return self.latest(a.node)
        if isinstance(a, np.generic):
            return a.item()
        if isinstance(a, np.ndarray) and a.dtype.kind in "biuf":  # such as indices
            return super().create_arg(torch.from_numpy(a.copy()))
        if isinstance(a, tuple) and hasattr(a, "_fields"):
            return self.create_proxy("call_function", type(a), tuple(a), {}).node
        if is_dataclass(a) and not isinstance(a, type):
            given = {f.name: getattr(a, f.name) for f in fields(a) if f.init}
            if not is_like(type(a)(**given), a):
                raise fx.proxy.TraceError(
                    f"its {type(a).__name__} has more than what it is made of, or changes that"
                )
            return self.create_proxy("call_function", type(a), (), given).node
        if isinstance(a, dict) and type(a) is not dict:
            return self.create_proxy("call_function", type(a), (dict(a),), {}).node
        try:
            return super().create_arg(a)
        except NotImplementedError as error:
            raise fx.proxy.TraceError(no_place_for(a)) from error

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A node that knows its value."""
        proxy = Proxy(node, self)
        self._proxies.append(weakref.ref(proxy))
        return proxy

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> Any:
        """A node, computed at once; a constant where it is known to be one."""
        whole = instead(self, kind, target, args, kwargs)
        if whole is not None:
            return whole
        if (copied := writes_to_constant(self, kind, target, args, kwargs)) is not None:
            args, kwargs = copied
            if target == "__setitem__":
                return args[0].__setitem__(*args[1:])
        args, kwargs = settle_filter(self, target, args, kwargs)
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        if kind not in ("placeholder", "get_attr"):
            try:
                self._run(proxy.node)
            except Exception:  # which the model's code may catch
                self.graph.erase_node(proxy.node)
                raise
            for source in proxy.node.meta["writes"]:
                if self.values[source] is self.values[proxy.node]:
                    self._written[source] = proxy.node
            if self.values[proxy.node] is None and self._stays_none(proxy.node):
                return None  # code asks `is None`, which no node answers
            if (whole := containers.whole(self, proxy.node)) is not None:
                if whole.op == "placeholder":
                    return part(self, proxy.node.name, proxy)
                returned(self, str(whole.target), proxy.node)
        if target in UNSCRIPTED:
            for source in proxy.node.all_input_nodes:
                self.known(self.proxy(source))
            proxy.node.meta["varying"] = False
        return proxy

    def _stays_none(self, node: fx.Node) -> bool:
        """Whether nothing else comes of other inputs; parts of inputs are guarded."""
        if not node.all_input_nodes:
            return node.target not in self.untraceable
        source = node
        takes = (operator.getitem, getattr, "get")
        while source.target in takes and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        if source.op != "placeholder" or len(node.all_input_nodes) != 1:
            return False
        self.guard(expect_none, node)
        return True

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Which way an `if` goes."""
        value = self.values[obj.node]
        if isinstance(value, (tuple, list, dict)):
            return containers.length(self, obj) > 0
        return bool(value if isinstance(value, str) else self.known(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Over what has a length."""
        value = self.values[obj.node]
        if isinstance(value, (dict, set)):
            return iter(self.keys(obj) if isinstance(value, dict) else value)
        if not isinstance(value, (tuple, list, Tensor)):
            raise fx.proxy.TraceError(f"its Python code iterates over a {type(value).__name__}")
        indexable: Any = obj
        if isinstance(value, Tensor):
            return (indexable[i] for i in range(indexable.__len__()))
        items = containers.length(self, obj, True)
        return (indexable[i] for i in range(items))

    def keys(self, obj: fx.Proxy) -> Any:
        """Of a dict; guarded."""
        return containers.keys(self, obj.node)

    # Modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether calls of the module are one node."""
        if isinstance(m, torch.jit.ScriptModule):
            return True
        before, self._running = self._running, True  # or attributes of m would be nodes
        try:
            if fake_quantizer(m) is not None or is_watcher(m):
                return True
            if is_watcher(getattr(m, "activation_post_process", None)):
                return False  # torch.ao's hook on its result is part of the model
        finally:
            self._running = before
        mode = getattr(m, "padding_mode", "zeros")
        if mode != "zeros" and isinstance(m, _CONVS) and not m._forward_hooks:
            return False  # a pad, and a convolution without
        if isinstance(m, nn.Sequential):  # an empty one is a shortcut that changes nothing
            return False
        if isinstance(m, nn.GLU):  # a table and a product, see `respelled`
            return False
        library = type(m).__module__.startswith(("torch.nn.", "torchq.")) and not is_patched(m)
        return library and (isinstance(m, _WHOLE) or next(m.children(), None) is None)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Traces into a module, or records one opaque call where that fails."""
        if self.running:
            return forward(*args, **kwargs)
        for cls, hint, position in _HINTS:
            if isinstance(m, cls) and len(args) <= position and kwargs.get(hint) is None:
                kwargs = {**kwargs, hint: False}  # else it looks for it in the mask's values
        if m not in self._known:  # made on the way, as by `self.layers[:2]`: its parts may be known
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        mark, stack = len(self.graph.nodes), dict(self.module_stack)
        if not self.is_leaf_module(m, name):
            self.entered.add(name)
        else:
            self.called.add(name)
        try:
            if name in self._opaque:
                raise fx.proxy.TraceError(self._opaque[name])
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            if self.is_leaf_module(m, name):
                raise
            self._roll_back(mark)
            put_back(self.root, self._state, name)
            self.module_stack.clear()
            self.module_stack.update(stack)
            self.untraceable.setdefault(name, self._opaque.get(name) or why(error))
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
        gone = self._forget(mark)
        for constant in [x for x in self.constants if x.torchq_proxy.node in gone]:
            self.constants.remove(constant)
            constant.settle(None)
        for name in [n for n, proxy in self._cache.items() if proxy.node in gone]:
            del self._cache[name]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """A parameter or buffer as a node."""
        if self.running:
            return attr_val
        self._cache = parameter_proxy_cache
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """One placeholder per argument of the model, in their order, left out or not.

        Arguments without tensors are constants, and guarded.

        Raises:
            TraceError: one was given by keyword behind ``*args``: one more of these would take its
                place in a graph.
        """
        args, kwargs = self.inputs
        signature = inspect.signature(root_fn)
        bound = signature.bind(self.root, *args, **kwargs)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if bound.kwargs and inspect.Parameter.VAR_POSITIONAL in kinds:
            named = ", ".join(f"'{name}'" for name in bound.kwargs)
            raise fx.proxy.TraceError(f"its forward takes {named} by keyword, behind *args")
        given = with_defaults(bound)
        values: list[Any] = []
        behind = False  # an argument that was left out: it has a default, so all that follow must
        for name, value in list(bound.arguments.items())[1:]:
            kind, default = signature.parameters[name].kind, signature.parameters[name].default
            if kind is inspect.Parameter.VAR_POSITIONAL:
                values.append(
                    tuple(self._argument(f"{name}_{i}", v) for i, v in enumerate(value))
                )  # fmt: skip
            elif kind is inspect.Parameter.VAR_KEYWORD:
                values.append({k: self._argument(k, v, behind=behind) for k, v in value.items()})
            else:
                values.append(self._argument(name, value, default, behind))
                behind = behind or name not in given
        required = False
        for node in reversed(self.graph.find_nodes(op="placeholder")):
            required = required or not node.args
            if required:  # Python takes no such argument behind one with a default
                node.args = ()
        for name, value in zip(list(bound.arguments)[1:], values, strict=True):
            bound.arguments[name] = value
        positional, keywords = _as_given(bound, len(args))
        return (lambda: root_fn(self.root, *positional, **keywords)), ()

    def _argument(
        self, name: str, value: Any, default: Any = inspect.Parameter.empty, behind: bool = False
    ) -> Any:
        """Has the model's default, where that is of the example's type, as TorchScript wants it.

        ``behind`` an argument that was left out it has None otherwise, and is guarded.
        """
        tensors = holds_tensors(name, value)
        if type(value) is float and type(default) is int:
            default = float(default)
        known = (default,) if type(default) is type(value) and not tensors else ()
        absent = behind and not known
        known = (None,) if absent else known
        proxy = super().create_proxy("placeholder", name, known, {})
        proxy.node.meta.update(scope="", varying=tensors, writes=[], static=not tensors)
        self.values[proxy.node] = value
        if tensors:
            if absent:
                proxy.node.type = OPTIONAL if isinstance(value, Tensor) else None
                return self.create_proxy("call_function", given, (proxy, name), {})
            proxy.node.type = collection(value)
            return part(self, name, proxy)
        kind = type(value) if isinstance(value, (bool, int, float, str)) else None
        proxy.node.type = Optional[kind] if kind and absent else kind  # noqa: UP045 - as OPTIONAL
        if isinstance(value, (bool, int, float, str)) or value is None:
            proxy.node.meta["varying"] = True
        if kind and absent:
            self.guard(expect_given, proxy.node, value)
            return value
        if value is None:
            proxy.node.type = OPTIONAL
        return part(self, name, proxy)


def _as_given(
    bound: inspect.BoundArguments, positional: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's arguments behind itself: by position what was given so, else by keyword.

    A decorator that adds keywords, as those of transformers do, would find others by position.
    """
    kinds = {name: p.kind for name, p in bound.signature.parameters.items()}
    named = {
        name: value
        for name, value in list(bound.arguments.items())[positional + 1 :]
        if kinds[name] is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    if inspect.Parameter.VAR_POSITIONAL in kinds.values():
        named = {}
    count = len(bound.args) - len(named)
    return bound.args[1:count], {**named, **bound.kwargs}


def _normal(inputs: Any) -> Any:
    """Copies: inference tensors have no version counter, which tells who writes in place.

    A tensor that is given twice is so in the copies: code may ask ``query is key``.
    """
    copies = dict[int, Tensor]()

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone()
        return copies[id(leaf)]

    return tree_map(copied, inputs)

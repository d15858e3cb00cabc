# SPDX-License-Identifier: Apache-2.0
"""What a model's code handles while it is traced: a node that knows its value."""

from __future__ import annotations

import copyreg
import functools
import gc
import operator
import sys
from collections import deque
from collections.abc import Callable, Mapping
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from torchq.fx.tracing import containers
from torchq.fx.tracing.arrays import universal
from torchq.fx.tracing.guards import expect, expect_kind, rounded, with_item
from torchq.fx.tracing.memory import KEEPS
from torchq.fx.tracing.place import assigns_item, is_models
from torchq.fx.tracing.recorder import Recorder

__all__ = ["Proxy", "release"]

_CONSTANTS = frozenset({
    "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "itemsize", "grad_fn", "grad",
    "is_leaf", "names",
})  # fmt: skip
# A node never has them; what a model is given may. By what tells them.
_OF_GRADIENTS = {
    "requires_grad": "requires_grad", "grad": "requires_grad", "is_leaf": "is_leaf",
    "grad_fn": "is_leaf",
}  # fmt: skip


class Proxy(fx.Proxy):
    """A node that knows its value on the example inputs."""

    tracer: Recorder

    def looks_like(self, asking: FrameType) -> type:
        """What ``isinstance`` says in the model's code: a tensor, tuple, list or dict is one.

        Not as ``__class__``: C++ that asks the same, as overloads with a number in the place of a
        tensor do, would take the node's memory for a tensor's.
        """
        value = self.tracer.values.get(self.node)
        pair = isinstance(value, tuple | list)
        if pair and is_models(asking) and containers.whole(self.tracer, self.node) is not None:
            self.tracer.guard(expect_kind, self.node, type(value).__name__)
        known = (Tensor, tuple, list, dict)
        return next((cls for cls in known if isinstance(value, cls)), Proxy)

    def __getattr__(self, name: str) -> Any:
        """As of its value; a tensor's dtype and the like are constants."""
        value = self.tracer.values[self.node]
        found = getattr(value, name)  # AttributeError as the value would raise it
        if isinstance(value, Tensor) and name in _CONSTANTS:
            self.tracer.asked_rank |= name == "ndim"
            if name in ("dtype", "itemsize"):
                self.tracer.asked_dtype.add(self.node)
            if name in _OF_GRADIENTS and containers.is_given(self.tracer, self.node):
                tells = _OF_GRADIENTS[name]
                asked = self.tracer.create_proxy("call_function", getattr, (self, tells), {})
                self.tracer.guard(expect, asked.node, getattr(value, tells))
            return found
        if isinstance(value, dict) and name in ("items", "values"):
            return functools.partial(self._entries, name == "items")
        if callable(found):
            return fx.proxy.Attribute(self, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        """From here on, this is another node: what was written to."""
        before = self.tracer.values[self.node]
        if not isinstance(before, Tensor):
            raise fx.proxy.TraceError("its Python code writes to what is no tensor")
        if kept := self.tracer.kept(before):
            raise fx.proxy.TraceError(KEEPS.format(f"'{kept}'"))
        written = self.tracer.create_proxy("call_function", with_item, (self, index, value), {})
        self.tracer.replace(self, written)

    def __len__(self) -> int:
        """Guarded where it may be another one."""
        if isinstance(self.tracer.values[self.node], Tensor):
            return int(self.tracer.known(self.size(0)))
        return containers.length(self.tracer, self)

    def __contains__(self, item: Any) -> bool:
        """Guarded."""
        value = self.tracer.values[self.node]
        if isinstance(value, dict):
            return containers.has_key(self.tracer, self.node, item)
        if isinstance(value, tuple | list):
            parts: Any = self
            return any(part == item for part in parts)
        return item in self.tracer.known(self)

    def _entries(self, with_keys: bool) -> list[Any]:
        """What ``items()`` or ``values()`` of a dict goes through."""
        indexable: Any = self
        entries = [(key, indexable[key]) for key in self.tracer.keys(self)]
        return entries if with_keys else [value for _, value in entries]

    def __index__(self) -> int:
        """Guarded, unless it is torch that asks whether this is a number, and then dispatches."""
        last = len(self.tracer.graph.nodes)
        value = int(self.tracer.known(self))
        guards = list(self.tracer.graph.nodes)[last:]
        frame = sys._getframe(1)
        self.tracer.asked.append((frame, frame.f_lasti, guards))
        return value

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None
    ) -> Any:
        """A node. Guards that this very call made on its way here are for nothing."""
        frame = sys._getframe(1)
        tracers = {x.tracer for x in tree_leaves((args, kwargs)) if type(x) is Proxy}
        for tracer in tracers:
            for asking, instruction, guards in tracer.asked:
                if asking is frame and instruction == frame.f_lasti:
                    for guard in guards:
                        tracer.graph.erase_node(guard)
                        del tracer.values[guard]
            tracer.asked.clear()
        return super().__torch_function__(orig_method, types, args, kwargs)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **more: Any) -> Any:
        """What numpy's functions do with it."""
        return universal(self.tracer, function, method, inputs, more)

    def __mul__(self, other: Any) -> Any:
        """A node, but for ``len(x) * [None]``, guarded: code goes through it, and writes to it."""
        if self._repeats(other):
            return self.__index__() * other
        return self.tracer.create_proxy("call_function", operator.mul, (self, other), {})

    def __rmul__(self, other: Any) -> Any:
        """The same."""
        if self._repeats(other):
            return other * self.__index__()
        return self.tracer.create_proxy("call_function", operator.mul, (other, self), {})

    def _repeats(self, other: Any) -> bool:
        number = isinstance(self.tracer.values[self.node], int)
        return number and isinstance(other, str | bytes | list | tuple)

    def __int__(self) -> int:
        """Guarded."""
        whole = self.tracer.create_proxy("call_function", int, (self,), {})
        return int(self.tracer.known(whole))

    def __float__(self) -> float:
        """Guarded."""
        return float(self.tracer.known(self))

    def __round__(self, digits: int | None = None) -> Any:
        """A node; with digits guarded, as TorchScript knows no such function."""
        value = self.tracer.values[self.node]
        if digits is not None or not isinstance(value, int | float):
            return round(self.tracer.known(self), digits)
        if isinstance(value, int):
            return self
        return self.tracer.create_proxy("call_function", rounded, (self,), {})

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        """Two nodes."""
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        """The same."""
        return other // self, other % self

    def __hash__(self) -> int:
        """By identity; of a number, as of another node of that number, but not as the number's.

        So a cache has what was kept for the same size in this call, but not in another one. The
        number is guarded: who does not find it compares it with nothing.
        """
        value = self.tracer.values[self.node]
        if isinstance(value, tuple):  # such as a shape, a key of somebody's cache
            raise TypeError("unhashable: a size that is traced")
        if isinstance(value, int | float):
            known = value if self.tracer.released else self.tracer.known(self)
            return hash(("node", known))
        return id(self)

    def __eq__(self, other: object) -> Any:
        """A node, but of what another trace left in somebody's cache: that is something else."""
        if type(other) is Proxy and other.tracer is not self.tracer:
            return False
        return super().__eq__(other)


# References to an operator's operand that nobody has: the interpreter's, two of the call.
_PASSING = 3


def _in_place(function: Callable[[Any, Any], Any], method: str) -> Callable[[Proxy, Any], Any]:
    """An operator such as ``+=``: whoever has the tensor, under another name too, gets the result.

    It is a new tensor where nobody sees the difference: that is what layers can be fused with.
    """

    def operate(self: Proxy, other: Any) -> Any:
        tracer = self.tracer
        value = tracer.values[self.node]
        if not isinstance(value, Tensor):
            return NotImplemented
        # of a[i] += b, where nobody else has a[i], which __setitem__ is about to write to a
        passing = sys.getrefcount(self) <= _PASSING and assigns_item(sys._getframe(1))
        written = self.node.all_input_nodes[:1] if passing else ()
        if _dtype(value, other) != value.dtype or tracer.has_views(self, written):
            return getattr(self, method)(other)
        result = function(self, other)
        tracer.replace(self, result)
        return result

    return operate


def _dtype(value: Tensor, other: Any) -> torch.dtype:
    """Of the result of a new tensor."""
    known = other.tracer.values[other.node] if isinstance(other, Proxy) else other
    return torch.result_type(value, known)


for _name, _method in (
    ("add", "add_"), ("sub", "sub_"), ("mul", "mul_"), ("truediv", "div_"), ("pow", "pow_"),
    ("floordiv", "floor_divide_"), ("mod", "remainder_"), ("and", "bitwise_and_"),
    ("or", "bitwise_or_"), ("xor", "bitwise_xor_"),
):  # fmt: skip
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Proxy, f"__i{_name}__", _in_place(_function, _method))


def release(left: list[Proxy], values: Mapping[fx.Node, Any]) -> None:
    """Puts values where nodes are kept: in lists, dicts, attributes and closures of anyone.

    A call with tensors would have left those; the nodes would spoil the next one.
    """

    def settle(leaf: Any) -> Any:
        return values.get(leaf.node, leaf) if type(leaf) is Proxy else leaf

    holders = gc.get_referrers(*left) if left else []
    tuples = [holder for holder in holders if type(holder) is tuple]
    for holder in holders + (gc.get_referrers(*tuples) if tuples else []):
        if holder is left or holder is tuples:
            continue
        for key, value in _kept(holder):
            if type(value) in (Proxy, tuple) and any(type(v) is Proxy for v in tree_leaves(value)):
                _keep(holder, key, tree_map(settle, value))


def _kept(holder: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a container, a closure's variable or somebody's object."""
    if type(holder) is dict:
        return list(holder.items())
    if type(holder) in (list, deque):
        return list(enumerate(holder))
    if type(holder) is CellType:
        return [("cell_contents", holder.cell_contents)]
    cls = type(holder)
    if not hasattr(cls, "__module__") or cls.__module__.startswith(("torch.fx", "torchq.")):
        return []
    names = [*getattr(holder, "__dict__", ()), *copyreg._slotnames(cls)]  # type: ignore[attr-defined]
    return [(name, getattr(holder, name)) for name in names if hasattr(holder, name)]


def _keep(holder: Any, key: Any, value: Any) -> None:
    if type(holder) in (list, deque):
        holder[key] = value
    elif type(holder) is dict:
        # The type cache would go on with what a class had: a node, after its end.
        owner = next((o for o in gc.get_referrers(holder) if isinstance(o, type)), None)
        holder.__setitem__(key, value) if owner is None else setattr(owner, key, value)
    else:
        object.__setattr__(holder, key, value)

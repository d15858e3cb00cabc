# SPDX-License-Identifier: Apache-2.0
"""From an exported program to a plain graph: tensors in, torch functions, the results out.

The graph scripts. Its calls are those of ``torch`` where there is one, else methods of tensors,
else ``torch.ops.aten``. Sizes are ``x.size(i)``. What only checks is dropped.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.fx.node import Argument, Target
from torch.utils import _pytree as pytree

from torchq.capture.einsum import as_product
from torchq.capture.exported import PREFIX, CaptureError, Exported, functional
from torchq.capture.graph import (
    Captured,
    Meta,
    aten_name,
    has_tensor,
    is_reserved,
    parameters_of,
    remove_unused,
)
from torchq.capture.heads import share_heads
from torchq.capture.merge import merge_equal
from torchq.capture.module_kinds import MATMUL
from torchq.capture.norms import join_rms_norms
from torchq.capture.patterns import row_of
from torchq.capture.rewrites import as_torch_call, base_name, full_name, is_random, passed_on
from torchq.models.trees import opened
from torchq.quantization.recipes.phases import largest_phase

_ATEN = torch.ops.aten
_DROPPED = {
    "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range_for_size",
    "sym_constrain_range", "_assert_async",
}  # fmt: skip
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_LOOK_UPS = (
    *("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"),
    *("index", "index_select", "gather"),
)
_REPEATED = {"expand", "expand_as", "repeat", "broadcast_to", "tile"}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.bool)


def plain_graph(exported: Exported, model: nn.Module) -> Captured:
    """Return the graph of a captured call of ``model``, whose parameters it refers to."""
    return _Plain(exported, model).run()


class _Plain:
    def __init__(self, exported: Exported, model: nn.Module) -> None:
        self.program, self.model, self.exported = exported.program, model, exported
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.values: dict[fx.Node, Any] = {}  # on the example; see _forget
        self.holders = Counter[fx.Node]()  # nodes of the program that have a value
        self.texts: dict[object, str] = {}  # of sizes: sympy takes long to print one
        self.held: dict[str, fx.Node] = {}
        self.modules = dict(model.named_modules())
        self.names = _argument_names(exported, model)

    def run(self) -> Captured:
        inputs = iter(self.exported.tensors)
        merge_equal(self.program.graph, lambda node: not self._place(node)[1])
        self._region(self.program.graph_module, inputs, inside=False)
        remove_unused(self.graph)
        join_rms_norms(self.graph)
        share_heads(self.graph)
        self._name_leaves()
        return Captured(self.graph, self.model)

    def _name_leaves(self) -> None:
        """Leave to each leaf module the one call that stands for the module."""
        calls: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op.startswith("call_") and node.meta["call"]:
                calls.setdefault(node.meta["call"], []).append(node)
        for nodes in calls.values():
            rows = [row_of(node) for node in nodes]
            products = [n for n, row in zip(nodes, rows, strict=True) if row and row.is_matmul]
            main = products[0] if products else nodes[0] if len(nodes) == 1 else None
            for node in nodes:
                if node is not main:
                    node.meta.update(scope=node.meta["owner"], owner="")
        for node in self.graph.nodes:
            if node.op == "call_function" and not node.meta["owner"]:
                row = row_of(node)
                if row is not None and row.is_matmul:
                    node.meta["owner"] = self._layer_of_weight(node)

    def _layer_of_weight(self, node: fx.Node) -> str:
        """Return the name of the layer whose parameters other code multiplies by, or ""."""
        left = [n for n in node.all_input_nodes if not n.meta["varying"]]
        names: set[str] = set()
        while left:
            constant = left.pop()
            left += constant.all_input_nodes
            if constant.op == "get_attr":
                name = str(constant.target).partition(".parametrizations.")[0]
                names |= {name, name.rpartition(".")[0]}
        found = [n for n in names if n and isinstance(self.modules.get(n), MATMUL)]
        return found[0] if len(found) == 1 else ""

    # Nodes

    def _region(self, module: fx.GraphModule, given: Iterator[Any], inside: bool = True) -> object:
        """Write the nodes of a graph, or of a region inside; return what it gives."""
        source = module.graph
        kinds = {s.arg.name: s for s in self.program.graph_signature.input_specs}
        last = {read: node for node in source.nodes for read in node.all_input_nodes}
        for node in source.nodes:
            if node.op == "placeholder":
                if inside:
                    self.env[node] = next(given)
                elif kinds[node.name].kind.name == "USER_INPUT":
                    self.env[node] = self._input(node, next(given))
                else:
                    self.env[node] = self._held(kinds[node.name].target)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(str(node.target), module)
            elif node.op == "output":
                if inside:
                    return fx.map_arg(node.args[0], self.env.__getitem__)
                self._output(node)
            else:
                self._call(node)
            if not inside:
                fx.map_arg(self.env.get(node), lambda made: self.holders.update([made]))
                self._forget([read for read in node.all_input_nodes if last[read] is node])
        return None

    def _forget(self, nodes: list[fx.Node]) -> None:
        """Drop values that only these nodes have; those in regions and of helper nodes stay."""
        gone: list[fx.Node] = []
        for node in nodes:
            fx.map_arg(self.env.pop(node, None), gone.append)
        self.holders.subtract(gone)
        for made in gone:
            if not self.holders[made] and made.meta["varying"]:
                self.values.pop(made, None)

    def _input(self, node: fx.Node, value: Tensor) -> fx.Node:
        made = self.graph.placeholder(self.names.pop(0))
        self.values[made] = value
        integral = value.dtype in _INTEGERS
        return self._noted(made, node, varying=True, static=False, positional=integral)

    def _held(self, target: str) -> fx.Node:
        """Return a parameter, buffer or constant of the program."""
        if target not in self.held:
            name = target.removeprefix(PREFIX)
            value = {**self.program.state_dict, **self.program.constants}[target]
            own = target.startswith(PREFIX) and has_tensor(self.model, name)
            if not own or is_reserved(name):
                name = f"_torchq_constant_{len(self.held)}"
                self.model.register_buffer(name, value)
            self.held[target] = made = self._stored(name, value)
            made.meta["parameters"] = frozenset({target.removeprefix(PREFIX)})
        return self.held[target]

    def _attribute(self, target: str, module: nn.Module) -> object:
        value = operator.attrgetter(target)(module)
        if isinstance(value, nn.Module):
            return value
        name = f"_torchq_constant_{len(self.held)}"
        self.model.register_buffer(name, value)
        self.held[name] = self._stored(name, value)
        return self.held[name]

    def _stored(self, name: str, value: Tensor) -> fx.Node:
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            made = self.graph.create_node("get_attr", name)
        self.values[made] = value
        made.meta.update(
            value=Meta.of(value), scope="", varying=False, static=False,
            positional=False, constant=value, sizes=tuple(map(str, value.shape)), phase=None,
        )  # fmt: skip
        return made

    def _output(self, node: fx.Node) -> None:
        specs = self.program.graph_signature.output_specs
        found: Any = fx.map_arg(node.args[0], self.env.__getitem__)
        kept = [v for v, s in zip(found, specs, strict=True) if s.kind.name == "USER_OUTPUT"]
        result = pytree.tree_unflatten(kept, self.program.call_spec.out_spec)
        known: list[fx.Node] = []
        fx.map_arg(result, known.append)
        if len(known) < sum(isinstance(value, fx.Node) for value in kept):
            result = tuple(kept)  # of a class that torch.fx does not look into
        made = self.graph.output(result)
        made.meta.update(scope="", varying=True, static=False, positional=False)

    def _call(self, node: fx.Node) -> None:
        target, name = node.target, base_name(node.target)
        in_place = name.endswith("_") and not name.endswith("__")
        call = functional(target) if in_place else None
        args: Any = fx.node.map_aggregate(node.args, self._known)
        kwargs = fx.node.map_aggregate(node.kwargs, self._known)
        if name == "cat":
            args = (self._without_empty(args[0]), *args[1:])
        if name in _REGIONS:
            at = next(i for i, arg in enumerate(args) if isinstance(arg, fx.GraphModule))
            self.env[node] = self._region(args[at], iter(args[at + 1 :]))
        elif name in _DROPPED:
            return
        elif (source := passed_on(node, args)) is not None:
            self.env[node] = source
        elif target is operator.getitem and isinstance(args[0], tuple | list):
            self.env[node] = args[0][args[1]]
        elif name == "recurrent":
            self.env[node] = self._recurrent(node, *args[:3])
        elif name == "fake_quantize" and getattr(target, "namespace", "") == "torchq_capture":
            self.env[node] = self._module(node, args[1], args[:1])
        elif isinstance(target, torch._ops.OpOverload) and target.namespace == "torchq_capture":
            call = getattr(getattr(_ATEN, name), target._overloadname)  # it is in the place of that
            self.env[node] = self._function(node, args, kwargs, call)
        elif name == "baddbmm":
            self.env[node] = self._add_product(node, *args, **kwargs)
        elif name == "glu":
            halves = self._function(
                node, (args[0], 2, *(args[1:] or (-1,))), {}, _ATEN.chunk.default
            )
            value, gate = (self._item(node, halves, i) for i in range(2))
            gate = self._function(node, (gate,), {}, _ATEN.sigmoid.default)
            self.env[node] = self._function(node, (value, gate), {}, _ATEN.mul.Tensor)
        elif name == "grouped_mm_fallback":  # of transformers, in place of torch's while exporting
            self.env[node] = self._function(node, args, kwargs, _ATEN._grouped_mm.default)
        elif name == "einsum" and (product := self._einsum(node, *args[:2])) is not None:
            self.env[node] = product
        elif name == "_native_batch_norm_legit_no_training":
            src, weight, bias, mean, var, momentum, eps = args
            given = (src, weight, bias, mean, var, False, momentum, eps, False)
            made = self._function(node, given, {}, _ATEN.batch_norm.default)
            self.env[node] = (made, None, None)
        else:
            self.env[node] = self._function(node, args, kwargs, call)

    def _known(self, value: Argument) -> Argument:
        return self.env[value] if isinstance(value, fx.Node) else value

    def _function(
        self, node: fx.Node, args: Any, kwargs: Any, call: Target | None = None
    ) -> fx.Node:
        """Write a call, of ``node`` or another one in its place."""
        call = call or node.target
        op, target, args, kwargs = as_torch_call(call, args, kwargs)
        made = self.graph.create_node(op, target, tuple(args), dict(kwargs))
        sources = made.all_input_nodes
        varying = any(n.meta["varying"] for n in sources) or is_random(call)
        static = varying and all(n.meta["static"] or not n.meta["varying"] for n in sources)
        name = base_name(call)
        if target in ("size", "numel"):
            static = varying = True
        made.meta["aten"] = full_name(call)
        self.values[made] = self._computed(made)
        if name == "as_strided" and not self._is_in_order(made.all_input_nodes[0]):
            raise CaptureError("its code reads the memory of a view by strides")
        looks_up = name in _LOOK_UPS
        known = [n.meta["positional"] for n in sources if n.meta["varying"]]
        positional = target in ("size", "numel") or (bool(known) and all(known))
        if (looks_up and not static) or (name in _REPEATED and not sources[0].meta["varying"]):
            positional = False  # values of a table, all of them where it is repeated
        return self._noted(made, node, varying=varying, static=static, positional=positional)

    def _add_product(
        self, node: fx.Node, *terms: Argument, beta: Argument = 1, alpha: Argument = 1
    ) -> fx.Node:
        """Write ``beta * added + alpha * first @ second``."""
        added, *factors = terms
        product = self._function(node, factors, {}, _ATEN.bmm.default)
        if alpha != 1:
            product = self._function(node, (product, alpha), {}, _ATEN.mul.Scalar)
        if beta == 0:
            return product
        if beta != 1:
            added = self._function(node, (added, beta), {}, _ATEN.mul.Scalar)
        return self._function(node, (product, added), {}, _ATEN.add.Tensor)

    def _without_empty(self, parts: Sequence[fx.Node]) -> Sequence[fx.Node]:
        """Leave out ``torch.tensor([])``, which a cache of keys begins with: cat ignores it."""
        full = [p for p in parts if p.meta["varying"] or self.values[p].shape != (0,)]
        alike = len({self.values[part].dtype for part in parts}) == 1
        return full if full and alike else parts

    def _einsum(self, node: fx.Node, equation: str, operands: list[fx.Node]) -> fx.Node | None:
        """Write an einsum as the matrix product that it is; None where it is none."""
        given: Any = node.args[1]
        fakes = {made: one.meta.get("val") for made, one in zip(operands, given, strict=True)}

        def emit(call: Callable[..., object], *args: Argument) -> fx.Node:
            made = self._function(node, args, {}, call)
            fakes[made] = _fake(call, fx.map_arg(args, fakes.get))
            shape = getattr(fakes[made], "shape", None)
            made.meta["sizes"] = None if shape is None else tuple(map(self._text, shape))
            return made

        known = [(tuple(self.values[x].shape), x.meta["varying"]) for x in operands]
        return as_product(emit, equation, operands, known)

    def _is_in_order(self, node: fx.Node) -> bool:
        """Return whether a tensor of the example fills its memory, in the order of its dims."""
        value = self.values[node]
        whole = value.untyped_storage().nbytes() == value.numel() * value.itemsize
        return bool(value.is_contiguous() and whole)

    def _recurrent(self, node: fx.Node, srcs: list[fx.Node], name: str, kind: str) -> list[fx.Node]:
        """Return the call of a recurrent module, and its results one by one."""
        states: Sequence[Argument] = [tuple(srcs[1:])] if "LSTM" in kind and srcs[1:] else srcs[1:]
        made = self._module(node, name, (srcs[0], *states))
        part = functools.partial(self._item, node)
        if kind == "LSTM":
            state = part(made, 1)
            return [part(made, 0), part(state, 0), part(state, 1)]
        if kind.endswith("Cell") and kind != "LSTMCell":
            return [made]
        return [part(made, 0), part(made, 1)]

    def _module(self, node: fx.Node, name: str, args: tuple[Argument, ...]) -> fx.Node:
        """Return the call of a module that is one call in the program, too."""
        if is_reserved(name):
            raise CaptureError(f"torch.fx has another meaning for the name '{name}'")
        made = self.graph.call_module(name, args)
        varying = any(n.meta["varying"] for n in made.all_input_nodes)
        self.values[made] = self._computed(made)
        made.meta["aten"] = None
        return self._noted(made, node, varying=varying, static=False, positional=False)

    def _item(self, node: fx.Node, source: fx.Node, index: int) -> fx.Node:
        """One of several results."""
        item = self.graph.call_function(operator.getitem, (source, index))
        item.meta["aten"] = None
        self.values[item] = self._computed(item)
        flags = {name: source.meta[name] for name in ("varying", "static", "positional")}
        return self._noted(item, node, **flags)

    # What is known of them

    def _computed(self, made: fx.Node) -> object:
        args, kwargs = fx.node.map_arg((made.args, made.kwargs), self.values.__getitem__)
        if made.op == "call_module":
            return self.modules[str(made.target)](*args, **kwargs)
        if made.op == "call_method":
            return getattr(args[0], str(made.target))(*args[1:], **kwargs)
        assert callable(made.target)
        return made.target(*args, **kwargs)

    def _noted(self, made: fx.Node, node: fx.Node, **flags: bool) -> fx.Node:
        value, symbolic = self.values[made], node.meta.get("val")
        if isinstance(symbolic, tuple | list) and isinstance(value, Tensor):
            symbolic = symbolic[0]  # of a batch norm
        scope, owner, call = self._place(node)
        made.meta.update(flags, value=Meta.of(value), scope=scope, owner=owner)
        made.meta["call"] = call
        shape = getattr(symbolic, "shape", None)
        made.meta.update(
            sizes=None if shape is None else tuple(map(self._text, shape)),
            phase=self._phase(made), line=node.meta.get("stack_trace"),
        )  # fmt: skip
        if not flags["varying"]:
            made.meta.update(constant=value, parameters=parameters_of(made))
        return made

    def _text(self, size: object) -> str:
        key = size.node.expr if isinstance(size, torch.SymInt) else size
        if key not in self.texts:
            self.texts[key] = str(size)
        return self.texts[key]

    def _phase(self, made: fx.Node) -> float | None:
        """Return the largest angle that a function of angles takes on the example."""
        values = [self.values.get(arg) if isinstance(arg, fx.Node) else arg for arg in made.args]
        return largest_phase(aten_name(made), values)

    def _place(self, node: fx.Node) -> tuple[str, str, str]:
        """Names of the module around a call, and of the leaf module that makes it ("" for none).

        The third name tells calls of one leaf module apart.
        """
        stack = node.meta.get("nn_module_stack") or {}
        found = {key: path for key, (path, _) in stack.items() if f"{path}.".startswith(PREFIX)}
        names = [re.sub(r"@\d+", "", path)[len(PREFIX) :] for path in found.values()]
        names = [name for name in names if name in self.modules]
        if not names:
            return "", "", ""
        leaf = self.modules[names[-1]]
        if names[-1] and next(leaf.children(), None) is None:
            return (names[-2] if len(names) > 1 else ""), names[-1], list(found)[-1]
        return names[-1], "", ""


def _argument_names(exported: Exported, model: nn.Module) -> list[str]:
    """Return the names that the model's code has for its tensors, which scripts keep."""
    leaves, _ = pytree.tree_flatten_with_path(opened((exported.args, exported.kwargs)))
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    positional = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    found: list[str] = []
    for i, argument in enumerate(exported.arguments):
        source, first, *rest = leaves[argument.index][0]
        names = dict(enumerate(positional)) if source == pytree.SequenceKey(0) else {}
        name = names.get(getattr(first, "idx", -1)) or str(getattr(first, "key", f"tensors_{i}"))
        name = "_".join([name, *(str(getattr(k, "idx", getattr(k, "key", i))) for k in rest)])
        fine = name.isidentifier() and name not in found and not keyword.iskeyword(name)
        found.append(name if fine and name != "self" else f"tensors_{i}")
    return found


def _fake(call: Callable[..., object], args: Sequence[object]) -> object:
    """Return what a call gives for tensors without values; None where one is not known."""
    mode = next((arg.fake_mode for arg in args if isinstance(arg, FakeTensor)), None)
    if mode is None or mode.shape_env is None or any(arg is None for arg in args):
        return None
    with mode.shape_env.suppress_guards():
        return call(*args)

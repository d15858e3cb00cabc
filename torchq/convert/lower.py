# SPDX-License-Identifier: Apache-2.0
"""From a calibrated plan to the converted graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from torchq.capture.graph import is_reserved, parameters_of
from torchq.capture.ops import Op, Role, Split, is_resampling, reads_strides
from torchq.convert.float_forms import channels_last, float_form
from torchq.convert.quantized_layers import lookup, quantized
from torchq.convert.settled import Settled
from torchq.graphs.module import QuantizedGraph
from torchq.models.state import twin
from torchq.nn.attention import DynamicQAttention
from torchq.nn.float_modules import Attention, Cat, GroupedLinear, Rotary
from torchq.nn.from_float import naming, pool_from_float
from torchq.nn.grouped import grouped_from_float
from torchq.nn.packed_weights import PackedWeights
from torchq.nn.pad import QPad
from torchq.nn.quantize import Dequantize, QLookup, Quantize
from torchq.planning.layers import Layer
from torchq.quantization.config import QConfig
from torchq.quantization.qparams import QParams

_Form = Callable[[fx.Node], fx.Node]


class Lowering:
    """Writes the converted graph, in the order of the float one.

    Each value may exist as float32, as int8, or both; what is not there yet is made where it is
    first needed. Layers and opaque operations are written in order; what only moves values is
    written when somebody reads it.
    """

    def __init__(
        self, settled: Settled, opaque: dict[str, nn.Module], weights: PackedWeights
    ) -> None:
        """Start an empty graph.

        Args:
            settled: the plan and its adjustments.
            opaque: submodules that were converted by themselves.
            weights: of the conversion.
        """
        self.settled, self.plan, self._weights = settled, settled.plan, weights
        self.graph = fx.Graph()
        self.modules: dict[str, Any] = {}
        self._opaque, self._names = opaque, dict[str, str]()
        self._attributes: dict[int, str] = {}  # id of a tensor -> name in the converted model
        self._float: dict[fx.Node, fx.Node] = {}
        self._int8: dict[fx.Node, fx.Node] = {}
        self._channels_last = channels_last(self.plan)

    def run(self) -> QuantizedGraph:
        """Return the converted model."""
        for node in self.plan.captured.graph.nodes:
            layer = self.plan.layer_at.get(node)
            op, dynamic = self.plan.ops.get(node), self.plan.dynamic_at.get(node)
            if layer is not None:
                self._layer(layer)
            elif dynamic is not None:
                self._float[node] = self._dynamic(dynamic)
            elif op is not None and isinstance(op.module, Rotary):
                sources = tuple(map(self.float_of, op.srcs))
                rotary = torch.ops.torchq.rotary.default
                self._float[node] = self.graph.call_function(rotary, sources)
            elif op is not None and (form := float_form(op, node in self._channels_last)):
                self._float[node] = self.call(op.name, form[0], *map(self.float_of, form[1]))
            elif node.op in ("placeholder", "output") or (
                node not in self.plan.inside and op is not None and not self._is_lazy(op)
            ):
                self._float[node] = self._copy(node)
        return QuantizedGraph(self.modules, self.graph, type(self.plan.captured.model).__name__)

    def _is_lazy(self, op: Op) -> bool:
        kinds = (Role.SHAPE, Role.MOVE, Role.PASS, Role.POOL, Role.PAD, Role.FAKE)
        return op.role in kinds

    def qparams(self, node: fx.Node) -> QParams:
        """Parameters of the group of a node."""
        return self.settled.qparams(node)

    # Values

    def float_of(self, node: fx.Node) -> fx.Node:
        """Return the float32 form of a value, or a value that is no tensor."""
        if node not in self._float:
            self._float[node] = self._make_float(node)
        return self._float[node]

    def _make_float(self, node: fx.Node) -> fx.Node:
        op = self.plan.ops.get(node)
        if op is not None and op.role is Role.SHAPE:
            return self._copy(node, self.any_of)
        joined = node in self.plan.joined and not node.meta["value"].is_sequence
        if op is not None and self._moves_float(op):
            return self.float_of(op.srcs[0]) if op.role is Role.PASS else self._copy(node)
        if node in self._int8 or node in self.plan.fakes or (joined and self.plan.is_int8(node)):
            src = self.int8_of(node)
            name, dequantize = f"{node.name}_dequantize", Dequantize(self.qparams(node))
            return self._as_in_model(node, self.call(name, dequantize, src))
        if op is not None and op.role is Role.PASS:
            return self.float_of(op.srcs[0])
        return self._copy(node)

    def _moves_float(self, op: Op) -> bool:
        """Return whether it moves float32 that only other readers quantize: nothing is rounded.

        Code that compares these values, with what stands for padding, say, sees them as they are.
        """
        node = op.node
        while node in self.plan.joined and self.plan.fixed(node) is None:
            part = self.plan.ops[node]
            if part.role not in (Role.MOVE, Role.PASS):
                return False
            node = part.srcs[0]
        return node is not op.node and node.op != "get_attr" and not self.plan.comes_as_int8(node)

    def _as_in_model(
        self, node: fx.Node, made: fx.Node, given: torch.dtype = torch.float32
    ) -> fx.Node:
        """Return a result of a ``given`` dtype in that which it has in the float model."""
        dtype = node.meta["value"].dtype
        return made if dtype == given else self.graph.call_method("to", (made, dtype))

    def any_of(self, node: fx.Node) -> fx.Node:
        """Any form, of a value whose shape is asked for."""
        if node in self._int8:
            return self._int8[node]
        op = self.plan.ops.get(node)
        lazy = op is not None and self._is_lazy(op) and op.role is not Role.SHAPE
        if node not in self._float and lazy and self.plan.is_int8(node):
            return self.int8_of(node)
        return self.float_of(node)

    def int8_of(self, node: fx.Node) -> fx.Node:
        """Return the int8 form of a value whose group is int8."""
        if node not in self._int8:
            op = self.plan.ops.get(node)
            if op is not None and node in self.plan.joined:
                self._int8[node] = self._moved(op)
            elif node in self.plan.fakes and op is not None:
                self._int8[node] = self._rounded(op)
            elif "constant" in node.meta:
                self._int8[node] = self._constant(node)
            else:
                src, factors = self.float_of(node), self.settled.factors.get(self.plan.root(node))
                if factors is not None:
                    factor = self.constant(f"{node.name}_factor", 1 / factors)
                    src = self.graph.call_function(torch.mul, (src, factor))
                quantize = Quantize(self.qparams(node))
                self._int8[node] = self.call(f"{node.name}_quantize", quantize, src)
        return self._int8[node]

    def _moved(self, op: Op) -> fx.Node:
        """Return what moves or pools elements, on int8."""
        src, qparams = self.int8_of(op.srcs[0]), self.qparams(op.node)
        if op.role is Role.PASS:
            return src
        if op.role is Role.POOL:
            assert op.module is not None
            size = [] if op.size is None else [fx.node.map_arg(op.size, self.any_of)]
            dst = self.call(op.name, pool_from_float(op.module, qparams), src, *size)
            return self._flat(op, dst)
        if op.role is Role.PAD:
            return self.call(op.name, QPad(qparams), src, self._padding(op))
        signed = qparams.dtype == torch.int8 and is_resampling(op)
        if signed:  # torch interpolates uint8, but not int8; TorchScript has no view(dtype)
            src = self.graph.call_method("to", (src, torch.uint8))  # the same bytes
        dst = self._copy(op.node, lambda n: src if n is op.srcs[0] else self.any_of(n))
        return self.graph.call_method("to", (dst, torch.int8)) if signed else dst

    def _flat(self, op: Op, dst: fx.Node) -> fx.Node:
        """Return what a module gives in the shape that it has in the model."""
        if op.joined is not None:
            return self._with_leading(dst, op.joined)
        return self.graph.call_method("flatten", (dst, 1)) if op.flatten else dst

    def _padding(self, op: Op) -> Argument:
        """Numbers or nodes, of a PAD."""
        pad = op.node.args[1] if len(op.node.args) > 1 else op.node.kwargs["pad"]
        return fx.node.map_arg(pad, self.any_of)

    def _rounded(self, op: Op) -> fx.Node:
        """Return what a fake quantizer gives that no layer took over."""
        src, fixed = op.srcs[0], self.plan.fakes[op.node]
        if self.plan.comes_as_int8(src):
            assert op.module is not None
            table = QLookup(op.module, self.qparams(src), fixed.dequantize, op.kind)
            return self.call(f"{op.node.name}_lookup", table, self.int8_of(src))
        value = self.float_of(src)
        if fixed.clip is not None:
            value = self.graph.call_function(torch.clamp, (value, *fixed.clip))
        return self.call(f"{op.node.name}_quantize", Quantize(fixed.quantize), value)

    def _constant(self, node: fx.Node) -> fx.Node:
        value, quantize = node.meta["constant"], Quantize(self.qparams(node))
        return self.constant(f"{node.name}_int8", quantize(value.detach()))

    def constant(self, name: str, value: Tensor) -> fx.Node:
        """Return the node of a tensor that the converted graph holds."""
        name = self._free(name.replace(".", "_"))
        self.modules[name] = value.detach()
        return self.graph.get_attr(name)

    # Nodes

    def _copy(self, node: fx.Node, form: _Form | None = None) -> fx.Node:
        """Return the node as it is in the float model."""
        form = form or self.float_of
        copied = self.graph.node_copy(node, self._in_order(form) if reads_strides(node) else form)
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.plan.captured.model)
            # not the original name: its module may be a quantized one, with a weight of its own
            if id(value) not in self._attributes:  # files hold a tensor under one name
                self._attributes[id(value)] = self._free(str(node.target).replace(".", "_"))
            copied.target = self._attributes[id(value)]
            self.modules[copied.target] = value
        if node.op == "call_module":
            copied.target = self._float_module(str(node.target))
        return copied

    def _in_order(self, form: _Form) -> _Form:
        """Return a form with the float model's strides: convolutions give channels-last ones."""

        def read(node: fx.Node) -> fx.Node:
            made = form(node)
            if node.meta["value"].shape is None:
                return made
            return self.graph.call_method("contiguous", (made,))

        return read

    def _float_module(self, name: str) -> str:
        """Return the name of this float module in the converted model."""
        if name not in self._names:
            module = twin(self.plan.captured.model.get_submodule(name))
            self._names[name] = self._free(name)
            self.modules[self._names[name]] = self._opaque.get(name, module)
        return self._names[name]

    def call(self, name: str, module: nn.Module, *args: Argument, **kwargs: Argument) -> fx.Node:
        """Return the node of a call of a module, under this name or one like it."""
        name = self._free(name)
        self.modules[name] = module
        return self.graph.call_module(name, args, kwargs)

    def _free(self, name: str) -> str:
        """``name``, or the first with a number behind it that nothing has."""
        if is_reserved(name):
            name = f"torchq_{name}"
        original, i = name, 1
        while name in self.modules:
            name, i = f"{original}_{i}", i + 1
        return name

    # Layers

    def _layer(self, layer: Layer) -> None:
        host = self.plan.table_hosts.get(layer)
        if host is not None:
            node = self._int8[layer.dst] = self._int8[host.dst]
            self.modules[str(node.target)].with_lookup(lookup(layer, self.plan, self.qparams))
            return
        dst = self.settled.results.get(layer.dst)  # its channels have their own scales

        def qparams(node: fx.Node) -> QParams:
            return dst if dst is not None and node is layer.dst else self.qparams(node)

        with naming(f"{self.plan.prefix}{layer.op.base}"):
            factors = self.settled.source(layer).factors
            adjusted = replace(layer, src_factors=factors)
            module = quantized(adjusted, self.plan, qparams, self._weights)
        if note := self.settled.notes.get(layer.dst):
            module.with_recipe(note)  # type: ignore[operator]
        sources, size = self._sources(layer), dict[str, Argument]()
        if layer.op.size is not None and layer.role is Role.MATMUL:
            size["output_padding"] = fx.node.map_arg(layer.op.size, self.any_of)
        made = self._flat(layer.op, self.call(layer.op.name, module, *sources, **size))
        form = self._int8 if self.plan.emits_int8(layer) else self._float
        form[layer.dst] = made if form is self._int8 else self._as_in_model(layer.dst, made)

    def _sources(self, layer: Layer) -> list[Argument]:
        """Return what the layer's module is called with."""
        args: list[Argument] = [self._src(src) for src in layer.srcs]
        if layer.residual is not None:
            as_int8 = self.plan.comes_as_int8(layer.residual)
            residual = (self.int8_of if as_int8 else self.float_of)(layer.residual)
            args.append(self._with_large_channels(layer, residual))
        if isinstance(layer.op.module, Attention):
            args = self._heads(layer.op, args) + self._attention_arguments(layer.op)
        return [args] if isinstance(layer.op.module, Cat) else args

    def _with_large_channels(self, layer: Layer, residual: fx.Node) -> fx.Node:
        """Return the residual, and the products of the large hidden channels, if there are any."""
        apart = self.settled.apart.get(layer.dst)
        if apart is None:
            return residual

        def qparams(node: fx.Node) -> QParams:
            return apart.qparams.get(node) or self.qparams(node)

        inner: Any = quantized(apart.first, self.plan, qparams, self._weights)
        inner.with_lookup(lookup(apart.function, self.plan, qparams))
        src = self.int8_of(apart.first.srcs[0])
        large = self.call(f"{apart.first.op.name}_large", inner, src)
        weights = self._weights
        outer = quantized(apart.second, self.plan, qparams, weights, emits_float=True)
        return self.call(f"{layer.op.name}_large", outer, large, residual)

    def _dynamic(self, op: Op) -> fx.Node:
        sources: list[Argument] = [self.float_of(src) for src in op.srcs]
        if isinstance(op.module, Attention):
            sources = self._heads(op, sources) + self._attention_arguments(op)
            dst = self.call(op.name, DynamicQAttention(op.module.options), *sources)
            dst = self._flat(op, dst)
            return self._as_in_model(op.node, dst, op.srcs[0].meta["value"].dtype)
        config = self.plan.config(op.base)
        assert config is not None
        if isinstance(op.module, GroupedLinear):
            return self._grouped(op, op.module.weight, config)
        assert isinstance(op.module, nn.Linear)
        name, sample = f"{self.plan.prefix}{op.base}", self.settled.samples.get(op.base)
        with naming(name):
            linear = self._weights.dynamic(name, op.module, config, op.weight_scale, sample)
        if op.post_ops:
            operands = [self.float_of(operand) for operand in op.operands]
            sources += [op.post_ops, operands or None]
        return self.call(op.name, linear, *sources)

    def _grouped(self, op: Op, weight: Tensor, config: QConfig) -> fx.Node:
        """Return the call of a product of rows in groups."""
        known = parameters_of(op.node)  # its one name, which the model's own code has for it, too
        name = f"{self.plan.prefix}{next(iter(known)) if len(known) == 1 else op.base}"
        with naming(f"{self.plan.prefix}{op.base}"):
            module = grouped_from_float(name, weight, None, config, self._weights)
        offsets = fx.node.map_arg(op.size, self.float_of)
        return self.call(op.name, module, self.float_of(op.srcs[0]), offsets)

    def _attention_arguments(self, op: Op) -> list[Argument]:
        """Return the mask, and the scale where it is known at run time only.

        The mask is what the steps in front of the softmax make of 0.
        """
        assert isinstance(op.module, Attention)
        mask: Argument = None
        scale: Argument = op.module.options.scale
        for function, args in op.steps:
            given = [self._argument(op, arg, mask) for arg in args]
            if function in (operator.mul, operator.truediv):
                if isinstance(args[1], fx.Node):
                    scale = self.graph.call_function(function, (scale, given[1]))
                if mask is None:
                    continue
            if function is operator.add and mask is None:
                mask = given[1]
            else:
                mask = self.graph.call_function(function, tuple(given))
        if isinstance(scale, fx.Node):
            return [mask, scale]
        return [] if mask is None else [mask]

    def _argument(self, op: Op, arg: Argument | Split, mask: Argument) -> Argument:
        """Return an argument of a step, for which the mask so far is what its scores are."""
        if arg is None:
            return 0.0 if mask is None else mask
        if isinstance(arg, Split):
            assert op.split is not None
            return self._with_leading(self.float_of(arg.mask), op.split)
        return self.float_of(arg) if isinstance(arg, fx.Node) else arg

    def _heads(self, op: Op, sources: list[Argument]) -> list[Argument]:
        """Return queries, keys and values with the leading sizes that the scores have."""
        if op.split is None:
            return sources
        count = 2 if op.joined is None else 3
        split: list[Argument] = [self._with_leading(src, op.split) for src in sources[:count]]
        return split + sources[count:]

    def _with_leading(self, src: Argument, leading: Sequence[Argument]) -> fx.Node:
        """Return a reshape to these sizes, and the source's last two."""
        last = [self.graph.call_method("size", (src, dim)) for dim in (-2, -1)]
        sizes = [*fx.node.map_arg(leading, self.any_of), *last]
        return self.graph.call_method("reshape", (src, sizes))

    def _src(self, node: fx.Node) -> fx.Node:
        """Return a source: int8, or a float32 value of which this layer is the only reader."""
        alone = self.plan.readers.get(self.plan.root(node)) == 1
        made = node in self.plan.joined or node in self.plan.fakes or "constant" in node.meta
        made |= node in self._int8 or node in self.settled.shared
        if made or not alone:
            return self.int8_of(node)
        return self.float_of(node)

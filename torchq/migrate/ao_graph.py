# SPDX-License-Identifier: Apache-2.0
"""Graphs that torch.ao has quantized, in float again: calls of int8 functions, and their scales."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._C import FunctionSchema
from torch._ops import OpOverload, OpOverloadPacket

from torchq.migrate.ao_modules import (
    STATIC,
    fake_quantizer,
    fake_weight,
    kind,
    output_params,
    weight_scales,
)
from torchq.migrate.leaves import dynamic_leaf, float_layer

Params = tuple[float, int, str]
"""Scale, zero point and name of the dtype of a quantized tensor."""


def _batch_norm(
    src: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    return F.batch_norm(src, mean, var, weight, bias, eps=eps)


def _instance_norm(src: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.instance_norm(src, weight=weight, bias=bias, eps=eps)


def _identity(src: Tensor, *_: object) -> Tensor:
    return src


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "add": torch.add,
    "mul": torch.mul,
    "matmul": torch.matmul,
    "cat": torch.cat,
    "hardswish": F.hardswish,
    "elu": torch.ops.aten.elu,
    "celu": torch.celu,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "softmax": torch.softmax,
    "prelu": F.prelu,
    "layer_norm": F.layer_norm,
    "group_norm": F.group_norm,
    "instance_norm": _instance_norm,
    "dropout": _identity,
    "relu6": F.relu6,
    "clamp": torch.clamp,
    "threshold": F.threshold,
    "max_pool1d": F.max_pool1d,
    "max_pool2d": F.max_pool2d,
    "add_scalar": torch.add,
    "mul_scalar": torch.mul,
    **dict.fromkeys(("batch_norm", "batch_norm1d", "batch_norm2d", "batch_norm3d"), _batch_norm),
}
_SCALES = [("output_scale", "output_zero_point"), ("Y_scale_i", "Y_zero_point_i")]
_SCALES.append(("scale", "zero_point"))  # last: elu has another scale as well
_NOT_QUANTIZED = ("dequantize", "size", "getattr")
_KNOWN_RANGES = {"sigmoid": (1 / 256, 0), "hardsigmoid": (1 / 256, 0), "tanh": (1 / 128, 128)}
"""What torch's own functions give of uint8 tensors, by the ends of their ranges."""
_COMPUTE = ("mean", "avg", "interpolate", "upsample", "gelu", "hardtanh", "cat")
"""In the names of functions whose results torch.ao puts on the levels of their sources."""


class AoGraph:
    """A graph with torch.ao's modules and functions, and the parameters of its values.

    Attributes:
        params: of the values that are quantized tensors.
        rounded: calls that round what they compute to the levels of their results.
        problems: what has no form here, and why.
        layers: float layers that functions of packed weights become, with their weights.
        dynamic: names of dynamic layers that functions become, with their classes in torch.nn.
    """

    def __init__(self, model: nn.Module) -> None:
        """Read the calls of a model, as far as they can be traced."""
        self.model = model
        self.graph = _traced(model)
        self.params: dict[fx.Node, Params] = {}
        self.rounded: set[fx.Node] = set()
        self.problems: list[str] = []
        self.layers: dict[str, tuple[nn.Module, Tensor]] = {}
        self.dynamic: dict[str, str] = {}
        for node in self.graph.nodes:
            found = self._params(node)
            if found is not None:
                self.params[node] = found

    def _value(self, arg: object) -> Any:
        """Return what an argument that is no value of the graph is."""
        if isinstance(arg, fx.Node) and arg.op == "get_attr":
            return operator.attrgetter(str(arg.target))(self.model)
        return arg

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """Return the arguments of a call in ``torch.ops.quantized``, by name."""
        schema = _schema(node)
        given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        names = [argument.name for argument in schema.arguments]
        return given | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)

    def _params(self, node: fx.Node) -> Params | None:
        """Return the parameters of what a call gives; None where it is no quantized tensor."""
        sources = [self.params[n] for n in node.all_input_nodes if n in self.params]
        if node.target is torch.quantize_per_tensor:
            names = ("input", "scale", "zero_point", "dtype")
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            scale, zero_point, dtype = (self._value(given[name]) for name in names[1:])
            return float(scale), int(zero_point), str(dtype)
        name = str(getattr(node.target, "__name__", node.target)).rstrip("_")
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            if kind(module) == "quantized.Quantize":
                return (*output_params(module), str(module.dtype))
            if kind(module) in STATIC and sources:
                return (*output_params(module), sources[0][2])
            name = type(module).__name__.lower()
        if not node.op.startswith("call_") or not sources or name in _NOT_QUANTIZED:
            return None
        if quantized := _quantized_name(node):
            given = self._arguments(node)
            for pair in _SCALES:
                if given.get(pair[0]) is not None and pair[1] in given:
                    self.rounded.add(node)
                    scale, zero_point = (self._value(given[key]) for key in pair)
                    return float(scale), int(zero_point), sources[0][2]
            if not quantized.startswith(("add", "mul")):
                return sources[0]
            scale, zero_point, dtype = sources[0]  # and a number
            factor: Any = given["b"] if quantized.startswith("mul") else 0
            return (scale * factor, zero_point, dtype) if factor > 0 else None
        known = _KNOWN_RANGES.get(name)
        own = sources[0] if known is None else (*known, "torch.quint8")
        if any(source != own for source in sources) or any(word in name for word in _COMPUTE):
            self.rounded.add(node)
        return own

    def module_calls(self) -> list[fx.Node]:
        """Return the calls of modules."""
        return [node for node in self.graph.nodes if node.op == "call_module"]

    def rounding_modules(self) -> dict[str, Params]:
        """Return modules of torch.nn that round in each call to levels that torch.ao has not set.

        A tanh is one, and an average. Those that have several scales are left out.
        """
        found: dict[str, set[Params | None]] = {}
        for node in self.module_calls():
            params = self.params[node] if node in self.rounded else None
            found.setdefault(str(node.target), set()).add(params)
        return the_only(found)

    # In float

    def rewrite(self) -> None:
        """Make the graph compute in float, with a fake quantizer where it quantized."""
        for node in list(self.graph.nodes):
            name = _quantized_name(node)
            if node.target in ("dequantize", torch.dequantize):
                node.replace_all_uses_with(node.all_input_nodes[0])
            elif node.target is torch.quantize_per_tensor:
                self._round(node, node.args[0])
            elif name:
                self._function(node, name)
            elif node.op != "call_module" and node in self.rounded:
                self._round(node, node)
        self.graph.eliminate_dead_code()

    def _round(self, node: fx.Node, value: fx.node.Argument) -> None:
        """Give the readers of a node ``value``, rounded to the node's scale."""
        name = f"{node.name}_fake"
        self.model.add_module(name, fake_quantizer(*self.params[node]))
        with self.graph.inserting_after(node):
            made = self.graph.call_module(name, (value,))
        self._replace(node, made)

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        if node in self.params:
            self.params[made] = self.params[node]
        node.replace_all_uses_with(made, lambda user: user is not made)

    def _function(self, node: fx.Node, name: str) -> None:
        given = self._arguments(node)
        base = name if name in _FUNCTIONS else name.removesuffix("_relu")
        with self.graph.inserting_before(node):
            made = None
            if "W_prepack" in given or "packed_weight" in given:
                made = self._layer(node, base, given)
            elif base in _FUNCTIONS:
                pair = next((pair for pair in _SCALES if pair[1] in given), ())
                args = tuple(value for key, value in given.items() if key not in pair)
                made = self.graph.call_function(_FUNCTIONS[base], args)
            if made is None:
                self.problems.append(f"'{node.name}', which calls quantized::{name}")
                return
            if base != name:
                made = self.graph.call_function(F.relu, (made,))
        if node in self.rounded:
            self._round(node, made)
        else:
            self._replace(node, made)

    def _layer(self, node: fx.Node, base: str, given: dict[str, object]) -> fx.Node | None:
        """Return the call of the layer that a function of packed weights is."""
        packed = self._value(given.get("W_prepack", given.get("packed_weight")))
        kinds = {"linear": nn.Linear, "conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}
        cls = kinds.get(base.removesuffix("_dynamic"))
        if cls is None or not hasattr(packed, "unpack"):
            return None
        weight, bias = packed.unpack()
        if cls is nn.Linear:
            layer: nn.Module = nn.Linear(weight.size(1), weight.size(0), device="meta")
        else:
            if cls is nn.Conv1d and weight.dim() == 4:
                weight = weight.squeeze(2)
            dims = weight.dim() - 2
            sizes = [list(f())[-dims:] for f in (packed.stride, packed.padding, packed.dilation)]
            layer = cls(weight.size(1) * packed.groups(), weight.size(0), weight.shape[2:], *sizes,
                        packed.groups(), device="meta")  # fmt: skip
        layer, name = float_layer(layer, weight.dequantize(), bias), f"{node.name}_layer"
        if base.endswith("_dynamic"):
            self.dynamic[name] = cls.__name__
            self.model.add_module(
                name, dynamic_leaf(layer, weight.int_repr(), weight_scales(weight))
            )
        else:
            self.model.add_module(name, fake_weight(layer, weight))
            self.layers[name] = layer, weight
        return self.graph.call_module(name, (node.args[0],))


def the_only(found: Mapping[str, Collection[Params | None]]) -> dict[str, Params]:
    """Return the parameters of what has one set of them."""
    single = {name: next(iter(params)) for name, params in found.items() if len(params) == 1}
    return {name: params for name, params in single.items() if params is not None}


def _quantized_name(node: fx.Node) -> str:
    """Return the name of a call in ``torch.ops.quantized``, or ""."""
    if not isinstance(node.target, OpOverload | OpOverloadPacket):
        return ""
    space, _, name = _schema(node).name.partition("::")
    return name if space == "quantized" else ""


def _schema(node: fx.Node) -> FunctionSchema:
    """Return the schema of a call; the overload follows from the number of arguments."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target._schema
    overloads: list[FunctionSchema] = [getattr(target, name)._schema for name in target.overloads()]
    count = len(node.args) + len(node.kwargs)
    fitting = [s for s in overloads if len(s.arguments) >= count and "out" not in s.overload_name]
    return min(fitting, key=lambda s: len(s.arguments))


def _traced(model: nn.Module) -> fx.Graph:
    """Return the calls of a model; none where its code does not trace."""
    if isinstance(model, fx.GraphModule):
        return model.graph
    try:
        return fx.Tracer().trace(model)
    except Exception:  # of the model's own code
        return fx.Graph()

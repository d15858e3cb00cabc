# SPDX-License-Identifier: Apache-2.0
"""``torchq.from_pt2e``: graphs with pairs of quantize and dequantize calls around ATen calls."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchq.graphs.code import as_module
from torchq.migrate.leaves import dynamic_leaf, float_layer, report
from torchq.models.conversions import refusing_conversions
from torchq.models.inputs import Inputs, without_gradients, working_copy
from torchq.nn.fake_quantize import FakeQuantize
from torchq.qat.known_scales import put, rounding, with_known_scales


@torch.inference_mode(False)
@torch.no_grad()
def from_pt2e(model: nn.Module, example_inputs: Inputs | None = None) -> nn.Module:
    """Take over a graph that ``convert_pt2e`` made, without a compiler.

    Weights keep their integers, and weights and activations their scales; nothing is calibrated.
    Results differ from those of the graph by rounding alone. Dynamic linear layers quantize each
    row of a source, where the graph takes all rows.

    Args:
        model: from torchao's ``convert_pt2e``, with the X86InductorQuantizer, say.
        example_inputs: one call's inputs: a tensor, a tuple, or a dict of keyword arguments. None
            makes random ones of the shapes that the graph was exported for.

    Returns:
        The int8 model.

    Raises:
        TypeError: ``model`` is no graph of ``torch.export``.
        ValueError: it has no quantized values, or some have no form here: the message names all.

    Example:
        >>> import torch, torchq
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
        >>> model, src = torch.nn.Linear(8, 4).eval(), torch.randn(2, 8)
        >>> config = x86.get_default_x86_inductor_quantization_config()
        >>> quantizer = x86.X86InductorQuantizer().set_global(config)
        >>> prepared = prepare_pt2e(torch.export.export(model, (src,)).module(), quantizer)
        >>> _ = prepared(src)
        >>> torchq.from_pt2e(convert_pt2e(prepared))(src).shape
        torch.Size([2, 4])
    """
    model = as_module(model)
    if not isinstance(model, fx.GraphModule):
        raise TypeError(
            f"torchq.from_pt2e: model must be a GraphModule, got {type(model).__name__}. Pass what "
            "convert_pt2e returns."
        )
    if example_inputs is None:
        example_inputs = _example(model)
    copied = working_copy(model, caller="from_pt2e")
    pairs = _Pairs(copied)
    pairs.run()
    result: nn.Module = fx.GraphModule(copied, copied.graph).eval()
    if pairs.dynamic:
        vars(result)["torchq_report"] = report(result, dict.fromkeys(pairs.dynamic, "linear"), {})
        return refusing_conversions(without_gradients(result))
    result = with_known_scales(result, example_inputs)
    put(result, rounding(result))
    result._buffers.update(pairs.weights)  # what rounds them passes integers on
    return result


class _Pairs:
    """Make fake quantizers of the pairs in a graph.

    Attributes:
        weights: int8 weights by the names of the float ones that took their places.
        dynamic: names of dynamic layers.
        problems: what has no form here, and why.
    """

    def __init__(self, model: fx.GraphModule) -> None:
        self.model, self.graph = model, model.graph
        self.weights: dict[str, Tensor] = {}
        self.dynamic: list[str] = []
        self.problems: list[str] = []
        self._made: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        """Rewrite the graph.

        Raises:
            ValueError: there are no pairs, or some have no form here.
        """
        for node in self.graph.find_nodes(op="call_module", target="_guards_fn"):
            self.graph.erase_node(node)  # torchq guards its own graphs
        pairs = [node for node in self.graph.nodes if _name(node).startswith("dequantize")]
        # dynamic layers read the weights as they are, so they come first
        for node in sorted(pairs, key=lambda node: not _name(node).endswith(".tensor")):
            problem = self._pair(node)
            if problem:
                self.problems.append(f"'{node.name}': {problem}")
        static = any(_name(node.all_input_nodes[0]).endswith(".default") for node in pairs)
        if self.dynamic and static:
            self.problems.append("static values beside dynamic ones")
        if self.problems or not pairs:
            got = "; ".join(self.problems) or "a graph without them"
            raise ValueError(
                "torchq.from_pt2e: model must have 8-bit values behind pairs of quantize and "
                f"dequantize calls, got {got}. Convert it with convert_pt2e, and leave in float "
                "what is named here."
            )
        self.graph.eliminate_dead_code()

    def _value(self, arg: object) -> Any:
        if isinstance(arg, fx.Node) and arg.op == "get_attr":
            return operator.attrgetter(str(arg.target))(self.model)
        return arg

    def _pair(self, node: fx.Node) -> str:
        """Rewrite one dequantization; returns why it cannot."""
        source = node.all_input_nodes[0]
        if _name(node).endswith(".tensor"):
            return self._dynamic(node, source)
        before = _name(source)
        params = [self._value(arg) for arg in node.args[1:]]
        if before.startswith("quantize_"):
            if before != _name(node).removeprefix("de"):
                return f"it reads what {before} gives"
            if source not in self._made:
                self._made[source] = self._fake(node, source.args[0], params)
            made = self._made[source]
        elif source.op == "get_attr":
            made = self._weight(node, self._value(source), params)
        else:
            return f"it reads what {before or source.target} gives on integers"
        node.replace_all_uses_with(made)
        return ""

    def _fake(self, node: fx.Node, source: fx.node.Argument, params: list[Any]) -> fx.Node:
        """Write the call of a fake quantizer with the parameters of a call."""
        scale, zero_point, *rest = params
        axis = rest.pop(0) if "per_channel" in _name(node) else None
        fake = FakeQuantize.from_affine(scale, zero_point, rest[0], rest[1], axis)
        name = f"{node.name}_fake"
        self.model.add_submodule(name, fake)
        with self.graph.inserting_before(node):
            return self.graph.call_module(name, (source,))

    def _weight(self, node: fx.Node, weight: Tensor, params: list[object]) -> fx.Node:
        """Write a float weight, and its fake quantizer."""
        name = f"{node.name}_weight"
        self.weights[name] = weight
        self.model.register_buffer(name, _dequantized(node, weight, params))
        with self.graph.inserting_before(node):
            source = self.graph.get_attr(name)
        return self._fake(node, source, params)

    def _dynamic(self, node: fx.Node, source: fx.Node) -> str:
        """Make dynamic layers of the linear ones that read what is quantized at run time."""
        for user in list(node.users):
            weight = user.args[1] if len(user.args) > 1 else None
            if user.target is not torch.ops.aten.linear.default:
                return f"{user.target} has no dynamic form in a graph"
            if not isinstance(weight, fx.Node) or not _name(weight).startswith("dequantize"):
                return "the weight beside it is float"
            int8, *params = [self._value(arg) for arg in weight.args]
            if int8.dtype != torch.int8 or bool(torch.as_tensor(params[1], device="cpu").any()):
                return "the weight beside it is not int8, or has zero points"
            bias = self._value(user.args[2]) if len(user.args) > 2 else None
            layer: nn.Module = nn.Linear(int8.size(1), int8.size(0), device="meta")
            layer = float_layer(layer, _dequantized(weight, int8, params), bias)
            name = f"{user.name}_dynamic"
            self.dynamic.append(name)
            scales = torch.as_tensor(params[0], dtype=torch.float32, device="cpu")
            self.model.add_submodule(name, dynamic_leaf(layer, int8, scales))
            with self.graph.inserting_before(user):
                made = self.graph.call_module(name, (source.args[0],))
            user.replace_all_uses_with(made)
            self.graph.erase_node(user)
        return ""


def _dequantized(node: fx.Node, weight: Tensor, params: list[object]) -> Tensor:
    assert callable(node.target)
    result: Tensor = node.target(weight, *params)
    return result


def _name(node: fx.Node) -> str:
    """Return the name of a quantization with its overload, or ""."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    space, _, name = target._schema.name.partition("::")
    named = space == "quantized_decomposed"
    return f"{name}.{target._schema.overload_name or 'default'}" if named else ""


def _example(model: fx.GraphModule) -> Inputs:
    """Return random inputs of the shapes that a graph was exported for.

    Raises:
        ValueError: the graph does not tell them.
    """
    values = [node.meta.get("val") for node in model.graph.find_nodes(op="placeholder")]
    if not all(isinstance(value, Tensor) for value in values):
        raise ValueError(
            "torchq.from_pt2e: example_inputs must be given for a graph that does not tell the "
            "shapes of its inputs, got None. Pass one batch."
        )
    tensors = [_random([int(size) for size in value.shape], value.dtype) for value in values]
    info = getattr(model.graph._codegen, "pytree_info", None)
    if info is None:
        return tuple(tensors)
    args, kwargs = pytree.tree_unflatten(tensors, info.in_spec)
    names = list(inspect.signature(model.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs} if kwargs else tuple(args)


def _random(shape: list[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    return torch.zeros(shape, dtype=dtype, device="cpu")

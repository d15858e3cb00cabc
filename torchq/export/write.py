# SPDX-License-Identifier: Apache-2.0
"""Walks the int8 graph of a converted model, and writes it in ONNX."""

from __future__ import annotations

import importlib
import inspect
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from torchq.attributes.arguments import HALVES
from torchq.convert.dispatch import dispatch_of
from torchq.export.functions import FUNCTIONS
from torchq.export.modules import MODULES, dst_params
from torchq.export.onnx_graph import OnnxGraph, UnsupportedError, Value
from torchq.graphs.data import name_of
from torchq.graphs.direct import CHECK
from torchq.graphs.module import QuantizedGraph
from torchq.models.inputs import Inputs, split_inputs
from torchq.models.trees import Args, Kwargs
from torchq.nn.attention import DynamicQAttention
from torchq.nn.dynamic_int4 import DynamicQLinearInt4
from torchq.nn.grouped import GroupedLinearBase
from torchq.quantization.qparams import QParams
from torchq.serialization.files import write_file

_8BIT = (torch.uint8, torch.int8)


def to_onnx(qmodel: nn.Module, path: str | os.PathLike[str], example_inputs: Inputs) -> None:
    """Write a converted model as an ONNX file of QuantizeLinear and DequantizeLinear.

    Weights are int8 constants with the model's own scales, and so is every 8-bit tensor. Inputs and
    outputs are those of the graph, in the order of its arguments and results. Sizes are as dynamic
    as the graph's guards leave them. The opset is the lowest that has all of the operators.

    Args:
        qmodel: from :func:`torchq.quantize` or :func:`torchq.convert`, with one graph for the whole
            call, or from :func:`torchq.load`.
        path: of the file, which is written whole or not at all.
        example_inputs: as :func:`torchq.prepare` takes them; a call that takes the graph.

    Raises:
        ImportError: the package onnx is missing.
        NotImplementedError: a module or a function has no ONNX form; the message names it.
        ValueError: the model has no graph for this call.
    """
    try:
        onnx = importlib.import_module("onnx")
    except ImportError as error:
        raise ImportError(
            "torchq.to_onnx: the package onnx must be installed, got none. Run "
            "pip install torchq-cpu[onnx]."
        ) from error
    graph, tensors = _call(qmodel, example_inputs)
    writer = _Writer(graph, OnnxGraph(onnx))
    with torch.no_grad():
        writer.run(*tensors)
    write_file("torchq.to_onnx", path, [writer.onnx.model()])


def _call(qmodel: nn.Module, example_inputs: Inputs) -> tuple[QuantizedGraph, Sequence[object]]:
    """Return the graph that takes such a call, and its tensors."""
    args, kwargs = split_inputs(example_inputs)
    if isinstance(qmodel, QuantizedGraph):
        return qmodel, [*args, *kwargs.values()]
    dispatch = dispatch_of(qmodel) if isinstance(qmodel, nn.Module) else None
    if dispatch is None or not isinstance(dispatch.graph, QuantizedGraph):
        raise ValueError(
            "torchq.to_onnx: model must be converted with one graph for its whole call, got "
            f"{type(qmodel).__name__} without one. torchq.explain tells why it was captured in "
            "parts, or not at all; a model quantized without calibration data has none either."
        )
    tensors = dispatch.example.chooser()(*args, **kwargs)
    if tensors is None:
        raise ValueError(
            "torchq.to_onnx: example_inputs must take the graph, but "
            f"{dispatch.example.why(args, kwargs)}. Pass inputs like those of torchq.prepare."
        )
    return dispatch.graph, tensors


class _Writer(fx.Interpreter):
    """Runs the graph on example inputs, and writes each node when its value is known."""

    def __init__(self, graph: QuantizedGraph, onnx: OnnxGraph) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # errors have one message
        self.onnx, self.forms = onnx, dict[fx.Node, Any]()

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if n.name.startswith(CHECK):
            return result
        self.onnx.scope = str(n.target) if n.op in ("call_module", "get_attr") else n.name
        args = fx.node.map_arg(n.args, self.forms.__getitem__)
        kwargs = fx.node.map_arg(n.kwargs, self.forms.__getitem__)
        try:
            self.forms[n] = self._form(n, result, args, kwargs)
        except UnsupportedError as error:
            raise NotImplementedError(
                f"torchq.to_onnx: '{self.onnx.scope}' must have an ONNX form, but {error}. Write "
                "the float model with torch.onnx.export, or run this one as TorchScript or with "
                "AOTInductor."
            ) from None
        return result

    def _form(self, n: fx.Node, result: Any, args: Args, kwargs: Kwargs) -> object:
        """Return what stands for the value of a node in ONNX."""
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.dtype in HALVES:
                name = str(t.dtype).removeprefix("torch.")
                raise UnsupportedError(f"it gives {name}: quantize model.float() for a file")
        if n.op == "placeholder":
            return self._input(n, result)
        if n.op == "output":
            self._outputs(args)
            return None
        values = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Value)]
        if n.op == "get_attr" or not values:  # the same in every call
            return self._constant(result)
        write, first = self._writer(n)
        try:
            call = inspect.signature(write).bind(self.onnx, *first, *args, **kwargs)
        except TypeError as error:
            raise UnsupportedError(f"its call has an argument that has none: {error}") from None
        made = write(*call.args, **call.kwargs)
        params = None
        if any(isinstance(t, Tensor) and t.dtype in _8BIT for t in tree_leaves(result)):
            known = (v.params for v in values if v.params is not None)
            params = dst_params(first[0]) if first else next(known, None)
        return self._values(made, result, params)

    def _writer(self, n: fx.Node) -> tuple[Callable[..., object], list[nn.Module]]:
        """Return what writes a node, and what that takes first."""
        if n.op == "call_module":
            module = operator.attrgetter(str(n.target))(self.module)
            write = next((MODULES[c] for c in type(module).__mro__ if c in MODULES), None)
            if write is None:
                raise UnsupportedError(_why(module))
            return write, [module]
        name = str(n.target) if n.op == "call_method" else name_of(n.target) or str(n.target)
        name = name.partition("::")[2].partition(".")[0] or name.rpartition(".")[2]
        if name not in FUNCTIONS:
            raise UnsupportedError(f"the function {name} has none")
        return FUNCTIONS[name], []

    def _values(self, names: object, example: Any, params: QParams | None) -> object:
        """Return what was written as values, those of 8 bits rounded to them."""
        if isinstance(names, list):
            pairs = zip(names, example, strict=True)
            return tuple(self._values(name, e, params) for name, e in pairs)
        if not isinstance(names, str):
            return names
        if params is not None and params.is_per_channel:  # whose reader has the factors
            return Value(self.onnx.integers(names, params), example)
        name = names if params is None else self.onnx.rounded(names, params)
        return Value(name, example, params)

    def _constant(self, value: object) -> object:
        if isinstance(value, tuple | list):
            return tuple(map(self._constant, value))
        return Value(self.onnx.constant(value), value) if isinstance(value, Tensor) else value

    def _input(self, n: fx.Node, example: Tensor) -> Value:
        name, fixed = str(n.target), _fixed_sizes(n)
        sizes = [fixed.get(d, f"{name}_{d}") for d in range(example.dim())]
        return Value(self.onnx.input(name, example, sizes), example)

    def _outputs(self, forms: object) -> None:
        values = [v for v in tree_leaves(forms) if isinstance(v, Value)]
        for i, value in enumerate(values):
            self.onnx.output(f"output_{i}" if len(values) > 1 else "output", value)


def _fixed_sizes(tensor: fx.Node) -> dict[int, int]:
    """Return the sizes of an input that the graph's guards fix, by dim."""
    found: dict[int, int] = {}
    for size in tensor.users:
        if size.name.startswith(CHECK) and size.target == "size":
            for check in size.users:
                one_of_two = any(user.target is operator.or_ for user in check.users)
                fixed = check.target is operator.eq and not one_of_two
                dim, wanted = size.args[1], check.args[1]
                if fixed and isinstance(dim, int) and isinstance(wanted, int):
                    found[dim] = wanted
    return found


def _why(module: nn.Module) -> str:
    name = type(module).__name__
    if type(module).__module__.startswith("torchq.nn.rnn"):
        return f"{name} has none: int8 recurrent layers are no operators of ONNX"
    if isinstance(module, DynamicQLinearInt4 | GroupedLinearBase | DynamicQAttention):
        remedy = "quantize with calibration data and recipe='fast'"
        return f"{name} has none: it chooses scales in each call; {remedy}"
    return f"{name} has none"

# SPDX-License-Identifier: Apache-2.0
"""Builds an ONNX graph in which every 8-bit tensor is a QuantizeLinear and a DequantizeLinear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torchq.quantization.qparams import QParams

_LOWEST = 13  # scales per channel
_SINCE = {"Trilu": 14, "LayerNormalization": 17, "ReduceMean": 18, "ReduceMax": 18}


@dataclass(frozen=True)
class Value:
    """A tensor or a number of the graph that is computed at run time.

    Attributes:
        name: in ONNX. A number is a tensor of shape [1].
        example: its value on the example inputs.
        params: of an 8-bit tensor whose real value ``name`` is; None where ``name`` has integers.
    """

    name: str
    example: Any
    params: QParams | None = None

    @property
    def rank(self) -> int:
        """The number of dims."""
        return int(self.example.dim())


class UnsupportedError(Exception):
    """Says why a call has no ONNX form."""


class OnnxGraph:
    """Nodes and constants, in the order of their use.

    Attributes:
        opset: the lowest that has all of the nodes.
        scope: what names begin with.
    """

    def __init__(self, onnx: ModuleType) -> None:
        """Start an empty graph; ``onnx`` is the package."""
        self.onnx, self.opset, self.scope = onnx, _LOWEST, ""
        self._nodes, self._constants = list[Any](), dict[str, object]()
        self._names, self._inputs, self._outputs = set[str](), list[object](), list[object]()
        self._made: dict[object, str] = {}  # constants by content, quantized tensors by parameters

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        """Add a node with one result, and return the name of that."""
        return self.add_many(op, 1, *inputs, **attributes)[0]

    def add_many(self, op: str, count: int, *inputs: str, **attributes: object) -> list[str]:
        """Add a node, and return the names of its results."""
        self.opset = max(self.opset, _SINCE.get(op, _LOWEST))
        results = [self._free(f"{self.scope}/{op}") for _ in range(count)]
        make = self.onnx.helper.make_node
        self._nodes.append(make(op, list(inputs), results, results[0], **attributes))
        return results

    def constant(self, value: Tensor | Sequence[int] | float) -> str:
        """Return the name of a constant: of int64 for integers, of float32 for a float."""
        if not isinstance(value, Tensor):
            dtype = torch.float32 if isinstance(value, float) else torch.int64
            value = torch.tensor(value, dtype=dtype, device="cpu")
        array = value.detach().contiguous().numpy()
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._made:
            self._made[key] = name = self._free(f"{self.scope}/constant")
            self._constants[name] = self.onnx.numpy_helper.from_array(array, name)
        return self._made[key]

    def real(self, x: str, scale: Tensor, zero_point: Tensor, dtype: torch.dtype, **at: int) -> str:
        """Return the real values of integers; ``at`` may have the ``axis`` of the scales."""
        params = [self.constant(scale)]
        if dtype != torch.int32:
            params.append(self.constant(zero_point.to(dtype)))
        return self.add("DequantizeLinear", x, *params, **at)

    def integers(self, x: str, params: QParams) -> str:
        """Return the 8-bit integers of real values."""
        scale, zero_point = params.scale, params.zero_point
        if params.bits < 8:
            low, high = (float(scale * (q - zero_point)) for q in params.integers)
            x = self.add("Clip", x, self.constant(low), self.constant(high))
        zeros = self.constant(zero_point.to(params.dtype))
        axis = {} if params.axis is None else {"axis": params.axis}
        return self.add("QuantizeLinear", x, self.constant(scale), zeros, **axis)

    def rounded(self, x: str, params: QParams) -> str:
        """Return real values after a step through 8 bits; what has made that step stays."""
        scale, zero_point = params.scale, params.zero_point
        key = (scale.item(), zero_point.item(), params.dtype, params.bits)
        if (x, key) not in self._made:
            made = self.real(self.integers(x, params), scale, zero_point, params.dtype)
            self._made[x, key] = self._made[made, key] = made
        return self._made[x, key]

    def source(self, value: Value, params: QParams) -> str:
        """Return the real values that a quantized module reads, whatever form they come in."""
        if value.params is not None:
            return value.name
        if value.example.dtype in (torch.uint8, torch.int8):
            return self.real(value.name, params.scale, params.zero_point, params.dtype)
        return self.rounded(value.name, params)

    def sizes(self, values: Sequence[int | Value]) -> str:
        """Return a tensor of these integers."""
        known = [value for value in values if isinstance(value, int)]
        if len(known) == len(values):
            return self.constant([int(value) for value in known])
        parts = [v.name if isinstance(v, Value) else self.constant([v]) for v in values]
        return self.add("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def size(self, value: Value, dim: int) -> Value:
        """Return the size of a dim as a number."""
        shape, at = self.add("Shape", value.name), self.constant([dim % value.rank])
        return Value(self.add("Gather", shape, at, axis=0), value.example.shape[dim])

    def input(self, name: str, example: Tensor, sizes: Sequence[int | str]) -> str:
        """Declare an input; a size that varies has a name."""
        self._names.add(name)
        self._inputs.append(self._info(name, example, sizes))
        return name

    def output(self, name: str, value: Value) -> None:
        """Declare an output."""
        x = value.name if value.params is None else self.integers(value.name, value.params)
        self._nodes.append(self.onnx.helper.make_node("Identity", [x], [name], name))
        self._outputs.append(self._info(name, value.example, [None] * value.rank))

    def model(self) -> bytes:
        """Return the checked ModelProto, serialized."""
        helper, opset = self.onnx.helper, self.onnx.helper.make_opsetid("", self.opset)
        used = {name for node in self._nodes for name in node.input}
        constants = [made for name, made in self._constants.items() if name in used]
        graph = helper.make_graph(self._nodes, "torchq", self._inputs, self._outputs, constants)
        version = helper.find_min_ir_version_for([opset])
        model = helper.make_model(
            graph, opset_imports=[opset], ir_version=version, producer_name="torchq"
        )
        self.onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString())

    def _info(self, name: str, example: Tensor, sizes: Sequence[object]) -> object:
        dtype = self.onnx.helper.np_dtype_to_tensor_dtype(example.numpy().dtype)
        return self.onnx.helper.make_tensor_value_info(name, dtype, sizes)

    def _free(self, name: str) -> str:
        free, i = name, 1
        while free in self._names:
            free, i = f"{name}_{i}", i + 1
        self._names.add(free)
        return free

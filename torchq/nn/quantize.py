# SPDX-License-Identifier: Apache-2.0
"""Boundaries between float and quantized tensors, and unary functions by table."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchq.functional.placeholders import placeholder
from torchq.functional.tables import lookup_table
from torchq.nn.direct_call import DirectCall, source, state
from torchq.nn.module import (
    QModule,
    Spec,
    dtype_name,
    is_real,
    placeholder_qparams,
    quantize_boundary,
)
from torchq.quantization.qparams import QParams


def _along(values: Tensor, src: Tensor, axis: int) -> Tensor:
    """Values per channel in a shape that broadcasts against ``src``."""
    if not -src.dim() <= axis < src.dim() or src.shape[axis] != values.numel():
        raise ValueError(
            f"torchq.nn: src must have {values.numel()} channels in dimension {axis}, got "
            f"{list(src.shape)}. Quantize along the axis of its channels."
        )
    shape = [1] * src.dim()
    shape[axis] = values.numel()
    return values.reshape(shape)


def _axis_fields(qparams: QParams) -> dict[str, int]:
    """Return the fields that the spec of per-channel parameters has beside others."""
    if qparams.axis is None:
        return {}
    return {"axis": qparams.axis, "channels": qparams.scale.numel()}


def _placeholder(dtype: str, spec: Spec) -> QParams:
    one = placeholder_qparams(dtype, spec["bits"])
    if "axis" not in spec:
        return one
    count = spec["channels"]
    scale, zero_point = placeholder(count), placeholder(count, dtype=torch.int32, value=0)
    return QParams(scale, zero_point, one.dtype, spec["axis"], one.bits)


class Quantize(QModule):
    """``clamp(rne(fma(src, 1 / scale, zero_point)))``: floats in, uint8 or int8 out, any shape.

    With 7 bits the result is clamped to their range. A tensor that has the destination's dtype
    already passes.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: per channel, and ``src`` has another number of channels.
    """

    def __init__(self, dst: QParams) -> None:
        """``dst`` is per tensor, or per channel: then for :class:`Dequantize` and torch to read."""
        super().__init__()
        self._add_src(dst)
        self.axis = dst.axis
        self._set_spec(dst=dtype_name(dst.dtype), bits=dst.bits, **_axis_fields(dst))

    @classmethod
    def from_spec(cls, spec: Spec) -> "Quantize":
        """See the base class."""
        return cls(_placeholder(spec["dst"], spec))

    def _own_repr(self) -> str:
        return f"f32 -> {dtype_name(self.src_dtype)}"

    def forward(self, src: Tensor) -> Tensor:
        """Quantize."""
        axis = self.axis
        if axis is None or src.dtype == self.src_dtype:
            return self._quantized_src(src)
        scale, zero_point = (
            _along(self.src_scale, src, axis),
            _along(self.src_zero_point, src, axis),
        )
        return quantize_boundary(src, scale, zero_point, self.src_code, self.src_low, self.src_high)


class Dequantize(QModule):
    """``scale * float(src - zero_point)``: uint8 or int8 in, float32 out; floats pass.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: per channel, and ``src`` has another number of channels.
    """

    def __init__(self, src: QParams) -> None:
        """``src`` is per tensor or per channel."""
        super().__init__()
        self._add_src(src)
        self.axis = src.axis
        self._set_spec(src=dtype_name(src.dtype), bits=src.bits, **_axis_fields(src))

    @classmethod
    def from_spec(cls, spec: Spec) -> "Dequantize":
        """See the base class."""
        return cls(_placeholder(spec["src"], spec))

    def _own_repr(self) -> str:
        return f"{dtype_name(self.src_dtype)} -> f32"

    def forward(self, src: Tensor) -> Tensor:
        """Dequantize."""
        if is_real(src):
            return src
        if src.dtype != self.src_dtype:
            raise TypeError(
                "torchq.nn.Dequantize: src must be float32, bfloat16 or float16, or the quantized "
                f"dtype it was made for, got {src.dtype}. Convert it with .float()."
            )
        scale, zero_point, axis = self.src_scale, self.src_zero_point, self.axis
        if axis is not None:
            scale, zero_point = _along(scale, src, axis), _along(zero_point, src, axis)
        dst: Tensor = torch.ops.torchq.dequantize(src, scale, zero_point)
        return dst


class QLookup(QModule):
    """A unary function on 8-bit tensors as a table of 256 values.

    ``dst = quantize(function(dequantize(src)))``, exact to the rounding of ``function`` in float32.
    float32 sources are quantized first.
    """

    _direct = DirectCall("lookup", (source("src_dtype"), *state("table")))

    table: Tensor
    dst_scale: Tensor
    dst_zero_point: Tensor

    def __init__(
        self, function: Callable[[Tensor], Tensor], src: QParams, dst: QParams, name: str = ""
    ) -> None:
        """``name`` is for reports: which function this is."""
        super().__init__()
        self._add_src(src)
        self._add_qparams("dst", dst)
        self.dst_dtype = dst.dtype
        low, high = dst.integers
        self.register_buffer("table", lookup_table(function, src, dst).clamp_(low, high))
        self.function_name = name or getattr(function, "__name__", type(function).__name__)
        self._set_spec(
            function=self.function_name,
            src=dtype_name(src.dtype),
            src_bits=src.bits,
            dst=dtype_name(dst.dtype),
        )

    @classmethod
    def from_spec(cls, spec: Spec) -> "QLookup":
        """See the base class."""
        src = placeholder_qparams(spec["src"], spec["src_bits"])
        dst = placeholder_qparams(spec["dst"])
        return cls(torch.zeros_like, src, dst, spec["function"])

    def _own_repr(self) -> str:
        return f"{self.function_name}, {dtype_name(self.src_dtype)} -> {dtype_name(self.dst_dtype)}"

    def forward(self, src: Tensor) -> Tensor:
        """Look every value up."""
        if src.dtype != self.src_dtype:
            src = self._quantized_src(src)
        dst: Tensor = torch.ops.torchq.lookup(src, self.table)
        return dst

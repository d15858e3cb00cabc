# SPDX-License-Identifier: Apache-2.0
"""Writes quantized modules in ONNX: what a module computes in float, between real values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchq.attributes.post_ops import PostOps
from torchq.export.formulas import post_op, table
from torchq.export.onnx_graph import OnnxGraph, UnsupportedError, Value
from torchq.nn.attention import QAttention
from torchq.nn.binary import QAdd, QCat, QMul, _QCombine
from torchq.nn.conv import QConv
from torchq.nn.conv_transpose import QConvTranspose
from torchq.nn.dynamic import DynamicQLinear
from torchq.nn.layer import QLayer
from torchq.nn.linear import QLinear
from torchq.nn.matmul import QMatMul
from torchq.nn.module import QModule
from torchq.nn.normalization import QGroupNorm, QRMSNorm
from torchq.nn.pad import QPad
from torchq.nn.pooling import QAdaptiveAvgPool, QAvgPool, QMaxPool
from torchq.nn.quantize import Dequantize, QLookup, Quantize
from torchq.nn.resample import QResample
from torchq.quantization.qparams import QParams


def src_params(module: QModule) -> QParams:
    """Return the parameters of the source of a module that has one."""
    if module.src_scale.numel() != 1:
        raise UnsupportedError("it has one scale for each channel")
    bits = 8 if module.src_high - module.src_low == 255 else 7
    return _params(module.src_scale, module.src_zero_point, module.src_dtype, bits)


def dst_params(module: Any) -> QParams:
    """Return the parameters of what a module gives."""
    if isinstance(module, QLayer | QLookup):
        last = getattr(module, "lookup", None) or module
        if last.dst_scale.numel() > 1:
            zero_point = last.dst_zero_point.expand_as(last.dst_scale).contiguous()
            axis = -1 if isinstance(last, QLinear) else 1
            return QParams(last.dst_scale, zero_point, last.dst_dtype, axis)
        return _params(last.dst_scale, last.dst_zero_point, last.dst_dtype)
    bits = 7 if getattr(module, "dst_high", 0) else 8
    if getattr(module, "scales", None) is not None:
        return _params(module.scales[-1], module.zero_points[-1], module.dst_dtype, bits)
    return src_params(module)


def _params(scale: Tensor, zero_point: Tensor, dtype: torch.dtype, bits: int = 8) -> QParams:
    return QParams(scale.reshape(()), zero_point.reshape(()), dtype, None, bits)


def _sources(g: OnnxGraph, module: _QCombine, values: list[Value]) -> list[str]:
    """Return the real values that a module with several sources reads."""
    names = []
    for i, value in enumerate(values):
        bits = 8 if module.src_highs[i] - module.src_lows[i] == 255 else 7
        dtype = torch.int8 if module.src_signed[i] else torch.uint8
        params = _params(module.scales[i], module.zero_points[i], dtype, bits)
        names.append(g.source(value, params))
    return names


# Linear layers and convolutions


def _weight(g: OnnxGraph, module: QLayer, weight: Tensor, axis: int) -> str:
    scale, zero_point = module.weight_scale, module.weight_zero_point
    zeros = torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else zero_point
    if scale.numel() == 1:
        return g.real(g.constant(weight), scale[0], zeros[0], weight.dtype)
    return g.real(g.constant(weight), scale, zeros.expand_as(scale), weight.dtype, axis=axis)


def _bias(g: OnnxGraph, module: QLayer) -> list[str]:
    return [] if module.bias is None else [g.constant(module.bias)]


def _finished(g: OnnxGraph, module: QLayer, x: str, srcs: list[Value], dims: int) -> str:
    """Return what post-ops and a table make of a product."""
    for op in module.attr.post_ops:
        x = post_op(g, op, x, srcs, dims)
    if module.lookup is None:
        return x
    params = _params(module.dst_scale, module.dst_zero_point, module.dst_dtype)
    return table(g, module.lookup, g.rounded(x, params))


def _linear(g: OnnxGraph, module: QLinear, src: Value, *residual: Value) -> str:
    weight = _weight(g, module, module.packed().unpack().t(), 1)
    x = g.add("MatMul", g.source(src, src_params(module)), weight)
    x = g.add("Add", x, *_bias(g, module)) if module.bias is not None else x
    return _finished(g, module, x, list(residual), 0)


def _dynamic_linear(
    g: OnnxGraph, module: DynamicQLinear, src: Value, post_ops: str = "", srcs: Sequence[Value] = ()
) -> str:
    """Read the source in float: scales of rows are no parameters of QuantizeLinear."""
    x = src.name
    if module.src_factor is not None:
        x = g.add("Mul", x, g.constant(module.src_factor))
    weight = g.constant(module.packed().unpack().t().contiguous())
    zeros = torch.zeros(module.out_features, dtype=torch.int32, device="cpu")
    x = g.add("MatMul", x, g.real(weight, module.weight_scale, zeros, torch.int8, axis=1))
    x = g.add("Add", x, g.constant(module.bias)) if module.bias is not None else x
    left = list(srcs or ())
    for op in PostOps.parse(post_ops):
        x = post_op(g, op, x, left, 0)
    return x


def _conv(g: OnnxGraph, module: QConv, src: Value, *residual: Value) -> str:
    kernel, strides, begin, end, dilations, (groups, _) = module._window()
    weight = _weight(g, module, module.packed().unpack(), 0)
    x = g.add(
        "Conv", g.source(src, src_params(module)), weight, *_bias(g, module), kernel_shape=kernel,
        strides=strides, pads=[*begin, *end], dilations=dilations, group=groups,
    )  # fmt: skip
    return _finished(g, module, x, list(residual), len(kernel))


def _conv_transpose(g: OnnxGraph, module: QConvTranspose, src: Value, *residual: Value) -> str:
    dims, geometry = len(module.geometry) // 6, module.geometry
    kernel, strides, begin, _, dilations, more = (
        geometry[i * dims : (i + 1) * dims] for i in range(6)
    )
    packed = module.packed()
    if packed.groups > 1 and module.weight_scale.numel() > 1:
        weight = _grouped_weight(g, module, packed.unpack(), packed.groups)
    else:
        weight = _weight(g, module, packed.unpack(), 1)
    x = g.add(
        "ConvTranspose", g.source(src, src_params(module)), weight, *_bias(g, module),
        kernel_shape=kernel, strides=strides, pads=[*begin, *begin], dilations=dilations,
        output_padding=more, group=packed.groups,
    )  # fmt: skip
    return _finished(g, module, x, list(residual), dims)


def _grouped_weight(g: OnnxGraph, module: QLayer, weight: Tensor, groups: int) -> str:
    """Return a weight whose scales differ from group to group: one for each block of dim 0."""
    g.opset = max(g.opset, 21)
    shape = (groups, *weight.shape[1:])
    zero_point = module.weight_zero_point
    zeros = torch.zeros(1, dtype=torch.int32, device="cpu") if zero_point is None else zero_point
    each = [groups, weight.shape[1], *[1] * (weight.dim() - 2)]
    scale, zeros = (t.expand(each[0] * each[1]).reshape(each) for t in (module.weight_scale, zeros))
    block = weight.shape[0] // groups
    return g.real(
        g.constant(weight), scale.expand(shape), zeros.expand(shape), weight.dtype,
        axis=0, block_size=block,
    )  # fmt: skip


# Pools and what moves elements


def _window(module: QMaxPool | QAvgPool) -> tuple[list[int], dict[str, object]]:
    """Return the padding before each dim and then behind, and the attributes of a pool."""
    dims = len(module.geometry) // 5
    kernel, strides = module.geometry[:dims], module.geometry[dims : 2 * dims]
    pads = list(module.geometry[2 * dims : 4 * dims])
    return pads, {
        "kernel_shape": kernel, "strides": strides, "ceil_mode": int(module.ceil_mode)
    }  # fmt: skip


def _max_pool(g: OnnxGraph, module: QMaxPool, src: Value) -> str:
    pads, window = _window(module)
    gaps = module.geometry[2 * len(pads) :]
    x = g.source(src, src_params(module))
    return g.add("MaxPool", x, pads=pads, dilations=gaps, **window)


def _avg_pool(g: OnnxGraph, module: QAvgPool, src: Value) -> str:
    pads, window = _window(module)
    params = src_params(module)
    x = g.source(src, params)
    if module.count_include_pad and any(pads):
        # Zeros of its own: with a zero point OpenVINO 2026.4 would pad by integers 0, and with
        # ceil_mode ONNX Runtime 1.32 would divide by windows that end outside of them.
        half = len(pads) // 2
        sizes = g.sizes([0, 0, *pads[:half], 0, 0, *pads[half:]])
        x, pads = g.rounded(g.add("Pad", x, sizes, g.constant(0.0)), params), [0] * len(pads)
    return g.add("AveragePool", x, pads=pads, **window)


def _adaptive_avg_pool(g: OnnxGraph, module: QAdaptiveAvgPool, src: Value) -> str:
    if set(module.output_size) != {1}:
        raise UnsupportedError(f"an adaptive pool must give size 1, got {module.output_size}")
    return g.add("GlobalAveragePool", g.source(src, src_params(module)))


def _pad(g: OnnxGraph, module: QPad, src: Value, padding: list[int | Value]) -> str:
    begin, end = padding[-2::-2], padding[-1::-2]
    rest = [0] * (src.rank - len(begin))
    x = g.source(src, src_params(module))
    return g.add("Pad", x, g.sizes([*rest, *begin, *rest, *end]), g.constant(0.0))


def _resample(g: OnnxGraph, module: QResample, src: Value, size: Sequence[int | Value] = ()) -> str:
    x, options = g.source(src, src_params(module)), {"mode": "linear"}
    options["coordinate_transformation_mode"] = "pytorch_half_pixel"
    if size or module.size:
        outer = [g.size(src, 0), g.size(src, 1)]
        return g.add("Resize", x, "", "", g.sizes([*outer, *(size or module.size)]), **options)
    return g.add(
        "Resize",
        x,
        "",
        g.constant(torch.tensor([1.0, 1.0, *module.factor], dtype=torch.float32, device="cpu")),
        **options,
    )


# Several sources


def _binary(op: str) -> Callable[..., str]:
    def write(g: OnnxGraph, module: QAdd | QMul, src0: Value, src1: Value) -> str:
        x = g.add(op, *_sources(g, module, [src0, src1]))
        return g.add("Relu", x) if module.relu else x

    return write


def _cat(g: OnnxGraph, module: QCat, srcs: list[Value]) -> str:
    return g.add("Concat", *_sources(g, module, srcs), axis=module.dim)


def _matmul(g: OnnxGraph, module: QMatMul, src0: Value, src1: Value) -> str:
    x = g.add("MatMul", *_sources(g, module, [src0, src1]))
    for op in PostOps.parse(module.post_ops):
        x = post_op(g, op, x, [], 0)
    return x


def _check_float(module: QGroupNorm | QRMSNorm) -> None:
    if not module.reads_float or module.post_ops:
        raise UnsupportedError("its source is int8, or it has post-ops")


def _group_norm(g: OnnxGraph, module: QGroupNorm, src: Value) -> str:
    _check_float(module)
    plain = torch.ones(module.num_groups, dtype=torch.float32, device="cpu")
    groups = g.add("Reshape", src.name, g.constant([0, module.num_groups, -1]))
    terms = [g.constant(plain), g.constant(torch.zeros_like(plain))]
    x = g.add("InstanceNormalization", groups, *terms, epsilon=module.eps)
    x = g.add("Reshape", x, g.add("Shape", src.name))
    for op, values in (("Mul", module.weight), ("Add", module.bias)):
        if values is not None:
            x = g.add(op, x, g.constant(values.reshape(-1, *[1] * (src.rank - 2))))
    return x


def _rms_norm(g: OnnxGraph, module: QRMSNorm, src: Value) -> str:
    _check_float(module)
    axes = g.constant([src.rank - dim - 1 for dim in range(module.dims)])
    mean = g.add("ReduceMean", g.add("Mul", src.name, src.name), axes, keepdims=1)
    x = g.add("Div", src.name, g.add("Sqrt", g.add("Add", mean, g.constant(float(module.eps)))))
    return x if module.weight is None else g.add("Mul", x, g.constant(module.weight))


def _attention(
    g: OnnxGraph, module: QAttention, query: Value, key: Value, value: Value,
    mask: Value | None = None, scale: float | Value | None = None,
) -> str:  # fmt: skip
    if module.enable_gqa:
        raise UnsupportedError("key and value have fewer heads than query")
    q, k, v = _sources(g, module, [query, key, value])
    if not module.transposed_key:
        last = list(range(key.rank))
        k = g.add("Transpose", k, perm=[*last[:-2], last[-1], last[-2]])
    factor = module.scale if scale is None else scale
    factor = query.example.shape[-1] ** -0.5 if factor is None else factor
    number = factor.name if isinstance(factor, Value) else g.constant(float(factor))
    scores = g.add("Mul", g.add("MatMul", q, k), number)
    lowest = torch.tensor([float("-inf")], dtype=torch.float32, device="cpu")
    if module.is_causal:
        shape = g.add("Slice", g.add("Shape", scores), g.constant([-2]), g.constant([2**31]))
        full = g.add("Expand", g.constant(lowest), shape)
        scores = g.add("Add", scores, g.add("Trilu", full, g.constant(1), upper=1))
    if mask is not None:
        added = mask.name
        if mask.example.dtype == torch.bool:
            added = g.add("Where", added, g.constant(0.0), g.constant(lowest))
        scores = g.add("Add", scores, added)
    weights = g.add("Softmax", scores, axis=-1)
    if mask is not None:  # a row that sees no key is 0
        weights = g.add("Where", g.add("IsNaN", weights), g.constant(0.0), weights)
    return g.add("MatMul", weights, v)


MODULES: dict[type, Callable[..., str]] = {
    QLinear: _linear,
    DynamicQLinear: _dynamic_linear,
    QConv: _conv,
    QConvTranspose: _conv_transpose,
    QMaxPool: _max_pool,
    QAvgPool: _avg_pool,
    QAdaptiveAvgPool: _adaptive_avg_pool,
    QPad: _pad,
    QResample: _resample,
    QAdd: _binary("Add"),
    QMul: _binary("Mul"),
    QCat: _cat,
    QMatMul: _matmul,
    QAttention: _attention,
    QGroupNorm: _group_norm,
    QRMSNorm: _rms_norm,
    QLookup: lambda g, module, src: table(g, module, g.source(src, src_params(module))),
    Quantize: lambda g, module, src: g.source(src, src_params(module)),
    Dequantize: lambda g, module, src: g.source(src, src_params(module)),
}
"""Class of a quantized module -> what it computes, in real values."""

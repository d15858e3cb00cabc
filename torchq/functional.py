# SPDX-License-Identifier: Apache-2.0
"""The functional API: readable scales in, folded per call.

Sources are plain uint8 or int8 tensors with ``real = scale * (q - zero_point)``; scales, zero points and post-ops
come in an :class:`~torchq.Attr`, whose masks index oneDNN's logical dimensions. Folding costs O(channels) a call;
modules in :mod:`torchq.nn` fold once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.attr import Attr
from torchq.folding import fold
from torchq.ops import dtype_code
from torchq.packing import PackedWeight, pack_conv, pack_linear
from torchq.qparams import QParams

__all__ = [
    "adaptive_avg_pool",
    "add",
    "avg_pool",
    "concat",
    "conv1d",
    "conv2d",
    "conv3d",
    "dequantize",
    "linear",
    "lookup",
    "lookup_table",
    "max_pool",
    "mul",
    "pad",
    "quantize",
    "quantize_weight",
    "reorder",
    "requantize",
]

Ints = int | Sequence[int]
Floats = float | Tensor
Zeros = int | Tensor


def _scale(value: Floats) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def _zero_point(value: Zeros) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int32)


# Reorders


def quantize(
    src: Tensor, scale: Floats, zero_point: Zeros = 0, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """``clamp(rne(fma(src, 1 / scale, zero_point)))``; NaN becomes the zero point.

    Args:
        src: float32, any shape and strides.
        scale: real units per step; a number or a float32 tensor that broadcasts against ``src``.
        zero_point: a number or an int32 tensor that broadcasts against ``src``.
        dtype: torch.uint8, torch.int8 or torch.int32.

    Raises:
        TypeError: ``src`` is not float32.
        ValueError: a scale is not finite and positive, a zero point is out of range, or the shapes do
            not broadcast.
        RuntimeError: ``src`` requires grad in grad mode.
    """
    result: Tensor = torch.ops.torchq.quantize(
        src, _scale(scale), _zero_point(zero_point), dtype_code(dtype)
    )
    return result


def dequantize(src: Tensor, scale: Floats, zero_point: Zeros = 0) -> Tensor:
    """``scale * float(src - zero_point)`` as float32; arguments as in :func:`quantize`."""
    result: Tensor = torch.ops.torchq.dequantize(src, _scale(scale), _zero_point(zero_point))
    return result


def requantize(
    src: Tensor,
    src_scale: Floats,
    src_zero_point: Zeros,
    dst_scale: Floats,
    dst_zero_point: Zeros,
    dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """``clamp(rne(fma(float(src - src_zero_point), src_scale / dst_scale, dst_zero_point)))``."""
    result: Tensor = torch.ops.torchq.requantize(
        src,
        _scale(src_scale),
        _zero_point(src_zero_point),
        _scale(dst_scale),
        _zero_point(dst_zero_point),
        dtype_code(dtype),
    )
    return result


def reorder(src: Tensor, dtype: torch.dtype, attr: Attr | None = None) -> Tensor:
    """Converts between float32, int32, int8 and uint8 with any mask on either side.

    With ``scales`` (v3): ``dst = (src - src_zero_point) * src_scale / dst_scale + dst_zero_point``; the ratio of
    the scales is rounded once. With ``output_scales`` (v1): ``dst = src * output_scale``. Integer destinations
    round half to even and saturate. Without scales, integers convert exactly.

    Raises:
        NotImplementedError: the Attr has post-ops or a rounding mode.
        ValueError: the number of values of a mask is not the product of the selected dims of ``src``.
    """
    attr = Attr() if attr is None else attr
    if attr.post_ops or attr.rounding("dst") != "nearest":
        raise NotImplementedError(
            f"torchq.reorder: post-ops and rounding modes are not supported, got {attr}. "
            "Use scales, zero_points or output_scales only."
        )
    for arg in ("src", "dst"):
        attr.check(arg, src.shape)
    if attr.mask("dst", "output_scales") is not None:
        scales = attr.resolve("dst", src.shape, "output_scales")
    elif any(attr.mask(arg, kind) is not None for arg in ("src", "dst") for kind in _REORDER_KINDS):
        return requantize(
            src,
            attr.resolve("src", src.shape),
            attr.resolve("src", src.shape, "zero_points"),
            attr.resolve("dst", src.shape),
            attr.resolve("dst", src.shape, "zero_points"),
            dtype,
        )
    else:
        scales = torch.empty(0)
    result: Tensor = torch.ops.torchq.reorder(src, scales, dtype_code(dtype))
    return result


_REORDER_KINDS = ("scales", "zero_points")


def quantize_weight(weight: Tensor, scale: Floats, bits: int = 8) -> Tensor:
    """``clamp(rne(weight / scale))`` as int8 in -127..127 (8 bits) or -63..63 (7 bits).

    Args:
        weight: float32, any strides; the result is dense in the same order.
        scale: a number, or a tensor that broadcasts against ``weight``: ``[OC, 1, ...]`` for one scale per
            output channel, ``[G, OC/G, 1, ...]`` per group and output channel (mask 3).
        bits: 8, or 7 for weights that cannot saturate on any CPU.
    """
    if bits not in (7, 8):
        raise ValueError(f"torchq.quantize_weight: bits must be 7 or 8, got {bits}.")
    limit = 2 ** (bits - 1) - 1
    with torch.no_grad():
        return quantize(weight.detach(), scale, 0, torch.int8).clamp_(-limit, limit)


# Matmul-like ops


def _refuse_float(op: str, src: Tensor, attr: Attr) -> None:
    if src.dtype == torch.float32 and attr.mask("dst", "output_scales") is not None:
        raise ValueError(
            f"torchq.{op}: output_scales need an integer computation, but src is float32, got {attr}. "
            "Quantize src, or drop the output scales and multiply the result."
        )


def linear(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``dst = post_ops(src_scale * weight_scale * sum_k (src - src_zero_point) * weight + bias)``, quantized.

    Args:
        src: uint8 or int8 ``(*, in_features)``.
        weight: int8 ``(out_features, in_features)``, or packed by :func:`~torchq.packing.pack_linear` (do that
            once where the weight is constant).
        bias: ``[out_features]``; float32 in real units (added after scaling) or int32 in accumulator units.
        attr: scales of ``src`` (mask 0), ``weights`` (0, or 1: per output channel), ``dst`` (0, or 2: per
            channel); zero points of ``src`` and ``dst`` (mask 0); or ``output_scales``; post-ops.
        dst_dtype: torch.uint8, int8, int32 or float32. int32 without scales gives the exact accumulators.
        post_op_srcs: one tensor of dst's shape per ``sum``.

    Returns:
        ``(*, out_features)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit.
        NotImplementedError: masks or post-ops without a kernel.
    """
    attr = Attr() if attr is None else attr
    _refuse_float("linear", src, attr)
    packed = weight if isinstance(weight, PackedWeight) else pack_linear(weight)
    folded = fold("linear", attr, packed, bias, dst_dtype)
    result: Tensor = torch.ops.torchq.linear(
        src,
        *packed[:3],
        *folded[:4],
        dtype_code(dst_dtype),
        folded.post_ops,
        folded.post_op_params,
        list(post_op_srcs),
    )
    return result


def _spread(op: str, name: str, value: Ints, dims: int) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    if len(values) != dims:
        raise ValueError(
            f"torchq.{op}: {name} must be one number or {dims}, one per spatial dimension, got {value}."
        )
    return values


def conv_geometry(
    op: str,
    kernel: Sequence[int],
    stride: Ints,
    padding: Ints,
    padding_end: Ints | None,
    dilation: Ints,
    groups: int | None = None,
) -> list[int]:
    """The ``geometry`` argument of ``torch.ops.torchq.conv`` and, without groups, of the pools."""
    dims = len(kernel)
    begin = _spread(op, "padding", padding, dims)
    end = begin if padding_end is None else _spread(op, "padding_end", padding_end, dims)
    windows = (
        _spread(op, "stride", stride, dims),
        begin,
        end,
        _spread(op, "dilation", dilation, dims),
    )
    flat = [*kernel, *(value for values in windows for value in values)]
    return flat if groups is None else [*flat, groups]


def _conv(
    dims: int,
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    attr: Attr | None,
    dst_dtype: torch.dtype,
    post_op_srcs: Sequence[Tensor],
    padding_end: Ints | None,
) -> Tensor:
    op = f"conv{dims}d"
    attr = Attr() if attr is None else attr
    _refuse_float(op, src, attr)
    spread = _spread(op, "dilation", dilation, dims)
    packed = weight if isinstance(weight, PackedWeight) else pack_conv(weight, groups, spread)
    if (len(packed.shape), packed.groups, packed.dilation) != (dims + 2, groups, tuple(spread)):
        raise ValueError(
            f"torchq.{op}: weight was packed from {list(packed.shape)} for groups={packed.groups}, "
            f"dilation={packed.dilation}; got groups={groups}, dilation={tuple(spread)}. Pack it for these."
        )
    if src.dim() != dims + 2:
        raise ValueError(
            f"torchq.{op}: src must be (N, C, spatial...) with {dims + 2} dimensions, got "
            f"{list(src.shape)}. Add a batch dimension with unsqueeze(0) if it is missing."
        )
    folded = fold(op, attr, packed, bias, dst_dtype)
    kernel = packed.shape[2:]
    result: Tensor = torch.ops.torchq.conv(
        src,
        *packed[:3],
        *folded[:4],
        conv_geometry(op, kernel, stride, padding, padding_end, spread, groups),
        dtype_code(dst_dtype),
        folded.post_ops,
        folded.post_op_params,
        list(post_op_srcs),
    )
    return result


def conv1d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """1-D convolution: ``src`` (N, C, L), ``weight`` int8 (OC, C/groups, k); see :func:`conv2d`."""
    return _conv(
        1, src, weight, bias, stride, padding, dilation, groups, attr, dst_dtype, post_op_srcs, padding_end
    )  # fmt: skip


def conv2d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """``dst = post_ops(src_scale * weight_scale * conv(src - src_zero_point, weight) + bias)``, quantized.

    Padding is real zero: it contributes nothing, whatever the zero point.

    Args:
        src: uint8 or int8 ``(N, C, H, W)``; channels-last is read in place, other strides are copied.
        weight: int8 ``(OC, C/groups, kh, kw)``, or packed by :func:`~torchq.packing.pack_conv`.
        bias: ``[OC]``; float32 in real units or int32 in accumulator units.
        stride: one number or one per spatial dimension; so are ``padding`` and ``dilation`` (1: dense).
        padding: added before, and after unless ``padding_end`` is given.
        dilation: distance between taps.
        groups: divides both channel counts; weight masks then index (G, OC/G, C/G, kh, kw): mask 3 is per
            group and channel, mask 2 is OC/G values shared by the groups.
        attr: as in :func:`linear`.
        dst_dtype: torch.uint8, int8, int32 or float32.
        post_op_srcs: one tensor of dst's shape per ``sum``.
        padding_end: padding after, where it differs.

    Returns:
        ``(N, OC, OH, OW)``, channels-last.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit.
        NotImplementedError: masks or post-ops without a kernel.
    """
    return _conv(
        2, src, weight, bias, stride, padding, dilation, groups, attr, dst_dtype, post_op_srcs, padding_end
    )  # fmt: skip


def conv3d(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
    padding_end: Ints | None = None,
) -> Tensor:
    """3-D convolution: ``src`` (N, C, D, H, W), ``weight`` int8 (OC, C/groups, kd, kh, kw)."""
    return _conv(
        3, src, weight, bias, stride, padding, dilation, groups, attr, dst_dtype, post_op_srcs, padding_end
    )  # fmt: skip


# Pooling: 1 to 3 dimensions by the rank of src


def max_pool(
    src: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Maximum over windows of ``(N, C, spatial...)``; padding is never picked; scale and zero point stay."""
    kernel = _spread("max_pool", "kernel_size", kernel_size, src.dim() - 2)
    step = kernel if stride is None else stride
    geometry = conv_geometry("max_pool", kernel, step, padding, None, dilation)
    result: Tensor = torch.ops.torchq.max_pool(src, geometry, ceil_mode)
    return result


def avg_pool(
    src: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    zero_point: Zeros = 0,
) -> Tensor:
    """``rne(float(sum) / float(count))`` over windows; scale and zero point stay.

    Padding counts as real zero (``zero_point``) with ``count_include_pad``. The defaults are those of
    ``torch.nn.functional.avg_pool2d``.
    """
    kernel = _spread("avg_pool", "kernel_size", kernel_size, src.dim() - 2)
    step = kernel if stride is None else stride
    geometry = conv_geometry("avg_pool", kernel, step, padding, None, 1)
    result: Tensor = torch.ops.torchq.avg_pool(
        src, _zero_point(zero_point), geometry, ceil_mode, count_include_pad, divisor_override
    )
    return result


def adaptive_avg_pool(src: Tensor, output_size: Ints) -> Tensor:
    """Average over ``output_size`` windows a dimension; 1 is the global average. Scale and zero point stay."""
    size = _spread("adaptive_avg_pool", "output_size", output_size, src.dim() - 2)
    result: Tensor = torch.ops.torchq.adaptive_avg_pool(src, size)
    return result


# Elementwise


def _operands(op: str, attr: Attr, count: int, dst_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zero points of src0, src1, ... and dst as the ops take them."""
    args = [*(f"src{i}" for i in range(count)), "dst"]
    for arg in args:
        for kind in _REORDER_KINDS:
            if attr.mask(arg, kind) not in (None, 0):
                raise NotImplementedError(
                    f"torchq.{op}: {kind} of {arg} with mask {attr.mask(arg, kind)} is not supported, got "
                    f"{attr}. Use mask 0, one value per tensor."
                )
    scales = torch.cat([attr.resolve(arg, (1,)) for arg in args])
    zero_points = torch.cat([attr.resolve(arg, (1,), "zero_points") for arg in args])
    return scales, zero_points


def _relu_only(op: str, attr: Attr) -> bool:
    text = str(attr.post_ops)
    if text not in ("", "eltwise_relu"):
        raise NotImplementedError(
            f"torchq.{op}: post_ops must be empty or 'eltwise_relu', got '{text}'. Apply the others with "
            "torchq.functional.lookup."
        )
    return text == "eltwise_relu"


def add(src0: Tensor, src1: Tensor, attr: Attr, dst_dtype: torch.dtype = torch.uint8) -> Tensor:
    """``real(dst) = real(src0) + real(src1)``, broadcast; post-ops: empty or ``eltwise_relu``.

    ``dst = clamp(rne(fma(src0, m0, fma(src1, m1, c))))`` with ``m_i = scale_i / dst_scale`` and
    ``c = dst_zero_point - z0 * m0 - z1 * m1``, computed in double and rounded once.
    """
    scales, zero_points = _operands("add", attr, 2, dst_dtype)
    relu = _relu_only("add", attr)
    result: Tensor = torch.ops.torchq.add(
        src0, src1, scales, zero_points, dtype_code(dst_dtype), relu
    )
    return result


def mul(src0: Tensor, src1: Tensor, attr: Attr, dst_dtype: torch.dtype = torch.uint8) -> Tensor:
    """``real(dst) = real(src0) * real(src1)``, broadcast; post-ops: empty or ``eltwise_relu``.

    ``dst = clamp(rne(fma(float((src0 - z0) * (src1 - z1)), scale0 * scale1 / dst_scale, dst_zero_point)))``.
    """
    scales, zero_points = _operands("mul", attr, 2, dst_dtype)
    relu = _relu_only("mul", attr)
    result: Tensor = torch.ops.torchq.mul(
        src0, src1, scales, zero_points, dtype_code(dst_dtype), relu
    )
    return result


def concat(
    srcs: Sequence[Tensor],
    attr: Attr | None = None,
    dim: int = 1,
    dst_dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """Concatenates along ``dim``; a source whose scale, zero point or dtype differ from dst's is requantized."""
    scales, zero_points = _operands(
        "concat", Attr() if attr is None else attr, len(srcs), dst_dtype
    )
    result: Tensor = torch.ops.torchq.concat(
        list(srcs), scales, zero_points, dim, dtype_code(dst_dtype)
    )
    return result


def lookup_table(function: Callable[[Tensor], Tensor], src: QParams, dst: QParams) -> Tensor:
    """The 256 destination values of a unary function, for :func:`lookup`.

    ``table[i] = quantize(function(dequantize(q_i)))`` for the source values in ascending order; exact to the
    rounding of ``function`` in float32.
    """
    low = 0 if src.dtype == torch.uint8 else -128
    q = torch.arange(low, low + 256, dtype=torch.int32)
    real = src.scale * (q - src.zero_point).to(torch.float32)
    with torch.no_grad():
        return quantize(function(real), dst.scale, dst.zero_point, dst.dtype)


def lookup(src: Tensor, table: Tensor) -> Tensor:
    """``table[src]`` (uint8) or ``table[src + 128]`` (int8): any unary function on 8-bit tensors."""
    result: Tensor = torch.ops.torchq.lookup(src, table)
    return result


def pad(src: Tensor, padding: Sequence[int], zero_point: int = 0) -> Tensor:
    """Pads with real zero; ``padding`` as in ``torch.nn.functional.pad``."""
    return F.pad(src, list(padding), value=zero_point)

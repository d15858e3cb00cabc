# SPDX-License-Identifier: Apache-2.0
"""Softmax and normalizations of uint8, int8 and, except batch norm, float32 tensors.

All dequantize an integer source, ``x = src_scale * (q - src_zero_point)``, and write
``clamp(rne(fma(y, 1 / dst_scale, dst_zero_point)))``, or ``y`` itself to float32. oneDNN instead
computes on the integers and multiplies the *result* by the source's scale. Sums are exact or run in
the order that csrc/kernels/rows/contract.h states: every tier and thread count gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attributes.arguments import FLOATS
from torchq.attributes.attr import Attr
from torchq.functional.arguments import check_8bit, integer, real_arguments


def softmax(
    src: Tensor,
    dim: int = -1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``y_i = e_i / sum_j e_j`` along ``dim``, with ``e_i = exp(x_i - max_j x_j)``.

    In float32: ``x_i - max_j x_j`` of an integer source is ``src_scale * float(q_i - max_j q_j)``,
    the quotient ``e_i * (1 / sum)``, and the sum runs in 16 lanes, block by block.

    Args:
        src: uint8, int8 or float32, any shape and strides.
        dim: may be negative. It is innermost in the memory of dst.
        attr: scales and zero points of ``dst`` and of an integer ``src``, mask 0; post-ops, in
            float32, their masks indexing the dims of dst. The usual 8-bit destination is uint8 with
            scale 1 / 256.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale).
        post_op_srcs: as in :func:`eltwise`.

    Raises:
        TypeError: ``src`` or one of ``post_op_srcs`` has another dtype.
        ValueError: ``dim`` does not exist, ``attr`` sets other arguments, or shapes do not fit.
        NotImplementedError: another mask of scales or zero points, or ``dw_conv``.
    """
    return _softmax("softmax", src, dim, False, attr, dst_dtype, post_op_srcs)


def log_softmax(
    src: Tensor,
    dim: int = -1,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``y_i = (x_i - max_j x_j) - log(sum_j e_j)``; all else as in :func:`softmax`."""
    return _softmax("log_softmax", src, dim, True, attr, dst_dtype, post_op_srcs)


def layer_norm(
    src: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``y = (x - mean) / sqrt(variance + eps) * weight + bias`` over the last dims.

    Mean ``m`` and variance of an integer source are those of the exact integers q. With ``c =
    rne(m)`` and ``g = src_scale / sqrt(src_scale^2 variance + eps)`` in double, ``y =
    fma(fma(float(q - c), float(g), float((c - m) g)), weight, bias)`` in float32.

    A float32 source has sums of float32 in 16 lanes, and means of these in double: ``y = fma((x -
    float(m)) * g, weight, bias)`` with ``g = 1 / sqrt(float(variance + eps))`` in float32.

    Args:
        src: uint8, int8 or float32, ending in ``normalized_shape``.
        normalized_shape: as for ``torch.nn.functional.layer_norm``.
        weight: float32 of ``normalized_shape``, or None for 1.
        bias: float32 of ``normalized_shape``, or None for 0.
        eps: at least 0, in squared real units.
        attr: as in :func:`softmax`.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale).
        post_op_srcs: as in :func:`softmax`.

    Errors as in :func:`softmax`.
    """
    params = _params("layer_norm", src, attr, dst_dtype, post_op_srcs)
    dims = _last_dims("layer_norm", src, normalized_shape)
    result: Tensor = torch.ops.torchq.layer_norm(src, dims, weight, bias, eps, *params)
    return result


def rms_norm(
    src: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dims.

    The mean of an integer source is that of the exact ``(q - src_zero_point)^2``. With ``g =
    src_scale / sqrt(src_scale^2 mean + eps)`` in double, ``y = float(q - src_zero_point) * float(g)
    * weight`` in float32. A float32 source has sums as in :func:`layer_norm`.

    Args:
        src: uint8, int8 or float32, ending in ``normalized_shape``.
        normalized_shape: as for ``torch.nn.functional.rms_norm``.
        weight: float32 of ``normalized_shape``, or None for 1.
        eps: at least 0, in squared real units; None is 2**-23, as for ``torch.nn.RMSNorm``.
        attr: as in :func:`softmax`.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale).
        post_op_srcs: as in :func:`softmax`.

    Errors as in :func:`softmax`.
    """
    params = _params("rms_norm", src, attr, dst_dtype, post_op_srcs)
    dims = _last_dims("rms_norm", src, normalized_shape)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    result: Tensor = torch.ops.torchq.rms_norm(src, dims, weight, eps, *params)
    return result


def _last_dims(op: str, src: Tensor, normalized_shape: int | Sequence[int]) -> int:
    """Return the number of normalized dims."""
    given = [normalized_shape] if isinstance(normalized_shape, int) else normalized_shape
    shape = [integer(op, "normalized_shape", size) for size in given]
    if not shape or list(src.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"torchq.{op}: src must end in normalized_shape {shape}, got {list(src.shape)}. Pass "
            "the sizes of its last dims."
        )
    return len(shape)


def group_norm(
    src: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """:func:`layer_norm` over groups of channels and all positions of ``(N, C, ...)``.

    ``weight`` and ``bias`` have one float32 per channel; ``num_groups = C`` is instance norm. dst
    is channels-last: for ``(N, C, L)``, strides ``(C * L, 1, C)``. A source with these strides is
    read in place, any other is copied first.

    A float32 source has, per channel and 64 positions, sums of float32 of ``x - x_0`` and of its
    square, where ``x_0`` is the first of them, and double sums of these. With the mean ``m``, ``c =
    float(m)`` and ``g = 1 / sqrt(variance + eps)``, ``y = fma(fma(x - c, float(g), float((c - m)
    g)), weight, bias)``.
    """
    params = _params("group_norm", src, attr, dst_dtype, post_op_srcs)
    groups = integer("group_norm", "num_groups", num_groups)
    result: Tensor = torch.ops.torchq.group_norm(src, groups, weight, bias, eps, *params)
    return result


def batch_norm(
    src: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``y = (x - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]``, as in inference.

    ``src`` is ``(N, C, ...)``, all parameters float32, one per channel, in real units. They are
    multiplied out in double: ``y = fma(float(q - src_zero_point), factor[c], shift[c])``. dst is
    channels-last. Where a convolution precedes, fuse it.
    """
    check_8bit("batch_norm", "src", src)
    params = _params("batch_norm", src, attr, dst_dtype, post_op_srcs)
    result: Tensor = torch.ops.torchq.batch_norm(
        src, running_mean, running_var, weight, bias, eps, *params
    )
    return result


def _params(
    op: str, src: Tensor, attr: Attr | None, dst_dtype: torch.dtype, srcs: Sequence[Tensor]
) -> tuple[Tensor, Tensor, int, str, list[Tensor] | None]:
    """Return the last arguments of every op here; dst has the dims of src."""
    if not (isinstance(src, Tensor) and src.dtype in FLOATS):
        check_8bit(op, "src", src)
    return real_arguments(op, attr, ["src", "dst"], dst_dtype, srcs, lambda: src.shape)


def _softmax(
    op: str,
    src: Tensor,
    dim: int,
    logarithmic: bool,
    attr: Attr | None,
    dst_dtype: torch.dtype,
    post_op_srcs: Sequence[Tensor],
) -> Tensor:
    params = _params(op, src, attr, dst_dtype, post_op_srcs)
    dim = integer(op, "dim", dim)
    result: Tensor = torch.ops.torchq.softmax(src, dim, logarithmic, *params)
    return result

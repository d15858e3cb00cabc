# SPDX-License-Identifier: Apache-2.0
"""Softmax and normalizations of uint8 and int8 tensors.

All dequantize their source, ``x = src_scale * (q - src_zero_point)``, and write
``clamp(rne(fma(y, 1 / dst_scale, dst_zero_point)))``, or ``y`` itself to float32. oneDNN instead
computes on the integers and multiplies the *result* by the source's scale. Sums are exact or run in
a fixed order in double, so that every tier and thread count gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attr import Attr
from torchq.functional.arguments import check_8bit, eltwise_post_ops, real_params
from torchq.ops import dtype_code


def softmax(
    src: Tensor, dim: int = -1, attr: Attr | None = None, dst_dtype: torch.dtype = torch.float32
) -> Tensor:
    """``y_i = e_i / sum_j e_j`` along ``dim``, with ``e_i = exp(x_i - max_j x_j)``.

    The exponentials are float32 (256 of them exist), their sum and the quotient double, rounded
    once.

    Args:
        src: uint8 or int8, any shape and strides.
        dim: may be negative. It is innermost in the memory of dst.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; eltwise post-ops. The usual
            8-bit destination is uint8 with scale 1 / 256.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale).

    Raises:
        TypeError: ``src`` is neither uint8 nor int8.
        ValueError: ``dim`` does not exist, or ``attr`` sets other arguments.
        NotImplementedError: another mask, or a post-op that is not eltwise.
    """
    return _softmax("softmax", src, dim, False, attr, dst_dtype)


def log_softmax(
    src: Tensor, dim: int = -1, attr: Attr | None = None, dst_dtype: torch.dtype = torch.float32
) -> Tensor:
    """``y_i = (x_i - max_j x_j) - log(sum_j e_j)``; arguments as in :func:`softmax`."""
    return _softmax("log_softmax", src, dim, True, attr, dst_dtype)


def layer_norm(
    src: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``y = (x - mean) / sqrt(variance + eps) * weight + bias`` over the last dims.

    Mean and variance are those of the exact integers; the rest is double, rounded to float32 once.

    Args:
        src: uint8 or int8, ending in ``normalized_shape``.
        normalized_shape: as for ``torch.nn.functional.layer_norm``.
        weight: float32 of ``normalized_shape``, or None for 1.
        bias: float32 of ``normalized_shape``, or None for 0.
        eps: at least 0, in squared real units.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; eltwise post-ops.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale).

    Errors as in :func:`softmax`.
    """
    shape = list(normalized_shape)
    dims = len(shape)
    if not dims or list(src.shape[-dims:]) != shape:
        raise ValueError(
            f"torchq.layer_norm: src must end in normalized_shape {shape}, got "
            f"{list(src.shape)}. Pass the sizes of its last dims."
        )
    scales, zero_points, rest = _params("layer_norm", src, attr)
    result: Tensor = torch.ops.torchq.layer_norm(
        src, dims, weight, bias, eps, scales, zero_points, dtype_code(dst_dtype, "layer_norm"), rest
    )
    return result


def group_norm(
    src: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`layer_norm` over groups of channels and all positions of ``(N, C, ...)``.

    ``weight`` and ``bias`` have one float32 per channel; ``num_groups = C`` is instance norm. dst
    is channels-last.
    """
    scales, zero_points, rest = _params("group_norm", src, attr)
    code = dtype_code(dst_dtype, "group_norm")
    result: Tensor = torch.ops.torchq.group_norm(
        src, num_groups, weight, bias, eps, scales, zero_points, code, rest
    )
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
) -> Tensor:
    """``y = (x - mean[c]) / sqrt(var[c] + eps) * weight[c] + bias[c]``, as in inference.

    ``src`` is ``(N, C, ...)``, all parameters float32, one per channel, in real units. Computed in
    double, rounded to float32 once. dst is channels-last. Where a convolution precedes, fuse it.
    """
    scales, zero_points, rest = _params("batch_norm", src, attr)
    code = dtype_code(dst_dtype, "batch_norm")
    result: Tensor = torch.ops.torchq.batch_norm(
        src, running_mean, running_var, weight, bias, eps, scales, zero_points, code, rest
    )
    return result


def _params(op: str, src: Tensor, attr: Attr | None) -> tuple[Tensor, Tensor, str]:
    attr = Attr() if attr is None else attr
    check_8bit(op, "src", src)
    return *real_params(op, attr, ["src", "dst"]), eltwise_post_ops(op, attr)


def _softmax(
    op: str, src: Tensor, dim: int, logarithmic: bool, attr: Attr | None, dst_dtype: torch.dtype
) -> Tensor:
    scales, zero_points, rest = _params(op, src, attr)
    result: Tensor = torch.ops.torchq.softmax(
        src, dim, logarithmic, scales, zero_points, dtype_code(dst_dtype, op), rest
    )
    return result

# SPDX-License-Identifier: Apache-2.0
"""Ops that take integers to integers by folded scales: add, mul, concat and pad."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.attributes.arguments import check_tensors, to_int
from torchq.attributes.attr import Attr
from torchq.functional.arguments import check_8bit, integer
from torchq.functional.folding import check_attr
from torchq.runtime.library import dtype_code


def add(src0: Tensor, src1: Tensor, attr: Attr, dst_dtype: torch.dtype = torch.uint8) -> Tensor:
    """``real(dst) = real(src0) + real(src1)``, broadcast; post-ops: none or ``eltwise_relu``.

    ``dst = clamp(rne(fma(src0, m0, fma(src1, m1, c))))`` with ``m_i = scale_i / dst_scale`` and
    ``c = dst_zero_point - z0 * m0 - z1 * m1``, computed in double and rounded once.

    Args:
        src0: uint8 or int8.
        src1: uint8 or int8, of a shape that broadcasts with ``src0``.
        attr: scales and zero points of ``src0``, ``src1`` and ``dst``, mask 0.
        dst_dtype: torch.uint8, int8 or float32; float32 has neither scale nor zero point.
    """
    scales, zero_points = _operands("add", attr, [src0, src1])
    relu, code = _binary("add", src0, src1, attr, dst_dtype)
    result: Tensor = torch.ops.torchq.add(src0, src1, scales, zero_points, code, relu)
    return result


def mul(src0: Tensor, src1: Tensor, attr: Attr, dst_dtype: torch.dtype = torch.uint8) -> Tensor:
    """``real(dst) = real(src0) * real(src1)``; arguments as in :func:`add`.

    ``dst = clamp(rne(fma(float((src0 - z0) * (src1 - z1)), m, dst_zero_point)))`` with ``m =
    scale0 * scale1 / dst_scale``, computed in double and rounded once.
    """
    scales, zero_points = _operands("mul", attr, [src0, src1])
    relu, code = _binary("mul", src0, src1, attr, dst_dtype)
    result: Tensor = torch.ops.torchq.mul(src0, src1, scales, zero_points, code, relu)
    return result


def concat(
    srcs: Sequence[Tensor],
    attr: Attr | None = None,
    dim: int = 1,
    dst_dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """Concatenate along ``dim``, requantizing each source that differs from dst.

    Args:
        srcs: uint8 or int8, of one shape but for ``dim``.
        attr: scales and zero points of ``src0``, ``src1``, ... and ``dst``, mask 0.
        dim: may be negative.
        dst_dtype: torch.uint8, int8 or float32; float32 has neither scale nor zero point.
    """
    check_tensors("torchq.concat: srcs", srcs)
    attr = Attr() if attr is None else attr
    scales, zero_points = _operands("concat", attr, srcs)
    if attr.post_ops:
        raise NotImplementedError(
            f"torchq.concat: post_ops must be empty, got '{attr.post_ops}'. Apply them to the "
            "sources, or with torchq.functional.lookup."
        )
    code = dtype_code(dst_dtype, "concat")
    dim = integer("concat", "dim", dim)
    result: Tensor = torch.ops.torchq.concat(list(srcs), scales, zero_points, dim, code)
    return result


def pad(src: Tensor, padding: Sequence[int], zero_point: int = 0) -> Tensor:
    """Pad with real zero, which is ``zero_point``; as ``torch.nn.functional.pad`` otherwise."""
    check_8bit("pad", "src", src)
    limits = torch.iinfo(src.dtype)
    zero = to_int(
        f"torchq.pad: zero_point of a {src.dtype} src", zero_point, limits.min, limits.max
    )
    return F.pad(src, list(padding), value=zero)


def _operands(op: str, attr: Attr, srcs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Scales and zero points of src0, src1, ... and dst as the ops take them."""
    args = [*(f"src{i}" for i in range(len(srcs))), "dst"]
    check_attr(op, attr, {(kind, arg): (0,) for kind in ("scales", "zero_points") for arg in args})
    for arg, src in zip(args, srcs, strict=False):
        check_8bit(op, arg, src)
    scales = torch.cat([attr.resolve(arg, (1,)) for arg in args])
    zero_points = torch.cat([attr.resolve(arg, (1,), "zero_points") for arg in args])
    return scales, zero_points


def _binary(
    op: str, src0: Tensor, src1: Tensor, attr: Attr, dst_dtype: torch.dtype
) -> tuple[bool, int]:
    """Return whether the destination ends in a relu, and its dtype code."""
    text = str(attr.post_ops)
    if text not in ("", "eltwise_relu"):
        raise NotImplementedError(
            f"torchq.{op}: post_ops must be empty or 'eltwise_relu', got '{text}'. Apply the "
            "others with torchq.functional.lookup."
        )
    pairs = zip(reversed(src0.shape), reversed(src1.shape), strict=False)
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        raise ValueError(
            f"torchq.{op}: src0 and src1 must have shapes that broadcast, got {list(src0.shape)} "
            f"and {list(src1.shape)}. Dims must agree or be 1, from the last one on."
        )
    return text == "eltwise_relu", dtype_code(dst_dtype, op)

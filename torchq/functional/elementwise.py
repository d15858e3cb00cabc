# SPDX-License-Identifier: Apache-2.0
"""Elementwise ops in real units, and shuffle.

Each reads ``x = scale * float(q - zero_point)`` of its sources, computes in float32, one rounding
per operation, and writes ``clamp(rne(fma(x, 1 / dst_scale, dst_zero_point)))``, or ``x`` itself to
float32. Sources may be uint8, int8, int32 or float32. :func:`~torchq.functional.add` and
:func:`~torchq.functional.mul` fold their scales and are faster than the same in :func:`binary`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attributes.arguments import check_tensors, check_type, float_values
from torchq.attributes.attr import Attr, check_attr_type
from torchq.attributes.options import BinaryOp, EltwiseAlg
from torchq.attributes.post_ops import PostOps
from torchq.functional.arguments import check_any, real_arguments, real_params
from torchq.runtime.library import dtype_code


def eltwise(
    src: Tensor,
    alg: EltwiseAlg,
    alpha: float | None = None,
    beta: float | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``real(dst) = alg(real(src))``; from 8 bits to 8 bits it is one lookup of 256 values.

    Args:
        src: any shape and strides, which dst keeps.
        alg: ``abs``, ``clip``, ``elu``, ``exp``, ``gelu_erf``, ``gelu_tanh``, ``hardsigmoid``,
            ``hardswish``, ``linear``, ``log``, ``logistic``, ``mish``, ``pow``, ``relu``,
            ``round``, ``soft_relu``, ``sqrt``, ``square``, ``swish`` or ``tanh``.
        alpha: parameter of ``alg``; :doc:`/concepts/post_ops` has formulas and defaults.
        beta: second parameter of ``alg``.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; post-ops, which follow ``alg``
            in float32, their masks indexing the dims of dst.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale); None is that of ``src``.
        post_op_srcs: in the order of the chain, what each ``sum`` adds (of dst's shape and the
            sum's dtype), the operand of each binary or prelu without values and with a mask other
            than 0 and 2, and the condition of each ``select``.

    Raises:
        TypeError: ``src``, or one of ``post_op_srcs``, has another dtype.
        ValueError: ``alg`` is unknown, ``attr`` sets other arguments, or shapes do not fit.
        NotImplementedError: another mask of scales or zero points, or ``dw_conv``.
        RuntimeError: ``src`` requires grad in grad mode.
    """
    check_any("eltwise", "src", src)
    chain = str(PostOps().append_eltwise(alg, alpha, beta))
    dst_dtype = src.dtype if dst_dtype is None else dst_dtype
    given = ["src", "dst"], dst_dtype, post_op_srcs
    *real, rest, operands = real_arguments("eltwise", attr, *given, lambda: src.shape)
    text = f"{chain}+{rest}" if rest else chain
    result: Tensor = torch.ops.torchq.eltwise(src, *real, text, operands)
    return result


def binary(
    src0: Tensor,
    src1: Tensor,
    alg: BinaryOp,
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
    condition: Tensor | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``real(dst) = alg(real(src0), real(src1))``, broadcast.

    Args:
        src0: uint8, int8, int32 or float32.
        src1: uint8, int8, int32 or float32, of a shape that broadcasts with ``src0``; the dtypes
            may differ.
        alg: ``add``, ``sub``, ``mul``, ``div``, ``max``, ``min``; ``ge``, ``gt``, ``le``, ``lt``,
            ``eq``, ``ne``, which give 1 or 0; ``select``: ``condition ? src0 : src1``; ``prelu``:
            ``src0 >= 0 ? src0 : src0 * src1``.
        attr: scales and zero points of ``src0``, ``src1`` and ``dst``, mask 0; post-ops.
        dst_dtype: torch.uint8, int8, int32 or float32 (without scale); None is that of ``src0``.
        condition: of ``select``: uint8, int8 or bool, of the shape of dst.
        post_op_srcs: as in :func:`eltwise`.

    A quotient by zero saturates; 0 / 0 becomes the zero point. ``max`` and ``min`` keep a NaN of
    ``src0`` and ignore one of ``src1``. Errors as in :func:`eltwise`.
    """
    check_any("binary", "src0", src0)
    check_any("binary", "src1", src1)
    if condition is not None:
        check_type("torchq.binary: condition", condition, Tensor, "Pass one of bool, or None.")
    dst_dtype = src0.dtype if dst_dtype is None else dst_dtype
    given = ["src0", "src1", "dst"], dst_dtype, post_op_srcs
    real = real_arguments("binary", attr, *given, lambda: _broadcast(src0, src1))
    if condition is not None and condition.dtype == torch.bool:
        condition = condition.to(torch.uint8)
    result: Tensor = torch.ops.torchq.binary(src0, src1, condition, alg, *real)
    return result


def _broadcast(src0: Tensor, src1: Tensor) -> list[int]:
    return list(torch.broadcast_shapes(src0.shape, src1.shape))


def prelu(
    src: Tensor,
    weight: Tensor,
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """``real(dst) = x >= 0 ? x : x * weight`` with ``x = real(src)``.

    Args:
        src: ``(N, C, ...)``; uint8, int8, int32 or float32.
        weight: float32: one value, ``[C]`` (as ``torch.nn.PReLU``), or any shape that broadcasts.
        attr: scales and zero points of ``src`` and ``dst``, mask 0; post-ops.
        dst_dtype: as in :func:`eltwise`, and so are the errors.
        post_op_srcs: as in :func:`eltwise`.
    """
    check_any("prelu", "src", src)
    check_any("prelu", "weight", weight)
    if weight.dim() == 1 and src.dim() > 2:
        weight = weight.reshape(-1, *[1] * (src.dim() - 2))
    pairs = zip(reversed(weight.shape), reversed(src.shape), strict=False)
    if weight.dim() > src.dim() or any(a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"torchq.prelu: weight must broadcast to src {list(src.shape)}, got "
            f"{list(weight.shape)}. Give one value, or one per channel."
        )
    dst_dtype = src.dtype if dst_dtype is None else dst_dtype
    given = ["src", "dst"], dst_dtype, post_op_srcs
    scales, zero_points, *rest = real_arguments("prelu", attr, *given, lambda: src.shape)
    one, zero = (
        torch.ones(1, dtype=torch.float32, device="cpu"),
        torch.zeros(1, dtype=torch.int32, device="cpu"),
    )
    result: Tensor = torch.ops.torchq.binary(
        src,
        weight,
        None,
        "prelu",
        torch.cat([scales[:1], one, scales[1:]]),
        torch.cat([zero_points[:1], zero, zero_points[1:]]),
        *rest,
    )
    return result


def sum(
    srcs: Sequence[Tensor],
    scales: Sequence[float] | Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype | None = None,
) -> Tensor:
    """``real(dst) = scales[0] * (srcs[0] - z0) + scales[1] * (srcs[1] - z1) + ...``.

    Args:
        srcs: 1 to 32 tensors of one shape; uint8, int8, int32 or float32, also mixed.
        scales: one finite number per source, of any sign; None: all 1.
        attr: zero points of ``src0``, ``src1``, ...; scale and zero point of ``dst``; mask 0.
        dst_dtype: as in :func:`eltwise`; None is that of the first source.

    Each product and each sum, in the order of the sources, is rounded to float32.
    """
    check_tensors("torchq.sum: srcs", srcs)
    attr = Attr() if attr is None else attr
    check_attr_type("sum", attr)
    if attr.post_ops:
        raise NotImplementedError(
            f"torchq.sum: post_ops must be empty, got '{attr.post_ops}'. The nearest supported "
            "form is torchq.functional.binary with alg 'add', whose post-ops add the other sources."
        )
    if not srcs:
        raise ValueError("torchq.sum: srcs must be 1 to 32 tensors, got 0 tensors. Pass some.")
    names = [f"src{i}" for i in range(len(srcs))]
    dst_scale, zero_points = real_params("sum", attr, [*names, "dst"], scaled=["dst"])
    factors = torch.ones(len(srcs), dtype=torch.float32, device="cpu")
    if scales is not None:
        factors = float_values("torchq.sum: scales", scales, positive=False)
    if factors.numel() != len(srcs):
        raise ValueError(
            f"torchq.sum: scales must be {len(srcs)} numbers, one per source, got "
            f"{factors.numel()}. Leave them out for 1."
        )
    code = dtype_code(srcs[0].dtype if dst_dtype is None else dst_dtype, "sum")
    result: Tensor = torch.ops.torchq.sum(
        list(srcs), torch.cat([factors, dst_scale[-1:]]), zero_points, code
    )
    return result


def shuffle(src: Tensor, group_size: int, dim: int = 1) -> Tensor:
    """OneDNN's shuffle: ``dim`` seen as (size / group_size, group_size), transposed.

    ``dst[j * (size / group_size) + i] = src[i * group_size + j]``. Any dtype; the values do not
    change; with ``dim`` 1 the result is channels-last.
    ``torch.nn.functional.channel_shuffle(x, groups)`` is ``group_size = C / groups``.
    """
    check_any("shuffle", "src", src)
    check_type("torchq.shuffle: group_size", group_size, int, "Pass an integer.")
    check_type("torchq.shuffle: dim", dim, int, "Pass an integer.")
    if not -src.dim() <= dim < src.dim():
        raise ValueError(
            f"torchq.shuffle: dim must lie in [{-src.dim()}, {src.dim() - 1}] for src "
            f"{list(src.shape)}, got {dim}."
        )
    dim %= src.dim()
    size = src.shape[dim]
    if group_size < 1 or size % group_size:
        raise ValueError(
            f"torchq.shuffle: group_size must divide dim {dim} of src, {size}, got {group_size}. "
            "Choose a divisor."
        )
    order = torch.arange(size, device=src.device).reshape(-1, group_size).t().reshape(-1)
    if dim == 1:
        return src.movedim(1, -1).index_select(-1, order).movedim(-1, 1)
    return src.index_select(dim, order)

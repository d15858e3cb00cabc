# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention of quantized operands; compressed rows of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.attributes.attr import Attr
from torchq.functional.arguments import check_8bit, real_params
from torchq.runtime.library import dtype_code


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``softmax(scale * real(query) @ real(key).mT + mask) @ real(value)``, weights in 8 bits.

    In float32, with ``acc`` the exact ``sum over e of (query - query_zero_point) * key``::

        x[i, j] = float(acc[i, j]) * (query_scale * key_scale * scale) + mask[i, j]
        c[i, j] = 254 * exp(x[i, j] - max x[i]) + c[i, j - 16]
        p[i, j] = rne(c[i, j]) - rne(c[i, j - 16])
        y[i] = value_scale * (p[i] @ value / sum of p[i] - value_zero_point)

    What rounding takes from a weight thus goes to the next one of its 16 lanes: weights below half
    a step still add up, and long rows lose nothing in their tails. The exponential is good to 1e-4;
    the products are exact. Rows that see no key are 0; NaN and positive infinity in the mask make
    their rows NaN. key's zero point changes all scores of a row alike, and so nothing.

    Args:
        query: uint8 or int8 ``(..., L, E)``. Any strides; those of a transposed ``(N, L, heads,
            E)`` cost nothing, and dst has the same order in memory.
        key: uint8 or int8 ``(..., S, E)``; batch dimensions broadcast.
        value: uint8 or int8 ``(..., S, Ev)``.
        mask: broadcasts to ``(..., L, S)``: bool, true where a key is seen, or float32, added.
        is_causal: query i sees keys 0 to i. Not with a mask.
        scale: of the scores; default ``1 / sqrt(E)``. Finite, above 0.
        attr: scales and zero points of ``src0`` (query), ``src1`` (key), ``src2`` (value) and
            ``dst``, mask 0.
        dst_dtype: torch.uint8, int8 or float32 (without scale).

    Returns:
        ``(..., L, Ev)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that do not fit, S or E above 65793, a mask together with
            ``is_causal``, or scales and zero points out of range.
        NotImplementedError: another mask of scales or zero points, post-ops, or an int32 dst.
    """
    attr = Attr() if attr is None else attr
    for name, operand in (("query", query), ("key", key), ("value", value)):
        check_8bit("attention", name, operand)
    if mask is not None:
        check_type("torchq.attention: mask", mask, Tensor, "Pass a tensor, or None.")
    scales, zero_points = real_params("attention", attr, ["src0", "src1", "src2", "dst"])
    if attr.post_ops:
        raise NotImplementedError(
            f"torchq.attention: attr must have no post-ops, got '{attr.post_ops}'. Apply them to a "
            "float32 result, or with torchq.functional.eltwise."
        )
    dst: Tensor = torch.ops.torchq.attention(
        query, key, value, mask, is_causal, score_scale(query, scale), scales, zero_points,
        dtype_code(dst_dtype, "attention"),
    )  # fmt: skip
    return dst


def dynamic_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """:func:`attention` of float32 tensors, which are quantized by the values of this call.

    Symmetrically, to ``rne(x / s)`` with ``s = max |x| / 127``: each row of query and key, and the
    values of a head together. Then ``acc`` is their exact product, and::

        x[i, j] = float(acc[i, j]) * (key_scale[j] * scale) * query_scale[i] + mask[i, j]

    Values of keys that the mask hides from every query (false, or -1e4 and less) count as 0, so
    that padding does not change a result. A query from which all keys are hidden counts as one that
    sees them. A query's result depends on its own row, and on the other keys and values of its
    head. Where these, or the row, have NaN or infinity, it is NaN.

    Args:
        query: float32 ``(..., L, E)``; strides as in :func:`attention`.
        key: float32 ``(..., S, E)``; batch dimensions broadcast.
        value: float32 ``(..., S, Ev)``.
        mask: as in :func:`attention`.
        is_causal: query i sees keys 0 to i. Not with a mask.
        scale: of the scores; default ``1 / sqrt(E)``. Finite, above 0.

    Returns:
        float32 ``(..., L, Ev)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that do not fit, S or E above 65793, or a mask together with
            ``is_causal``.
    """
    for name, operand in (("query", query), ("key", key), ("value", value), ("mask", mask)):
        if operand is not None or name != "mask":
            check_type(f"torchq.dynamic_attention: {name}", operand, Tensor, "Pass a tensor.")
    dst: Tensor = torch.ops.torchq.dynamic_attention(
        query, key, value, mask, is_causal, score_scale(query, scale)
    )
    return dst


def compress_rows(src: Tensor) -> Tensor:
    """Return rows as bytes with a scale each, such as a cache of keys or values holds.

    Symmetrically: ``q = rne(x / s)`` with ``s = max |x| / 127`` of each row. Behind the ``E`` bytes
    of a row are the four of its ``s``, a float32 in the machine's order. So rows are indexed, cut
    and joined in front of the last dimension as those of a float tensor. Rows of zeros stay zeros.
    Rows with NaN or infinity become NaN.

    Args:
        src: float32, bfloat16 or float16 ``(..., E)``.

    Returns:
        int8 ``(..., E + 4)``.

    Raises:
        TypeError: another dtype.
        ValueError: a tensor without dimensions.
    """
    check_type("torchq.compress_rows: src", src, Tensor, "Pass a tensor.")
    dst: Tensor = torch.ops.torchq.compress_rows(src)
    return dst


def decompress_rows(src: Tensor) -> Tensor:
    """Return the real values ``s * q`` of what :func:`compress_rows` made.

    Args:
        src: int8 ``(..., E + 4)``.

    Returns:
        float32 ``(..., E)``.

    Raises:
        TypeError: another dtype.
        ValueError: rows of less than four bytes.
    """
    check_type("torchq.decompress_rows: src", src, Tensor, "Pass a tensor.")
    if src.dtype != torch.int8:
        raise TypeError(
            f"torchq.decompress_rows: src must be torch.int8, got {src.dtype}. Compress it with "
            "torchq.functional.compress_rows."
        )
    if src.dim() == 0 or src.shape[-1] < 4:
        raise ValueError(
            "torchq.decompress_rows: src must have rows of a scale's 4 bytes and more, got "
            f"{list(src.shape)}. Pass what torchq.functional.compress_rows returned."
        )
    scale = src[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return src[..., :-4] * scale


def compressed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of float queries to keys and values that :func:`compress_rows` made.

    ``softmax(scale * query @ real(key).mT + mask) @ real(value)``, in float32: only the rounding of
    keys and values differs from attention of floats. Their bytes are read once for all queries that
    share a head. Sums have one order, so all tiers and numbers of threads give the same bits.

    A query from which the mask hides all keys gets 0, as in PyTorch. NaN and positive infinity in
    the mask make their rows NaN. A key or value that is NaN spoils what it does in float: hiding
    it by a mask is no help.

    Args:
        query: float32, bfloat16 or float16 ``(N, H, L, E)``; any strides, and dst has the same
            order in memory.
        key: int8 ``(N, G, S, E + 4)``. Heads of query ``i * H / G`` and on read head ``i``; H is a
            multiple of G.
        value: int8 ``(N, G, S, Ev + 4)``.
        mask: broadcasts to ``(N, H, L, S)``: bool, true where a key is seen, or float32, added. A
            causal one is ``torch.ones(L, S, dtype=torch.bool).tril(S - L)``, if the last key is the
            last query's.
        scale: of the scores; default ``1 / sqrt(E)``. Finite, above 0.

    Returns:
        ``(N, H, L, Ev)``, of query's dtype.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes that do not fit, or a scale out of range.
    """
    for name, operand in (("query", query), ("key", key), ("value", value), ("mask", mask)):
        if operand is not None or name != "mask":
            check_type(f"torchq.compressed_attention: {name}", operand, Tensor, "Pass a tensor.")
    dst: Tensor = torch.ops.torchq.compressed_attention(
        query, key, value, mask, score_scale(query, scale)
    )
    return dst


def score_scale(query: Tensor, scale: float | None) -> float:
    """``scale``, or what it is by default."""
    size = query.shape[-1] if query.dim() > 0 else 0  # of a number the op says what is wrong
    return float(max(size, 1)) ** -0.5 if scale is None else scale

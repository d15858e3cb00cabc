# SPDX-License-Identifier: Apache-2.0
"""Matrix products of two operands that are both given at run time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attr import Attr
from torchq.folding import Folded, check_attr, check_int32_bias, fold
from torchq.functional.arguments import check_8bit
from torchq.functional.matmul import check_source, post_op_sources
from torchq.ops import dtype_code
from torchq.packing import PackedWeight
from torchq.post_ops import PostOps

__all__ = ["matmul"]


def matmul(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Quantizes ``post_ops(src_scale * weight_scale * (src - z_src) @ (weight - z_w) + bias)``.

    The sum over k is exact. With weight scales per group of k, each group's exact sum is scaled on
    its own, and float32 adds them in order of k::

        t = fma(float(acc_0), s_0, 0);  t = t + fma(float(acc_g), s_g, 0);
        x = fma(float(acc_last), s_last, bias) + t

    A float32 ``src`` multiplies the dequantized weight instead (weight-only int8):
    ``src @ (weight_scale * float(weight - z_w)) + bias`` by torch's own float32 matmul, whose
    order of summation, and so its last bits, are torch's. It takes no post-ops and a float32 dst.

    Args:
        src: uint8 or int8 ``(..., M, K)``; columns that are not adjacent are copied.
        weight: uint8 or int8 ``(..., K, N)``, contiguous or transposed (``x.mT`` costs nothing).
            Batch dimensions broadcast.
        bias: ``[N]``; float32 in real units or int32 in accumulator units.
        attr: masks index the dims of each argument, n being its number of dims: scales of ``src``
            (mask 0), ``weights`` (0; ``1 << (n - 1)`` per column; ``3 << (n - 2)`` with groups
            ``(k, 1)`` per column and group of k rows) and ``dst`` (0, or ``1 << (n - 1)`` per
            column); zero points of ``src`` and ``dst`` (0) and ``weights`` (0 or per column);
            output scales (0 or per column); post-ops, whose mask 2 is per column.
        dst_dtype: torch.uint8, int8, int32 or float32. Without scales, int32 gives the exact
            accumulators.
        post_op_srcs: for each ``sum``, a tensor of dst's shape and the sum's dtype.

    Returns:
        ``(..., M, N)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit, or K above
            65793 (33025 with weight zero points), per group.
        NotImplementedError: masks or post-ops without a kernel.
    """
    attr = Attr() if attr is None else attr
    _check_shapes(src, weight)
    if src.dtype == torch.float32:
        return _weight_only(src, weight, bias, attr, dst_dtype)
    check_source("matmul", src, attr)
    check_8bit("matmul", "weight", weight)
    n, k = weight.shape[-1], weight.shape[-2]
    zero_point = _weight_zero_point(attr, weight)
    groups = _groups(attr, weight)
    if bias is not None and bias.dtype == torch.int32:
        plain = zero_point is None and weight.dtype == torch.int8
        check_int32_bias("matmul", bias, k if plain else 2 * k)

    def sizes() -> list[int]:
        batch = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            src.shape[:-2], weight.shape[:-2]
        )
        return [*batch, src.shape[-2], n]

    folded = _fold(attr, weight, _dst_dims(src, weight), groups, bias, dst_dtype, n, k)
    result: Tensor = torch.ops.torchq.matmul(
        src,
        weight,
        folded.multiplier,
        folded.offset,
        folded.acc_bias,
        folded.src_zero_point,
        zero_point,
        dtype_code(dst_dtype),
        folded.post_ops,
        folded.post_op_params,
        post_op_sources("matmul", attr, dst_dtype, post_op_srcs, sizes),
    )
    return result


def _check_shapes(src: Tensor, weight: Tensor) -> None:
    if src.dim() < 2 or weight.dim() < 2 or src.shape[-1] != weight.shape[-2]:
        raise ValueError(
            "torchq.matmul: src and weight must be (..., M, K) and (..., K, N), got "
            f"{list(src.shape)} and {list(weight.shape)}. Transpose with .mT, or add the missing "
            "dimension with unsqueeze."
        )


def _dst_dims(src: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Only their number and the last one matter."""
    dims = max(src.dim(), weight.dim())
    return (*([1] * (dims - 2)), src.shape[-2], weight.shape[-1])


def _check_masks(attr: Attr, weight: Tensor, dst_dims: Sequence[int]) -> None:
    column, dst_column = 1 << (weight.dim() - 1), 1 << (len(dst_dims) - 1)
    check_attr(
        "matmul",
        attr,
        {
            ("scales", "src"): (0,),
            ("scales", "weights"): (0, column | column >> 1, column),
            ("scales", "dst"): (0, dst_column),
            ("zero_points", "src"): (0,),
            ("zero_points", "weights"): (0, column),
            ("zero_points", "dst"): (0,),
            ("output_scales", "dst"): (0, dst_column),
        },
    )
    attr.check("weights", weight.shape)


def _weight_zero_point(attr: Attr, weight: Tensor) -> Tensor | None:
    values = attr.values("weights", "zero_points")
    return None if values is None else values.contiguous()


def _groups(attr: Attr, weight: Tensor) -> int:
    """Groups of k with a scale of their own."""
    if attr.mask("weights") != 3 << (weight.dim() - 2):
        return 1
    param = attr._params["scales", "weights"]
    group, columns = param.groups or (1, 1)
    if columns != 1:
        raise NotImplementedError(
            f"torchq.matmul: groups of weight scales must be (k, 1), got {param.groups}: {attr}. "
            "The nearest supported form has one scale per column."
        )
    return int(weight.shape[-2]) // group


def _fold(
    attr: Attr,
    weight: Tensor,
    dst_dims: Sequence[int],
    groups: int,
    bias: Tensor | None,
    dst_dtype: torch.dtype,
    n: int,
    k: int,
) -> Folded:
    """Folds as for a linear layer of the same scales, once per group of k."""
    _check_masks(attr, weight, dst_dims)
    empty = torch.empty(0)
    layer = PackedWeight(empty, empty, empty, (n, k), 1, ())
    if groups == 1:
        return fold("matmul", _as_linear(attr, _columns(attr, weight)), layer, bias, dst_dtype)
    columns = _columns(attr, weight)
    assert columns is not None
    scales = columns.reshape(groups, n)
    multipliers = []
    for scale in scales[:-1]:
        part = Attr().set_scales("src", 0, attr.resolve("src", ()).reshape(1))
        part.set_scales("weights", 1, scale)
        multipliers.append(fold("matmul", part, layer, None, torch.float32).multiplier)
    text = "+".join(filter(None, ["sum:1:0:f32", str(attr.post_ops)]))
    last = _as_linear(attr, scales[-1])
    last.post_ops = PostOps.parse(text, attr.post_ops.values)
    folded = fold("matmul", last, layer, bias, dst_dtype)
    multiplier = torch.stack([*multipliers, folded.multiplier])
    return folded._replace(multiplier=multiplier, post_ops=text)


def _columns(attr: Attr, weight: Tensor) -> Tensor | None:
    """Scales of the weights as one, ``[N]``, or ``[groups, N]``; None if they are not set."""
    mask = attr.mask("weights")
    if not mask:
        return attr.values("weights")
    if mask == 1 << (weight.dim() - 1):
        return attr.values("weights")
    scales = attr.resolve("weights", weight.shape).reshape(weight.shape[-2:])
    return scales[:: weight.shape[-2] // _groups(attr, weight)]


def _as_linear(attr: Attr, weight_scale: Tensor | None) -> Attr:
    """The same attributes with the masks of a linear layer, whose dst is (M, N)."""
    result = Attr()
    src, zero_point = attr.values("src"), attr.values("src", "zero_points")
    if src is not None:
        result.set_scales("src", 0, src)
    if zero_point is not None:
        result.set_zero_points("src", 0, zero_point)
    if weight_scale is not None:
        result.set_scales("weights", 0 if weight_scale.numel() == 1 else 1, weight_scale)
    for kind in ("scales", "zero_points", "output_scales"):
        values = attr.values("dst", kind)
        if values is None:
            continue
        mask = 2 if attr.mask("dst", kind) else 0
        if kind == "scales":
            result.set_scales("dst", mask, values)
        elif kind == "zero_points":
            result.set_zero_points("dst", mask, values)
        else:
            result.set_output_scales(mask, values)
    return result.set_post_ops(attr.post_ops)


def _weight_only(
    src: Tensor, weight: Tensor, bias: Tensor | None, attr: Attr, dst_dtype: torch.dtype
) -> Tensor:
    """Float source, int8 weight."""
    check_8bit("matmul", "weight", weight)
    column = 1 << (weight.dim() - 1)
    masks = {
        ("scales", "weights"): (0, column | column >> 1, column),
        ("zero_points", "weights"): (0, column),
    }
    check_attr("matmul", attr, masks)
    if dst_dtype != torch.float32 or attr.post_ops:
        raise NotImplementedError(
            "torchq.matmul: a float32 src must have a float32 dst and no post-ops, got "
            f"{dst_dtype} and '{attr.post_ops}'. Apply them to the result with torch's operators."
        )
    if src.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "torchq.matmul: src requires grad, but torchq's ops have no backward. Run them under "
            "torch.no_grad() or torch.inference_mode(), or pass src.detach()."
        )
    scale = attr.resolve("weights", weight.shape)
    zero_point = attr.resolve("weights", weight.shape, "zero_points")
    real: Tensor = torch.ops.torchq.dequantize(weight, scale, zero_point)
    dst = torch.matmul(src, real)
    return dst if bias is None else dst + bias

# SPDX-License-Identifier: Apache-2.0
"""Matrix products of two operands that are both given at run time."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchq.attributes.arguments import (
    FLOATS,
    as_float32,
    check_count,
    check_tensors,
    check_type,
    selected_dims,
)
from torchq.attributes.attr import Attr, check_attr_type
from torchq.attributes.post_op import Binary, PostOp, PReLU, Sum, is_full, selects
from torchq.attributes.post_ops import PostOps, post_ops_of
from torchq.functional.arguments import check_8bit, check_source, from_float, post_op_sources
from torchq.functional.folding import Folded, check_attr, check_int32_bias, fold, real_bias
from torchq.functional.packing import PackedWeight
from torchq.runtime.library import dtype_code


def matmul(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Quantize ``post_ops(src_scale * weight_scale * (src - z_src) @ (weight - z_w) + bias)``.

    The sum over k is exact. With scales or zero points per group of k, each group's exact sum is
    scaled on its own, and float32 adds them in order of k::

        t = fma(float(acc_0), s_0, 0);  t = t + fma(float(acc_g), s_g, 0);
        x = fma(float(acc_last), s_last, bias) + t

    With scales of ``src`` per row, rows and bias are post-ops in front of all others::

        x = fma(float(acc), weight_scale, 0) [+ t];  x = x * src_scale[row];  x = x + bias

    Zero points of ``src`` per row are subtracted from the exact sums::

        x = float(acc - z_src[row] * (sum of weight - z_w)) * weight_scale * src_scale + bias

    Scales of ``dst`` per row divide the result of the post-ops. They, and a bias of another shape
    than ``[N]``, count as one of the 32 post-ops.

    With scales of ``src`` per row and per group of k at once, each group has its own::

        t = t + fma(float(acc_g), weight_scale[g], 0) * src_scale[row, g];  x = t + bias

    A float ``src`` multiplies the dequantized weight instead (weight-only int8):
    ``src @ (weight_scale * float(weight - z_w)) + bias`` by torch's own float32 matmul, whose
    order of summation, and so its last bits, are torch's. Post-ops and a quantized dst are those of
    :func:`eltwise`, masks of ``dst`` 0; ``weights`` have any masks and groups.

    Args:
        src: uint8 or int8 ``(..., M, K)``; columns that are not adjacent are copied.
        weight: uint8 or int8 ``(..., K, N)``, contiguous or transposed (``x.mT`` costs nothing).
            Batch dimensions broadcast.
        bias: ``[N]``: int32 in accumulator units; or float32, bfloat16, float16, int8 or uint8 in
            real units. A bias in real units may also have dst's number of dimensions, each of dst's
            size or 1: ``(M, 1)`` is one value per row. Such a bias is added before the post-ops.
        attr: masks index the dims of each argument; K, M and N name the bits of its last two.
            Scales of ``src``: any mask; with K, groups ``(1, k)`` are of k columns. Zero points of
            ``src``: 0, K with groups, or any mask without K; those per row exclude groups of k,
            output scales, and scales and zero points of ``dst`` per column. Scales and zero points
            of ``weights``: 0, K, N or both, in groups. Scales of ``dst``: 0, N, or any mask that
            selects rows; its zero points, and output scales: 0 or N. Post-ops' masks are any of
            dst's dims: of (B, M, N), mask 4 is per column, 2 per row of each matrix, 3 per row of
            all.
        dst_dtype: torch.uint8, int8, int32 or float32. Without scales, and zero points per group,
            int32 gives the exact accumulators.
        post_op_srcs: in the order of the chain, a tensor of dst's shape and the sum's dtype for
            each ``sum``; for each binary or prelu with another mask than 0 and N and without values
            its operand, of dst's shape with 1 where the mask has no bit; the condition of each
            select.

    Returns:
        ``(..., M, N)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit, or K above
            65793 (33025 with weight zero points), per group.
        NotImplementedError: masks or post-ops without a kernel.
    """
    attr = Attr() if attr is None else attr
    check_attr_type("matmul", attr)
    _check_operands(src, weight, bias)
    dims = _dst_dims(src, weight)
    bias, attr = _with_bias(attr, bias, dims)
    attr = _with_row_scales_of_dst(attr, dims, dst_dtype)
    if src.dtype in FLOATS:
        return _weight_only(src, weight, bias, attr, dst_dtype, post_op_srcs)
    check_source("matmul", src, attr)
    check_8bit("matmul", "weight", weight)
    _check_masks(attr, src, weight)
    groups = _groups(attr, src, weight)
    _check_bias(attr, weight, bias)
    if _by_row(attr, src, "zero_points"):
        return _shifted_by_row(src, weight, bias, attr, dst_dtype, post_op_srcs)
    chain = _by_rows_and_columns(attr.post_ops, dims)
    srcs = _expanded(attr.post_ops, chain, dims, post_op_srcs)
    _check_dst_zero_points(attr, src, groups, dst_dtype)
    rows = _row_scales(attr, src, groups, dims)
    if rows is not None:
        chain, bias = _by_rows(rows, chain, bias, dims)
    own = [rows] if rows is not None and len(rows) > 1 else []
    folded = _fold(attr, chain, src, weight, groups, bias, dst_dtype, bool(own))
    sources = post_op_sources("matmul", Attr().set_post_ops(chain), dst_dtype, srcs, lambda: dims)
    result: Tensor = torch.ops.torchq.matmul(
        src,
        weight,
        folded.multiplier,
        folded.offset,
        folded.acc_bias,
        _zero_points(attr, "src", src, groups),
        _zero_points(attr, "weights", weight, groups),
        dtype_code(dst_dtype),
        folded.post_ops,
        folded.post_op_params,
        [*own, *sources],
    )
    return result


def _dst_dims(src: Tensor, weight: Tensor) -> list[int]:
    try:
        batch = torch.broadcast_shapes(src.shape[:-2], weight.shape[:-2])
    except RuntimeError:
        raise ValueError(
            "torchq.matmul: the batch dimensions of src and weight must be equal or 1, got "
            f"{list(src.shape)} and {list(weight.shape)}. Expand one of them."
        ) from None
    return [*batch, src.shape[-2], weight.shape[-1]]


def _by_rows_and_columns(chain: PostOps, dims: Sequence[int]) -> PostOps:
    """Return the chain with the op's masks: 1 for rows, of all matrices, 2 for columns."""
    if len(dims) == 2:
        return chain
    ops = list[PostOp]()
    for op in chain:
        if isinstance(op, Binary | PReLU):
            where = f"torchq.matmul: values of {op}"
            shape, full = selected_dims(where, op.mask, dims), _full_shape(op, dims)
            check_count(where, op.mask, op.values, shape, dims)
            values = op.values
            if values is not None:
                values = values.reshape(shape).expand(full).reshape(-1)
            op = replace(op, mask=_op_mask(op, dims), values=values)
        ops.append(op)
    return post_ops_of(ops)


def _op_mask(op: Binary | PReLU, dims: Sequence[int]) -> int:
    rows, columns = op.mask & ((1 << len(dims) - 1) - 1), op.mask >> len(dims) - 1
    return int(rows > 0) + 2 * columns


def _full_shape(op: Binary | PReLU, dims: Sequence[int]) -> list[int]:
    """Return the operand's shape in the op: all rows, if the mask has any of them."""
    mask = _op_mask(op, dims)
    rows = list(dims[:-1]) if mask & 1 else [1] * (len(dims) - 1)
    return [*rows, dims[-1] if mask & 2 else 1]


def _expanded(
    chain: PostOps, by_rows: PostOps, dims: Sequence[int], srcs: Sequence[Tensor]
) -> list[Tensor]:
    """Return the caller's sources, operands in the shape that the op's own masks ask for.

    Raises:
        ValueError: an operand has another shape than its mask says.
    """
    check_tensors("torchq.matmul: post_op_srcs", srcs)
    result, index = list(srcs), 0
    for op, own in zip(chain, by_rows, strict=True):
        if isinstance(op, Binary | PReLU) and is_full(own) and own.values is None:
            if index < len(result):
                result[index] = _operand(index, result[index], op, dims)
            index += 1
        index += isinstance(op, Sum) + selects(op)
    return result


def _operand(index: int, src: Tensor, op: Binary | PReLU, dims: Sequence[int]) -> Tensor:
    where = f"torchq.matmul: post_op_srcs[{index}]"
    shape = selected_dims(where, op.mask, dims)
    if list(src.shape) != shape:
        raise ValueError(
            f"{where} must be {shape} for {op} and dst {list(dims)}, got {list(src.shape)}. Give "
            "it 1 where the mask has no bit."
        )
    return src.expand(_full_shape(op, dims))


def _check_operands(src: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, operand in (("src", src), ("weight", weight)):
        check_type(f"torchq.matmul: {name}", operand, Tensor, "Pass a tensor.")
    if bias is not None:
        check_type("torchq.matmul: bias", bias, Tensor, "Pass a tensor, or None.")
    if src.is_floating_point() and src.dtype not in FLOATS:
        raise TypeError(
            "torchq.matmul: a floating src must be torch.float32, torch.bfloat16 or torch.float16, "
            f"got {src.dtype}. Convert it with .float(), or quantize it."
        )
    if src.dim() < 2 or weight.dim() < 2 or src.shape[-1] != weight.shape[-2]:
        raise ValueError(
            "torchq.matmul: src and weight must be (..., M, K) and (..., K, N), got "
            f"{list(src.shape)} and {list(weight.shape)}. Transpose with .mT, or add the missing "
            "dimension with unsqueeze."
        )


def _bits(t: Tensor) -> tuple[int, int]:
    """Mask bits of the last two dims."""
    return 1 << (t.dim() - 2), 1 << (t.dim() - 1)


def _check_masks(attr: Attr, src: Tensor, weight: Tensor) -> None:
    (_, k), (weight_k, weight_n) = _bits(src), _bits(weight)
    n = 1 << (max(src.dim(), weight.dim()) - 1)
    weights = (0, weight_k, weight_k | weight_n, weight_n)
    check_attr(
        "matmul",
        attr,
        {
            ("scales", "src"): None,
            ("scales", "weights"): weights,
            ("scales", "dst"): (0, n),
            ("zero_points", "src"): (0, k, *range(1, k)),
            ("zero_points", "weights"): weights,
            ("zero_points", "dst"): (0, n),
            ("output_scales", "dst"): (0, n),
        },
    )
    attr.check("src", src.shape)
    attr.check("weights", weight.shape)


def _with_bias(attr: Attr, bias: Tensor | None, dims: list[int]) -> tuple[Tensor | None, Attr]:
    """Return a bias per column, and attr, whose chain first adds one of another shape."""
    bias = None if bias is None else real_bias(bias.detach())
    if bias is None or tuple(bias.shape) == (dims[-1],):
        return bias, attr
    sizes = zip(bias.shape, dims, strict=False)
    fits = bias.dim() == len(dims) and all(size in (1, n) for size, n in sizes)
    if bias.dtype != torch.float32 or not fits:
        raise ValueError(
            f"torchq.matmul: bias must have shape [{dims[-1]}]; one of float32, or converted to "
            f"it, may have 1 or dst's size in each dimension of dst, {dims}; got {bias.dtype} "
            f"{list(bias.shape)}. Reshape it, or convert it with .float()."
        )
    if all(n == 1 for n in bias.shape[:-1]):
        return bias.reshape(-1).expand(dims[-1]), attr
    if attr.mask("dst", "output_scales") is not None:
        raise NotImplementedError(
            f"torchq.matmul: a bias of rows must come without output scales, got {attr}. The "
            "nearest supported are scales of src, weights and dst."
        )
    mask = sum(1 << dim for dim, n in enumerate(bias.shape) if n > 1)
    first = PostOps().append_binary("add", bias.reshape(-1), mask)
    return None, copy.copy(attr).set_post_ops(post_ops_of([*first, *attr.post_ops]))


def _with_row_scales_of_dst(attr: Attr, dims: list[int], dst_dtype: torch.dtype) -> Attr:
    """Return attr with scales of dst per row as a division behind all other post-ops."""
    mask = attr.mask("dst") or 0
    if not mask & ((1 << len(dims) - 1) - 1):
        return attr
    if dst_dtype in FLOATS:
        raise ValueError(
            "torchq.matmul: dst must be an integer to have a scale or zero point, got dst_dtype "
            f"{dst_dtype} with {attr}. Leave them out: a float dst is in real units."
        )
    attr.check("dst", dims)
    chain = post_ops_of(attr.post_ops).append_binary("div", attr.values("dst"), mask)
    result = copy.copy(attr).set_post_ops(chain)
    result._params = {key: p for key, p in attr._params.items() if key != ("scales", "dst")}
    return result


def _shifted_by_row(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attr: Attr,
    dst_dtype: torch.dtype,
    post_op_srcs: Sequence[Tensor],
) -> Tensor:
    """Compute with a zero point of src per row, which is subtracted from the sums, exactly."""
    dst_masks = {attr.mask("dst", kind) or 0 for kind in ("scales", "zero_points")}
    scaled_later = attr.mask("dst", "output_scales") is not None
    if _groups(attr, src, weight) > 1 or scaled_later or dst_masks != {0}:
        raise NotImplementedError(
            "torchq.matmul: zero points of src per row must come without groups of k, output "
            f"scales, and scales and zero points of dst per column, got {attr}. The nearest "
            "supported is one zero point of src, mask 0."
        )
    shifts, limits = attr.resolve("src", src.shape, "zero_points"), torch.iinfo(src.dtype)
    if ((shifts < limits.min) | (shifts > limits.max)).any():
        raise ValueError(
            f"torchq.matmul: zero points of src must lie in [{limits.min}, {limits.max}] for "
            f"{src.dtype}, got {shifts.min()} to {shifts.max()}. Quantize src with others."
        )
    plain, (_, n) = Attr(), _bits(weight)
    if attr.mask("weights", "zero_points") is not None:
        values = _by_group(attr, "weights", weight, 1, "zero_points").reshape(-1)
        plain.set_zero_points("weights", 0 if len(values) == 1 else n, values)
    ones = torch.ones((1, src.shape[-1]), dtype=torch.uint8, device="cpu")
    acc, sums = (matmul(x, weight, None, plain, torch.int32).long() for x in (src, ones))
    acc -= shifts.long() * sums
    if bias is not None and bias.dtype == torch.int32:
        acc, bias = acc + bias, None
    scaled = any(kind == "scales" or arg == "dst" for kind, arg in attr._params)
    if bias is None and dst_dtype == torch.int32 and not (scaled or attr.post_ops):
        return acc.int()
    rows = _row_scales(attr, src, 1, _dst_dims(src, weight))
    of_src = _by_group(attr, "src", src, 1) if rows is None else rows[0]
    real = acc.float() * _by_group(attr, "weights", weight, 1) * of_src
    real = real if bias is None else real + bias
    of_dst = _with_destination(attr, Attr()).set_post_ops(attr.post_ops)
    return from_float("matmul", real, of_dst, dst_dtype, post_op_srcs)


def _check_bias(attr: Attr, weight: Tensor, bias: Tensor | None) -> None:
    if bias is not None and bias.dtype == torch.int32:
        plain = attr.values("weights", "zero_points") is None and weight.dtype == torch.int8
        k = weight.shape[-2]
        check_int32_bias("matmul", bias, k if plain else 2 * k)


def _check_dst_zero_points(attr: Attr, src: Tensor, groups: int, dst_dtype: torch.dtype) -> None:
    """Per column they are part of the offset, which neither rows nor groups of k have."""
    if not attr.mask("dst", "zero_points") or dst_dtype in FLOATS:
        return
    by_row = _by_row(attr, src)
    if by_row or groups > 1:
        other = "scales of src per row" if by_row else "scales or zero points per group of k"
        raise NotImplementedError(
            f"torchq.matmul: zero points of dst per column must come without {other}, got {attr}. "
            "The nearest supported is one zero point of dst, mask 0."
        )


def _by_row(attr: Attr, src: Tensor, kind: str = "scales") -> bool:
    """Return whether a mask of src selects rows."""
    return bool((attr.mask("src", kind) or 0) & (_bits(src)[1] - 1))


def _groups(attr: Attr, src: Tensor, weight: Tensor) -> int:
    """Return the number of groups of k that every scale and zero point divides into."""
    k = src.shape[-1]
    common = k
    for arg, bit, position in (("src", _bits(src)[1], 1), ("weights", _bits(weight)[0], 0)):
        for kind in ("scales", "zero_points"):
            param = attr._params.get((kind, arg))
            if param is not None and param.mask & bit:
                common = math.gcd(common, param.groups[position] if param.groups else 1)
    return k // common if k else 1


def _by_group(attr: Attr, arg: str, t: Tensor, groups: int, kind: str = "scales") -> Tensor:
    """Values ``[groups, 1 or N]`` of src per k, or of weights."""
    values = attr.resolve(arg, t.shape, kind)
    if arg == "src":
        values = values.mT
    k, n = values.shape[-2:]
    values = values.reshape(k, n)
    if k == 0:
        return torch.ones((groups, n), dtype=values.dtype, device="cpu")
    return values.expand(groups, n) if k == 1 else values[:: k // groups]


def _zero_points(attr: Attr, arg: str, t: Tensor, groups: int) -> Tensor | None:
    """One, ``[N]``, or ``[groups, 1 or N]``."""
    values = attr.values(arg, "zero_points")
    if values is None:
        return None
    values = _by_group(attr, arg, t, groups, "zero_points").contiguous()
    return values if groups > 1 else values.reshape(-1)


def _row_scales(attr: Attr, src: Tensor, groups: int, dims: list[int]) -> Tensor | None:
    """Return scales of src by row, ``[1, ..., M, 1]``, or ``[groups, ..., M, 1]`` if k matters."""
    if not _by_row(attr, src):
        return None
    values, k = attr.resolve("src", src.shape), src.shape[-1]
    if values.shape[-1] == 0:
        values = values.new_ones((*values.shape[:-1], 1))
    own = attr._params["scales", "src"].groups
    size = k if own is not None and own[1] == k else k // groups
    values = values[..., :: max(size, 1)]
    return values.expand(*dims[:-1], -1).movedim(-1, 0).unsqueeze(-1)


def _by_rows(
    rows: Tensor, chain: PostOps, bias: Tensor | None, dims: list[int]
) -> tuple[PostOps, Tensor | None]:
    """Return the chain behind post-ops for row scales and a float bias; the bias that is left.

    Row scales per group are no post-op: they come before the sum of the groups.
    """
    first = PostOps()
    if len(rows) == 1:
        first = first.append_binary("mul", rows.reshape(-1), 1)
    if bias is not None and bias.dtype == torch.float32 and bias.shape == (dims[-1],):
        first, bias = first.append_binary("add", bias, 2), None
    return post_ops_of([*first, *chain]), bias


def _fold(
    attr: Attr,
    chain: PostOps,
    src: Tensor,
    weight: Tensor,
    groups: int,
    bias: Tensor | None,
    dst_dtype: torch.dtype,
    rows_per_group: bool,
) -> Folded:
    """Fold as for a linear layer of the same scales, once per group of k."""
    n, k = weight.shape[-1], weight.shape[-2]
    empty = torch.empty(0, dtype=torch.float32, device="cpu")
    layer = PackedWeight(empty, empty, empty, (n, k), 1, ())
    by_row = _by_row(attr, src) or attr.mask("src") is None
    src_scales = None if by_row else _by_group(attr, "src", src, groups)
    weight_scales = None
    if attr.mask("weights") is not None:
        weight_scales = _by_group(attr, "weights", weight, groups)

    def scales(group: int) -> Attr:
        part = Attr()
        if src_scales is not None:
            part.set_scales("src", 0, src_scales[group])
        if weight_scales is not None:
            values = weight_scales[group]
            part.set_scales("weights", 0 if values.numel() == 1 else 1, values)
        return part

    if groups == 1:
        last = _with_destination(attr, scales(0)).set_post_ops(chain)
        return fold("matmul", last, layer, bias, dst_dtype)
    multipliers = [
        fold("matmul", scales(g), layer, None, torch.float32).multiplier for g in range(groups - 1)
    ]
    group_sum = "binary_mul:1+sum:1:0:f32" if rows_per_group else "sum:1:0:f32"
    text = "+".join(filter(None, [group_sum, str(chain)]))
    last = _with_destination(attr, scales(groups - 1))
    last.set_post_ops(post_ops_of([*PostOps.parse(group_sum), *chain]))
    folded = fold("matmul", last, layer, bias, dst_dtype)
    multiplier = torch.stack([*multipliers, folded.multiplier])
    return folded._replace(multiplier=multiplier, post_ops=text)


def _with_destination(attr: Attr, result: Attr) -> Attr:
    """Add what ``attr`` says of dst, with the masks of a linear layer, whose dst is (M, N)."""
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
    return result


def _weight_only(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attr: Attr,
    dst_dtype: torch.dtype,
    post_op_srcs: Sequence[Tensor],
) -> Tensor:
    """Float source, int8 weight."""
    check_8bit("matmul", "weight", weight)
    kinds = ("scales", "zero_points")
    masks = {(kind, "weights"): None for kind in kinds} | {(kind, "dst"): (0,) for kind in kinds}
    check_attr("matmul", attr, masks)
    if src.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "torchq.matmul: src requires grad, but torchq's ops have no backward. Run them under "
            "torch.no_grad() or torch.inference_mode(), or pass src.detach()."
        )
    if bias is not None and bias.dtype != torch.float32:
        raise TypeError(
            "torchq.matmul: bias must be float32, bfloat16, float16, int8 or uint8 with a float "
            f"src, got {bias.dtype}: there are no accumulators. Convert it with .float()."
        )
    scale = attr.resolve("weights", weight.shape)
    zero_point = attr.resolve("weights", weight.shape, "zero_points")
    real: Tensor = torch.ops.torchq.dequantize(weight, scale, zero_point)
    with torch.autocast("cpu", enabled=False):
        dst = torch.matmul(as_float32(src), real)
        dst = dst if bias is None else dst + bias
        of_dst = _with_destination(attr, Attr()).set_post_ops(attr.post_ops)
        return from_float("matmul", dst, of_dst, dst_dtype, post_op_srcs)

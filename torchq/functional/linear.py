# SPDX-License-Identifier: Apache-2.0
"""Fully connected layer: an exact int32 sum, then scales, bias and post-ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.attr import Attr
from torchq.folding import fold
from torchq.functional.arguments import check_source, packed_arguments, post_op_sources
from torchq.ops import dtype_code
from torchq.packing import PackedWeight, pack_linear


def linear(
    src: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    attr: Attr | None = None,
    dst_dtype: torch.dtype = torch.float32,
    post_op_srcs: Sequence[Tensor] = (),
) -> Tensor:
    """Quantizes ``post_ops(src_scale * weight_scale * (src - src_zero_point) @ weight.T + bias)``.

    Args:
        src: uint8 or int8 ``(*, in_features)``.
        weight: int8 or uint8 ``(out_features, in_features)``, or packed by
            :func:`~torchq.packing.pack_linear` (do that once where the weight is constant).
        bias: ``[out_features]``; float32 in real units, added after scaling, or int32 in
            accumulator units, added before. With output scales any bias is added before.
        attr: scales of ``src`` (mask 0), ``weights`` (0, or 1: per output channel) and ``dst``
            (0, or 2: per channel, the last dim of dst), zero points of ``src`` (mask 0),
            ``weights`` (0 or 1) and ``dst`` (0; or 2 where the post-ops fold and no sum is
            float32), or output scales (0 or 2); post-ops. What is not set is 1 (zero points: 0).
        dst_dtype: torch.uint8, int8, int32 or float32. Without scales, int32 gives the exact
            accumulators. A float32 dst has neither scale nor zero point.
        post_op_srcs: in the order of the chain, a tensor of dst's shape and the sum's dtype for
            each ``sum``; for each binary or prelu with another mask than 0 and 2 and without values
            its operand, of dst's shape with 1 where the mask has no bit; the condition of each
            select.

    Returns:
        ``(*, out_features)``.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes, numbers of values, zero points or scales that do not fit, or output
            scales with a float32 source.
        NotImplementedError: masks or post-ops without a kernel.

    Example:
        >>> src = torch.tensor([[130, 126]], dtype=torch.uint8)
        >>> weight = torch.tensor([[10, 20], [30, -40]], dtype=torch.int8)
        >>> attr = torchq.Attr().set_scales("src", 0, 0.5).set_zero_points("src", 0, 128)
        >>> torchq.functional.linear(src, weight, None, attr.set_scales("weights", 0, 0.1))
        tensor([[-1.,  7.]])
    """
    attr = Attr() if attr is None else attr
    check_source("linear", src, attr)
    packed = weight if isinstance(weight, PackedWeight) else pack_linear(weight)
    if packed.dilation or src.dim() == 0 or src.shape[-1] != packed.shape[1]:
        raise ValueError(
            f"torchq.linear: src must be (*, {packed.shape[1]}) for weight {list(packed.shape)}, "
            f"a matrix, got {list(src.shape)}. Check the layer's in_features."
        )
    folded = fold("linear", attr, packed, bias, dst_dtype)
    result: Tensor = torch.ops.torchq.linear(
        src,
        *packed_arguments(packed, folded),
        packed.in_channels,
        dtype_code(dst_dtype),
        folded.post_ops,
        folded.post_op_params,
        post_op_sources(
            "linear", attr, dst_dtype, post_op_srcs, lambda: (*src.shape[:-1], packed.channels)
        ),
        folded.weight_zero_point,
    )
    return result

# SPDX-License-Identifier: Apache-2.0
"""A convolution and the depthwise convolution in its post-ops, as two convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchq.attributes.attr import Attr
from torchq.attributes.post_op import DwConv
from torchq.attributes.post_ops import PostOps, post_ops_of
from torchq.functional.folding import check_attr

_SOURCES_OF_SECOND = {"src": "dst", "weights": "dw_weights", "dst": "dw_dst"}


class Parts(NamedTuple):
    """``first``: of the convolution, whose dst is the source of ``dw``; ``second``: of ``dw``."""

    first: Attr
    dw: DwConv
    weight: Tensor
    second: Attr


def split_at_dw_conv(op: str, attr: Attr) -> Parts | None:
    """Return the attributes of both convolutions; None for a chain without a dw_conv.

    Raises:
        ValueError: the weight or values are missing, or their number is not what masks ask for.
        NotImplementedError: output scales, or a mask without a kernel.
    """
    chains = attr.post_ops.split_at_dw_conv()
    if chains is None:
        return None
    before, dw, behind = chains
    behind.check_supported(op)
    if attr.mask("dst", "output_scales") is not None:
        raise NotImplementedError(
            f"torchq.{op}: a dw_conv must have scales, got output_scales: {attr}. The nearest "
            "supported form has scales of src, weights, dst, dw_weights and dw_dst."
        )
    check_attr(
        op,
        attr,
        {
            (kind, arg): masks
            for kind in ("scales", "zero_points")
            for arg, masks in (
                ("src", (0,)),
                ("weights", None),
                ("dst", (0,)),
                ("dw_weights", (0, 3, 1)),
                ("dw_dst", (0, 2) if kind == "scales" else (0,)),
            )
        },
    )
    weight = post_ops_of([dw]).values[0]  # raises where it is missing
    channels, *window = weight.shape
    attr.check("dw_weights", (channels, 1, *window))
    first, second = Attr().set_post_ops(before), Attr().set_post_ops(behind)
    for (kind, arg), values in attr._params.items():
        if not arg.startswith("dw_"):
            first._params[kind, arg] = values
    for arg, source in _SOURCES_OF_SECOND.items():
        for kind in ("scales", "zero_points"):
            if (kind, source) in attr._params:
                second._params[kind, arg] = attr._params[kind, source]
    return Parts(first, dw, weight, second)


def join_at_dw_conv(first: Attr, dw: PostOps, second: Attr) -> Attr:
    """Undo :func:`split_at_dw_conv`; ``dw`` is the chain of the one post-op."""
    joined, chain = Attr(), PostOps()
    for op in (*first.post_ops, *dw, *second.post_ops):
        chain._append(op)
    joined._params |= first._params
    for kind, arg in second._params:
        if arg != "src":
            joined._params[kind, f"dw_{arg}"] = second._params[kind, arg]
    return joined.set_post_ops(chain)


def padding_end(op: str, dw: DwConv, src: Tensor) -> Sequence[int]:
    """Return the padding behind the source of the depthwise convolution.

    Raises:
        ValueError: ``src`` has other channels or dimensions than the weight.
        NotImplementedError: fewer outputs than the padding gives.
    """
    weight = dw.weight
    assert weight is not None
    if weight.dim() != src.dim() or weight.shape[0] != src.shape[1]:
        raise ValueError(
            f"torchq.{op}: the weight of dw_conv must be ({src.shape[1]}, 1, k...) with "
            f"{src.dim()} dims for the result {list(src.shape)} in front of it, got "
            f"{list(weight.shape)}. Give one filter per channel."
        )
    ends = dw.padding_end(src.shape[2:])
    if min(ends) < 0:
        raise NotImplementedError(
            f"torchq.{op}: {dw} of {list(src.shape[2:])} must give ceil(size / {dw.stride}) "
            f"outputs, got a padding behind of {ends}. The nearest supported padding is "
            f"{(dw.kernel - 1) // 2}."
        )
    return ends

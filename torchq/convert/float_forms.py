# SPDX-License-Identifier: Apache-2.0
"""Operations that stay float, and that torchq computes faster than torch does."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from torchq.capture.graph import aten_name
from torchq.capture.ops import Op, Role
from torchq.capture.patterns import arguments_of
from torchq.nn.attention import CachedAttention, CompressedAttention
from torchq.nn.cached_cat import CachedCat
from torchq.nn.float_modules import Cat
from torchq.nn.normalization import QGroupNorm, QRMSNorm
from torchq.planning.plan import Plan
from torchq.report import reasons

_Form = tuple[nn.Module, list[fx.Node]]


def float_form(op: Op, is_channels_last: bool) -> _Form | None:
    """Return the module that computes a float operation, and what it reads; None for others.

    Args:
        op: stays float.
        is_channels_last: whether its source is, as :func:`channels_last` says.
    """
    if op.reason == reasons.CACHED:
        return _attention(op)
    if op.reason == reasons.CACHED_8:
        a, new = arguments_of(op.node), [src.all_input_nodes[1] for src in op.srcs[1:]]
        mask = [a.nodes["attn_mask"]] if isinstance(a.nodes.get("attn_mask"), fx.Node) else []
        return CompressedAttention(a.scale, bool(a.enable_gqa)), [*op.srcs, *new, *mask]
    if op.reason in (reasons.GROWS, reasons.GROWS_8, reasons.NOT_8):
        a = arguments_of(op.node)
        return CachedCat(a.dim), list(a.tensors)
    is_group_norm = is_channels_last and aten_name(op.node) == "group_norm"
    if not is_group_norm and op.node.target is not torch.rms_norm:
        return None
    a, value = arguments_of(op.node), op.node.meta["value"]
    if a.why_varying("input") or value.dtype != torch.float32:
        return None
    if is_group_norm:  # torch copies channels-last sequences to contiguous ones
        channels = value.shape[1]
        return QGroupNorm(None, None, a.num_groups, channels, a.weight, a.bias, a.eps), [a.input]
    # torch makes seven tensors, one after another
    return QRMSNorm(None, None, a.normalized_shape, a.weight, a.eps), [a.input]


def _attention(op: Op) -> _Form | None:
    """Return attention with a mask of bools; None for another product."""
    a = arguments_of(op.node)
    mask = a.nodes.get("attn_mask")
    varying = a.why_varying("query", "key", "value", "attn_mask")
    if mask is None or varying or mask.meta["value"].dtype != torch.bool:
        return None
    if "1" in mask.meta["sizes"][-2:]:  # it is the same for all queries, say
        return None
    return CachedAttention(a.scale, bool(a.enable_gqa)), [*op.srcs, mask]


def channels_last(plan: Plan) -> set[fx.Node]:
    """Return the values that come from convolutions alone, by functions of each element."""
    found = set[fx.Node]()
    for node in plan.captured.graph.nodes:
        layer, op = plan.layer_at.get(node), plan.ops.get(node)
        op = op if layer is None else layer.op
        if op is None or isinstance(op.module, Cat):
            continue
        made = layer is not None and (op.role is Role.NORM or isinstance(op.module, _ConvNd))
        keeps = op.role in (Role.UNARY, Role.COMBINE, Role.PASS)
        if not made and (keeps or aten_name(node) == "group_norm"):
            shape = node.meta["value"].shape
            srcs = {src for src in op.node.all_input_nodes if src.meta["value"].shape == shape}
            made = bool(srcs) and srcs <= found
        if made:
            found.add(node)
    return found

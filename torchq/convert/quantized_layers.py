# SPDX-License-Identifier: Apache-2.0
"""From a layer of the plan to the quantized module that computes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx, nn

from torchq.attributes.post_ops import PostOps, foldable, post_ops_of
from torchq.capture.ops import Role, append_clip
from torchq.nn.attention import QAttention
from torchq.nn.batch_norm import bias_of, channels, combined, fold_affines, with_bias
from torchq.nn.binary import QAdd, QCat, QMul
from torchq.nn.float_modules import Add, Attention, Cat
from torchq.nn.from_float import Pack, matmul_from_float, pool_from_float
from torchq.nn.matmul import QMatMul
from torchq.nn.module import QModule
from torchq.nn.packed_weights import PackedWeights
from torchq.nn.quantize import QLookup
from torchq.nn.weight import QuantizedWeight
from torchq.planning.layers import Layer
from torchq.planning.plan import Plan
from torchq.quantization.qparams import QParams

QParamsOf = Callable[[fx.Node], QParams]


def quantized(
    layer: Layer,
    plan: Plan,
    qparams: QParamsOf,
    weights: PackedWeights,
    emits_float: bool = False,
) -> QModule:
    """Return the module that computes the layer from int8 sources, and perhaps a float32 residual.

    Args:
        layer: of the plan.
        plan: of its graph.
        qparams: parameters of a value.
        weights: of the conversion.
        emits_float: the result is float32, whatever the plan says.

    Raises:
        TypeError, ValueError, NotImplementedError: the module's own reasons.
    """
    if layer.role is Role.UNARY:
        return lookup(layer, plan, qparams)
    dst = None if emits_float else _dst(layer, plan, qparams)
    srcs = [qparams(src) for src in layer.srcs]
    if layer.role is Role.MATMUL:
        return _matmul(layer, plan, qparams, dst, weights)
    if layer.role is Role.MEAN:
        assert layer.op.module is not None
        return pool_from_float(layer.op.module, srcs[0], dst=dst or "f32")
    if isinstance(layer.op.module, Cat):
        return QCat(srcs, dst, layer.op.module.dim)
    if isinstance(layer.op.module, Attention):
        return QAttention(srcs, dst, layer.op.module.options)
    if layer.role is Role.PRODUCT:
        return QMatMul(srcs, dst, _factor(layer, plan))
    cls = QAdd if isinstance(layer.op.module, Add) else QMul
    return cls(srcs, dst, layer.clip is not None)


def lookup(layer: Layer, plan: Plan, qparams: QParamsOf) -> QLookup:
    """Return the table of a UNARY."""
    assert layer.function is not None
    src = qparams(layer.srcs[0])
    dst = qparams(layer.dst) if layer.fake is None else plan.fakes[layer.dst].quantize
    label = "+".join(part.kind for part in layer.parts if part.role is not Role.PASS)
    return QLookup(layer.function, src, dst, label)


def _dst(layer: Layer, plan: Plan, qparams: QParamsOf) -> QParams | None:
    """Parameters of the result; None: it is float32."""
    if layer.fake is not None:
        return plan.fakes[layer.dst].quantize
    return qparams(layer.dst) if plan.emits_int8(layer) else None


def _matmul(
    layer: Layer, plan: Plan, qparams: QParamsOf, dst: QParams | None, weights: PackedWeights
) -> QModule:
    config = plan.config(layer.op.base)
    assert config is not None
    chain = _chain(layer, plan, qparams)
    per_tensor = config.weight_granularity == "per_tensor" and layer.op.weight_scale is None
    folds = foldable(chain, torch.float32 if dst is None else dst.dtype)
    name = f"{plan.prefix}{layer.op.base}"
    module, first, pack = _with_affines(layer, name, weights, per_tensor, folds)
    chain, src = post_ops_of([*first, *chain]), qparams(layer.srcs[0])
    scale = layer.op.weight_scale
    return matmul_from_float(module, src, dst, config, chain, scale, pad=layer.pad, pack=pack)


def _with_affines(
    layer: Layer, name: str, weights: PackedWeights, per_tensor: bool, folds: bool
) -> tuple[nn.Module, PostOps, Pack]:
    """Return the float layer, the post-ops that its affines become, and what packs its weight.

    Factors of channels change the scales of the weight alone, so that the model's own code reads
    the same integers. Scales are positive: signs and zeros become a post-op, which folds. Integers
    have the factors where one scale serves all channels, or where the post-ops behind do not fold.
    """
    module = layer.unfolded()
    if not layer.affines:
        return module, PostOps(), weights.packing(name, layer.src_factors)
    factor, shift = combined(layer.affines, bias_of(module))
    bias = shift.expand(channels(module)).float()
    signs = factor.sign().float()
    if (per_tensor and factor.numel() > 1) or (bool((signs <= 0).any()) and not folds):
        folded = fold_affines(module, layer.affines)
        return folded, PostOps(), weights.packing(name, layer.src_factors, module)
    pack = partial(_scaled, weights.packing(name, layer.src_factors), factor)
    if bool((signs > 0).all()):
        return with_bias(module, bias), PostOps(), pack
    chain = PostOps().append_binary("mul", signs.expand(channels(module)), 2)
    return with_bias(module, None), chain.append_binary("add", bias, 2), pack


def _scaled(pack: Pack, factor: Tensor, *args: object) -> QuantizedWeight:
    """Return what ``pack`` gives, with scales that are multiplied by magnitudes of factors."""
    made = pack(*args)
    size = torch.where(factor == 0, 1, factor.abs())
    least = torch.finfo(torch.float32).tiny
    return made._replace(scale=(made.scale * size).float().clamp(min=least))


def _chain(layer: Layer, plan: Plan, qparams: QParamsOf) -> PostOps:
    """Return the post-ops behind the affines."""
    chain = PostOps()
    if layer.residual is not None and plan.comes_as_int8(layer.residual):
        residual = qparams(layer.residual)
        chain.append_sum(float(residual.scale), int(residual.zero_point), residual.dtype)
    elif layer.residual is not None:
        chain.append_sum(1.0, 0, "f32")
    if layer.slopes is not None:
        chain.append_prelu(layer.slopes, 2)
    if (clip := _clip(layer, plan)) is not None:
        append_clip(chain, clip)
    return chain


def _factor(layer: Layer, plan: Plan) -> PostOps:
    """Return what a matrix product takes over, in order."""
    chain = PostOps()
    if layer.affines:
        scale, shift = combined(layer.affines)
        chain.append_eltwise("linear", float(scale), float(shift))
    clip = _clip(layer, plan)
    return chain if clip is None else append_clip(chain, clip)


def _clip(layer: Layer, plan: Plan) -> tuple[float, float] | None:
    """Bounds of the activation, and of a fake quantizer with few levels."""
    more = None if layer.fake is None else plan.fakes[layer.dst].clip
    if layer.clip is None or more is None:
        return layer.clip or more
    low, high = (min(max(bound, more[0]), more[1]) for bound in layer.clip)
    return low, high

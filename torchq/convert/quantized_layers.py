# SPDX-License-Identifier: Apache-2.0
"""From a layer of the plan to the quantized module that computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import fx

from torchq.attributes.post_ops import PostOps
from torchq.capture.ops import Role, append_clip
from torchq.convert.fuse import Layer
from torchq.nn.attention import QAttention
from torchq.nn.batch_norm import combined
from torchq.nn.binary import QAdd, QCat, QMul
from torchq.nn.float_modules import Add, Attention, Cat
from torchq.nn.from_float import matmul_from_float, pool_from_float
from torchq.nn.matmul import QMatMul
from torchq.nn.module import QModule
from torchq.nn.quantize import QLookup
from torchq.quantization.qparams import QParams

if TYPE_CHECKING:
    from torchq.convert.plan import Plan

QParamsOf = Callable[[fx.Node], QParams]


def quantized(layer: Layer, plan: Plan, qparams: QParamsOf, emits_float: bool = False) -> QModule:
    """Return the module that computes the layer from int8 sources, and perhaps a float32 residual.

    ``emits_float``: the result is float32, whatever the plan says.

    Raises:
        TypeError, ValueError, NotImplementedError: the module's own reasons.
    """
    if layer.role is Role.UNARY:
        return lookup(layer, plan, qparams)
    dst = None if emits_float else _dst(layer, plan, qparams)
    srcs = [qparams(src) for src in layer.srcs]
    if layer.role is Role.MATMUL:
        return _matmul(layer, plan, qparams, dst)
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


def _matmul(layer: Layer, plan: Plan, qparams: QParamsOf, dst: QParams | None) -> QModule:
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
    config = plan.config(layer.op.base)
    assert config is not None
    src, module = qparams(layer.srcs[0]), layer.float_module()
    scale = layer.weight_scale()
    return matmul_from_float(module, src, dst, config, chain, scale, pad=layer.pad)


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

# SPDX-License-Identifier: Apache-2.0
"""From float modules and scales to quantized modules, for both flows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from torchq.attributes.post_ops import PostOps
from torchq.convert.ops import append_clip
from torchq.nn import conv, conv_transpose, dynamic, dynamic_conv, linear, pooling, resample
from torchq.nn.batch_norm import TRANSPOSED
from torchq.nn.dynamic_int4 import DynamicQLinearInt4
from torchq.nn.module import QModule
from torchq.quantization.config import QConfig
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.linear import linear_recipe
from torchq.quantization.recipes.sample import SourceSample

_CONVS: dict[type[nn.Module], type[conv.QConv]] = {
    nn.Conv1d: conv.QConv1d,
    nn.Conv2d: conv.QConv2d,
    nn.Conv3d: conv.QConv3d,
}
_DYNAMIC: dict[type[nn.Module], Any] = {
    nn.Linear: dynamic.DynamicQLinear,
    nn.Conv1d: dynamic_conv.DynamicQConv1d,
    nn.Conv2d: dynamic_conv.DynamicQConv2d,
    nn.Conv3d: dynamic_conv.DynamicQConv3d,
}
_TRANSPOSED: dict[type[nn.Module], type[conv_transpose.QConvTranspose]] = {
    nn.ConvTranspose1d: conv_transpose.QConvTranspose1d,
    nn.ConvTranspose2d: conv_transpose.QConvTranspose2d,
    nn.ConvTranspose3d: conv_transpose.QConvTranspose3d,
}
_POOLS: dict[type[nn.Module], Any] = {
    nn.MaxPool1d: pooling.QMaxPool1d,
    nn.MaxPool2d: pooling.QMaxPool2d,
    nn.MaxPool3d: pooling.QMaxPool3d,
    nn.AvgPool1d: pooling.QAvgPool1d,
    nn.AvgPool2d: pooling.QAvgPool2d,
    nn.AvgPool3d: pooling.QAvgPool3d,
    nn.AdaptiveAvgPool1d: pooling.QAdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: pooling.QAdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: pooling.QAdaptiveAvgPool3d,
    nn.Upsample: resample.QResample,
}
_Class = TypeVar("_Class")


def _of_base(classes: dict[type[nn.Module], _Class], module: nn.Module) -> _Class:
    """Return the entry of the module's class or the nearest base class."""
    return next(classes[base] for base in type(module).__mro__ if base in classes)


def pool_from_float(module: nn.Module, qparams: QParams, **own: pooling.Dst) -> QModule:
    """Return a float pool on such tensors; an average may have a ``dst`` of its own."""
    cls = _of_base(_POOLS, module)
    result: QModule = cls.from_float(module, qparams, **own)
    return result


def matmul_from_float(
    module: nn.Module,
    src: QParams,
    dst: QParams | None,
    config: QConfig,
    post_ops: PostOps,
    weight_scale: Tensor | None = None,
    *,
    pad: tuple[list[int], list[int]] | None = None,
    contiguous: bool = False,
) -> QModule:
    """Return a float linear layer or convolution, between tensors with these parameters.

    Args:
        module: the float layer.
        src: parameters of the source.
        dst: parameters of the destination; None for float32.
        config: how to quantize the weight.
        post_ops: applied before the destination is quantized.
        weight_scale: of the weight, where it is known: one, or one per output channel.
        pad: zeros before and after each spatial dim, beside those of the convolution.
        contiguous: make the destination of a convolution contiguous instead of channels-last.
    """
    options: dict[str, Any] = {
        "granularity": config.weight_granularity,
        "bits": config.int8_bits,
        "weight_scale": weight_scale,
        "post_ops": post_ops,
    }
    if isinstance(module, nn.Linear):
        return linear.QLinear.from_float(module, src, dst, **options)
    options["contiguous"] = contiguous
    if isinstance(module, TRANSPOSED):
        return _of_base(_TRANSPOSED, module).from_float(module, src, dst, **options)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return _of_base(_CONVS, module).from_float(module, src, dst, pad=pad, **options)


def dynamic_from_float(
    module: nn.Module,
    config: QConfig,
    weight_scale: Tensor | None = None,
    sample: SourceSample | None = None,
) -> QModule:
    """Return the dynamic form of a float linear layer or convolution.

    Args:
        module: the float layer.
        config: how to quantize the weight.
        weight_scale: of the weight, where it is known: one, or one per output channel.
        sample: rows of the source of a linear layer, which then takes the recipe of ``config``.
    """
    # A known scale is that of an int8 weight.
    is_int4 = config.weight_bits == 4 and isinstance(module, nn.Linear) and weight_scale is None
    group_size = config.group_size or 32 if is_int4 else None
    recipe = None
    if sample is not None and sample.calibrated and weight_scale is None:
        assert isinstance(module, nn.Linear)
        weight, bias, gptq = module.weight.detach(), module.bias, config.recipe == "best"
        grid = config.weight_granularity, config.int8_bits, gptq, group_size
        recipe = linear_recipe(weight, bias, sample, *grid)
    if group_size is not None:
        assert isinstance(module, nn.Linear)
        return DynamicQLinearInt4.from_float(module, group_size=group_size, recipe=recipe)
    options: dict[str, Any] = {
        "granularity": config.weight_granularity,
        "bits": config.int8_bits,
        "weight_scale": weight_scale,
    }
    if recipe is not None:
        options["recipe"] = recipe
    result: QModule = _of_base(_DYNAMIC, module).from_float(module, **options)
    return result


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Around the making of a layer's module: what it raises names the layer, and how to go on."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(
            f"torchq.convert: '{name}' cannot be quantized: {error} To keep it float, pass "
            f"overrides={{'{name}': None}}."
        ) from error


def post_op_chain(
    has_residual: bool, residual: QParams | None, clip: tuple[float, float] | None
) -> PostOps:
    """Return a sum for the residual (float32 if without parameters), then the fused activation."""
    chain = PostOps()
    if has_residual:
        if residual is None:
            chain.append_sum(1.0, 0, "f32")
        else:
            chain.append_sum(float(residual.scale), int(residual.zero_point), residual.dtype)
    return chain if clip is None else append_clip(chain, clip)

# SPDX-License-Identifier: Apache-2.0
"""From float modules and scales to quantized modules, for both flows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torchq.attributes.arguments import as_float32, place_of
from torchq.attributes.post_ops import PostOps
from torchq.nn.dynamic_int4 import DynamicQLinearInt4
from torchq.nn.module import QModule
from torchq.nn.weight import QuantizedWeight, packed_weight
from torchq.quantization.config import QConfig
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.linear import linear_recipe
from torchq.quantization.recipes.sample import SourceSample

Pack = Callable[..., QuantizedWeight]
"""Takes the arguments of :func:`~torchq.nn.weight.packed_weight` up to the scale."""


def quantized_class(module: nn.Module, prefix: str = "Q") -> Any:
    """Return the quantized class of a float layer: ``QConv2d`` for ``nn.Conv2d``."""
    bases = (cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn."))
    names = (f"{prefix}{cls.__name__}".replace("Upsample", "Resample") for cls in bases)
    return next(QModule.registry[name] for name in names if name in QModule.registry)


def pool_from_float(module: nn.Module, qparams: QParams, **own: object) -> QModule:
    """Return a float pool on such tensors; an average may have a ``dst`` of its own."""
    result: QModule = quantized_class(module).from_float(module, qparams, **own)
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
    pack: Pack = packed_weight,
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
        pack: returns the quantized weight.
    """
    quantized = pack(module, config.weight_granularity, config.int8_bits, weight_scale)
    options: dict[str, object] = {"post_ops": post_ops, "quantized": quantized}
    if not isinstance(module, nn.Linear):
        options["contiguous"] = contiguous
    if pad is not None:  # not in front of linear layers and transposed convolutions
        options["pad"] = pad
    result: QModule = quantized_class(module).from_float(module, src, dst, **options)
    return result


def dynamic_from_float(
    module: nn.Module,
    config: QConfig,
    weight_scale: Tensor | None = None,
    sample: SourceSample | None = None,
    pack: Pack = packed_weight,
) -> QModule:
    """Return the dynamic form of a float linear layer or convolution.

    Args:
        module: the float layer.
        config: how to quantize the weight.
        weight_scale: of the weight, where it is known: one, or one per output channel.
        sample: rows of the source of a linear layer, which then takes the recipe of ``config``.
        pack: returns the quantized int8 weight, where there is no recipe.
    """
    # A known scale is that of an int8 weight.
    is_int4 = config.weight_bits == 4 and isinstance(module, nn.Linear) and weight_scale is None
    group_size = config.group_size or 32 if is_int4 else None
    recipe = None
    if sample is not None and sample.calibrated and weight_scale is None:
        assert isinstance(module, nn.Linear)
        weight = as_float32(module.weight.detach())
        bias = None if module.bias is None else as_float32(module.bias.detach())
        grid = config.weight_granularity, config.int8_bits, config.recipe == "best", group_size
        recipe = linear_recipe(weight, bias, sample, *grid)
    if group_size is not None:
        assert isinstance(module, nn.Linear)
        return DynamicQLinearInt4.from_float(module, group_size=group_size, recipe=recipe)
    if recipe is not None:
        own: dict[str, object] = {"bits": config.int8_bits, "recipe": recipe}
    else:
        own = {"quantized": pack(module, config.weight_granularity, config.int8_bits, weight_scale)}
    result: QModule = quantized_class(module, "DynamicQ").from_float(module, **own)
    return result


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Around the making of a layer's module: what it raises names the layer, and how to go on."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(
            f"torchq.convert: {place_of(name)} cannot be quantized: {error} To keep it float, "
            f"pass overrides={{{name!r}: None}}."
        ) from error

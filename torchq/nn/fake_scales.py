# SPDX-License-Identifier: Apache-2.0
"""Fake quantizers in a model: the scales and zero points that it was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.nn.fake_quantize import FakeQuantize
from torchq.quantization.qparams import QParams
from torchq.report import reasons

_LEVELS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in range(2, 9)}
_LEVELS |= {f"uint{bits}": (0, 2**bits - 1) for bits in range(2, 9)}


@dataclass(frozen=True, eq=False)
class Fixed:
    """Parameters that a fake quantizer fixes for an activation.

    Attributes:
        quantize: from its source to integers.
        dequantize: what these integers stand for; the same unless the output bounds are others.
        clip: bounds of its source, where it has fewer levels than the integers.
    """

    quantize: QParams
    dequantize: QParams
    clip: tuple[float, float] | None = None

    @property
    def keeps(self) -> bool:
        """Return whether it only rounds: values on its levels stay what they are."""
        return self.clip is None and self.quantize == self.dequantize


def is_fake(module: nn.Module) -> bool:
    """Return whether a module rounds to levels: torchq's, and torch.ao's or torchao's in use."""
    if isinstance(module, FakeQuantize) or _torchao_config(module) is not None:
        return True
    enabled = getattr(module, "fake_quant_enabled", None)
    if enabled is None or not hasattr(module, "scale"):
        return False
    if isinstance(enabled, Tensor) and enabled.is_meta:  # of a model whose values are to be loaded
        return True
    return bool(torch.as_tensor(enabled, device="cpu").any())


def fake_quantizer(module: nn.Module) -> FakeQuantize | str:
    """Return what a module for which :func:`is_fake` holds computes, or why there is none."""
    if isinstance(module, FakeQuantize):
        return module
    if (config := _torchao_config(module)) is None:
        return FakeQuantize.from_torch(module)
    low, high = _LEVELS.get(str(config.dtype).rpartition(".")[2], (0, 0))
    if type(config.granularity).__name__ != "PerAxis" or high == 0:
        return reasons.FAKE_FORM.format(dtype=config.dtype, granularity=config.granularity)
    scale, zero_point = (getattr(module, name) for name in ("scale", "zero_point"))
    return FakeQuantize.from_affine(scale, zero_point, low, high, 0)


def is_per_token(module: object) -> bool:
    """Return whether it takes int8 levels of each row from the row, as dynamic layers do."""
    if (config := _torchao_config(module)) is None:
        return False
    rows = type(config.granularity).__name__ == "PerToken" and config.is_dynamic
    return rows and config.dtype is torch.int8


def _torchao_config(module: object) -> Any:
    """Return the config of a fake quantizer of torchao to integers that is switched on, or None."""
    known = any(cls.__name__ == "FakeQuantizerBase" for cls in type(module).__mro__)
    config = getattr(module, "config", None)
    known = known and hasattr(config, "granularity") and bool(getattr(module, "enabled", True))
    return config if known else None


def keep_fixed(module: nn.Module) -> None:
    """Make buffers of what a fake quantizer of torchao chose in its first call, for states."""
    config = _torchao_config(module)
    if config is None or getattr(config, "is_dynamic", True):
        return
    for name in {"scale", "zero_point"} & vars(module).keys():
        module.register_buffer(name, vars(module).pop(name))


def is_watcher(module: nn.Module) -> bool:
    """Return whether a module of torch.ao passes values on: an observer, or one switched off."""
    off = hasattr(module, "fake_quant_enabled") and not is_fake(module)
    return off or (hasattr(module, "calculate_qparams") and not is_fake(module))


def fixed_qparams(fake: FakeQuantize, dtype: torch.dtype) -> Fixed:
    """Parameters of an activation; :func:`why_not_fixed` must have said "".

    Fewer levels than the integers have are those of 256, clipped.
    """
    wide, clip = fake, None
    if fake.levels not in (128, 256):
        wide = _widened(fake)
        clip = float(fake.input_low), float(fake.input_high)
    return Fixed(*wide.qparams(dtype), clip)


def why_not_fixed(fake: FakeQuantize) -> str:
    """Return why an activation with this fake quantizer cannot be int8; "" if it can."""
    if fake.is_per_channel:
        return reasons.FAKE_CHANNELS
    if fake.levels > 256:
        return reasons.FAKE_LEVELS.format(levels=fake.levels)
    if bool((fake.input_low >= fake.input_high).any()):
        return fake.why_float()
    return (fake if fake.levels in (128, 256) else _widened(fake)).why_float()


def _widened(fake: FakeQuantize) -> FakeQuantize:
    """With 256 levels, the first of them the same."""
    high = fake.input_low + 255 * fake.input_scale
    return FakeQuantize(
        fake.input_low, high, fake.output_low, fake.output_low + 255 * fake.output_scale
    )


def composed(fake: FakeQuantize, scale: float, shift: float) -> FakeQuantize:
    """``fake(x) * scale + shift``: an explicit dequantization behind it."""
    low, high = (bound * scale + shift for bound in (fake.output_low, fake.output_high))
    return FakeQuantize(fake.input_low, fake.input_high, low, high, fake.levels, fake.axis)


def weight_scale(fake: FakeQuantize, weight: Tensor, axis: int, groups: int) -> Tensor | str:
    """Scales of a fake-quantized weight, one or one per output channel; or why there are none.

    Args:
        fake: what the weight came from.
        weight: on its levels.
        axis: of the output channels.
        groups: that split dimension 0, where ``axis`` is another.
    """
    scale = fake.output_scale
    if fake.axis is not None and fake.axis % weight.dim() != axis:
        return reasons.FAKE_AXIS
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        return reasons.FAKE_SCALE
    shape = [1] * weight.dim()
    shape[axis] = -1
    steps = weight.detach().double() / (scale.reshape(shape) if fake.axis is not None else scale)
    if steps.numel() and float((steps - steps.round()).abs().max()) > 0.01:
        return reasons.FAKE_ZERO
    if steps.numel() and not -128.5 < float(steps.min()) <= float(steps.max()) < 127.5:
        return reasons.FAKE_ZERO_POINT
    repeated = scale.repeat(groups) if axis != 0 and scale.numel() > 1 else scale
    return repeated.float()

# SPDX-License-Identifier: Apache-2.0
"""FakeQuantize: float tensors rounded to the values that a quantized tensor can hold.

With ``S_i = (ih - il) / (levels - 1)``, ``Z_i = -il / S_i`` and the same for the output, the
formula of `FakeQuantize` is ``q = clamp(round(x / S_i + Z_i), 0, levels - 1)``, then
``S_o * (q - Z_o)``: a quantization and a dequantization wherever ``Z_i`` and ``Z_o`` are integers
(rules T1 to T6).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.nn.quantize import Dequantize, Quantize
from torchq.quantization.qparams import QParams

Bound = float | Tensor
_BITS = {256: 8, 128: 7}


class FakeQuantize(nn.Module):
    """Rounds float values as a quantized tensor would; float in, float out.

    With ``il, ih = input_low, input_high`` and ``ol, oh = output_low, output_high``::

        x <= min(il, ih):  ol
        x >  max(il, ih):  oh
        otherwise:  round((x - il) / (ih - il) * (levels - 1)) / (levels - 1) * (oh - ol) + ol

    Rounding is half to even, in float64, then once to the source's dtype. NaN stays NaN.
    Gradients go straight through, times ``(oh - ol) / (ih - il)``, where a value rounds to one of
    the levels. Outside they are zero, as those of torch's fake quantizers. Bounds get no gradient.

    Shapes:
        src: any floating-point shape; dst has the same shape and dtype.

    Buffers:
        input_low, input_high, output_low, output_high: float64 ``[1]`` or ``[C]``. They stay
            float64 when the model is converted with ``half()`` and the like, so that scale and
            zero point keep their precision.

    Raises:
        TypeError: ``src`` is not floating point.
        ValueError: dimension ``axis`` of ``src`` does not have ``C`` elements.
    """

    input_low: Tensor
    input_high: Tensor
    output_low: Tensor
    output_high: Tensor

    __jit_unused_properties__ = (
        "input_scale",
        "input_zero_point",
        "output_scale",
        "output_zero_point",
        "quantized_output",
        "is_per_channel",
    )

    def __init__(
        self,
        input_low: Bound,
        input_high: Bound,
        output_low: Bound | None = None,
        output_high: Bound | None = None,
        levels: int = 256,
        axis: int | None = None,
    ) -> None:
        """Take finite bounds, each one number or ``C`` values along ``axis``.

        Args:
            input_low: values up to it become ``output_low``.
            input_high: values above it become ``output_high``.
            output_low: what the lowest level stands for; None means ``input_low``.
            output_high: what the highest level stands for; None means ``input_high``.
            levels: how many values there are, at least 2.
            axis: the channel dimension; required exactly if a bound has several values.

        Raises:
            TypeError: a bound is no number or tensor, or ``axis`` no int.
            ValueError: ``levels`` or a bound is out of its domain, or the sizes disagree.
        """
        super().__init__()
        if isinstance(levels, bool) or not isinstance(levels, int) or not 2 <= levels <= 2**16:
            raise ValueError(
                f"torchq.FakeQuantize: levels must be an int in [2, 65536], got {levels!r}. "
                "Use 256 for 8 bits."
            )
        bounds = {
            "input_low": input_low,
            "input_high": input_high,
            "output_low": input_low if output_low is None else output_low,
            "output_high": input_high if output_high is None else output_high,
        }
        tensors = {name: _bound(name, value) for name, value in bounds.items()}
        channels = max(bound.numel() for bound in tensors.values())
        for name, bound in tensors.items():
            if bound.numel() not in (1, channels):
                raise ValueError(
                    f"torchq.FakeQuantize: {name} must have 1 or {channels} values as the other "
                    f"bounds, got {bound.numel()}. Give one per channel or one in all."
                )
            self.register_buffer(name, bound)
        if axis is not None and type(axis) is not int:
            raise TypeError(
                f"torchq.FakeQuantize: axis must be an int or None, got {axis!r}. Pass the index "
                "of the channel dimension."
            )
        if channels > 1 and axis is None:
            raise ValueError(
                f"torchq.FakeQuantize: axis must be the channel dimension for {channels} values, "
                "got None. Pass axis=1 for activations, axis=0 for weights."
            )
        self.levels = levels
        self.axis = axis if channels > 1 else None
        self.channels = channels

    @classmethod
    def from_torch(cls, module: nn.Module) -> Self:
        """Convert a FakeQuantize module of ``torch.ao.quantization``, with its scale.

        See :meth:`from_affine` for the one difference. The module's observer is left behind.

        Args:
            module: has ``scale``, ``zero_point``, ``quant_min``, ``quant_max``, and ``ch_axis`` for
                per-channel scales, as torch's FakeQuantize modules have.

        Raises:
            TypeError: the module has no such attributes.
            ValueError: its fake quantization is switched off.
        """
        source = getattr(module, "activation_post_process", None)
        found: dict[str, Any] = {}
        for name in ("scale", "zero_point", "quant_min", "quant_max"):
            found[name] = getattr(module, name, getattr(source, name, None))
            if found[name] is None:
                raise TypeError(
                    "torchq.FakeQuantize.from_torch: module must have scale, zero_point, quant_min "
                    f"and quant_max, got {type(module).__name__} without {name}. Pass a "
                    "torch.ao.quantization FakeQuantize, or use FakeQuantize.from_affine."
                )
        enabled = getattr(module, "fake_quant_enabled", None)
        if enabled is not None and not bool(enabled[0] if enabled.dim() else enabled):
            raise ValueError(
                "torchq.FakeQuantize.from_torch: module must have fake_quant_enabled, got a "
                f"{type(module).__name__} that passes values on. Call enable_fake_quant() first, "
                "or leave the module out."
            )
        axis = getattr(module, "ch_axis", -1)
        scale = _bound("scale", found["scale"])
        return cls.from_affine(
            scale,
            found["zero_point"],
            int(found["quant_min"]),
            int(found["quant_max"]),
            int(axis) if scale.numel() > 1 else None,
        )

    @classmethod
    def from_affine(
        cls,
        scale: Bound,
        zero_point: float | Tensor,
        quant_min: int,
        quant_max: int,
        axis: int | None = None,
    ) -> Self:
        """From the parameters of ``torch.fake_quantize_per_tensor_affine`` / ``_per_channel_``.

        The bounds are ``scale * (quant_min - zero_point)`` and ``scale * (quant_max -
        zero_point)``. One difference remains: torch computes ``round(x / scale) + zero_point``,
        this module, as oneDNN, ``round(x / scale + zero_point)`` with the lowest integer as 0. They
        differ, by one step, exactly at ties ``x / scale = k + 0.5`` when ``zero_point -
        quant_min`` is odd. Symmetric u8 (128) and s8 (0 - -128) are even.

        Raises:
            ValueError: a scale is not positive, or ``quant_min >= quant_max``.
        """
        step = _bound("scale", scale)
        if not bool((step > 0).all()):
            raise ValueError(
                f"torchq.FakeQuantize.from_affine: scale must be > 0, got {float(step.min())}. "
                "Run the observer on data first."
            )
        if quant_min >= quant_max:
            raise ValueError(
                "torchq.FakeQuantize.from_affine: quant_max must be above quant_min, got "
                f"{quant_min}..{quant_max}. For 8 bits use 0..255 or -128..127."
            )
        zero = _bound("zero_point", zero_point)
        low, high = step * (quant_min - zero), step * (quant_max - zero)
        return cls(low, high, levels=quant_max - quant_min + 1, axis=axis)

    @property
    def is_per_channel(self) -> bool:
        """Return whether a bound has one value per channel."""
        return self.axis is not None

    @property
    def input_scale(self) -> Tensor:
        """``S_i = (input_high - input_low) / (levels - 1)``, float64 ``[1]`` or ``[C]``."""
        return (self.input_high - self.input_low) / (self.levels - 1)

    @property
    def input_zero_point(self) -> Tensor:
        """``Z_i = -input_low / S_i``, a real number: an integer only for tuned bounds (T1, T2)."""
        return -self.input_low / self.input_scale

    @property
    def output_scale(self) -> Tensor:
        """``S_o = (output_high - output_low) / (levels - 1)``."""
        return (self.output_high - self.output_low) / (self.levels - 1)

    @property
    def output_zero_point(self) -> Tensor:
        """``Z_o = -output_low / S_o``."""
        return -self.output_low / self.output_scale

    @property
    def quantized_output(self) -> torch.dtype | None:
        """The dtype whose integers the output consists of, if it is quantized already (T4).

        uint8 if the output is 0..255 (``S_o = 1``, ``Z_o = 0``), int8 if it is -128..127 (``S_o =
        1``, ``Z_o = 128``), else None.
        """
        for dtype in (torch.uint8, torch.int8):
            limits = torch.iinfo(dtype)
            low, high = self.output_low == limits.min, self.output_high == limits.max
            if self.levels == 256 and bool(low.all()) and bool(high.all()):
                return dtype
        return None

    def why_float(self) -> str:
        """Return why no quantized tensor can hold the result, or "" if one can."""
        if bool((self.input_low >= self.input_high).any()):
            return (
                "input_low must be below input_high to be a scale and zero point; otherwise only "
                "the definition holds (T5)"
            )
        if bool((self.output_low >= self.output_high).any()):
            return "output_low must be below output_high: a scale is positive (T5)"
        if self.levels not in _BITS:
            return f"levels must be 256 (8 bits) or 128 (7 bits), got {self.levels}"
        for side, zero in (("in", self.input_zero_point), ("out", self.output_zero_point)):
            if reason := self._why_no_zero_point(f"{side}put", zero):
                return reason
        return ""

    def qparams(self, dtype: torch.dtype | None = None) -> tuple[QParams, QParams]:
        """Parameters of the quantization and of the dequantization.

        int8 is uint8 with both zero points lowered by half the levels: same scales, same values
        (T3). None chooses int8 where that makes the input symmetric (zero point 0) or the output
        is int8 already (T4), uint8 otherwise.

        Raises:
            ValueError: there are none; says which of the rules T1 to T6 forbids it.
        """
        if reason := self.why_float():
            raise ValueError(
                f"torchq.FakeQuantize.qparams: {reason}, got {self.extra_repr()}. Keep it float, "
                "or change the bounds."
            )
        half = self.levels // 2
        zeros = [torch.round(z) for z in (self.input_zero_point, self.output_zero_point)]
        if dtype is None:
            symmetric = bool((zeros[0] == half).all())
            signed = symmetric or self.quantized_output == torch.int8
            dtype = torch.int8 if signed else torch.uint8
        shift = half if dtype == torch.int8 else 0
        scales = (self.input_scale, self.output_scale)
        made = [self._side(s, z - shift, dtype) for s, z in zip(scales, zeros, strict=True)]
        return made[0], made[1]

    def to_quantized(self, dtype: torch.dtype | None = None) -> nn.Sequential:
        """``Sequential(Quantize, Dequantize)`` with the same result.

        Equal but for float32's rounding: the quantized value may differ by one where ``x / S_i``
        lies within float32's precision of a tie.

        Raises:
            ValueError: the rules T1 to T6 forbid it.
        """
        quantize, dequantize = self.qparams(dtype)
        return nn.Sequential(Quantize(quantize), Dequantize(dequantize))

    def forward(self, src: Tensor) -> Tensor:
        """Round to levels."""
        if not src.is_floating_point():
            raise TypeError(
                f"torchq.FakeQuantize: src must be floating point, got {src.dtype}. "
                "Dequantize it first."
            )
        shape = [1] * max(src.dim(), 1)
        axis = self.axis
        if axis is not None:
            if not -src.dim() <= axis < src.dim() or src.shape[axis] != self.channels:
                raise ValueError(
                    f"torchq.FakeQuantize: src must have {self.channels} channels in dimension "
                    f"{axis}, got {list(src.shape)}. Choose the axis of its channels."
                )
            shape[axis] = self.channels
        input_low, input_high = _spread(self.input_low, shape), _spread(self.input_high, shape)
        output_low, output_high = _spread(self.output_low, shape), _spread(self.output_high, shape)
        steps = self.levels - 1
        x = src.detach().to(torch.float64)
        q = torch.round((x - input_low) / (input_high - input_low) * steps)
        dst = q / steps * (output_high - output_low) + output_low
        dst = torch.where(x > torch.maximum(input_low, input_high), output_high, dst)
        dst = torch.where(x <= torch.minimum(input_low, input_high), output_low, dst)
        slope = (output_high - output_low) / (input_high - input_low)
        slope = torch.where(torch.isfinite(slope), slope, torch.zeros_like(slope))
        through = src.to(torch.float64) * slope
        inside = (q >= 0) & (q <= steps) & torch.isfinite(through)
        through = torch.where(inside, through, torch.zeros_like(through))
        dst = dst - (through.detach() - through)  # less +0: even -0 keeps its bits
        return dst.to(src.dtype).reshape(src.shape)

    def extra_repr(self) -> str:
        """Levels and bounds."""
        names = ("input_low", "input_high", "output_low", "output_high")
        axis = "" if self.axis is None else f", axis={self.axis}"
        return ", ".join(f"{name}={_text(getattr(self, name))}" for name in names) + (
            f", levels={self.levels}{axis}"
        )

    def _why_no_zero_point(self, side: str, zero: Tensor) -> str:
        """Bounds that were float32 hold an integer zero point to ``levels * 2^-24`` only."""
        off = (zero - torch.round(zero)).abs()
        if bool((off > self.levels * 2.0**-24).any()):
            worst = float(zero[off.argmax()])
            return f"the zero point of the {side} must be an integer (T1), got {worst:.6g}" + (
                f"; for {self.levels // 2} let {side}_low = -{side}_high / (1 - 2 / levels) (T2)"
                if abs(worst - (self.levels - 1) / 2) < 0.25
                else ""
            )
        outside = (torch.round(zero) < 0) | (torch.round(zero) > self.levels - 1)
        if bool(outside.any()):
            worst = float(zero[outside][0])
            return (
                f"the range of the {side} must contain zero, or its zero point is outside "
                f"0..{self.levels - 1} (T6), got {worst:.6g}"
            )
        return ""

    def _side(self, scale: Tensor, zero_point: Tensor, dtype: torch.dtype) -> QParams:
        bits = _BITS[self.levels]
        scale, zero_point = scale.float(), zero_point.to(torch.int32)
        if bool((scale == scale[0]).all()) and bool((zero_point == zero_point[0]).all()):
            return QParams(scale[0], zero_point[0], dtype, None, bits)
        scale = scale.expand(self.channels).contiguous()
        return QParams(scale, zero_point.expand(self.channels).contiguous(), dtype, self.axis, bits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if fn(self.input_low[:0]).dtype != torch.float64:
            return self
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        for name in ("input_low", "input_high", "output_low", "output_high"):
            given = state_dict.get(prefix + name)
            if given is not None and given.dtype != torch.float64:
                raise RuntimeError(
                    f"torchq.FakeQuantize: '{prefix}{name}' of the state must be torch.float64, "
                    f"got {given.dtype}. Was the state converted with half() or the like?"
                )
            if given is not None and not given.is_meta and not bool(given.isfinite().all()):
                raise ValueError(
                    f"torchq.FakeQuantize: '{prefix}{name}' of the state must be finite, got "
                    f"{_text(given)}. Was the state changed, or did training diverge?"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _bound(name: str, value: Bound) -> Tensor:
    try:
        # tensors stay on their device; numbers go to the default one, as a module's parameters do
        given = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        bound = given.detach().to(torch.float64).reshape(-1).clone()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"torchq.FakeQuantize: {name} must be a number or a tensor of numbers, got {value!r}. "
            "Calibrate the range."
        ) from None
    if bound.numel() == 0 or not bool(torch.isfinite(bound).all()):
        raise ValueError(
            f"torchq.FakeQuantize: {name} must be finite, got {_text(bound)}. Calibrate the range."
        )
    return bound


def _spread(bound: Tensor, shape: list[int]) -> Tensor:
    return bound.reshape(shape) if bound.numel() > 1 else bound.reshape([1] * len(shape))


def _text(bound: Tensor) -> str:
    if bound.numel() == 0:
        return "[]"
    if bound.numel() == 1:
        return f"{bound.item():.8g}"
    return f"{bound.min().item():.8g}..{bound.max().item():.8g}[{bound.numel()}]"

# SPDX-License-Identifier: Apache-2.0
"""A FakeQuantize appended to an op: its crop, scales, rounding and zero points (rules F1 to F7)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchq.attributes.arguments import Values
from torchq.nn.fake_quantize import FakeQuantize
from torchq.onednn.composer import Composer, Refused, State, collapse


def append_fake_quantize(
    composer: Composer,
    st: State,
    fq: FakeQuantize,
    values: Callable[[str, Values], Tensor],
    last: bool,
    inner: bool,
) -> State:
    """``crop, * 1/S_i + Z_i, round, * S_o + output_low``, simplified by F1 to F7."""
    if reason := _why_not_composed(fq):
        raise Refused(reason)
    low, high = values("input_low", fq.input_low), values("input_high", fq.input_high)
    scale, shift = 1 / fq.input_scale, _snap(fq.input_zero_point, fq.levels)
    out_scale, out_shift = values("output_scale", fq.output_scale), fq.output_low
    if inner:
        return _without_round(
            composer, st, low, high, scale * out_scale, shift * out_scale + out_shift
        )
    low, high = bounds_behind_round(low, high, scale, shift)
    st = st.note("F3: the clip moves behind the rounding")
    integral = bool((out_scale == 1).all() and (out_shift == torch.round(out_shift)).all())
    if last and integral and composer.dst_dtype in (torch.uint8, torch.int8):
        shift, low, high = shift + out_shift, low + out_shift, high + out_shift
        limits = torch.iinfo(composer.dst_dtype)
        if bool((low <= limits.min).all() and (high >= limits.max).all()):
            st = st.note("F4: the conversion to dst clips and rounds")
            return _into_scale(composer, st, scale, shift, last=True)
        st = _into_scale(composer, st, scale, shift, last=False)
        st = st.note("F4, F7: the conversion to dst rounds, but the clip is narrower and stays")
        return composer.clip(st, low, high)
    st = composer.round(_into_scale(composer, st, scale, shift, last=False))
    st = composer.clip(st, low, high)
    return composer.linear(st, out_scale, out_shift, last)


def _into_scale(composer: Composer, st: State, scale: Tensor, shift: Tensor, last: bool) -> State:
    """F1: as the first of all post-ops its multiplication goes into the op's own scales."""
    stored = last and composer.v3 and collapse(scale).numel() == 1
    if st.ops or stored or not composer.folds(st, scale):
        return composer.linear(st, scale, shift, last)
    st = composer.scale(st.note("F1: the first post-op"), scale, last=False)
    return composer.shift(st, shift, last) if bool((shift != 0).any()) else st


def _snap(zero_point: Tensor, levels: int) -> Tensor:
    """Round zero points that are integers to the precision of float32 bounds, as for T1."""
    nearest = torch.round(zero_point)
    return torch.where((zero_point - nearest).abs() <= levels * 2.0**-24, nearest, zero_point)


def _without_round(
    composer: Composer, st: State, low: Tensor, high: Tensor, scale: Tensor, shift: Tensor
) -> State:
    """F5: ``x * scale + shift``, clipped; a shift below 1e-5 of the range is dropped."""
    first, second = low * scale + shift, high * scale + shift
    low, high = collapse(torch.minimum(first, second)), collapse(torch.maximum(first, second))
    st = st.note("F5: the rounding before a sum and another FakeQuantize is dropped")
    shift = collapse(shift)
    per_tensor = low.numel() == high.numel() == shift.numel() == 1
    if per_tensor and 0 < abs(shift) < 1e-5 * (high - low):
        shift, st = torch.zeros_like(shift), st.note("F5: so is its negligible shift")
    return composer.clip(composer.linear(st, scale, shift, last=False), low, high)


def _why_not_composed(fq: FakeQuantize) -> str:
    if bool((fq.input_low >= fq.input_high).any()):
        return "input_low must be below input_high; otherwise only the definition holds (T5)"
    if bool((fq.input_low > 0).any() or (fq.input_high < 0).any()):
        return "its range must contain zero, or its zero point is outside the levels (T6)"
    return ""


def bounds_behind_round(
    low: Tensor, high: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Bounds of a clip that moves from before ``round(x * scale + shift)`` to behind it (F3).

    ``low2 = round(low * scale + shift)``, the same for ``high``, and swapped where ``scale < 0``:
    rounding is monotone, so the result is the same. Bounds per channel that differ only because
    the scales do become one.
    """
    first, second = torch.round(low * scale + shift), torch.round(high * scale + shift)
    return collapse(torch.minimum(first, second)), collapse(torch.maximum(first, second))

# SPDX-License-Identifier: Apache-2.0
"""`compose`: float steps after an int8 op become its scales, bias, post-ops and destination.

A graph has them as separate steps: ``conv -> multiply -> relu -> FakeQuantize``. oneDNN's ops take
them over: a multiplication may become an output scale, a weight scale, the destination's scale, the
scale of a sum or an eltwise, or a post-op of its own. The rules F1 to F7 (FakeQuantize;
``quantization.py``) and C0 to C16 (everything else; ``composer.py``) say which; every decision is
reported with its rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from torchq.attributes.arguments import (
    INT32,
    Values,
    check_choice,
    check_type,
    to_dtype,
    to_float32,
    to_int,
)
from torchq.attributes.attr import Attr
from torchq.attributes.options import Convention
from torchq.attributes.post_op import Binary, Eltwise, PostOp, PReLU, Sum
from torchq.attributes.post_ops import PostOps
from torchq.nn.fake_quantize import FakeQuantize
from torchq.onednn.composed_quantization import append_fake_quantize, bounds_behind_round
from torchq.onednn.composer import Composer, Refused, State

__all__ = [
    "Binary",
    "Clip",
    "Composed",
    "Eltwise",
    "FakeQuantize",
    "Linear",
    "PReLU",
    "Round",
    "Scale",
    "Shift",
    "Step",
    "Sum",
    "bounds_behind_round",
    "compose",
]


@dataclass(frozen=True, eq=False)
class Scale:
    """``x * values``; here and below one value, or one per channel."""

    values: Values


@dataclass(frozen=True, eq=False)
class Shift:
    """``x + values``."""

    values: Values


@dataclass(frozen=True, eq=False)
class Linear:
    """``x * scale + shift``."""

    scale: Values
    shift: Values


@dataclass(frozen=True, eq=False)
class Clip:
    """``min(max(x, low), high)`` with ``low <= high``."""

    low: Values
    high: Values


@dataclass(frozen=True)
class Round:
    """``round(x)``, half to even."""


Step: TypeAlias = (
    Scale | Shift | Linear | Clip | Round | Eltwise | Binary | PReLU | Sum | FakeQuantize
)


@dataclass(frozen=True, eq=False)
class Composed:
    """Arguments for the op, and the steps that are left over.

    Attributes:
        scales: float32 ``[1]`` or ``[N]``: output scales (v1), or scales of the weights (v3).
        src_scale: the source's (v3); already part of ``scales`` in v1.
        bias: to give to the op instead of its own; None for none.
        post_ops: to give to the op.
        dst_dtype: as asked for; float32 if steps are left over.
        dst_scale: the destination's (v3), 1 if it has none.
        dst_zero_point: the destination's (v3).
        rest: the first step that was refused, and all after it. They stay float.
        refusal: why, or "".
        reasons: one line per decision, with its rule.
        convention: "v1" or "v3".
        int8: whether there are scales.
    """

    scales: Tensor
    src_scale: float
    bias: Tensor | None
    post_ops: PostOps
    dst_dtype: torch.dtype
    dst_scale: float
    dst_zero_point: int
    rest: tuple[Step, ...]
    refusal: str
    reasons: tuple[str, ...]
    convention: Convention
    int8: bool

    def attr(self, groups: int = 1) -> Attr:
        """Return the Attr of the op, without the source's zero point.

        Args:
            groups: of a convolution: weight scales then have mask 3.
        """
        attr = Attr().set_post_ops(self.post_ops)
        if not self.int8:
            return attr
        several = self.scales.numel() > 1
        if self.convention == "v1":
            return attr.set_output_scales(2 if several else 0, self.scales)
        attr.set_scales("src", 0, self.src_scale)
        attr.set_scales("weights", (3 if groups > 1 else 1) if several else 0, self.scales)
        if self.dst_scale != 1:
            attr.set_scales("dst", 0, self.dst_scale)
        if self.dst_zero_point:
            attr.set_zero_points("dst", 0, self.dst_zero_point)
        return attr


def compose(
    steps: Sequence[Step],
    channels: int,
    *,
    convention: Convention = "v3",
    int8: bool = True,
    dst_dtype: torch.dtype = torch.float32,
    src_scale: float = 1.0,
    weight_scale: Values = 1.0,
    bias: Tensor | None = None,
    bias_is_constant: bool = True,
    takes_bias: bool = True,
    allow_binary: bool = True,
    drop_inner_round: bool = False,
) -> Composed:
    """Let a convolution, linear, matmul or deconvolution take over the steps that follow it.

    Step by step in order, until one is refused: that one and the rest stay float, and the result
    says why. A refused step changes nothing. With ``acc`` the exact integer sum, the result means::

        v1   dst = post_ops(scales[n] * (acc + bias[n]))
        v3   dst = post_ops(src_scale * scales[n] * acc + bias[n]) / dst_scale + dst_zero_point

    Args:
        steps: what happens to the op's float result. ``Sum`` has its source at run time.
        channels: of the result, N.
        convention: "v3" (scales of src, weights and dst), or "v1" (output scales; oneDNN 1 and 2).
        int8: whether the source is quantized. A float op has no scales, only post-ops.
        dst_dtype: of what comes after all steps; uint8 and int8 are rounded and saturated to.
        src_scale: of the source, the dequantization's part that is per tensor.
        weight_scale: one value or N; dequantizes with ``src_scale`` (C13).
        bias: ``[N]``, as the op gets it: float32 (v3: real units; v1: accumulator units), or int32
            (accumulator units).
        bias_is_constant: whether ``bias`` may be replaced by other values (C12, C15).
        takes_bias: whether the op has a bias at all (C15).
        allow_binary: whether per-channel binary post-ops may be used (C6, C9).
        drop_inner_round: opt-in, F5: an error of at most half an output step per dropped round.

    Raises:
        ValueError: an argument is out of its domain; the number of values fits neither 1 nor N.
        TypeError: a step is of another class.
    """
    check_choice("torchq.compose: convention", convention, ("v1", "v3"))
    channels = to_int("torchq.compose: channels", channels, 0, INT32.max)
    if to_float32("torchq.compose: src_scale", src_scale) <= 0:
        raise ValueError(f"torchq.compose: src_scale must be > 0, got {src_scale}. Pass a scale.")
    if bias is not None:
        check_type("torchq.compose: bias", bias, Tensor, "Pass a tensor, or None.")
    composer = Composer(
        channels,
        convention == "v3",
        int8,
        to_dtype("torchq.compose: dst_dtype", dst_dtype),
        takes_bias,
        bias_is_constant,
        allow_binary,
    )
    start = _start(composer, src_scale, weight_scale, bias)
    st, done, refusal = _taken(composer, start, steps, drop_inner_round)
    reasons = (*st.notes, f"{refusal}; it and what follows stay float") if refusal else st.notes
    return Composed(
        scales=st.scale.float(),
        src_scale=src_scale if composer.v3 else 1.0,
        bias=st.bias if st.bias is None or st.bias is bias else st.bias.float().contiguous(),
        post_ops=_post_ops(st.ops),
        dst_dtype=torch.float32 if refusal else composer.dst_dtype,
        dst_scale=st.dst_scale,
        dst_zero_point=st.dst_zero_point,
        rest=tuple(steps[done:]),
        refusal=refusal,
        reasons=reasons,
        convention=convention,
        int8=int8,
    )


def _taken(
    composer: Composer, st: State, steps: Sequence[Step], drop_inner_round: bool
) -> tuple[State, int, str]:
    """Return the state behind the steps that are taken over, their number, and why no more are."""
    for index, step in enumerate(steps):
        label = f"step {index} ({type(step).__name__})"
        last = index == len(steps) - 1
        inner = drop_inner_round and _before_sum_and_another(steps[index + 1 :])
        try:
            after = _append(composer, st, step, label, last, inner)
            _post_ops(after.ops)
        except Refused as reason:
            return st, index, f"{label}: {reason}"
        new = [f"{label}: {note}" for note in after.notes[len(st.notes) :]]
        st = replace(after, notes=(*st.notes, *new))
    return st, len(steps), ""


def _start(
    composer: Composer, src_scale: float, weight_scale: Values, bias: Tensor | None
) -> State:
    scale = _values("weight_scale", weight_scale, composer.channels)
    if not composer.int8 and (src_scale != 1 or bool((scale != 1).any())):
        raise ValueError(
            f"torchq.compose: src_scale and weight_scale must be 1 for a float op, got {src_scale} "
            f"and {scale.tolist()[:4]}. Append a Scale step, or pass int8=True."
        )
    if bias is not None and tuple(bias.shape) != (composer.channels,):
        raise ValueError(
            f"torchq.compose: bias must have shape [{composer.channels}], one value per channel, "
            f"got {list(bias.shape)}. Check the channels."
        )
    if bias is not None and bias.dtype not in (torch.float32, torch.int32):
        raise ValueError(
            f"torchq.compose: bias must be float32 or int32, got {bias.dtype}. Convert it."
        )
    notes = ("C13: the dequantization scales come first",) if bool((scale != 1).any()) else ()
    return State(scale if composer.v3 else scale * src_scale, bias, notes=notes)


def _append(
    composer: Composer, st: State, step: Step, label: str, last: bool, inner: bool
) -> State:
    def values(name: str, given: Values) -> Tensor:
        return _values(f"{label}: {name}", given, composer.channels)

    if isinstance(step, Scale):
        return composer.scale(st, values("values", step.values), last)
    if isinstance(step, Shift):
        return composer.shift(st, values("values", step.values), last)
    if isinstance(step, Linear):
        scale, shift = values("scale", step.scale), values("shift", step.shift)
        return composer.linear(st, scale, shift, last)
    if isinstance(step, Clip):
        low, high = values("low", step.low), values("high", step.high)
        if bool((low > high).any()):
            raise Refused("its bounds must have low <= high")
        return composer.clip(st, low, high)
    if isinstance(step, Round):
        return composer.round(st)
    if isinstance(step, Eltwise):
        return composer.eltwise(st, step, last)
    if isinstance(step, PReLU):
        if step.values is None:
            raise Refused("the weight of prelu must be constant")
        return composer.prelu(st, values("values", step.values))
    if isinstance(step, Binary):
        return composer.binary(st, step, last)
    if isinstance(step, Sum):
        return composer.sum(st, step)
    if isinstance(step, FakeQuantize):
        return append_fake_quantize(composer, st, step, values, last, inner)
    raise TypeError(
        f"torchq.compose: {label} must be one of {Step}, got {type(step).__name__}. "
        "Describe it by these, or end the steps before it."
    )


def _before_sum_and_another(following: Sequence[Step]) -> bool:
    """Return whether a sum follows, and behind it another FakeQuantize."""
    sums = [i for i, step in enumerate(following) if isinstance(step, Sum)]
    return bool(sums) and any(isinstance(s, FakeQuantize) for s in following[sums[0] :])


def _post_ops(ops: Sequence[PostOp]) -> PostOps:
    """Round to float32.

    Raises:
        Refused: what PostOps does not take, such as a constant beyond float32.
    """
    chain = PostOps()
    try:
        for op in ops:
            if isinstance(op, Sum):
                chain.append_sum(op.scale, op.zero_point, op.dtype)
            elif isinstance(op, Eltwise):
                chain.append_eltwise(op.alg, op.alpha, op.beta, op.scale)
            elif isinstance(op, Binary):
                chain.append_binary(op.alg, op.values, op.mask, op.dtype)
            elif isinstance(op, PReLU):
                chain.append_prelu(op.values, op.mask)
    except ValueError as error:
        raise Refused(str(error)) from None
    return chain


def _values(where: str, given: Values, channels: int) -> Tensor:
    """One value or one per channel, finite, in float64."""
    values = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().reshape(-1)
    if values.numel() not in (1, channels) or not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"torchq.compose: {where} must be 1 or {channels} finite values, got "
            f"{values.numel()}: {values.tolist()[:4]}. Give one per channel or one in all."
        )
    return values

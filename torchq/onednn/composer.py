# SPDX-License-Identifier: Apache-2.0
"""Basic operations appended to an op: scale, shift, clip, round and the rest (rules C0 to C16).

Every method takes a :class:`State` and returns the next one, or raises :class:`Refused` and leaves
the given one as it was: nothing is ever half done. Numbers are float64 until the end.

    v1   x = scale[n] * (acc + bias[n]), post-ops, dst = x        (output scales; oneDNN 1 and 2)
    v3   x = scale[n] * acc + bias[n],   post-ops, dst = x / dst_scale + dst_zero_point
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from torchq.attributes.options import BinaryAlg
from torchq.attributes.post_op import Binary, Eltwise, PostOp, PReLU, Sum

FLT_MAX = torch.finfo(torch.float32).max
PER_CHANNEL = 2


class Refused(Exception):
    """A step that the op cannot take over; the text says why."""


@dataclass(frozen=True, eq=False)
class State:
    """Computation of the op so far.

    Attributes:
        scale: float64 ``[1]`` or ``[N]``: the output scale (v1), or the weight's (v3).
        bias: float ``[N]``, int32 ``[N]``, or None.
        ops: the post-ops; values of binary and prelu are float64.
        dst_scale: v3 only; a divisor.
        dst_zero_point: v3 only.
        notes: which rule did what, in order.
    """

    scale: Tensor
    bias: Tensor | None = None
    ops: tuple[PostOp, ...] = ()
    dst_scale: float = 1.0
    dst_zero_point: int = 0
    notes: tuple[str, ...] = ()

    def note(self, text: str) -> State:
        """With one more note."""
        return replace(self, notes=(*self.notes, text))

    def push(self, *ops: PostOp, note: str) -> State:
        """With ``ops`` appended."""
        return replace(self, ops=(*self.ops, *ops)).note(note)

    def swap(self, *ops: PostOp) -> State:
        """With the last ``len(ops)`` post-ops replaced."""
        return replace(self, ops=(*self.ops[: len(self.ops) - len(ops)], *ops))


@dataclass(frozen=True)
class Composer:
    """The rules, for one kind of op; see :func:`torchq.compose` for the fields."""

    channels: int
    v3: bool
    int8: bool
    dst_dtype: torch.dtype
    takes_bias: bool
    bias_is_constant: bool
    allow_binary: bool

    def scale(self, st: State, values: Tensor, last: bool) -> State:
        """``x * values``: rules C0 to C6, C11, C12, C14 and C16."""
        s = collapse(values)
        if bool((s == 1).all()):
            return st.note("C0: multiplying by 1 does nothing")
        if last and self._stores(1 / s):
            dst_scale = st.dst_scale / float(s)
            return replace(st, dst_scale=dst_scale).note("C11: the last scale is dst's: 1/s")
        return (
            self._scale_accumulator(st, s)
            or self._scale_last(st, s)
            or self._push_scale(st, s, self._why_not_folded(st, s))
        )

    def shift(self, st: State, values: Tensor, last: bool = False) -> State:
        """``x + values``: rules C7 and C15, and dst's zero point (C11)."""
        if bool((values == 0).all()):
            return st.note("C7: adding 0 does nothing")
        b = collapse(values)
        if last and self._is_zero_point(st, b):
            return replace(st, dst_zero_point=round(float(b))).note("C11: dst's zero point")
        if values.numel() > 1 and not st.ops and self._bias_can_change(st):
            # v1 adds the bias before the output scale.
            per_bias = (
                torch.ones(1, dtype=torch.float64, device="cpu") if self._bias_is_real else st.scale
            )
            if bool((per_bias != 0).all()):
                old = (
                    torch.zeros(1, dtype=torch.float64, device="cpu")
                    if st.bias is None
                    else st.bias
                )
                bias = old.double() + values / per_bias
                return replace(st, bias=bias.expand(self.channels)).note("C15: added to the bias")
        if b.numel() == 1:
            return st.push(Eltwise("linear", 1.0, float(b)), note="C7: eltwise_linear(1, b)")
        return st.push(self._binary("add", b), note="C7: binary_add per channel")

    def linear(self, st: State, scale: Tensor, shift: Tensor, last: bool) -> State:
        """``x * scale + shift``: rule C8."""
        s, b = collapse(scale), collapse(shift)
        whole = last and self._stores(1 / s) and self._is_zero_point(st, b)
        if s.numel() > 1 or b.numel() > 1 or bool(b == 0) or whole:
            no_shift = bool((b == 0).all())
            st = self.scale(st, s, last and (whole or no_shift))
            return st if no_shift else self.shift(st, shift, last)
        op = Eltwise("linear", float(s), float(b))
        return st.push(op, note="C8: one eltwise_linear(s, b)")

    def clip(self, st: State, low: Tensor, high: Tensor) -> State:
        """``min(max(x, low), high)``: rule C9."""
        low, high = collapse(low), collapse(high)
        if low.numel() == high.numel() == 1:
            return st.push(Eltwise("clip", float(low), float(high)), note="C9: eltwise_clip")
        if low.numel() == 1:
            ops = (Eltwise("clip", float(low), FLT_MAX), self._binary("min", high))
            return st.push(*ops, note="C9: eltwise_clip(low, FLT_MAX) and binary_min")
        if high.numel() == 1:
            ops = (Eltwise("clip", -FLT_MAX, float(high)), self._binary("max", low))
            return st.push(*ops, note="C9: eltwise_clip(-FLT_MAX, high) and binary_max")
        both = (self._binary("max", low), self._binary("min", high))
        return st.push(*both, note="C9: binary_max(low), then binary_min(high)")

    def round(self, st: State) -> State:
        """``rne(x)``: rule C10."""
        return st.push(Eltwise("round"), note="C10: eltwise_round, half to even")

    def eltwise(self, st: State, op: Eltwise, last: bool) -> State:
        """``scale * f(x)``; v3 has no such scale (C14): it becomes a multiplication."""
        if op.alg in ("linear", "clip", "round"):
            st = self._plain(st, op)
        elif not self.v3:
            return st.push(op, note=f"{op.name} as it is")
        else:
            st = st.push(replace(op, scale=1.0), note=f"{op.name} as it is")
        return self.scale(st, _number(op.scale), last) if op.scale != 1 else st

    def prelu(self, st: State, weight: Tensor) -> State:
        """``x >= 0 ? x : x * weight``."""
        w = collapse(weight)
        return st.push(PReLU(0 if w.numel() == 1 else PER_CHANNEL, w), note="prelu as it is")

    def binary(self, st: State, op: Binary, last: bool) -> State:
        """Constant adds and multiplies are shifts and scales; all else stays as it is."""
        if _is_constant(op, "add") or _is_constant(op, "mul"):
            assert op.values is not None  # see _is_constant
            append = self.shift if op.alg == "add" else self.scale
            return append(st, op.values.double(), last)
        if not self.allow_binary and op.mask:
            raise Refused(f"binary post-ops are not allowed, {op} is one")
        return st.push(op, note=f"{op.name} as it is")

    def sum(self, st: State, op: Sum) -> State:
        """``x + scale * (old - zero_point)``."""
        return st.push(op, note="sum as it is")

    def folds(self, st: State, s: Tensor) -> bool:
        """Return whether a multiplication would go into the scales of the accumulator."""
        return self._scale_accumulator(st, collapse(s)) is not None

    @property
    def _bias_is_real(self) -> bool:
        """Return whether a float bias is in real units: v3, and float ops."""
        return self.v3 or not self.int8

    def _plain(self, st: State, op: Eltwise) -> State:
        alpha, beta = _number(op.alpha), _number(op.beta)
        if op.alg == "linear":
            return self.linear(st, alpha, beta, last=False)
        return self.clip(st, alpha, beta) if op.alg == "clip" else self.round(st)

    def _scale_accumulator(self, st: State, s: Tensor) -> State | None:
        """C1, C2, C3, and C16 where a lone binary_add is all that stands between."""
        scaled = self._scale_base(st, s)
        if scaled is None or len(st.ops) > 1:
            return None
        where = "weight scales" if self.v3 else "output scales"
        if not st.ops:
            return scaled.note(f"C1: folded into the {where}")
        op, positive = st.ops[0], bool((s > 0).all())
        if positive and (isinstance(op, PReLU) or (isinstance(op, Eltwise) and op.alg == "relu")):
            return scaled.note(f"C2: commutes with {op.name}, folded into the {where}")
        if isinstance(op, Sum) and s.numel() == 1:
            summed = scaled.swap(replace(op, scale=op.scale * float(s)))
            return summed.note(f"C3: folded into the sum's scale and the {where}")
        if _is_constant(op, "add"):
            added = scaled.swap(_times(op, s))
            return added.note(f"C16: folded into binary_add and the {where}")
        return None

    def _scale_base(self, st: State, s: Tensor) -> State | None:
        """Multiply the accumulator's scale by ``s``; in v3 a float bias, too (C12, C16)."""
        scale = st.scale * s
        single = scale.float()
        if not self.int8 or not bool(torch.isfinite(single).all()):
            return None
        if not self.v3:
            return replace(st, scale=scale)
        if self._why_not_folded(st, s):
            return None
        bias = st.bias
        if bias is not None and bias.is_floating_point():
            bias = bias.double() * s
        return replace(st, scale=scale, bias=bias)

    def _why_not_folded(self, st: State, s: Tensor) -> str:
        if not self.int8:
            return " (no int8 source, so no scales)"
        if self.v3 and bool(((st.scale * s).float() <= 0).any()):
            return " (a weight scale must be > 0)"
        real = st.bias is not None and st.bias.is_floating_point()
        if self.v3 and real and not self.bias_is_constant:
            return " (C12: the bias comes after the weight scales and is not constant)"
        return ""

    def _scale_last(self, st: State, s: Tensor) -> State | None:
        """C16, C5 and C4: into the constants of the last post-ops."""
        if not st.ops:
            return None
        op, before = st.ops[-1], st.ops[-2] if len(st.ops) > 1 else None
        one = s.numel() == 1
        if _is_constant(op, "mul"):
            return st.swap(_times(op, s)).note("C16: folded into binary_mul")
        if _is_constant(op, "add") and before is not None:
            scaled = _times_constant(before, s)
            if scaled is not None:
                both = st.swap(scaled, _times(op, s))
                return both.note(f"C16: folded into {before.name} and binary_add")
        if isinstance(op, Eltwise) and op.alg == "linear" and one:
            return st.swap(_times_linear(op, float(s))).note("C16: folded into eltwise_linear")
        if self.v3 or not one:
            return None
        if isinstance(op, Eltwise):
            scaled = replace(op, scale=op.scale * float(s))
            return st.swap(scaled).note(f"C5: folded into the scale of {op.name}")
        if isinstance(op, Sum) and isinstance(before, Eltwise):
            first = replace(before, scale=before.scale * float(s))
            second = replace(op, scale=op.scale * float(s))
            return st.swap(first, second).note(f"C4: folded into {before.name} and the sum")
        return None

    def _push_scale(self, st: State, s: Tensor, why: str) -> State:
        if s.numel() == 1:
            return st.push(Eltwise("linear", float(s), 0.0), note=f"C6: eltwise_linear(s, 0){why}")
        return st.push(self._binary("mul", s), note=f"C6: binary_mul per channel{why}")

    def _binary(self, alg: BinaryAlg, values: Tensor) -> Binary:
        if not self.allow_binary:
            raise Refused(f"it needs binary_{alg} per channel, and binary post-ops are not allowed")
        return Binary(alg, PER_CHANNEL, torch.float32, values)

    def _bias_can_change(self, st: State) -> bool:
        if not self.takes_bias:
            return False
        if st.bias is None:
            return True
        return self.bias_is_constant and st.bias.is_floating_point()

    def _stores(self, dst_scale: Tensor) -> bool:
        """Return whether the value is a legal scale of dst."""
        if not (self.v3 and self.int8 and self.dst_dtype != torch.float32):
            return False
        single = dst_scale.float()
        return dst_scale.numel() == 1 and bool((single > 0) & torch.isfinite(single))

    def _is_zero_point(self, st: State, b: Tensor) -> bool:
        """Return whether ``b`` is a zero point of dst, to the precision of float32 bounds."""
        eight = self.dst_dtype in (torch.uint8, torch.int8)
        if not (self.v3 and self.int8 and eight) or b.numel() > 1 or st.dst_zero_point:
            return False
        limits, nearest = torch.iinfo(self.dst_dtype), torch.round(b)
        inside = (nearest >= limits.min) & (nearest <= limits.max)
        return bool(inside & ((b - nearest).abs() <= 2.0**-16))


def collapse(values: Tensor) -> Tensor:
    """One value if all agree: per tensor iff all channels agree."""
    return values[:1] if bool((values == values[:1]).all()) else values


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device="cpu")


def _is_constant(op: PostOp, alg: str) -> TypeGuard[Binary]:
    """Return whether it is this binary with values that this file may change."""
    if not isinstance(op, Binary) or op.alg != alg or op.mask not in (0, PER_CHANNEL):
        return False
    return op.values is not None and op.dtype == torch.float32


def _times(op: Binary, s: Tensor) -> Binary:
    assert op.values is not None  # see _is_constant
    values = op.values.double() * s
    return replace(op, mask=0 if values.numel() == 1 else PER_CHANNEL, values=values)


def _times_constant(op: PostOp, s: Tensor) -> PostOp | None:
    if _is_constant(op, "mul"):
        return _times(op, s)
    if isinstance(op, Eltwise) and op.alg == "linear" and s.numel() == 1:
        return _times_linear(op, float(s))
    return None


def _times_linear(op: Eltwise, s: float) -> Eltwise:
    return Eltwise("linear", op.alpha * op.scale * s, op.beta * op.scale * s)

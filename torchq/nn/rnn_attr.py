# SPDX-License-Identifier: Apache-2.0
"""oneDNN's attributes and weights of recurrent networks, in torch's terms.

oneDNN's scales multiply: ``q = rne(x * scale + shift)`` of data, ``q = rne(w * scale)`` of weights.
Its weights are ldigo (layers, directions, inputs, gates, outputs), those of a projection ldio, its
biases ldgo. Gates are i f c o of an LSTM as in torch, but u r o of a GRU, where torch has r z n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchq.attributes.attr import Attr, check_attr_type
from torchq.quantization.qparams import QParams

_SETTERS = "set_rnn_data_qparams, set_rnn_weights_qparams, set_rnn_weights_projection_qparams"


class RnnParams(NamedTuple):
    """Parameters that an Attr sets; None where it sets none.

    Attributes:
        data: of source and states.
        weights: float32 ``[gates, units]`` in torch's order, or ``[1]``; factors.
        projection: float32 ``[1, units]``, or ``[1]``.
    """

    data: QParams | None = None
    weights: Tensor | None = None
    projection: Tensor | None = None


def gate_order(gates: int) -> list[int]:
    """Positions in oneDNN's order of torch's gates; the same list maps back."""
    return [1, 0, 2] if gates == 3 else list(range(gates))


def read_attr(
    op: str, attr: Attr | None, gates: int, hidden: int, projection: int, dtype: torch.dtype
) -> RnnParams:
    """Return the parameters that ``attr`` holds.

    Args:
        op: for messages.
        attr: as oneDNN has it; None says nothing.
        gates: of the cell.
        hidden: units.
        projection: units of the projection, 0 without one.
        dtype: of the data, uint8 or int8.

    Raises:
        TypeError: it is no Attr.
        ValueError: it sets something else, lacks values, or has another number of them; the shift
            is no integer of ``dtype``; a projection's scales come without a projection.
        NotImplementedError: another mask than 0 or 24, of projections 0 or 8.
    """
    if attr is None:
        return RnnParams()
    check_attr_type(op, attr)
    others = [part for part in str(attr).split(" ") if part and not part.startswith("rnn_")]
    if others:
        raise ValueError(
            f"torchq.{op}: attr must set only rnn_data, rnn_weights and rnn_weights_projection, "
            f"got {' '.join(others)}. Use {_SETTERS}."
        )
    if attr.mask("weights_projection", "rnn_weights_projection") is not None and not projection:
        raise ValueError(
            f"torchq.{op}: attr must set rnn_weights_projection only for an LSTM with a "
            "projection, got one without. Leave it out."
        )
    weights = _factors(op, attr, "weights", "rnn_weights", (1, 1, 1, gates, hidden), 24)
    if weights is not None and weights.numel() > 1:
        weights = weights.reshape(gates, hidden)[gate_order(gates)]
    kind = "rnn_weights_projection"
    projected = _factors(op, attr, "weights_projection", kind, (1, 1, 1, projection), 8)
    return RnnParams(
        _data(op, attr, dtype),
        weights,
        projected if projected is None or projected.numel() == 1 else projected.reshape(1, -1),
    )


def _factors(
    op: str, attr: Attr, arg: str, kind: str, dims: Sequence[int], most: int
) -> Tensor | None:
    """Return the values of one kind in one dimension; None where it is not set."""
    mask = attr.mask(arg, kind)
    if mask is None:
        return None
    if mask not in (0, most):
        raise NotImplementedError(
            f"torchq.{op}: the mask of {kind} must be 0 (one scale) or {most} (one per output), "
            f"got {mask}. The nearest supported form is mask {most}, with values repeated."
        )
    return attr.resolve(arg, dims, kind).reshape(-1)


def _data(op: str, attr: Attr, dtype: torch.dtype) -> QParams | None:
    if attr.rnn_data_qparams is None:
        return None
    scale, shift = attr.rnn_data_qparams
    if dtype not in (torch.uint8, torch.int8):
        raise ValueError(
            f"torchq.{op}: data_dtype must be torch.uint8 or torch.int8, got {dtype}. oneDNN's u8 "
            "and s8."
        )
    limits = torch.iinfo(dtype)
    if shift != int(shift) or not limits.min <= shift <= limits.max:
        raise ValueError(
            f"torchq.{op}: the shift of rnn_data must be an integer in [{limits.min}, "
            f"{limits.max}] for {dtype}, got {shift:g}. Use 128 for values of both signs in u8, 0 "
            "in s8."
        )
    return QParams.per_tensor(1 / scale, int(shift), dtype)


def attr_of(
    data: Sequence[tuple[float, int]], src: Tensor, state: Tensor, projection: Tensor | None
) -> Attr:
    """Return the Attr of a layer, for reports and to make another one alike.

    Args:
        data: scale and zero point of the source, the hidden state, and what a projection or the new
            gate of a vanilla GRU reads; none of a dynamic layer. If all are the same they are
            ``rnn_data``, else scales and zero points of ``src``, ``src1`` and ``src2``.
        src: scales of the weights, ``[1]`` or ``[directions, gates, units]``, torch's gates.
        state: the same; only weights that share their scales have values in the Attr.
        projection: ``[1]`` or ``[directions, 1, units]``; None without one.
    """
    attr = Attr()
    if len(set(data)) == 1:
        attr.set_rnn_data_qparams(_factor(data[0][0]), data[0][1])
    else:
        for arg, (scale, zero_point) in zip(("src", "src1", "src2"), data, strict=False):
            attr.set_scales(arg, 0, scale).set_zero_points(arg, 0, zero_point)
    shared = src.shape == state.shape and torch.equal(src, state)
    mask = 24 if max(src.numel(), state.numel()) > 1 else 0
    attr.set_rnn_weights_qparams(mask, _values(src) if shared else None)
    if projection is not None:
        mask = 8 if projection.numel() > 1 else 0
        attr.set_rnn_weights_projection_qparams(mask, _values(projection))
    return attr


def _factor(scale: float) -> float:
    """Return the shortest number whose inverse is this scale in float32: 60, not 59.999996."""
    for digits in range(1, 9):
        factor = float(f"{1 / scale:.{digits}g}")
        if float(torch.tensor(1 / factor, dtype=torch.float32, device="cpu")) == scale:
            return factor
    return 1 / scale


def _values(scale: Tensor) -> Tensor | None:
    """Factors in oneDNN's order, where all directions have the same."""
    if scale.dim() == 3 and not bool((scale == scale[:1]).all()):
        return None
    factors = 1 / scale.double()
    if factors.dim() == 3:
        factors = factors[0, gate_order(factors.shape[1])]
    return factors.reshape(-1)

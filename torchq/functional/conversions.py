# SPDX-License-Identifier: Apache-2.0
"""Conversions between float32, int32, int8 and uint8."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.attributes.arguments import FLOATS, check_type, to_int
from torchq.attributes.attr import Attr
from torchq.attributes.post_op import Sum
from torchq.functional.arguments import Floats, Zeros, to_scale, to_zero_point
from torchq.functional.folding import check_attr
from torchq.runtime.library import dtype_code

_SCALED = [(kind, arg) for kind in ("scales", "zero_points") for arg in ("src", "dst")]
_V1 = ("output_scales", "dst")


def quantize(
    src: Tensor, scale: Floats, zero_point: Zeros = 0, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """``clamp(rne(fma(src, 1 / scale, zero_point)))``; NaN becomes the zero point.

    Args:
        src: float32, any shape and strides.
        scale: real units per step; a number or a float32 tensor that broadcasts against ``src``.
        zero_point: a number or an int32 tensor that broadcasts against ``src``.
        dtype: torch.uint8, torch.int8 or torch.int32.

    Raises:
        TypeError: ``src`` or ``scale`` is not float32, or ``zero_point`` not an integer.
        ValueError: a scale is not finite and positive, a zero point is out of range, or the
            shapes do not broadcast.
        RuntimeError: ``src`` requires grad in grad mode.

    Example:
        >>> torchq.functional.quantize(torch.tensor([-1.0, 0.0, 0.26]), 0.1, 128)
        tensor([118, 128, 131], dtype=torch.uint8)
    """
    result: Tensor = torch.ops.torchq.quantize(
        src,
        to_scale("torchq.quantize: scale", scale),
        to_zero_point("torchq.quantize: zero_point", zero_point),
        dtype_code(dtype, "quantize"),
    )
    return result


def dequantize(src: Tensor, scale: Floats, zero_point: Zeros = 0) -> Tensor:
    """``scale * float(src - zero_point)`` as float32; arguments as in :func:`quantize`.

    Example:
        >>> torchq.functional.dequantize(torch.tensor([118, 128], dtype=torch.uint8), 0.5, 128)
        tensor([-5.,  0.])
    """
    result: Tensor = torch.ops.torchq.dequantize(
        src,
        to_scale("torchq.dequantize: scale", scale),
        to_zero_point("torchq.dequantize: zero_point", zero_point),
    )
    return result


def requantize(
    src: Tensor,
    src_scale: Floats,
    src_zero_point: Zeros,
    dst_scale: Floats,
    dst_zero_point: Zeros,
    dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """``clamp(rne(fma(float(src - src_zero_point), src_scale / dst_scale, dst_zero_point)))``."""
    result: Tensor = torch.ops.torchq.requantize(
        src,
        to_scale("torchq.requantize: src_scale", src_scale),
        to_zero_point("torchq.requantize: src_zero_point", src_zero_point),
        to_scale("torchq.requantize: dst_scale", dst_scale),
        to_zero_point("torchq.requantize: dst_zero_point", dst_zero_point),
        dtype_code(dtype, "requantize"),
    )
    return result


def reorder(
    src: Tensor,
    dtype: torch.dtype,
    attr: Attr | None = None,
    old: Tensor | None = None,
    seed: int = 0,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Convert between float32, int32, int8 and uint8 with any mask on either side.

    With scales (v3): ``dst = (src - src_zero_point) * src_scale / dst_scale + dst_zero_point``;
    the ratio of the scales is rounded once. With ``output_scales`` (v1): ``dst = (src -
    src_zero_point) * output_scale + dst_zero_point``. Integer destinations round half to even and
    saturate. Without scales, integers convert exactly. A float32 tensor has no zero point. Masks
    index the dims of ``src``.

    One post-op is possible, a sum: ``x = (src - src_zero_point) * src_scale + sum_scale *
    (old - sum_zero_point)``, each product and the sum rounded to float32, then ``dst =
    clamp(rne(fma(x, 1 / dst_scale, dst_zero_point)))``. ``old`` has the shape of ``src`` and the
    sum's dtype, by default that of dst. Output scales stand for ``src_scale``; ``dst_scale`` is
    then 1.

    Another ``rounding`` of an integer dst gives a contiguous result, rounding the same ``y =
    fma(x, 1 / dst_scale, dst_zero_point)``: ``environment`` as the calling thread's
    ``fesetround`` says; ``stochastic`` up where ``y - floor(y) > u``, with ``u`` the upper 24 bits
    of splitmix64's value number ``i`` from ``seed``, for element ``i`` in row-major order.

    ``memory_format`` is the layout of dst, such as ``torch.channels_last``; by default the strides
    of ``src`` are kept. Weights get the layout of the kernels, and their compensation, from
    :mod:`torchq.packing`.

    Raises:
        TypeError: ``src`` is no tensor.
        ValueError: ``attr`` sets another argument than src and dst, or the number of values of a
            mask is not the product of the selected dims of ``src``.
        NotImplementedError: ``attr`` has other post-ops.
    """
    attr = Attr() if attr is None else attr
    check_attr("reorder", attr, dict.fromkeys([*_SCALED, _V1, ("rounding", "dst")]))
    check_type("torchq.reorder: src", src, Tensor, "Pass a tensor.")
    check_type(
        "torchq.reorder: memory_format",
        memory_format,
        torch.memory_format,
        "Pass torch.contiguous_format, torch.channels_last or torch.channels_last_3d.",
    )
    seed = to_int("torchq.reorder: seed", seed, -(2**63), 2**63 - 1)
    for arg, kind in (("src", src.dtype), ("dst", dtype)):
        attr.check(arg, src.shape)
        zero = attr.resolve(arg, src.shape, "zero_points")
        if kind in FLOATS and bool(zero.any()):
            raise ValueError(
                f"torchq.reorder: {arg}_zero_point must lie in [0, 0] for a tensor of float32, got "
                f"{int(zero[zero != 0][0])}. Leave it out."
            )
    plain = attr.rounding("dst") == "nearest" and not attr.post_ops and old is None
    dst = _converted(src, dtype, attr) if plain else _reorder_real(src, dtype, attr, old, seed)
    if memory_format == torch.preserve_format:
        return dst
    return dst.contiguous(memory_format=memory_format)


def _converted(src: Tensor, dtype: torch.dtype, attr: Attr) -> Tensor:
    """In one step."""
    if attr.mask("dst", "output_scales") is not None:
        return _multiplied(src, dtype, attr, attr.resolve("dst", src.shape, "zero_points"))
    if any(attr.mask(arg, kind) is not None for kind, arg in _SCALED):
        return requantize(
            src,
            attr.resolve("src", src.shape),
            attr.resolve("src", src.shape, "zero_points"),
            attr.resolve("dst", src.shape),
            attr.resolve("dst", src.shape, "zero_points"),
            dtype,
        )
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    result: Tensor = torch.ops.torchq.reorder(src, none, dtype_code(dtype, "reorder"))
    return result


def _multiplied(
    src: Tensor, dtype: torch.dtype, attr: Attr, dst_zero_point: Tensor | None
) -> Tensor:
    """By the output scales."""
    result: Tensor = torch.ops.torchq.reorder(
        src,
        attr.resolve("dst", src.shape, "output_scales"),
        dtype_code(dtype, "reorder"),
        attr.resolve("src", src.shape, "zero_points"),
        dst_zero_point,
    )
    return result


def _reorder_real(
    src: Tensor, dtype: torch.dtype, attr: Attr, old: Tensor | None, seed: int
) -> Tensor:
    """With a sum, or another rounding than to nearest: by way of real units where need be."""
    rounding = attr.rounding("dst")
    scales = [attr.resolve(arg, src.shape) for arg in ("src", "dst")]
    zeros = [attr.resolve(arg, src.shape, "zero_points") for arg in ("src", "dst")]
    code = dtype_code(dtype, "reorder")
    one, none = (
        torch.ones(1, dtype=torch.float32, device="cpu"),
        torch.zeros(1, dtype=torch.int32, device="cpu"),
    )
    if attr.mask("dst", "output_scales") is not None:  # of any sign, unlike scales
        src, zeros[0] = _multiplied(src, torch.float32, attr, None), none
    if attr.post_ops or old is not None:
        step, values = _checked_sum(src, dtype, attr, old)
        masked = any(x.numel() > 1 for x in (*scales, *zeros))
        scaled = dtype in FLOATS and attr.mask("dst") is not None  # the sum is in real units
        if rounding == "nearest" and not masked and not scaled:
            return _sum([src, values], step, scales, zeros, code)
        real = requantize(src, scales[0], zeros[0], one, none, torch.float32)
        src = _sum([real, values], step, [one, one], [none, none], dtype_code(torch.float32))
        scales[0], zeros[0] = one, none
    if rounding == "nearest":
        return requantize(src, scales[0], zeros[0], scales[1], zeros[1], dtype)
    result: Tensor = torch.ops.torchq.reorder_rounded(
        src,
        torch.stack(torch.broadcast_tensors(*scales)),
        torch.stack(torch.broadcast_tensors(*zeros)),
        code,
        rounding,
        seed,
    )
    return result


def _checked_sum(
    src: Tensor, dtype: torch.dtype, attr: Attr, old: Tensor | None
) -> tuple[Sum, Tensor]:
    """Return the only post-op, and what it adds."""
    chain = list(attr.post_ops)
    if len(chain) != 1 or not isinstance(chain[0], Sum):
        raise NotImplementedError(
            f"torchq.reorder: post_ops must be empty or one sum, got '{attr.post_ops}'. Apply an "
            "eltwise with torchq.functional.eltwise."
        )
    wanted = chain[0].dtype or dtype
    if old is None or old.dtype != wanted or old.shape != src.shape:
        got = "None" if old is None else f"{old.dtype} {list(old.shape)}"
        raise ValueError(
            f"torchq.reorder: old must be {wanted} {list(src.shape)} for {chain[0]}, got {got}. "
            "Pass the values that the sum adds to."
        )
    return chain[0], old


def _sum(
    srcs: list[Tensor], step: Sum, scales: list[Tensor], zeros: list[Tensor], code: int
) -> Tensor:
    """``scales`` and ``zeros``: one of src and one of dst."""
    factors = [
        scales[0].reshape(1),
        torch.tensor([step.scale], dtype=torch.float32, device="cpu"),
        scales[1].reshape(1),
    ]
    offset = torch.tensor([step.zero_point], dtype=torch.int32, device="cpu")
    offsets = [zeros[0].reshape(1), offset, zeros[1].reshape(1)]
    result: Tensor = torch.ops.torchq.sum(srcs, torch.cat(factors), torch.cat(offsets), code)
    return result


def quantize_weight(weight: Tensor, scale: Floats, bits: int = 8) -> Tensor:
    """``clamp(rne(weight / scale))`` as int8 in -127..127 (8 bits) or -63..63 (7 bits).

    Args:
        weight: float32, any strides; the result is dense in the same order.
        scale: a number, or a tensor that broadcasts against ``weight``: ``[OC, 1, ...]`` for one
            scale per output channel, ``[G, OC/G, 1, ...]`` per group and output channel (mask 3).
        bits: 8, or 7 for weights that cannot saturate on any CPU.
    """
    if bits not in (7, 8):
        raise ValueError(
            f"torchq.quantize_weight: bits must be 7 or 8, got {bits}. Use 8 unless the weights "
            "also run elsewhere."
        )
    limit = 2 ** (bits - 1) - 1
    with torch.no_grad():
        return quantize(weight.detach(), scale, 0, torch.int8).clamp_(-limit, limit)

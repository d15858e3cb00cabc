# SPDX-License-Identifier: Apache-2.0
"""Arguments that several functions take: numbers, windows, 8-bit sources, packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchq.attributes.arguments import (
    FLOATS,
    INT32,
    check_type,
    computed_dtype,
    to_float32,
    to_int,
)
from torchq.attributes.attr import Attr, check_attr_type
from torchq.attributes.post_op import Sum
from torchq.functional.folding import check_attr, fold
from torchq.functional.packing import PackedWeight
from torchq.runtime.library import dtype_code

Ints: TypeAlias = int | Sequence[int]
Floats: TypeAlias = float | Tensor
Zeros: TypeAlias = int | Tensor


def to_scale(where: str, value: Floats) -> Tensor:
    """Return a float32 tensor; tensors pass as they are, and the op checks them."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(to_float32(where, value), dtype=torch.float32, device="cpu")


def to_zero_point(where: str, value: Zeros) -> Tensor:
    """Return an int32 tensor; tensors pass as they are, and the op checks them."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(to_int(where, value, INT32.min, INT32.max), dtype=torch.int32, device="cpu")


def check_8bit(op: str, name: str, src: Tensor) -> None:
    """Raise TypeError unless ``src`` is uint8 or int8."""
    check_type(f"torchq.{op}: {name}", src, Tensor, "Pass a uint8 or int8 tensor.")
    if src.dtype not in (torch.uint8, torch.int8):
        raise TypeError(
            f"torchq.{op}: {name} must be torch.uint8 or torch.int8, got {src.dtype}. "
            "Quantize it first: torchq.functional.quantize(x, scale, zero_point)."
        )


def check_any(op: str, name: str, src: Tensor) -> None:
    """Raise TypeError unless ``src`` is a tensor, of a dtype that the op checks."""
    remedy = "Pass a uint8, int8, int32 or float32 tensor; a number with torch.tensor(number)."
    check_type(f"torchq.{op}: {name}", src, Tensor, remedy)


def integer(op: str, name: str, value: int) -> int:
    """Return the value; the dispatcher would cut the fraction of a tensor or numpy number.

    A size may be symbolic, or an integer tensor while ``torch.jit.trace`` runs.

    Raises:
        TypeError: it is no integer.
    """
    sized = isinstance(value, Tensor) and value.dtype == torch.int64 and value.numel() == 1
    if isinstance(value, torch.SymInt) or sized:
        return int(value)
    return to_int(f"torchq.{op}: {name}", value, INT32.min, INT32.max)


def real_params(
    op: str, attr: Attr, args: Sequence[str], scaled: Sequence[str] | None = None
) -> tuple[Tensor, Tensor]:
    """Scales and zero points of ``args`` (sources, then dst), mask 0, as ops in real units take.

    ``scaled`` are those that may have a scale; default all.
    """
    allowed = [("zero_points", arg) for arg in args]
    allowed += [("scales", arg) for arg in (args if scaled is None else scaled)]
    check_attr(op, attr, dict.fromkeys(allowed, (0,)))
    scales = torch.cat([attr.resolve(arg, (1,)) for arg in args])
    return scales, torch.cat([attr.resolve(arg, (1,), "zero_points") for arg in args])


def real_arguments(
    op: str,
    attr: Attr | None,
    args: Sequence[str],
    dst_dtype: torch.dtype,
    srcs: Sequence[Tensor],
    dims: Callable[[], Sequence[int]],
) -> tuple[Tensor, Tensor, int, str, list[Tensor] | None]:
    """Return the last arguments of ops in real units, from scales to the operands of post-ops.

    ``args`` as in :func:`real_params`; ``dims`` gives those of dst, which masks index.
    """
    attr = Attr() if attr is None else attr
    scales, zero_points = real_params(op, attr, args)
    chain = attr.post_ops
    chain.check_supported(op, dst_dtype)
    sources = chain.sources(op, dims, srcs, every=True)
    return scales, zero_points, dtype_code(dst_dtype, op), str(chain), sources or None


def from_float(
    op: str, real: Tensor, attr: Attr, dst_dtype: torch.dtype, srcs: Sequence[Tensor]
) -> Tensor:
    """Return a float32 result in another dtype, behind the post-ops of ``attr``.

    ``attr`` has scales and zero points of dst only, mask 0.
    """
    given = ["dst"], dst_dtype, srcs
    scales, zero_points, *rest = real_arguments(op, attr, *given, lambda: real.shape)
    if dst_dtype in FLOATS and attr == Attr():
        return real.to(dst_dtype)
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    none = torch.zeros(1, dtype=torch.int32, device="cpu")
    params = torch.cat([one, scales]), torch.cat([none, zero_points])
    result: Tensor = torch.ops.torchq.eltwise(real, *params, *rest)
    return result


def check_channels(op: str, src: Tensor, dims: int, channels: int, weight: str) -> None:
    """Raise ValueError unless ``src`` is ``(N, channels, spatial...)`` with ``dims`` spatial ones.

    ``weight`` says what asks for the channels.
    """
    if src.dim() != dims + 2:
        raise ValueError(
            f"torchq.{op}: src must be (N, {channels}, spatial...) with {dims + 2} dims for "
            f"{weight}, got {list(src.shape)}. Add a batch dimension with unsqueeze(0) if it is "
            "missing."
        )
    if src.shape[1] != channels:
        last = f" Its last dimension has {channels}: permute it to the second." * (
            src.shape[-1] == channels
        )
        raise ValueError(
            f"torchq.{op}: src must have {channels} channels for {weight}, got {src.shape[1]} in "
            f"{list(src.shape)}, (N, C, spatial...). Check C of both, and groups.{last}"
        )


def spatial_dims(op: str, src: Tensor) -> int:
    """Return the number of spatial dimensions of ``(N, C, spatial...)``, 1 to 3."""
    if not 3 <= src.dim() <= 5:
        raise ValueError(
            f"torchq.{op}: src must be (N, C, spatial...) with one to three spatial dimensions, "
            f"got {list(src.shape)}. Add a batch dimension with unsqueeze(0) if it is missing."
        )
    return src.dim() - 2


def spread(op: str, name: str, value: Ints, dims: int) -> list[int]:
    """One number for all spatial dimensions, or one for each."""
    values = list(value) if isinstance(value, Sequence) else [value] * dims
    if len(values) != dims or not all(isinstance(v, int) for v in values):
        raise ValueError(
            f"torchq.{op}: {name} must be one integer or {dims}, one per spatial dimension, got "
            f"{value!r}. Check the number of dimensions of src."
        )
    return values


def conv_geometry(
    op: str,
    kernel: Sequence[int],
    stride: Ints,
    padding: Ints,
    padding_end: Ints | None,
    dilation: Ints,
    *channels: int,
) -> list[int]:
    """Return the ``geometry`` of pools, or with ``groups, in_channels`` behind, of convolutions."""
    dims = len(kernel)
    begin = spread(op, "padding", padding, dims)
    end = begin if padding_end is None else spread(op, "padding_end", padding_end, dims)
    step, gap = spread(op, "stride", stride, dims), spread(op, "dilation", dilation, dims)
    return [*kernel, *step, *begin, *end, *gap, *channels]


def conv_transpose_geometry(
    op: str,
    kernel: Sequence[int],
    stride: Ints,
    padding: Ints,
    padding_end: Ints | None,
    dilation: Ints,
    output_padding: Ints,
    groups: int,
    in_channels: int,
) -> list[int]:
    """Return the ``geometry`` argument of the op."""
    extra = spread(op, "output_padding", output_padding, len(kernel))
    window = conv_geometry(op, kernel, stride, padding, padding_end, dilation)
    return [*window, *extra, groups, in_channels]


def check_source(op: str, src: Tensor, attr: Attr) -> None:
    """Raise TypeError unless ``src`` is uint8 or int8; ValueError for float with output scales."""
    check_attr_type(op, attr)
    check_type(f"torchq.{op}: src", src, Tensor, "Pass a uint8 or int8 tensor.")
    if src.is_floating_point() and attr.mask("dst", "output_scales") is not None:
        raise ValueError(
            f"torchq.{op}: src must be torch.uint8 or torch.int8 with output_scales, which are "
            f"only for integer computation, got {src.dtype} with {attr}. Quantize src, or drop "
            "the output scales and multiply the result."
        )
    check_8bit(op, "src", src)


def post_op_sources(
    op: str,
    attr: Attr,
    dst_dtype: torch.dtype,
    srcs: Sequence[Tensor],
    dst_sizes: Callable[[], Sequence[int]],
) -> list[Tensor]:
    """Return the sources of the chain, in its order; those of sums are checked for their dtype."""
    sources = attr.post_ops.sources(op, dst_sizes, srcs)
    for index, (post_op, src) in enumerate(zip(attr.post_ops.source_owners, sources, strict=True)):
        expected = (post_op.dtype or dst_dtype) if isinstance(post_op, Sum) else src.dtype
        if computed_dtype(src.dtype) != computed_dtype(expected):
            raise TypeError(
                f"torchq.{op}: post_op_srcs[{index}] must be {expected}, the dtype of its sum (by "
                f"default that of dst), got {src.dtype}. Give append_sum its dtype."
            )
    return sources


def packed_layer(
    op: str,
    kernel: Callable[..., Tensor],
    src: Tensor,
    packed: PackedWeight,
    geometry: int | list[int],
    bias: Tensor | None,
    attr: Attr,
    dst_dtype: torch.dtype,
    post_op_srcs: Sequence[Tensor],
    dst_sizes: Callable[[], Sequence[int]],
) -> Tensor:
    """Fold the scales and call ``kernel``, the op of a layer with a packed weight."""
    folded = fold(op, attr, packed, bias, dst_dtype)
    return kernel(
        src,
        packed.weight,
        packed.compensation,
        packed.pair_bound,
        folded.multiplier,
        folded.offset,
        folded.acc_bias,
        folded.src_zero_point,
        geometry,
        dtype_code(dst_dtype),
        folded.post_ops,
        folded.post_op_params,
        post_op_sources(op, attr, dst_dtype, post_op_srcs, dst_sizes),
        folded.weight_zero_point,
    )

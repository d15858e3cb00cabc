# SPDX-License-Identifier: Apache-2.0
"""Unary functions of 8-bit values by a table of 256 results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.quantization.qparams import QParams
from torchq.runtime.library import dtype_code


def lookup_table(function: Callable[[Tensor], Tensor], src: QParams, dst: QParams) -> Tensor:
    """Return the 256 destination values of a unary function, for :func:`lookup`.

    ``table[i] = quantize(function(dequantize(q_i)))`` for the source values in ascending order;
    exact to the rounding of ``function`` in float32. ``src`` and ``dst`` are per tensor.
    """
    for name, params in (("src", src), ("dst", dst)):
        remedy = "Make it with QParams.per_tensor or choose_qparams."
        check_type(f"torchq.lookup_table: {name}", params, QParams, remedy)
        if params.is_per_channel:
            raise NotImplementedError(
                f"torchq.lookup_table: {name} must be per tensor, got {params.scale.numel()} "
                "scales. Use QParams.per_tensor."
            )
    low = torch.iinfo(src.dtype).min
    q = torch.arange(low, low + 256, dtype=torch.int32, device="cpu")
    with torch.no_grad():
        real = function(src.scale * (q - src.zero_point).to(torch.float32))
        if real.shape != q.shape:
            raise ValueError(
                f"torchq.lookup_table: function must map each of 256 values to one, got "
                f"{list(real.shape)} for [256]. Pass an elementwise function."
            )
        code = dtype_code(dst.dtype, "quantize")
        table: Tensor = torch.ops.torchq.quantize(real, dst.scale, dst.zero_point, code)
        return table


def lookup(src: Tensor, table: Tensor) -> Tensor:
    """Any unary function on 8 bits: ``table[src]`` for uint8, ``table[src + 128]`` for int8."""
    result: Tensor = torch.ops.torchq.lookup(src, table)
    return result

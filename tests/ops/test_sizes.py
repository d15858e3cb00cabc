# SPDX-License-Identifier: Apache-2.0
"""Tensors without values: their other sizes may be anything, and their product leaves 64 bits.

What is computed for such sizes ends at once, or raises an error with the op's name. Calls that
crashed once are in tests/fuzz/fuzz_ops.py, which runs them in processes of their own.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import torchq

ops = torch.ops.torchq
FLOAT, U8, S8, INT = torch.float32, torch.uint8, torch.int8, torch.int32
NONE, ZERO = torch.empty(0), torch.zeros(1, dtype=INT)


def of(*shape: int, dtype: torch.dtype = U8) -> Tensor:
    """Ones, or nothing of this shape."""
    return torch.ones(shape, dtype=dtype)


def packed_conv(*shape: int) -> list[Tensor]:
    return list(ops.pack_conv(of(*shape, dtype=S8), 1, [1, 1]))


def lstm(steps: int, batch: int, inputs: int = 4) -> list[Any]:
    """Arguments of an LSTM of 16 units with weights of 1."""
    weights = [
        [*ops.pack_linear(of(64, k, dtype=S8))[:2], of(64, dtype=FLOAT)] for k in (inputs, 16)
    ]
    weights = [[packed, sums.view(-1), scale] for packed, sums, scale in weights]
    bounds = [torch.full((4,), 2, dtype=INT)] * 2
    return [
        *(of(steps, batch, inputs), None, None, None, *weights[0], *weights[1]),
        *(of(64, dtype=FLOAT), None, None, None, None, bounds, of(2, dtype=FLOAT)),
        *(torch.zeros(3, dtype=INT), [0, 1, inputs, 16, 0, 0, 255], 6, 0, 6),
    ]


def matmul(m: int, k: int, n: int, multiplier: Tensor = NONE, dtype: int = 3, **more: Any) -> Any:
    chain = "sum:1:0:f32" if multiplier.dim() == 2 else ""
    params = of(1, dtype=FLOAT) if chain else NONE
    zero = more.get("zero_point")
    return ops.matmul(
        *(of(m, k), of(k, n, dtype=S8), multiplier, NONE, None, None, zero),
        *(dtype, chain, params, None),
    )


def gemm(columns: int) -> Tensor:
    b = of(0, columns, dtype=S8)
    return ops.gemm(of(0, 0), b, None, False, False, 1.0, 0.0, 1, 1, "F", ZERO)


def conv(src: Tensor, outputs: int, kernel: int, stride: int, padding: int, **more: Any) -> Tensor:
    channels = src.shape[1]
    values = torch.arange(1.0, outputs + 1)
    geometry = [kernel] * 2 + [stride] * 2 + [padding] * 4 + [1, 1, 1, channels]
    weight = packed_conv(outputs, channels, kernel, kernel)
    return ops.conv(src, *weight, values, values, None, None, geometry, 6, "", NONE, None, **more)


EMPTY = {
    "rnn": (lambda: ops.rnn(*lstm(2**61 - 1, 0))[0], (2**61 - 1, 0, 16)),
    "gemm": (lambda: gemm(2**30), (0, 2**30)),
    "matmul": (lambda: matmul(0, 0, 2**30, zero_point=ZERO + 1), (0, 2**30)),
    "matmul_of_groups": (lambda: matmul(0, 0, 0, of(2**62, 0, dtype=FLOAT), 6), (0, 0)),
    "linear_with_zero_points": (
        lambda: ops.linear(
            *(of(2**40, 0), *ops.pack_linear(of(0, 0, dtype=S8)), NONE, NONE, None, None, 0, 3),
            *("", NONE, None, torch.empty(0, dtype=INT)),
        ),
        (2**40, 0),
    ),
    "dynamic_conv": (
        lambda: ops.dynamic_conv(
            *(of(2**40, 4, 5, 0, dtype=FLOAT), *packed_conv(0, 4, 3, 3), NONE, None),
            [3, 3, 1, 1, 2, 2, 2, 2, 1, 1, 1, 4],
        ),
        (2**40, 0, 7, 2),
    ),
    "binary_of_a_broadcast_operand": (
        lambda: ops.eltwise(
            *(of(0, 2**40), of(2, dtype=FLOAT), torch.zeros(2, dtype=INT), 6, "binary_add:2"),
            [torch.zeros(1, 1).expand(1, 2**40)],
        ),
        (0, 2**40),
    ),
    "unpack_linear": (
        lambda: ops.unpack_linear(of(2**26, 1, 0, 16, 4, dtype=S8), 2**30, 0),
        (2**30, 0),
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_result_is_returned_at_once(name: str):
    call, shape = EMPTY[name]
    assert call().shape == shape


TOO_LARGE = "sizes must multiply to less than 2^63, in bytes too, got ["
WIDE = torch.empty(0, 1, 1, dtype=U8).expand(0, 2**62, 2**62)
REFUSED = {
    "embedding_bag": (
        lambda: ops.embedding_bag(
            *(of(9, 32), of(2**61 - 1, 0, dtype=torch.int64), None, None, 24, 8, "sum", False, None)
        ),
        f"torchq.embedding_bag: {TOO_LARGE}2305843009213693951, 24]. Use smaller tensors.",
    ),
    "gemm": (lambda: gemm(2**62), "torchq.matmul: dst must have at most 2147483583 columns or "),
    "matmul": (lambda: matmul(2**62, 0, 2**62), f"torchq.matmul: {TOO_LARGE}"),
    "rnn": (lambda: ops.rnn(*lstm(2**62, 1, 0)), f"torchq.rnn: {TOO_LARGE}4611686018427387904, 1"),
    "lookup": (lambda: ops.lookup(WIDE, of(256)), f"torchq.lookup: {TOO_LARGE}"),
    "conv": (
        lambda: ops.conv(
            *(of(0, 1, 1, 1).expand(0, 4, 2**31, 2**31), *packed_conv(8, 4, 1, 1)),
            *(of(8, dtype=FLOAT), of(8, dtype=FLOAT), None, None),
            *([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 4], 0, "", NONE, None),
        ),
        f"torchq.conv: {TOO_LARGE}",
    ),
    "rotary": (
        lambda: ops.rotary(*[torch.empty(0, 1, 2).expand(0, 2**62, 2)] * 3),
        f"torchq.rotary: {TOO_LARGE}",
    ),
    "compress_rows": (
        lambda: ops.compress_rows(torch.empty(0, 1, 1).expand(0, 2**62, 1)),
        f"torchq.compress_rows: {TOO_LARGE}",
    ),
    "rows of compress_rows": (
        lambda: ops.compress_rows(torch.empty(0, 1).expand(0, 2**62)),
        "torchq.compress_rows: src must have rows of at most 2147483583 values, got [0, 46116860",
    ),
    "compressed_attention": (
        lambda: ops.compressed_attention(
            torch.empty(0, 1, 1, 2).expand(0, 1, 2**62, 2), *[of(0, 1, 1, 6, dtype=S8)] * 2,
            None, 1.0,
        ),
        f"torchq.compressed_attention: {TOO_LARGE}",
    ),
    "keys of compressed_attention": (
        lambda: ops.compressed_attention(
            torch.empty(1, 1, 1, 2), *[of(1, 1, 1, 6, dtype=S8).expand(1, 1, 2**40, 6)] * 2,
            None, 1.0,
        ),
        "torchq.compressed_attention: query and value must have at most 2147483583 columns, key "
        "as many rows, got [1, 1, 1, 2], [1, 1, 1099511627776, 6] and",
    ),
    "layer_norm": (
        lambda: ops.layer_norm(
            *(WIDE, 2, None, None, 1e-5, of(2, dtype=FLOAT), torch.zeros(2, dtype=INT), 0, "")
        ),
        f"torchq.layer_norm: {TOO_LARGE}",
    ),
    "concat": (
        lambda: ops.concat(
            [of(2**62, 0)] * 2, of(3, dtype=FLOAT), torch.zeros(3, dtype=INT), 0, 0
        ),
        "torchq.concat: sizes in dimension 0 must add to less than 2^63, got 4611686018427387904 "
        "more than fit",
    ),
    "fold": (
        lambda: ops.fold_output_scales(of(1, dtype=FLOAT), None, 2**62, 0, "", []),
        "torchq.fold_output_scales: channels must lie in [0, 2147483583], got 4611686018427387904.",
    ),
    "pack_linear": (
        lambda: ops.pack_linear(of(2**62, 0, dtype=S8)),
        "torchq.pack_linear: weight must have at most 2147483583 outputs, got weight [46116860",
    ),
    "pack_conv": (
        lambda: ops.pack_conv(of(0, 1, 1, dtype=S8).expand(0, 2**62, 4), 1, [1]),
        "torchq.pack_conv: weight sums 4 x 4611686018427387904 products per output",
    ),
    "pack_conv_transpose": (
        lambda: ops.pack_conv_transpose(of(0, 2**62, 1, dtype=S8), 1, [1], [1]),
        "torchq.pack_conv_transpose: weight must have at most 2147483583 outputs, got weight [0, ",
    ),
    "attention": (
        lambda: ops.dynamic_attention(
            of(1, 4, dtype=FLOAT), of(1, 4, dtype=FLOAT), torch.zeros(1, 1).expand(1, 2**31),
            None, False, 1.0,
        ),
        "torchq.dynamic_attention: value must have at most 2147483583 columns, got [1, 2147483648]",
    ),
    "grouped_linear": (
        lambda: ops.grouped_linear(
            *(of(1, 0, dtype=FLOAT), torch.ones(1, dtype=INT), of(2**27, 1, 0, 16, 4, dtype=S8)),
            *(torch.zeros(1, 1, dtype=INT), NONE, NONE, None, 0, 2**31),
        ),
        "torchq.grouped_linear: out_features must lie in [0, 2147483583], got 2147483648. It is",
    ),
    "pool": (
        lambda: ops.max_pool(of(1, 1, 2**20, 0), [1, 2, 1, 1, 0, 1, 0, 1, 1, 1], False),
        "meets only padding on src [1, 1, 1048576, 0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_cannot_be_are_an_error_of_the_op(name: str):
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


def test_any_image_without_values_convolves_to_the_offset(isa: str):
    expected = torch.arange(1.0, 9).view(8, 1, 1).expand(1, 8, 256, 256)
    for points in (None, torch.ones(8, dtype=INT)):
        found = conv(of(1, 0, 2**31, 2**31), 8, 1, 2**23, 0, weight_zero_point=points)
        assert torch.equal(found, expected)
    with torchq.use_isa(isa):  # without rows, there is padding alone
        found = conv(of(2, 3, 0, 2**31), 8, 3, 2**23, 2, weight_zero_point=ZERO.expand(8).clone())
    assert torch.equal(found, expected[:, :, :1, :1].expand(found.shape))


@pytest.mark.parametrize("channels", [4, 24])
def test_a_depthwise_source_without_rows_is_all_padding(isa: str, channels: int):
    weight = ops.pack_conv(of(channels, 1, 3, 3, dtype=S8), channels, [1, 1])
    values = torch.arange(1.0, channels + 1)
    found = ops.conv(
        *(of(2, channels, 0, 2**31), *weight, values, values, None, ZERO + 7),
        *([3, 3, 2**23, 2**23, 2, 2, 2, 2, 1, 1, channels, channels], 6, "", NONE, None),
    )
    assert torch.equal(found, values.view(-1, 1, 1).expand(found.shape))


def test_samples_without_values_are_those_of_one(isa: str):
    weight, scale, bias = packed_conv(8, 0, 3, 3), torch.ones(8), torch.arange(8.0)
    geometry = [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    found = ops.dynamic_conv(of(50, 0, 5, 5, dtype=FLOAT), *weight, scale, bias, geometry)
    assert torch.equal(found, bias.view(8, 1, 1).expand(50, 8, 5, 5))


@pytest.mark.parametrize("place", [19, 20, 21])
@pytest.mark.parametrize("code", [15, 5, 7, -1, 2**40])
def test_every_code_of_a_dtype_ends(place: int, code: int):
    args = lstm(3, 2)
    args[place] = code
    with pytest.raises(NotImplementedError, match=rf"torchq.rnn: dst_dtype must be .* got {code}"):
        ops.rnn(*args)

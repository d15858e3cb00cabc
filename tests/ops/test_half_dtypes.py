# SPDX-License-Identifier: Apache-2.0
"""bfloat16 and float16: read as the float32 of the same values, given as rounded float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchq
import torchq.functional as TF

HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("half", HALVES, ids=["bf16", "f16"])


def rounded(x: Tensor, half: torch.dtype) -> Tensor:
    """Round float32 to nearest, ties to even: to bfloat16 by its bits, to float16 by numpy."""
    if half == torch.float16:
        with np.errstate(over="ignore"):
            return torch.from_numpy(x.numpy().astype(np.float16))
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return kept.to(torch.int16).view(half).reshape(x.shape)


def same(a: Tensor, b: Tensor) -> None:
    """All bits, but any NaN is like another."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan())
    a, b = (x.contiguous().nan_to_num(1.5, torch.inf, -torch.inf) for x in (a, b))
    bits = torch.int16 if a.dtype in HALVES else a.dtype
    assert torch.equal(a.view(bits), b.view(bits))


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# ops


def _bytes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
    return torch.randint(low, high, shape).to(dtype)


ATTR = torchq.Attr().set_scales("src", 0, 0.02).set_zero_points("src", 0, 117)
ATTR.set_scales("weights", 0, 0.0037)
_U8, _W = _bytes(5, 36), _bytes(10, 36, dtype=torch.int8)
_IMAGES, _KERNELS = _bytes(2, 4, 7, 6), _bytes(8, 4, 3, 3, dtype=torch.int8)
_HEADS = [_bytes(2, 3, 6, 8) for _ in range(3)]
_SCALED = torchq.Attr().set_scales("src0", 0, 0.1).set_scales("src1", 0, 0.3)

GIVES: dict[str, Callable[..., Tensor]] = {
    "linear": lambda d, b: TF.linear(_U8, _W, b, ATTR, d),
    "conv2d": lambda d, b: TF.conv2d(_IMAGES, _KERNELS, b[:8], attr=ATTR, dst_dtype=d),
    "conv_transpose2d": lambda d, b: TF.conv_transpose2d(
        _IMAGES, _KERNELS.transpose(0, 1).contiguous(), b[:8], attr=ATTR, dst_dtype=d
    ),
    "matmul": lambda d, b: TF.matmul(_U8, _W.t(), b, ATTR, d),
}  # fmt: skip


@each_half
@pytest.mark.parametrize("name", GIVES)
def test_destination_and_bias(isa: str, name: str, half: torch.dtype) -> None:
    """Bits of the float32 op on every tier, rounded; a bias of either dtype is its float32 twin."""
    bias = torch.randn(10).to(half)
    with torchq.use_isa(isa):
        expected = GIVES[name](torch.float32, bias.float())
        same(GIVES[name](half, bias), rounded(expected, half))


def test_one_of_each(isa: str) -> None:
    """The destination may be of another dtype than the bias and the operand of a sum."""
    bias, old = torch.randn(10).half(), torch.randn(5, 10).bfloat16()
    attr = torchq.Attr().set_scales("src", 0, 0.02).set_post_ops(torchq.PostOps().append_sum())
    with torchq.use_isa(isa):
        expected = TF.linear(_U8, _W, bias.float(), attr, torch.float32, [old.float()])
        got = TF.linear(_U8, _W, bias, attr, torch.float16, [old])
        same(got, rounded(expected, torch.float16))


@pytest.mark.parametrize("scale", [1e-9, 3e-8, 0.0037, 2.0, 1e30])
def test_the_range_of_float16(isa: str, scale: float) -> None:
    """Numbers too small for a normal one, and those beyond the largest, which become infinite."""
    attr = torchq.Attr().set_scales("weights", 0, scale)
    with torchq.use_isa(isa):
        expected = TF.linear(_U8, _W, None, attr, torch.float32)
        got = TF.linear(_U8, _W, None, attr, torch.float16)
    same(got, rounded(expected, torch.float16))
    assert bool(got.isinf().any()) == (float(expected.abs().max()) >= 65520)


@each_half
@pytest.mark.parametrize("per_row", ["per_row", "per_tensor"])
def test_dynamic_linear(isa: str, per_row: Any, half: torch.dtype) -> None:
    src, bias = (torch.randn(7, 36) * 3).to(half), torch.randn(10).to(half)
    with torchq.use_isa(isa):
        expected = TF.dynamic_linear(src.float(), _W, 0.01, bias.float(), per_row)
        same(TF.dynamic_linear(src, _W, 0.01, bias, per_row), rounded(expected, half))


@each_half
def test_dynamic_linear_beside_float64(half: torch.dtype) -> None:
    """Independent of the float32 op: int8 products summed in float64."""
    src = torch.randn(6, 36).to(half)
    low, high = src.double().amin(1).clamp(max=0), src.double().amax(1).clamp(min=0)
    scale = ((high - low) / 255).float().double()
    zero = torch.round(-low * 255 / (high - low)).clamp(0, 255)
    q = torch.round(src.double() / scale[:, None] + zero[:, None]).clamp(0, 255)
    real = (q - zero[:, None]) @ _W.double().t() * 0.01 * scale[:, None]
    got = TF.dynamic_linear(src, _W, 0.01)
    assert got.dtype == half
    assert float((got.double() - real).abs().max() / real.abs().max()) < 2**-8


@each_half
def test_weight_only(isa: str, half: torch.dtype) -> None:
    """8-bit and 4-bit weights, post-ops, and destinations of another dtype than the source."""
    src, bias = (torch.randn(7, 64) * 3).to(half), torch.randn(10).to(half)
    weight = TF.quantize_weight_int4(torch.randn(10, 64), 32)
    packed, by_column = torchq.packing.pack_linear_int4(*weight), _bytes(64, 10, dtype=torch.int8)
    attr = torchq.Attr().set_post_ops(torchq.PostOps().append_eltwise("tanh"))
    calls: list[Callable[[Tensor, Tensor, torch.dtype], Tensor]] = [
        lambda x, b, dtype: TF.dynamic_linear_int4(x, packed, b, attr, dtype),
        lambda x, b, dtype: TF.matmul(x, by_column, b, attr, dtype),
    ]
    with torchq.use_isa(isa):
        for call in calls:
            expected = call(src.float(), bias.float(), torch.float32)
            for dtype in HALVES:
                same(call(src, bias, dtype), rounded(expected, dtype))
            same(call(src, bias, torch.float32), expected)


@each_half
def test_quantize_and_dequantize(isa: str, half: torch.dtype) -> None:
    """All finite values of the dtype, and zeros, infinities and NaN."""
    src = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    with torchq.use_isa(isa):
        for scale in (0.05, 1e20, 1e-20):
            same(TF.quantize(src, scale, 100), TF.quantize(src.float(), scale, 100))
        q = _bytes(1000)
        out = torch.ops.torchq.requantize(
            q, torch.tensor(0.3), torch.tensor(7, dtype=torch.int32), torch.tensor(1.0),
            torch.tensor(0, dtype=torch.int32), {torch.bfloat16: 15, torch.float16: 5}[half],
        )  # fmt: skip
        real = (q.double() - 7).mul(float(torch.tensor(0.3))).float()
        same(out, rounded(real, half))
        attr = torchq.Attr().set_scales("src", 0, 0.3).set_zero_points("src", 0, 7)
        same(TF.reorder(q, half, attr), out)
        for dtype in (torch.uint8, torch.int8, torch.int32):
            same(TF.reorder(src, dtype), TF.reorder(src.float(), dtype))


def test_every_float32_that_float16_rounds(isa: str) -> None:
    """Halfway between two of its numbers, and the float32 numbers on either side."""
    numbers = torch.arange(2**15).to(torch.int16).view(torch.float16).float()
    numbers = numbers[numbers.isfinite()]
    between = torch.cat([(numbers[1:] + numbers[:-1]) / 2, torch.tensor([65520.0])])
    around = [between, torch.nextafter(between, numbers[0]), torch.nextafter(between, between * 2)]
    src = torch.cat([sign * x for x in (*around, torch.tensor([torch.nan])) for sign in (1, -1)])
    with torchq.use_isa(isa):
        same(TF.reorder(src, torch.float16), rounded(src, torch.float16))


@each_half
def test_dynamic_attention(isa: str, half: torch.dtype) -> None:
    heads, mask = [torch.randn(2, 3, 6, 8).to(half) for _ in range(3)], torch.randn(6, 6).to(half)
    with torchq.use_isa(isa):
        expected = TF.dynamic_attention(*(head.float() for head in heads), mask.float())
        same(TF.dynamic_attention(*heads, mask), rounded(expected, half))


@each_half
def test_compressed_attention(isa: str, half: torch.dtype) -> None:
    """Rows are those of the same values in float32; the result is rounded to query's dtype."""
    query, key, value = (torch.randn(2, 3, 6, 8).to(half) for _ in range(3))
    mask = torch.randn(6, 6).to(half)
    with torchq.use_isa(isa):
        rows = [TF.compress_rows(x) for x in (key, value)]
        for x, of in zip(rows, (key, value), strict=True):
            same(x, TF.compress_rows(of.float()))
        expected = TF.compressed_attention(query.float(), *rows, mask.float())
        same(TF.compressed_attention(query, *rows, mask), rounded(expected, half))


REAL: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "eltwise": lambda x, d: TF.eltwise(x, "gelu_erf", dst_dtype=d),
    "binary": lambda x, d: TF.binary(x, x.flip(0), "mul", dst_dtype=d),
    "prelu": lambda x, d: TF.prelu(x, x[:1, :, :1, :1], dst_dtype=d),
    "sum": lambda x, d: TF.sum([x, x], [0.5, 2.0], dst_dtype=d),
    "softmax": lambda x, d: TF.softmax(x, dst_dtype=d),
    "layer_norm": lambda x, d: TF.layer_norm(x, 8, x[0, 0, 0], x[0, 0, 1], dst_dtype=d),
    "rms_norm": lambda x, d: TF.rms_norm(x, 8, x[0, 0, 0], dst_dtype=d),
    "group_norm": lambda x, d: TF.group_norm(x, 5, dst_dtype=d),
    "reduction": lambda x, d: TF.reduction(x, "norm_lp_sum", [1, 3], dst_dtype=d),
}  # fmt: skip


@each_half
@pytest.mark.parametrize("name", REAL)
def test_ops_in_real_units(isa: str, name: str, half: torch.dtype) -> None:
    src, call = torch.randn(2, 5, 6, 8).to(half), REAL[name]
    with torchq.use_isa(isa):
        same(call(src, half), rounded(call(src.float(), torch.float32), half))
        same(call(src, torch.float32), call(src.float(), torch.float32))
        same(call(src, torch.int32), call(src.float(), torch.int32))


@each_half
def test_pools_and_reductions(isa: str, half: torch.dtype) -> None:
    src, attr = torch.randn(2, 5, 6, 8).to(half), torchq.Attr().set_scales("dst", 0, 0.02)
    x = src.float()
    with torchq.use_isa(isa):
        same(TF.max_pool(src, 2), rounded(TF.max_pool(x, 2), half))
        same(TF.avg_pool(src, 3, 2, 1), rounded(TF.avg_pool(x, 3, 2, 1), half))
        same(
            TF.adaptive_avg_pool(src, 1, attr, torch.int8),
            TF.adaptive_avg_pool(x, 1, attr, torch.int8),
        )
        same(
            TF.reduction(src, "sum", [1, 3], dst_dtype=half),
            rounded(TF.reduction(x, "sum", [1, 3]), half),
        )


@each_half
def test_fake_kernels_agree(half: torch.dtype) -> None:
    src = torch.randn(7, 36).to(half)
    packed = torchq.packing.pack_linear(_W)
    scale = torch.full((10,), 0.01)
    args = (packed.weight, packed.compensation, packed.pair_bound, scale, None, 36, True)
    torch.library.opcheck(torch.ops.torchq.dynamic_linear.default, (src, *args))
    heads = [torch.randn(2, 3, 6, 8).to(half)] * 3
    torch.library.opcheck(torch.ops.torchq.dynamic_attention.default, (*heads, None, False, 0.3))


@pytest.mark.parametrize("call", [
    lambda: TF.quantize(torch.ones(3).double(), 0.1),
    lambda: TF.dynamic_linear(torch.ones(3, 36).double(), _W, 0.1),
    lambda: TF.linear(_U8, _W, torch.ones(10).double(), ATTR),
    lambda: TF.matmul(torch.ones(3, 36).double(), _W.t()),
    lambda: TF.dynamic_attention(*[torch.ones(2, 4, 8).double()] * 3),
    lambda: TF.compress_rows(torch.ones(2, 4).double()),
    lambda: torchq.prepare(nn.Sequential(nn.Linear(4, 4)).double().eval(), torch.ones(2, 4)),
    lambda: torchq.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).double().eval()),
    lambda: torchq.nn.QLSTM.from_float(nn.LSTM(4, 4))(torch.ones(2, 1, 4).double()),
])  # fmt: skip
def test_float64_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"(?s)float32.*got .*float64.*float"):
        call()

# SPDX-License-Identifier: Apache-2.0
"""bfloat16: read as the float32 of the same values, given as float32 rounded to nearest even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
import torchq.functional as TF

BF16 = torch.bfloat16


def rounded(x: Tensor) -> Tensor:
    """Round float32 to bfloat16 by its bits: to nearest, ties to even."""
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return kept.to(torch.int16).view(BF16).reshape(x.shape)


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.contiguous(), b.contiguous())


def close(a: Tensor, b: Tensor, decibels: float = 25) -> None:
    assert a.dtype == b.dtype
    assert torchq.sqnr(a.float(), b.float()) > decibels


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


@pytest.mark.parametrize("name", GIVES)
def test_destination_and_bias(isa: str, name: str) -> None:
    """Bits of the float32 op on every tier, rounded; a bias in bfloat16 is its float32 twin."""
    bias = torch.randn(10).to(BF16)
    with torchq.use_isa(isa):
        expected = GIVES[name](torch.float32, bias.float())
        same(GIVES[name](BF16, bias), rounded(expected))


@pytest.mark.parametrize("per_row", ["per_row", "per_tensor"])
def test_dynamic_linear(isa: str, per_row: Any) -> None:
    src, bias = (torch.randn(7, 36) * 3).to(BF16), torch.randn(10).to(BF16)
    with torchq.use_isa(isa):
        expected = TF.dynamic_linear(src.float(), _W, 0.01, bias.float(), per_row)
        same(TF.dynamic_linear(src, _W, 0.01, bias, per_row), rounded(expected))


def test_dynamic_linear_beside_float64() -> None:
    """Independent of the float32 op: int8 products summed in float64."""
    src = torch.randn(6, 36).to(BF16)
    low, high = src.double().amin(1).clamp(max=0), src.double().amax(1).clamp(min=0)
    scale = ((high - low) / 255).float().double()
    zero = torch.round(-low * 255 / (high - low)).clamp(0, 255)
    q = torch.round(src.double() / scale[:, None] + zero[:, None]).clamp(0, 255)
    real = (q - zero[:, None]) @ _W.double().t() * 0.01 * scale[:, None]
    got = TF.dynamic_linear(src, _W, 0.01)
    assert got.dtype == BF16
    assert float((got.double() - real).abs().max() / real.abs().max()) < 2**-8


def test_quantize_and_dequantize(isa: str) -> None:
    """All finite values of bfloat16, and zeros, infinities and NaN."""
    src = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    with torchq.use_isa(isa):
        for scale in (0.05, 1e20, 1e-20):
            same(TF.quantize(src, scale, 100), TF.quantize(src.float(), scale, 100))
        q = _bytes(1000)
        out = torch.ops.torchq.requantize(
            q, torch.tensor(0.3), torch.tensor(7, dtype=torch.int32), torch.tensor(1.0),
            torch.tensor(0, dtype=torch.int32), 15,
        )  # fmt: skip
        same(out, rounded((q.double() - 7).mul(float(torch.tensor(0.3))).float()))


def test_dynamic_attention(isa: str) -> None:
    heads, mask = [torch.randn(2, 3, 6, 8).to(BF16) for _ in range(3)], torch.randn(6, 6).to(BF16)
    with torchq.use_isa(isa):
        expected = TF.dynamic_attention(*(head.float() for head in heads), mask.float())
        same(TF.dynamic_attention(*heads, mask), rounded(expected))


def test_pools_and_reductions(isa: str) -> None:
    src, attr = torch.randn(2, 5, 6, 8).to(BF16), torchq.Attr().set_scales("dst", 0, 0.02)
    x = src.float()
    with torchq.use_isa(isa):
        same(TF.max_pool(src, 2), rounded(TF.max_pool(x, 2)))
        same(TF.avg_pool(src, 3, 2, 1), rounded(TF.avg_pool(x, 3, 2, 1)))
        same(
            TF.adaptive_avg_pool(src, 1, attr, torch.int8),
            TF.adaptive_avg_pool(x, 1, attr, torch.int8),
        )
        same(
            TF.reduction(src, "sum", [1, 3], dst_dtype=BF16),
            rounded(TF.reduction(x, "sum", [1, 3])),
        )


def test_fake_kernels_agree() -> None:
    src = torch.randn(7, 36).to(BF16)
    packed = torchq.packing.pack_linear(_W)
    scale = torch.full((10,), 0.01)
    args = (packed.weight, packed.compensation, packed.pair_bound, scale, None, 36, True)
    torch.library.opcheck(torch.ops.torchq.dynamic_linear.default, (src, *args))
    heads = [torch.randn(2, 3, 6, 8).to(BF16)] * 3
    torch.library.opcheck(torch.ops.torchq.dynamic_attention.default, (*heads, None, False, 0.3))


@pytest.mark.parametrize("call", [
    lambda: TF.quantize(torch.ones(3).half(), 0.1),
    lambda: TF.dynamic_linear(torch.ones(3, 36).half(), _W, 0.1),
    lambda: TF.linear(_U8, _W, torch.ones(10).half(), ATTR),
    lambda: TF.matmul(torch.ones(3, 36).half(), _W.t()),
    lambda: TF.dynamic_attention(*[torch.ones(2, 4, 8).half()] * 3),
    lambda: torchq.prepare(nn.Sequential(nn.Linear(4, 4)).half().eval(), torch.ones(2, 4).half()),
    lambda: torchq.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).half().eval()),
    lambda: torchq.nn.QLSTM.from_float(nn.LSTM(4, 4))(torch.ones(2, 1, 4).half()),
])  # fmt: skip
def test_float16_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"(?s)float32.*bfloat16.*got .*float16.*float"):
        call()
